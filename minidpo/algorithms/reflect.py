"""Reflection: a failure is told to the agent, it says what went wrong, and tries again after its own words.

    π_0   imitates the demonstrations
    each round: π plays each of some new instances
                where it failed, it is shown its attempt and asked what went wrong; it plays the instance again
                with that in its prompt
                a new π imitates the demonstrations and all successes so far, without the words

Overview §7.4; Reflexion, Shinn et al. 2023, arXiv:2303.11366. Differs from the paper: what the words achieved is
trained into the weights, and they are not kept for later episodes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from minidpo.data.selection import distinct, solved
from minidpo.experiment import Experiment, Policy
from minidpo.learning.sft import SFT
from minidpo.system.ranges import Checked, Positive


@dataclass(frozen=True)
class Reflection(Checked):
    """Reflection: failures are tried again after the agent's own words; successes are imitated without them."""

    demonstrations: Positive[int] = 5
    "golden episodes of each task"
    rounds: Positive[int] = 1
    "how often to explore and train"
    instances: Positive[int] = 24
    "instances of each task explored in a round"
    retries: Positive[int] = 4
    "attempts after the words"
    sft: SFT = SFT(steps=100)
    imitation: SFT = SFT(lr=2e-4)


def reflection(run: Experiment, o: Reflection) -> Iterator[Policy]:
    imitated = run.demonstrations(o.demonstrations)
    policy = run.sft(imitated, o.sft)
    yield policy
    for _ in range(o.rounds):
        played = run.play(policy, run.instances(o.instances))
        failed = [e for e in played if not e.solved and e.turns]
        again = run.reflect(policy, failed, o.retries)
        imitated = imitated + solved(played) + solved(again)
        policy = run.sft(distinct(imitated), o.imitation)
        yield policy
