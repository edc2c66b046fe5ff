"""Scripts that measure; what they measured lies in results/, with date, machine, versions and command.

The learning       study (docs/learners.md), miniwob (docs/miniwob.md), tables, rates
Steps of training  growth (beside TRL: minidpo_side, trl_side), deep_trees, head_memory, shared_cores,
                   qwen2_7b, qwen2_7b_cuda
Acting             generate (with answers; beside transformers and llama.cpp: peer_generate), one_row, rollout
A real model       real_model, which runs both of the above
A GPU              gpu, which runs those that need one
Real pages         env_speed (beside env_floor and env_peers), soak, worlds_overhead
Tests              mutants
The shipped model  make_nano
Shared by them     records (how a result is written), works (what both sides of a training are given), sides
                   (their options and memory), parts, checkpoints
"""
