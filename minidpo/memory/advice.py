"""Whether a plan fits into the memory that there is, and which settings would help if it does not."""

import bisect
from collections.abc import Callable
from dataclasses import replace

from minidpo.memory.machine import (
    GPU_MICRO_TOKENS,
    MIB,
    MICRO_TOKENS,
    Machine,
    memory_limit,
    row_length,
)
from minidpo.memory.plan import Load, Setup, acting_plan, meta_model, step_plan, weights_of
from minidpo.system import processes

STEP = 32  # tokens: the precision of `longest`


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
    setup = setup.on(
        micro_tokens=min(processes.all_gather(tokens))
    )  # all ranks make the same micro-batches
    with processes.fail_together():  # another GPU may have less memory left
        if (peak := step_plan(setup, load_of(setup.machine)).peak) > limit:
            raise ValueError(
                f"a training step would take {peak / MIB:,.0f} MiB, but there are "
                f"{limit / MIB:,.0f}: {best_advice(setup, load_of)}"
            )
    return setup.machine


def require_weights(setup: Setup, what: str, way_out: str) -> None:
    """Raises ValueError if the weights alone do not fit."""
    needed, limit = (
        sum(weights_of(meta_model(setup)).values()),
        memory_limit(setup.machine, setup.cuda),
    )
    if needed > limit:
        raise ValueError(
            f"{what} {needed / MIB:,.0f} MiB, but there are {limit / MIB:,.0f}: {way_out}"
        )


def savings(setup: Setup, load_of: Callable[[Machine], Load]) -> dict[str, float]:
    """Settings that would save memory, and how many bytes each saves."""
    machine, rank = setup.machine, max(1, setup.adapter.rank // 2)
    micro, tree = (-(-tokens // 2) for tokens in (machine.pass_tokens(), machine.tree_tokens))

    few = () if machine.dtype == "rounded" else ("nf4", "keep")[: 1 + bool(setup.formats)]
    setups = {
        **{f"--machine.quantize {name}": setup.on(quantize=name, cache=None) for name in few},
        "--machine.recompute": setup.on(recompute=True),
        f"--machine.micro-tokens {micro} with --machine.tree-tokens {tree}": setup.on(
            micro_tokens=micro, tree_tokens=tree
        ),
        "the option optimizer = adamw8bit": setup._replace(optimizer="adamw8bit"),
        f"an adapter of rank {rank}": setup._replace(adapter=replace(setup.adapter, rank=rank)),
    }
    if setup.cuda and machine.recompute:
        setups["--machine.offload"] = setup.on(offload=True)
    peak = step_plan(setup, load_of(machine)).peak
    saved = {
        name: peak - step_plan(other, load_of(other.machine)).peak for name, other in setups.items()
    }
    return {
        name: size for name, size in saved.items() if size >= MIB / 2
    }  # less would be printed as 0 MiB


def best_advice(setup: Setup, load_of: Callable[[Machine], Load]) -> str:
    """The three settings that would save most, in words."""
    largest = sorted(savings(setup, load_of).items(), key=lambda item: -item[1])[:3]
    return (
        "; ".join(f"{name} saves {size / MIB:,.0f} MiB" for name, size in largest)
        or "no setting helps: take a smaller model"
    )


def longest(setup: Setup, limit: float, pair: bool, heads: str = "vocabulary") -> int:
    """The longest trajectory that fits, in tokens; with `pair`, two of that length that share no prefix."""

    def peak(steps: int) -> float:
        tokens = row_length(steps * STEP * (2 if pair else 1))
        return step_plan(setup, Load(1, tokens, tokens, branched=pair, heads=heads)).peak

    steps = range(1, setup.config.max_position_embeddings // STEP + 1)
    return STEP * bisect.bisect_right(steps, limit, key=peak)


def verdict(stage: str, setup: Setup, load_of: Callable[[Machine], Load], limit: float) -> str:
    """One line: whether training fits into `limit` bytes, and what would help if it does not."""
    load = load_of(setup.machine)
    if (spare := limit - step_plan(setup, load).peak) < 0:
        return (
            f"{stage} does not fit into {limit / MIB:,.0f} MiB, it needs {-spare / MIB:,.0f} more: "
            f"{best_advice(setup, load_of)}"
        )
    what = (
        "pair without a common prefix that fits is 2 x" if load.branched else "episode that fits is"
    )
    return (
        f"{stage} fits into {limit / MIB:,.0f} MiB, {spare / MIB:,.0f} are left; the longest {what} "
        f"{longest(setup, limit, load.branched, load.heads):,} tokens"
    )


def acting_verdict(setup: Setup, tokens: int, limit: float) -> str:
    """One line: whether as many agents as pages fit into `limit` bytes, and how many would."""
    if (spare := limit - acting_plan(setup, tokens).peak) >= 0:
        return f"exploring fits into {limit / MIB:,.0f} MiB, {spare / MIB:,.0f} are left"
    most = bisect.bisect_right(
        range(1, setup.machine.page_count()),
        limit,
        key=lambda pages: acting_plan(setup.on(pages=pages), tokens).peak,
    )
    fewer_bits = (
        "" if setup.machine.quantize else "--machine.quantize nf4 with --machine.dtype bfloat16, "
    )
    advice = (
        f"--machine.pages {most} fits"
        if most
        else (f"take {fewer_bits}fewer --machine.page-tokens or a smaller model")
    )
    return f"exploring does not fit into {limit / MIB:,.0f} MiB, it needs {-spare / MIB:,.0f} more: {advice}"
