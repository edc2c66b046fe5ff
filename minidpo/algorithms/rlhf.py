"""RLHF: a reward model from preferences, then PPO on its reward with a KL to the start (Ouyang et al. 2022).

    π_0   imitates the demonstrations
    R     learns from pairs of π_0's episodes, solved ≻ failed: -log σ(R(chosen) - R(rejected))
    each round: π plays a group of episodes on each of some new instances
                π ← PPO on the reward R(episode) after the last turn, and a KL(π ‖ π_0)

Source: arXiv:2203.02155, section 3.5; Christiano et al. 2017, arXiv:1706.03741. Differs from the paper: the
page's verdict replaces people who compare answers; the KL is in the loss and its weight follows a target
(Ziegler et al. 2019, arXiv:1909.08593); no pretraining gradients are mixed in; the reward is not shifted to mean
0, because the value function learns its mean.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from minidpo.algorithms.rounds import Exploring
from minidpo.data.pairs import outcome_pairs, whole
from minidpo.experiment import Experiment, Policy
from minidpo.learning.ppo import PPO, after_last_turn
from minidpo.learning.rm import RewardModel
from minidpo.system.ranges import Positive


@dataclass(frozen=True)
class RLHF(Exploring):
    """A reward model, then PPO."""

    rounds: Positive[int] = 2
    reward_model: RewardModel = RewardModel()
    ppo: PPO = PPO()


def rlhf(run: Experiment, o: RLHF) -> Iterator[Policy]:
    policy = reference = run.sft(run.demonstrations(o.demonstrations), o.sft)
    yield policy
    compared = run.play(policy, run.instances(o.instances), group=o.group)
    reward_model = run.reward_model(
        policy, outcome_pairs(compared), o.reward_model, attempts=compared
    )
    for _ in range(o.rounds):
        played = whole(run.play(policy, run.instances(o.instances), group=o.group, on_policy=True))
        rewards = after_last_turn(run.episode_rewards(reward_model, played), played)
        policy = run.ppo(policy, played, o.ppo, rewards=rewards, reference=reference)
        yield policy
