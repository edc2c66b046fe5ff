"""R3: process rewards from an agent's own continuations, then PPO on R = α·R_task + β·Σ_i R_step(i) - γ·KL.

    π_0   imitates the demonstrations
    each round: π plays a group of episodes on each of some new instances
                V after a turn = how often π solves the page when it continues from there
                R_step ← a head on π's states, trained on these V by mean squared error
                π ← PPO; the reward of a turn is β·R_step, plus α·[solved] for the last; γ weights the KL to π_0

Source: the overview of agent training, section 6; step values by continuations: Xiong et al. 2024 (IPR),
arXiv:2406.11176. α = 1.0, β = 0.5, γ = 0.1 (`ppo.kl`, kept constant). Differs from the paper: the KL is in the
loss, not in the reward; the head was trained on the same turns that it rewards, except on held-out instances.
As in the formula, Σ R_step gives more reward to a longer way to the same end.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from minidpo.algorithms.rounds import Exploring
from minidpo.data.pairs import whole
from minidpo.data.values import values_of
from minidpo.experiment import Experiment, Policy
from minidpo.learning.ppo import PPO, after_last_turn
from minidpo.learning.rm import RewardModel
from minidpo.system.ranges import NotNegative, Positive


@dataclass(frozen=True)
class R3(Exploring):
    """PPO on the verdict and on a learned reward of each step."""

    rounds: Positive[int] = 2
    group: Positive[int] = 4
    continuations: Positive[int] = 4
    "episodes that go on from each step, to estimate its value"
    alpha: NotNegative[float] = 1.0
    "weight of the verdict, paid after the last turn"
    beta: NotNegative[float] = 0.5
    "weight of the step head's reward of each turn"
    step_model: RewardModel = RewardModel()
    ppo: PPO = PPO(kl=0.1, kl_target=None)


def r3(run: Experiment, o: R3) -> Iterator[Policy]:
    policy = reference = run.sft(run.demonstrations(o.demonstrations), o.sft)
    yield policy
    for _ in range(o.rounds):
        played = whole(run.play(policy, run.instances(o.instances), group=o.group, on_policy=True))
        continued = run.continue_from(policy, played, o.continuations)
        values = values_of(played, [*played, *continued])
        known = [n for n, of_turns in enumerate(values) if None not in of_turns]
        step_model = run.step_model(
            policy, [played[n] for n in known], [values[n] for n in known], o.step_model
        )
        solved = after_last_turn([float(e.solved) for e in played], played)
        steps = run.step_rewards(step_model, played)
        rewards = [o.alpha * task + o.beta * step for task, step in zip(solved, steps)]
        policy = run.ppo(policy, played, o.ppo, rewards=rewards, reference=reference)
        yield policy
