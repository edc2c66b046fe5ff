"""The trainer: batch, loss, backward, clip, step, log, and resume after a kill.

It knows nothing of SFT or DPO. `score(batch)` gives a micro-batch's scores, `objective(batch, scores)` a loss
and numbers to log. Both are already divided by the whole step's totals, so the sum over micro-batches equals
one big batch. A step depends only on its number, the seed and the saved state (for PPO also on its values and
its log), never on what else ran in this process. So a resumed run reaches the same result: bit for bit on a CPU
with as many threads; on a GPU except that attention's backward adds in no fixed order.
"""

import math
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from minidpo.system import processes
from minidpo.system.ranges import Checked, NotNegative, Positive
from minidpo.system.run_folder import RunFolder, records

LEARNED = 1e-3  # a preference loss that stays below this for a whole pass has nothing left to teach


@dataclass(frozen=True)
class Optimizer(Checked):
    """How long to train, how fast, and with which optimizer."""

    epochs: Positive[float] = 3.0
    "passes over the data"
    steps: Positive[int | None] = None
    "optimizer steps, in place of epochs"
    batch: Positive[int] = 8
    "examples a step: episodes, or pairs; those of one instance are taken together where they share tokens"
    lr: Positive[float] = 1e-3
    "full learning rate, after the warm-up"
    warmup: NotNegative[float] = 0.1
    "steps of linear warm-up; below 1: share of all steps"
    weight_decay: NotNegative[float] = 0.0
    "decoupled weight decay"
    clip: Positive[float] = 1.0
    "largest norm of the gradient"
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    "adamw8bit keeps its two moments in 2 bytes a weight in place of 8"
    save_every: Positive[int] = 25
    "steps between saved states, from which a killed run resumes"
    constant: bool = False
    "keep the full rate after the warm-up, in place of half a cosine down to 0"


class StepSettings(NamedTuple):
    """The settings of `train`. Of `options` it reads steps, warmup, constant, clip and save_every."""

    options: Optimizer
    seed: int  # of dropout
    title: str  # of the progress bar
    pass_steps: float = math.inf  # stop when the loss was below LEARNED for so many steps in a row


def train(
    run: RunFolder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    batches: Callable[[int], Iterable],
    score: Callable[..., Tensor],
    objective: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    settings: StepSettings,
) -> None:
    """Train, and log one record a step.

    `batches(step)` gives this process's micro-batches of the step; each has its `trees` and the `names` of its
    scores. The model keeps its mode: with dropout or, for DPO, without. A record has the objective's numbers,
    the loss, the gradient norm before clipping, the learning rate, tokens/s and peak memory. Raises ValueError,
    before the step, if a score, loss or gradient is not finite.
    """
    options, seed, title, pass_steps = settings
    parameters = [p for p in model.parameters() if p.requires_grad]
    full_rates = [group["lr"] for group in optimizer.param_groups]
    start = _begin_or_resume(run, model, optimizer)
    learned = steps_below(LEARNED, records(run.folder)[:start])  # in a row, so far
    falls_until = math.inf if options.constant else options.steps
    bar = tqdm(range(start, options.steps), title, options.steps, initial=start, unit="step")
    for step in bar:
        if learned >= pass_steps:
            bar.write(f"the loss was below {LEARNED} for a whole pass: ends after {step} steps")
            break
        torch.manual_seed(seed * 1_000_003 + step)  # dropout is the same after a resume
        began = time.perf_counter()
        sums = _StepSums()
        with processes.fail_together():
            for batch in batches(step):
                scores = score(batch)
                sums.add_scores(scores, batch.names)
                loss, numbers = objective(batch, scores)
                loss.backward()
                sums.add_numbers(loss, numbers, batch.trees.tokens)
        processes.sum_gradients(parameters)
        norm = nn.utils.clip_grad_norm_(parameters, options.clip)
        totals = sums.transfer(norm)
        tokens = totals.pop("tokens")
        rate = cosine(step, falls_until, options.warmup)
        record = {"step": step + 1, **totals, "lr": full_rates[0] * rate}
        _check_step(record)
        for group, full_rate in zip(optimizer.param_groups, full_rates):
            group["lr"] = full_rate * rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        learned = learned + 1 if record["loss"] < LEARNED else 0
        is_last = step + 1 == options.steps or learned >= pass_steps
        if is_last and not torch.stack([p.isfinite().all() for p in parameters]).all():
            raise ValueError(
                f"step {step + 1}: a weight is not finite any more; lower the learning rate"
            )
        record["tokens_per_s"] = round(tokens / (time.perf_counter() - began))
        record["peak_memory_mib"] = round(peak_memory_mib(norm.device))
        run.log(record)
        bar.set_postfix_str(f"loss {record['loss']:.4f}")
        if is_last or (step + 1) % options.save_every == 0:
            run.save_state(step + 1, _state(model, optimizer))


def steps_below(loss: float, log: Sequence[dict]) -> int:
    """How many steps in a row, up to the last one, had a lower loss.

    >>> steps_below(0.5, [{"loss": 0.1}, {"loss": 0.9}, {"loss": 0.2}, {"loss": 0.1}])
    2
    """
    below = 0
    for record in log:
        below = below + 1 if record["loss"] < loss else 0
    return below


@dataclass
class _StepSums:
    """A step's sums over its micro-batches, kept on the device until `transfer`."""

    numbers: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0
    scored: list[tuple[Tensor, Sequence[str]]] = field(default_factory=list)

    def add_scores(self, scores: Tensor, names: Sequence[str]) -> None:
        self.scored.append((scores.detach(), names))
        if scores.is_cpu:  # scores on a GPU are checked once, in `transfer`
            check_finite(scores.detach(), names)

    def add_numbers(self, loss: Tensor, numbers: dict[str, Tensor], tokens: int) -> None:
        self.tokens += tokens
        for name, value in {"loss": loss, **numbers}.items():
            self.numbers[name] = self.numbers.get(name, 0) + value.detach()

    def transfer(self, norm: Tensor) -> dict[str, float]:
        """The sums over all processes and the gradient norm, as floats: the step's only transfer from a GPU.
        Raises ValueError in all processes, naming a score that is not finite."""
        none = torch.zeros(0, device=norm.device)  # a process may have no micro-batch
        finite = torch.cat([none, *(scores for scores, _ in self.scored)]).isfinite().all()
        values = [value.double() for value in (*self.numbers.values(), norm, finite)]
        *values, norm_value, all_finite = torch.stack(values).tolist()
        with processes.fail_together():
            if not all_finite:
                for scores, names in self.scored:
                    check_finite(scores, names)
        totals = processes.sum_numbers({**dict(zip(self.numbers, values)), "tokens": self.tokens})
        return {**totals, "grad_norm": norm_value}


def cosine(step: int, steps: float, warmup: int) -> float:
    """Share of the full learning rate at `step`, from 0: linear up over `warmup` steps, then half a cosine to 0.
    With steps = inf it stays at 1 after the warm-up.

    >>> [round(cosine(s, 6, 2), 2) for s in range(6)], cosine(5, math.inf, 2)
    ([0.5, 1.0, 1.0, 0.85, 0.5, 0.15], 1.0)
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def check_finite(scores: Tensor, names: Sequence[str]) -> Tensor:
    """Returns the scores, (n,). Raises ValueError that names a trajectory whose score is not finite.

    >>> check_finite(torch.tensor([-1.0, float("nan")]), ["click-link seed 1", "click-link seed 2"])
    Traceback (most recent call last):
    ValueError: click-link seed 2: its score is nan; the model overflowed, or cannot write one of its tokens
    """
    for score, name in zip(scores.tolist(), names, strict=True):
        if not math.isfinite(score):
            raise ValueError(
                f"{name}: its score is {score}; the model overflowed, or cannot write one of "
                "its tokens"
            )
    return scores


def _check_step(record: dict) -> None:
    if not (math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])):
        raise ValueError(
            f"step {record['step']}: the loss is {record['loss']}, the norm of its gradient "
            f"{record['grad_norm']}; lower the learning rate, or look at the data"
        )


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory so far: the allocator's on CUDA, the whole process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _begin_or_resume(run: RunFolder, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Open the run's folder and restore its last saved state, if any. Returns the step to begin with."""
    run.begin()
    start, tensors = run.load_state() or (0, {})
    if tensors:
        _restore(model, optimizer, tensors)
    run.truncate_log(start)
    return start


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that the next step depends on: `param.NAME`, and `optimizer.0.NUMBER.MOMENT` for each parameter."""
    tensors = {f"param.{name}": p for name, p in model.named_parameters() if p.requires_grad}
    for number, moments in optimizer.state_dict()["state"].items():
        for name, value in moments.items():
            tensors[f"optimizer.0.{number}.{name}"] = torch.as_tensor(value)
    return tensors


@torch.no_grad()
def _restore(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    parameters = dict(model.named_parameters())
    for key, tensor in tensors.items():
        kind, _, name = key.partition(".")
        if kind == "param":
            parameters[name].copy_(tensor)
        else:
            _, number, moment = name.split(".", 2)
            state.setdefault(int(number), {})[moment] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
