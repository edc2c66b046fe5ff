"""Scripts that measure; what they measured lies in results/, with date, machine, versions and command.

The learning      study/ (which recipes help: docs/results.md)
Steps of DPO      dpo_step (beside TRL: minidpo_dpo, trl_dpo), head_memory, qwen2_7b, qwen2_7b_cuda
Acting            generate (with answers; beside transformers: hf_generate), rollout
Real pages        env_speed (beside env_floor and env_peers), env_memory
Shared by them    records (how a result is written), sides (memory and options of the two sides)
"""
