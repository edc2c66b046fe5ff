"""AgentEvol: each round, a new policy imitates all episodes with enough reward (Xi et al. 2024, arXiv:2406.04151).

    π_0   imitates the demonstrations
    each round: π plays each of some instances (exploration step)
                a new π, trained from the base, maximises r · log π of the demonstrations and of all episodes so
                far whose reward r reaches a threshold (learning step)

Differs from the paper: instances are new in each round; a share of the agent's episodes can be drawn.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from minidpo.algorithms.rounds import Exploring
from minidpo.data.selection import distinct, paid
from minidpo.experiment import Experiment, Policy
from minidpo.learning.sft import SFT
from minidpo.system.ranges import Positive, Share


@dataclass(frozen=True)
class AgentEvol(Exploring):
    """AgentEvol: each round trains a new policy on demonstrations and own episodes, weighted by their reward."""

    rounds: Positive[int] = 4
    group: Positive[int] = 1
    threshold: Share[Positive[float]] = 1.0
    "least reward of an episode that is imitated"
    share: Share[Positive[float]] = 1.0
    "share of the agent's own such episodes that is drawn; all demonstrations are imitated"
    imitation: SFT = SFT(epochs=1, lr=1e-5)


def agentevol(run: Experiment, o: AgentEvol) -> Iterator[Policy]:
    demonstrations = run.demonstrations(o.demonstrations)
    policy = run.sft(demonstrations, o.sft)
    yield policy
    episodes = list(demonstrations)
    for _ in range(o.rounds):
        episodes += run.play(policy, run.instances(o.instances), o.group)
        imitated = paid(distinct(episodes), o.threshold, o.share, seed=run.seed)
        policy = run.sft(imitated, o.imitation, weights=[e.reward for e in imitated])
        yield policy
