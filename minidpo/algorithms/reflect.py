"""Reflection: after a failure the agent says what went wrong, and tries again with its own words in the prompt.

    π_0   imitates the demonstrations
    each round: π plays some new instances
                where it failed, it reads its attempt and says what went wrong; then it plays the instance again
                with these words in its prompt
                a new π imitates the demonstrations and all successes so far, without the words

Overview §7.4; Reflexion, Shinn et al. 2023, arXiv:2303.11366. Differs from the paper: the successes are trained
into the weights, and the words are not kept for later episodes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from minidpo.algorithms.rounds import Exploring
from minidpo.data.selection import distinct, solved
from minidpo.experiment import Experiment, Policy
from minidpo.learning.sft import SFT
from minidpo.system.ranges import Positive


@dataclass(frozen=True)
class Reflection(Exploring):
    """Reflection: retry failures with the agent's own words in the prompt; imitate successes without them."""

    group: Positive[int] = 1
    retries: Positive[int] = 4
    "new attempts after each failure"
    imitation: SFT = SFT(lr=2e-4)


def reflection(run: Experiment, o: Reflection) -> Iterator[Policy]:
    imitated = run.demonstrations(o.demonstrations)
    policy = run.sft(imitated, o.sft)
    yield policy
    for _ in range(o.rounds):
        played = run.play(policy, run.instances(o.instances), o.group)
        failed = [e for e in played if not e.solved and e.turns]
        again = run.reflect(policy, failed, o.retries)
        imitated = imitated + solved(played) + solved(again)
        policy = run.sft(distinct(imitated), o.imitation)
        yield policy
