"""The algorithms, one page each: the options, then the algorithm as a generator of policies.

Read `ef_dpo.py` first, then `eto.py` beside Algorithm 1 of its paper. ALGORITHMS is the table of commands.
"""

from collections.abc import Callable
from typing import NamedTuple

from minidpo.algorithms.agentevol import AgentEvol, agentevol
from minidpo.algorithms.averaged_eto import AveragedETO, averaged_eto
from minidpo.algorithms.dagger import DAgger, dagger
from minidpo.algorithms.dmpo import DMPO, dmpo
from minidpo.algorithms.ef_dpo import EFDPO, ef_dpo
from minidpo.algorithms.eto import ETO, eto
from minidpo.algorithms.grpo import GRPO, GiGPO, gigpo, grpo
from minidpo.algorithms.kto import KTO, kto
from minidpo.algorithms.r3 import R3, r3
from minidpo.algorithms.reflect import Reflection, reflection
from minidpo.algorithms.rft import RFT, rft
from minidpo.algorithms.rlhf import RLHF, rlhf
from minidpo.algorithms.self_play import SelfPlay, self_play


class Algorithm(NamedTuple):
    """A page: its options and its generator of policies."""

    options: type
    run: Callable


ALGORITHMS = {
    "ef-dpo": Algorithm(EFDPO, ef_dpo),
    "eto": Algorithm(ETO, eto),
    "dmpo": Algorithm(DMPO, dmpo),
    "kto": Algorithm(KTO, kto),
    "self-play": Algorithm(SelfPlay, self_play),
    "rft": Algorithm(RFT, rft),
    "agentevol": Algorithm(AgentEvol, agentevol),
    "rlhf": Algorithm(RLHF, rlhf),
    "r3": Algorithm(R3, r3),
    "online-grpo": Algorithm(GRPO, grpo),
    "gigpo": Algorithm(GiGPO, gigpo),
    "reflection": Algorithm(Reflection, reflection),
    "dagger": Algorithm(DAgger, dagger),
    "averaged-eto": Algorithm(AveragedETO, averaged_eto),
}
