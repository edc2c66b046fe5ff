"""Ranges in the types of options: `lr: Positive[float]` is checked as soon as the dataclass is made."""

import math
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from typing import Annotated, NamedTuple, TypeVar, get_type_hints

T = TypeVar("T")


class Range(NamedTuple):
    """The finite numbers that an option may have."""

    words: str
    holds: Callable[[float], bool]


Positive = Annotated[T, Range("greater than 0", lambda x: x > 0)]
NotNegative = Annotated[T, Range("at least 0", lambda x: x >= 0)]
Share = Annotated[T, Range("from 0 to 1", lambda x: 0 <= x <= 1)]
Seed = Annotated[int, Range("from 0 to 2^32 - 1", lambda x: 0 <= x < 2**32)]


@dataclass(frozen=True)
class Checked:
    """Options that must lie within the ranges of their types, otherwise ValueError. None means off and is allowed."""

    def __post_init__(self):
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            for limit in getattr(kind, "__metadata__", ()):
                value = vars(self)[name]
                if (
                    isinstance(limit, Range)
                    and value is not None
                    and not (limit.holds(value) and value < math.inf)
                ):  # nan is in no range
                    raise ValueError(f"{name} must be finite and {limit.words}, got {value}")
        if empty := [f.name for f in fields(self) if f.default and vars(self)[f.name] == ()]:
            raise ValueError(f"{empty[0]} has no value: give one or more")

    def changed(self, *names: str) -> list[str]:
        """Those of these options that differ from their default."""
        found = {f.name: f for f in fields(self) if f.name in names}
        return [name for name, f in found.items() if vars(self)[name] != default_of(f)]


def default_of(f: Field) -> object:
    """The default of a field; MISSING if it is required."""
    return f.default if f.default_factory is MISSING else f.default_factory()
