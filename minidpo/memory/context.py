"""What all stages of a run share."""

from dataclasses import dataclass, field

from envs.protocol import World
from minidpo.memory.machine import Machine


@dataclass(frozen=True)
class Context:
    """The base model, the world, the seed of all that is random, and where the model runs."""

    model: str
    world: World
    seed: int = 1
    machine: Machine = field(default_factory=Machine)
