"""Learning: SFT, DPO, policy gradients, PPO and reward models, each a function from data to an adapter.

Read `dpo` and `sft` first: options, batches, step. Then `trainer` (batch, loss, backward, clip, step, log),
`preferences` (pairs as token ids, a step's trees, the loss on four scores, KTO's baseline), `reference` (its
scores, made once) and `loss_table` (which losses there are). `policy_gradient`, `ppo` and `rm` are the other
learners, with `rollouts` (the agent's own episodes as token ids, log-probs of who played). `average` takes
adapters' mean, `explain` shows one pair as the loss sees it. `training_run` has the order of examples and the
end of a run, `micro_batches` what goes through the model together.
"""
