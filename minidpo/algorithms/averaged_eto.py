"""ETO on new instances, averaging the weights before and after each round: the recipe of `minidpo/miniwob`.

    π_0   imitates the demonstrations
    π_1   imitates its own successes on new instances, too
    each round: π plays new instances, more of them from tasks with mixed verdicts
                the instance's golden episode ≻ a failure; solved instances are rehearsed
                π ← the mean of π and DPO(π) on these pairs

ETO: Song et al. 2024, arXiv:2403.02502; the mean: Wortsman et al. 2022, arXiv:2109.01903 (WiSE-FT).
Differs from ETO: new instances with golden episodes in each round, rehearsal, the mean of the weights.
On all of MiniWoB++, SmolLM2, six rounds made by hand: +9.0 points over SFT (docs/miniwob.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from minidpo.algorithms.rounds import Exploring
from minidpo.data.curriculum import most_mixed
from minidpo.data.episodes import instances_of
from minidpo.data.pairs import contrast, unpaired_successes
from minidpo.data.selection import solved
from minidpo.experiment import Experiment, Policy
from minidpo.learning.dpo import DPO
from minidpo.learning.sft import SFT
from minidpo.system.ranges import NotNegative, Positive


@dataclass(frozen=True)
class AveragedETO(Exploring):
    """The recipe of minidpo/miniwob: imitation of own successes, then ETO on new instances with averaging."""

    rounds: Positive[int] = 6
    instances: Positive[int] = 8
    group: Positive[int] = 1
    rehearse: NotNegative[int] = 2
    "solved episodes of instances without a pair that each DPO step imitates"
    sft: SFT = SFT(epochs=5, batch=2)
    imitation: SFT = SFT(epochs=1, lr=2e-4)
    dpo: DPO = DPO(epochs=1.5, batch=8, lr=3e-4, beta=1.0, nll=5.0, until="token")


def averaged_eto(run: Experiment, o: AveragedETO) -> Iterator[Policy]:
    policy = run.sft(run.demonstrations(o.demonstrations), o.sft)
    yield policy
    played = run.play(policy, run.instances(o.instances), o.group)
    policy = run.sft(solved(played), o.imitation, start=policy)
    yield policy
    for _ in range(o.rounds):
        counts = most_mixed(run.success_by_task(policy), o.instances)
        played = run.play(policy, run.instances(counts), o.group)
        pairs = contrast(run.experts(instances_of(played)), played)
        rehearsed = unpaired_successes(played, pairs, run.seed)
        trained = run.dpo(policy, pairs, o.dpo, rehearsed=rehearsed, rehearse=o.rehearse)
        policy = run.average(policy, trained)
        yield policy
