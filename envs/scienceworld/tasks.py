"""The tasks, how many variations each has, and how long their solutions are.

`measure` prints the table again, from the game. Left out, as by ETO: three tasks with inclined planes, two on Mendel's
genetics, and the melting point of an unknown substance.
"""

from typing import NamedTuple


class Variations(NamedTuple):
    """How many there are in each official split, which follow one another, numbered from 0."""

    train: int
    dev: int
    test: int
    longest: int
    "actions of the longest golden path in a sample of `train` (`measure`)"


TASKS = {
    "boil": Variations(14, 7, 9, longest=143),
    "change-the-state-of-matter-of": Variations(14, 7, 9, longest=39),
    "chemistry-mix": Variations(16, 8, 8, longest=58),
    "chemistry-mix-paint-secondary-color": Variations(18, 9, 9, longest=27),
    "chemistry-mix-paint-tertiary-color": Variations(18, 9, 9, longest=33),
    "find-animal": Variations(150, 75, 75, longest=16),
    "find-living-thing": Variations(150, 75, 75, longest=16),
    "find-non-living-thing": Variations(150, 75, 75, longest=11),
    "find-plant": Variations(150, 75, 75, longest=14),
    "freeze": Variations(14, 7, 9, longest=66),
    "grow-fruit": Variations(62, 31, 33, longest=103),
    "grow-plant": Variations(62, 31, 33, longest=77),
    "identify-life-stages-1": Variations(6, 3, 5, longest=41),
    "identify-life-stages-2": Variations(4, 2, 4, longest=17),
    "lifespan-longest-lived": Variations(62, 31, 32, longest=8),
    "lifespan-longest-lived-then-shortest-lived": Variations(62, 31, 32, longest=9),
    "lifespan-shortest-lived": Variations(62, 31, 32, longest=8),
    "measure-melting-point-known-substance": Variations(218, 109, 109, longest=74),
    "melt": Variations(14, 7, 9, longest=53),
    "power-component": Variations(10, 5, 5, longest=15),
    "power-component-renewable-vs-nonrenewable-energy": Variations(10, 5, 5, longest=30),
    "test-conductivity": Variations(450, 225, 225, longest=45),
    "test-conductivity-of-unknown-substances": Variations(300, 150, 150, longest=33),
    "use-thermometer": Variations(270, 135, 135, longest=24),
}
