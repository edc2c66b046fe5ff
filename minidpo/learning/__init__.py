"""Learning: SFT and DPO, from files to an adapter.

Read `sft` and `dpo` first: one screen each. Behind them: `trainer` (batch, loss, backward, clip, step, log),
`preferences` (pairs as token ids, a step's trees, the loss on four scores), `loss_table` (which losses there
are), `reference` (the policy at step 0, scored once), `kto` (its baseline). `schedule` chooses what a round
of the loop explores and which is kept, `explain` shows one pair as the loss sees it, `plan_loop` is `train.py
plan`, and `nano_base` makes the small shipped model.
"""
