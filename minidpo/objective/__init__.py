"""The maths of the papers. It imports torch and nothing of minidpo. Read it in this order:

scores     weighted sums of a model's log-probs, which is all that SFT and preference losses read
losses     DPO on four such scores, supervised fine-tuning, and the numbers logged for a pair
variants   what other papers changed in DPO; `learning/loss_table` names them all
policy_gradient   REINFORCE, PPO, GRPO, RLOO, GiGPO: advantages and losses
reward_model      rewards learned from pairs, or from the values of turns
"""
