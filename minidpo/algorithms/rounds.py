"""Options that several pages share: how much to demonstrate, explore and train."""

from dataclasses import dataclass

from minidpo.learning.sft import SFT
from minidpo.system.ranges import Checked, Positive


@dataclass(frozen=True)
class Rounds(Checked):
    """How often to play and train, and how much."""

    rounds: Positive[int] = 1
    "how often to explore and train"
    group: Positive[int] = 8
    "episodes of each instance in a round"


@dataclass(frozen=True)
class Demonstrated(Rounds):
    """Rounds after SFT on demonstrations."""

    demonstrations: Positive[int] = 5
    "golden episodes of each task, by the scripted experts"
    sft: SFT = SFT(steps=100)


@dataclass(frozen=True)
class Exploring(Demonstrated):
    """Rounds on new instances after SFT on demonstrations."""

    instances: Positive[int] = 24
    "new instances of each task explored in a round"
