"""DPO and its variants: trains an adapter on pairs of episodes, of which one went better.

Load, tokenise, score the reference once. Then each step takes the policy's scores from its trees, the
reference's from the cache, and the gradient of the loss.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from minidpo.data.batch import batch_scores
from minidpo.data.prompt import dialogues_of
from minidpo.learning.loss_table import LOSSES, LossParameters
from minidpo.learning.preferences import (
    PairBatch,
    PairLoss,
    Preferences,
    mismatched,
    pair_batches,
    pair_loss,
    step_baseline,
    tokenise,
)
from minidpo.learning.reference import identity, reference_scores
from minidpo.learning.sft import Demonstrations, SFTBatch, sft_batches, sft_objective
from minidpo.learning.trainer import Optimizer, StepSettings, train
from minidpo.learning.training_run import (
    example_indices,
    finish,
    finished,
    in_steps,
    open_learner,
    optimizer_of,
)
from minidpo.memory import lora
from minidpo.memory.context import Context
from minidpo.memory.loading import open_chat
from minidpo.memory.machine import Machine
from minidpo.system.ranges import NotNegative, Positive
from minidpo.system.run_folder import RunFolder


@dataclass(frozen=True)
class DPO(Optimizer, LossParameters):
    """Preference learning on pairs of episodes. By default as published: whole episodes, beta 0.1, no NLL."""

    batch: Positive[int] = 16
    lr: Positive[float] = 2e-4
    loss: str = "dpo"
    "name of the loss, in minidpo/learning/loss_table.py"
    nll: NotNegative[float] = 0.0
    "weight of an added -log π a token of the chosen, which keeps its log-prob from falling"
    until: Literal["end", "turn", "token"] = "end"
    "where pairs are cut; end: nowhere; turn: both after the first turn that differs; token: the rejected alone \
after its first token that differs from the chosen"
    pairs_per_instance: Positive[int] = 4
    "most pairs of one instance; the episodes used least so far come first"
    pairs_per_task: Positive[int | None] = None
    "most pairs of one task, spread evenly over its instances; None: all"

    def __post_init__(self):
        super().__post_init__()
        pair_loss_of(self)


def dpo(
    run: RunFolder,
    context: Context,
    pairs: Sequence,
    options: DPO,
    *,
    start: Path,
    reference: Path | None = None,
    rehearsed: Sequence = (),
    rehearse: int = 0,
) -> Path:
    """Train the adapter `start` on pairs (`data/pairs`). Returns the trained adapter's folder.

    reference: the adapter of the reference policy; None: `start`, before the first step. rehearsed: solved
    episodes of instances without a pair; each step also imitates `rehearse` of them, weighted by nll.
    Rafailov et al. 2023, arXiv:2305.18290. Differs from the paper: nothing by default.
    """
    if run.finished:
        return finished(run)
    settings = pair_loss_of(options)
    chat, limit = open_chat(context.model)
    system = context.world.system_prompt
    data = tokenise(pairs, chat, limit, system, settings.until)
    rehearsal = Demonstrations(
        *dialogues_of(rehearsed, chat, limit, system), [1.0] * len(rehearsed)
    )
    options = in_steps(options, len(data.pairs))

    def largest_tree(machine: Machine) -> int:
        return max(data.largest_tree(machine), *(len(d.ids) for d in rehearsal.dialogues), 0)

    policy, machine = open_learner(run, context, options, largest_tree, start, reference)
    device = policy.head_weight.device

    # the reference: the policy at step 0, or another adapter, scored once
    lora.switch_adapter(policy, reference or start, run.base)
    run.begin()
    record_pairs(run, pairs, data)
    weights = identity(policy, run.base, lora.read_config(reference or start))
    score = partial(
        reference_scores, run, policy, settings=settings, machine=machine, weights=weights
    )
    ref = score(data, "reference.safetensors")
    baseline_data, ref_baseline = None, None
    if settings.loss.needs_baseline:
        baseline_data = mismatched(data, limit)
        ref_baseline = score(baseline_data, "reference-baseline.safetensors")
    if reference:
        lora.switch_adapter(policy, start, run.base)
    print(lora.describe(policy))
    labels = [data.instances[chosen] for chosen, _ in data.pairs]

    def step_batches(step: int) -> Iterator[PairBatch | SFTBatch]:
        picked = example_indices(step, options.batch, len(data.pairs), context.seed, labels=labels)
        baseline = step_baseline(policy, baseline_data, ref_baseline, picked, settings, machine)
        yield from pair_batches(data, picked, ref, settings, machine, device, baseline)
        n = len(rehearsal.dialogues)
        if rehearse and n:
            picked = example_indices(step, min(rehearse, n), n, context.seed)
            yield from sft_batches(rehearsal, picked, device, machine.pass_tokens())

    pass_steps = math.ceil(len(data.pairs) / options.batch)  # one pass over all pairs
    train(
        run,
        policy,
        optimizer_of(options, policy),
        batches=step_batches,
        score=lambda batch: batch_scores(policy, batch.trees, machine.walk_above),
        objective=partial(pair_or_rehearsal_loss, settings),
        settings=StepSettings(options, context.seed, options.loss.upper(), pass_steps),
    )
    return finish(run, policy, context.model)


def pair_or_rehearsal_loss(
    settings: PairLoss, batch: PairBatch | SFTBatch, scores: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of the step's loss, and the numbers to log. A rehearsed batch has the SFT loss times
    nll: its instances have no pairs, and without rehearsal the policy might forget them."""
    if isinstance(batch, PairBatch):
        return pair_loss(settings, batch, scores)
    loss = settings.nll * sft_objective(batch, scores)[0]
    return loss, {"rehearsal": loss}


def pair_loss_of(options: DPO) -> PairLoss:
    """The loss that the options name. Raises ValueError for an unknown loss, and for parameters or a cut that it
    cannot have."""
    if options.loss not in LOSSES:
        raise ValueError(f"no loss is called {options.loss!r}; there are {', '.join(LOSSES)}")
    loss = LOSSES[options.loss]
    given, defaults = options.given(), loss.defaults.given()
    for name in given.keys() - defaults.keys():
        raise ValueError(
            f"{name} is not a parameter of the loss {options.loss}, which has "
            f"{', '.join(defaults)}: leave it out, or choose another loss"
        )
    if options.until == "token" and not loss.cancels:
        raise ValueError(
            f"until token cuts one side alone, so what both share would not cancel in the scores of "
            f"{options.loss}: use turn or end"
        )
    return PairLoss(loss, LossParameters(**{**defaults, **given}), options.nll, options.until)


def record_pairs(run: RunFolder, pairs: Sequence, data: Preferences) -> None:
    """Write where each pair comes from to pairs.jsonl, and print how many there are."""
    run.write("pairs.jsonl", "".join(json.dumps(pair.provenance()) + "\n" for pair in pairs))
    sources = Counter(pair.source for pair in pairs)
    told = ", ".join(f"{n} {source}" for source, n in sources.items())
    print(
        f"{len(pairs)} pairs ({told}) of {len(data.dialogues)} trajectories, "
        f"{len(set(data.instances))} instances"
    )
