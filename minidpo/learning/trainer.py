"""24. The trainer: micro-batches, backward, clip, step, log, resume.

It knows nothing of SFT or DPO: `score(batch)` gives the micro-batch's scores, `objective(batch, scores)` a
loss and numbers to log, both already divided by the step's totals, so that adding up micro-batches IS the big
batch. Nothing in the loop waits for a GPU but one transfer a step: the numbers to log, and whether they are
finite. What a step does depends only on its number, the seed and the state that is saved, never on what else
ran in this process; so a run killed anywhere goes on to the same result: on a CPU with as many threads to the last bit, on a GPU
but for attention's backward, which adds up in no fixed order. Next: 25 stats.
"""

import math
import resource
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

from minidpo.system import processes
from minidpo.system.run_folder import RunFolder

Score = Callable[..., Tensor]
Objective = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def cosine(step: int, steps: int, warmup: int) -> float:
    """Share of the full rate at `step`, from 0: linear up over `warmup` steps, then half a cosine to 0.

    >>> [round(cosine(s, 6, 2), 2) for s in range(6)]
    [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def peak_memory_mib(device: torch.device) -> float:
    """Most memory used so far: the allocator's on CUDA, the whole process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _state(model: nn.Module, optimizers: list) -> dict[str, Tensor]:
    tensors = {f"param.{n}": p for n, p in model.named_parameters() if p.requires_grad}
    for i, optimizer in enumerate(optimizers):
        for j, kept in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{j}.{name}": torch.as_tensor(value) for name, value in kept.items()}
    return tensors


def _restore(model: nn.Module, optimizers: list, tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(tensors[f"param.{name}"])
    for i, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            if key.startswith(f"optimizer.{i}."):
                _, _, j, name = key.split(".", 3)
                state.setdefault(int(j), {})[name] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def check_finite(scores: Tensor, names: Sequence[str]) -> None:
    """Refuse, by name, a trajectory whose score is not finite; scores and names (n,).

    >>> check_finite(torch.tensor([-1.0, float("nan")]), ["click-link seed 1", "click-link seed 2"])
    Traceback (most recent call last):
    ValueError: click-link seed 2: its log-prob is nan; the model overflowed, or cannot write one of its ...
    """
    for score, name in zip(scores.tolist(), names, strict=True):
        if not math.isfinite(score):
            raise ValueError(f"{name}: its log-prob is {score}; the model overflowed, or cannot write one of "
                             "its tokens")


def train(run: RunFolder, model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int,
          batches: Callable[[int], Iterable], score: Score, objective: Objective, warmup: int, clip: float,
          seed: int, save_every: int, title: str) -> list[dict]:
    """Train for `steps` steps and return the log.

    `batches(step)` gives this rank's of the step's micro-batches (chapter 23; alone: all of them), which know
    their number of `tokens` and the `names` of what is scored. Raises ValueError before the step if a score,
    the loss or its gradient is not finite. The model stays in the mode it came in: with dropout or,
    as DPO needs it, without. Each optimizer's own learning rate is scaled by the cosine schedule. Logged at
    each step: the objective's numbers, loss, gradient norm before clipping, learning rate, tokens/s, peak
    memory.
    """
    device = next(model.parameters()).device
    parameters = [p for p in model.parameters() if p.requires_grad]
    full = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    start = 0
    processes.on_rank_0(run.begin)
    if (kept := run.load_state()) is not None:
        start, tensors = kept
        _restore(model, optimizers, tensors)
    processes.on_rank_0(run.truncate_log, start)
    bar = tqdm(range(start, steps), initial=start, total=steps, desc=title, unit="step")
    for step in bar:
        torch.manual_seed(seed * 1_000_003 + step)  # a step's dropout is its own, whether resumed or not
        began, tokens, total, seen = time.perf_counter(), 0, {}, [(torch.zeros(0, device=device), [])]
        with processes.fail_together():
            for batch in batches(step):
                scores = score(batch)
                seen.append((scores.detach(), batch.names))
                if device.type == "cpu":  # a GPU is asked once, below
                    check_finite(*seen[-1])
                loss, numbers = objective(batch, scores)
                loss.backward()
                for name, value in {"loss": loss, **numbers}.items():
                    total[name] = total.get(name, 0) + value.detach()
                tokens += batch.tokens
        processes.sum_gradients(parameters)
        norm = nn.utils.clip_grad_norm_(parameters, clip)
        scored = torch.cat([scores for scores, _ in seen])
        values = torch.stack([v.double() for v in (*total.values(), norm, scored.isfinite().all())]).tolist()
        *values, norm, all_finite = values  # one transfer for all
        if device.type != "cpu":
            with processes.fail_together():
                for scores, names in seen if not all_finite else ():
                    check_finite(scores, names)
        total = processes.sum_numbers({**dict(zip(total, values)), "tokens": tokens})
        tokens, share = total.pop("tokens"), cosine(step, steps, warmup)
        record = {"step": step + 1, **total, "grad_norm": norm, "lr": full[0][0] * share}
        if not (math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])):
            raise ValueError(f"step {step + 1}: the loss is {record['loss']}, the norm of its gradient "
                             f"{record['grad_norm']}; lower the learning rate, or look at the data")
        for optimizer, rates in zip(optimizers, full):
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step + 1 == steps and not torch.stack([p.isfinite().all() for p in parameters]).all():
            raise ValueError(f"step {step + 1}: a weight is not finite any more; lower the learning rate")
        record |= {"tokens_per_s": round(tokens / (time.perf_counter() - began)),
                   "peak_memory_mib": round(peak_memory_mib(device))}
        if processes.rank() == 0:
            run.log(record)
        bar.set_postfix_str(f"loss {record['loss']:.4f}")
        if step + 1 == steps or (step + 1) % save_every == 0:
            processes.on_rank_0(run.save_state, step + 1, _state(model, optimizers))
    return run.records()
