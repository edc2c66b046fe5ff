"""Whether a plan fits into the memory that there is, and what to do if it does not."""

import bisect
from collections.abc import Callable

from minidpo.memory.machine import (
    GPU_MICRO_TOKENS,
    MIB,
    MICRO_TOKENS,
    Machine,
    memory_limit,
    row_length,
)
from minidpo.memory.plan import Load, Setup, meta_model, step_plan, weights_of
from minidpo.system import processes

STEP = 32  # tokens: the precision of `longest`
LESS = (
    "--machine.quantize nf4, --machine.recompute, fewer --machine.micro-tokens and --machine.tree-tokens, "
    "the option optimizer = adamw8bit and an adapter of lower rank save memory; train.py plan counts it"
)


def with_micro_tokens(setup: Setup, load_of: Callable[[Machine], Load], limit: float) -> Setup:
    """The setup with a number of `micro_tokens`: the one that is asked for, or by default what fits."""
    if setup.machine.micro_tokens is not None:
        return setup
    for tokens in GPU_MICRO_TOKENS if setup.cuda else ():
        chosen = setup.on(micro_tokens=tokens)
        if step_plan(chosen, load_of(chosen.machine)).peak <= 0.9 * limit:  # a plan is within 5 %
            return chosen
    return setup.on(micro_tokens=MICRO_TOKENS)


def require_step(setup: Setup, load_of: Callable[[Machine], Load]) -> Machine:
    """The machine with its `micro_tokens` chosen. Raises ValueError, with advice, if a step does not fit."""
    limit = memory_limit(setup.machine, setup.cuda)
    tokens = with_micro_tokens(setup, load_of, limit).machine.micro_tokens
    # all ranks make the same micro-batches
    setup = setup.on(micro_tokens=min(processes.all_gather(tokens)))
    with processes.fail_together():  # another GPU may have less memory left
        require(
            step_plan(setup, load_of(setup.machine)).peak, limit, "a training step would take", LESS
        )
    return setup.machine


def require_weights(setup: Setup, what: str, way_out: str) -> None:
    """Raises ValueError if the weights alone do not fit."""
    needed = sum(weights_of(meta_model(setup)).values())
    require(needed, memory_limit(setup.machine, setup.cuda), what, way_out)


def require(needed: float, limit: float, what: str, way_out: str) -> None:
    """Raises ValueError if `what` needs more bytes than `limit`."""
    if needed > limit:
        raise ValueError(
            f"{what} {needed / MIB:,.0f} MiB, but there are {limit / MIB:,.0f}: {way_out}"
        )


def longest(setup: Setup, limit: float, pair: bool, heads: str = "vocabulary") -> int:
    """The longest trajectory that fits, in tokens; with `pair`, two of that length that share no prefix."""

    def peak(steps: int) -> float:
        tokens = row_length(steps * STEP * (2 if pair else 1))
        return step_plan(setup, Load(1, tokens, tokens, branched=pair, heads=heads)).peak

    steps = range(1, setup.config.max_position_embeddings // STEP + 1)
    return STEP * bisect.bisect_right(steps, limit, key=peak)


def verdict(what: str, peak: float, limit: float, way_out: str) -> str:
    """One line: whether `peak` bytes fit into `limit` bytes, and what would help if they do not."""
    room = f"into {limit / MIB:,.0f} MiB"
    if peak > limit:
        return f"{what} does not fit {room}, it needs {(peak - limit) / MIB:,.0f} more: {way_out}"
    return f"{what} fits {room}, {(limit - peak) / MIB:,.0f} are left"
