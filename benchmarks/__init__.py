"""Scripts that measure; what they measured lies in results/, with date, machine, versions and command.

The learning       study/ (docs/results.md, docs/learners.md), miniwob and new_pages (docs/miniwob.md)
Steps of training  dpo_step (beside TRL: minidpo_dpo, trl_dpo), deep_trees, head_memory, shared_cores,
                   allocator, qwen2_7b, qwen2_7b_cuda
Acting             generate (with answers; beside transformers: hf_generate), rollout
A real model       real_model (minidpo_sft, trl_sft, llamacpp_generate)
A GPU              gpu, which runs those that need one
Real pages         env_speed (beside env_floor and env_peers), env_memory, soak
For the tests      trl_policy (tests/oracles/policy_gradient.json)
Shared by them     records (how a result is written), sides (memory and options of the two sides), parts,
                   checkpoints
"""
