"""Learning: SFT, DPO, policy gradients and reward models, from files to an adapter.

Read `sft` and `dpo` first: the first function of each is the algorithm, as it is in `grpo`, `ppo` and `rm`.
Behind them: `trainer` (batch, loss, backward, clip, step, log), `training_run` (settings, the order of
examples, the end), `preferences` (pairs as token ids, a step's trees, the loss on four scores, KTO's
baseline), `rollouts` (the agent's own episodes as token ids, log-probs of who played), `loss_table` (which
losses there are), `reference` (its scores, made once), `selection` (which episodes are imitated). `schedule`
chooses what a round of the loop explores and which is kept, `average` takes adapters' mean, `explain` shows
one pair as the loss sees it, `plan_loop` is `train.py plan`, and `nano_base` makes the small shipped model.
"""
