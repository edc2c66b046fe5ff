"""What all stages of a run share, and the options that choose it."""

import os
from dataclasses import dataclass, field

import envs
from envs.protocol import World
from minidpo.memory.machine import Machine
from minidpo.model.checkpoint import NANO
from minidpo.system.ranges import Checked, Seed


@dataclass(frozen=True)
class Context:
    """The base model, the world, the seed of all that is random, and where the model runs."""

    model: str
    world: World
    seed: int = 1
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Checked):
    """Which model acts or learns, on which machine."""

    model: str = NANO
    "the base model: folder, hub id, GGUF file, or smollm2"
    seed: Seed = 1
    "of all that is random"
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "model", os.path.expanduser(self.model))  # no hub id begins with ~


@dataclass(frozen=True, kw_only=True)
class ContextOptions(ModelOptions):
    """Which model acts or learns, in which world, on which machine."""

    world: str = "miniwob"
    "where the tasks are: miniwob, toy, babyai, textcraft, scienceworld, textworld_express (docs/worlds.md), a \
module of your own, an environment class FILE.py:CLASS, or a server ws://HOST:PORT (docs/other-programs.md)"

    def context(self) -> Context:
        """The world of that name with the rest. Raises ValueError if there is none."""
        return Context(self.model, envs.world(self.world), self.seed, self.machine)
