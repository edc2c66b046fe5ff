"""The maths of the papers. It imports torch and nothing of minidpo. Read it in this order:

scores     all that SFT and preference losses read of a model: weighted sums of its log-probs
losses     DPO on four such scores, supervised fine-tuning, and what is logged of a pair
variants   what other papers changed in DPO; `learning/loss_table` names them all
policy_gradient   REINFORCE, PPO, GRPO, RLOO, GiGPO: advantages, and the losses that they weigh
reward_model      rewards that are learned from pairs
"""
