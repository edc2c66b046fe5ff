"""21. The trainer: micro-batches, backward, clip, step, log, resume.

It knows nothing of SFT or DPO: it receives `objective(batch) -> (loss, numbers to log)`, both already
divided by the step's totals, so that adding up micro-batches IS the big batch. What a step does depends
only on its number, the seed and the state that is saved, never on what else ran in this process; so a run
killed anywhere goes on to the same result. Next: 22 stats.
"""

import math
import resource
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from tqdm import tqdm

from minidpo.runs import Run

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


def train(run: Run, model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int,
          batches: Callable[[int], Iterable], objective: Objective, warmup: int, clip: float, seed: int,
          save_every: int, title: str) -> list[dict]:
    """Train for `steps` steps and return the log. `batches(step)` gives the step's micro-batches.

    Each optimizer's own learning rate is scaled by the cosine schedule. Logged at each step: the objective's
    numbers, loss, gradient norm before clipping, learning rate, tokens/s, peak memory.
    """
    device = next(model.parameters()).device
    parameters = [p for p in model.parameters() if p.requires_grad]
    full = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    start = 0
    run.begin()
    if (kept := run.load_state()) is not None:
        start, tensors = kept
        _restore(model, optimizers, tensors)
    bar = tqdm(range(start, steps), initial=start, total=steps, desc=title, unit="step")
    model.train()
    for step in bar:
        torch.manual_seed(seed * 1_000_003 + step)  # a step's dropout is its own, whether resumed or not
        began, tokens, total = time.perf_counter(), 0, {}
        for batch in batches(step):
            loss, numbers = objective(batch)
            loss.backward()
            for name, value in {"loss": loss, **numbers}.items():
                total[name] = total.get(name, 0) + value.detach()
            tokens += batch.tokens
        norm = nn.utils.clip_grad_norm_(parameters, clip)
        share = cosine(step, steps, warmup)
        for optimizer, rates in zip(optimizers, full):
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        values = torch.stack([v.double() for v in (*total.values(), norm)]).tolist()  # one transfer for all
        record = {"step": step + 1, **dict(zip((*total, "grad_norm"), values)), "lr": full[0][0] * share,
                  "tokens_per_s": round(tokens / (time.perf_counter() - began)),
                  "peak_memory_mib": round(peak_memory_mib(device))}
        if not (math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])):  # before it is kept
            raise ValueError(f"step {step + 1}: the loss is {record['loss']}, the norm of its gradient "
                             f"{record['grad_norm']}; lower the learning rate, or look at the data")
        run.log(record)
        bar.set_postfix_str(f"loss {record['loss']:.4f}")
        if step + 1 == steps or (step + 1) % save_every == 0:
            run.save_state(step + 1, _state(model, optimizers))
    model.eval()
    return run.records()
