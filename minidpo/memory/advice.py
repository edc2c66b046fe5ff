"""Whether a plan fits into the memory that there is, and what to do if it does not."""

from collections.abc import Callable

from minidpo.memory.machine import (
    GPU_MICRO_TOKENS,
    MIB,
    MICRO_TOKENS,
    Machine,
    memory_limit,
)
from minidpo.memory.plan import Load, Setup, meta_model, step_plan, weights_of
from minidpo.system import processes

LESS = (
    "--machine.quantize nf4, --machine.recompute, fewer --machine.micro-tokens and --machine.tree-tokens, "
    "the option optimizer = adamw8bit and an adapter of lower rank save memory"
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
