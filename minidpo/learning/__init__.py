"""Learning: SFT, DPO, policy gradients, PPO and reward models, each a function from data to an adapter.

Read `dpo` and `sft` first: options, batches, step. Then `trainer` (batch, loss, backward, clip, step, log),
`preferences` (pairs as token ids, a step's trees, the loss on four scores, KTO's baseline), `reference` (the
reference's scores, computed once) and `loss_table` (all losses). `policy_gradient`, `ppo` and `rm` are the other
learners; `rollouts` gives them the agent's own episodes as token ids, with the log-probs of the policy that
played. `average` takes the mean of adapters, `explain` shows one pair as the loss sees it. `training_run` has
the order of examples and the end of a run, `micro_batches` packs trees into passes through the model.
"""
