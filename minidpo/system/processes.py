"""Several processes as one run: the processes that torchrun started share the work and make one result.

Each rank holds the whole model and computes its share of a step's micro-batches. Gradients are summed over the
ranks and all ranks make the same step, so the parameters stay equal without being sent. When episodes are played,
each rank plays its own instances in its own browser and writes its own file, which is merged later. Everything else
is written and printed by rank 0 alone. Ranks exchange numbers and JSON. Without torchrun there is one rank, which
does everything.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from functools import wraps
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minidpo.system.errors import first_line

T = TypeVar("T")
# How long ranks wait for each other in a training step, and in a phase, when one may still play. The death of a
# rank is noticed at once.
STEP_TIMEOUT, PHASE_TIMEOUT = timedelta(minutes=30), timedelta(days=30)
GO_ON = "the same command continues from what is saved"
_groups: dict[str, dist.ProcessGroup] = {}


class RankLost(OSError):
    """Another rank has ended or does not answer."""


class _Terminated(KeyboardInterrupt):
    """torchrun ends this process. It is a KeyboardInterrupt because an event loop swallows other exceptions."""


def cores() -> int:
    """The cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def world_size() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def refuse_torchrun(what: str) -> None:
    """Raise ValueError if there are several processes. `what` begins its text, as in "a pair is not explained"."""
    if world_size() > 1:
        raise ValueError(f"{what} in {world_size()} processes; start it without torchrun")


def rank_parts(parts: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """This rank's share of the micro-batches `parts`, each a list of indices into `lengths` (tokens). One process
    would compute the same micro-batches; only the order of summing differs."""
    costs = [len(part) * max(lengths[i] for i in part) for part in parts]
    return [
        part for part, owner in zip(parts, assign_ranks(costs, world_size())) if owner == rank()
    ]


def assign_ranks(costs: Sequence[int], ranks: int) -> list[int]:
    """The rank of each part. The most expensive parts are dealt first, each to the rank with the least work.

    >>> assign_ranks([3, 9, 5, 4], ranks=2)
    [0, 0, 1, 1]
    """
    loads, owner = [0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner[i] = loads.index(min(loads))
        loads[owner[i]] += costs[i]
    return owner


def require_own_gpu(device: torch.device) -> None:
    """Raise ValueError in all ranks if two of them would share a GPU."""
    with fail_together():
        if (
            world_size() > 1
            and device.type == "cuda"
            and (
                device.index not in (None, int(os.environ.get("LOCAL_RANK", "0")))
                or int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()
            )
        ):
            raise ValueError(
                "under torchrun each process needs its own GPU: start at most "
                f"{torch.cuda.device_count()} processes, and leave out --machine.device or set it to cuda"
            )


def sum_over_ranks(tensor: Tensor) -> None:
    """Replace a tensor by its sum over all ranks, which is the same to the last bit in each."""
    if world_size() > 1:
        with _detect_lost_ranks():
            dist.all_reduce(tensor)


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sum the gradients over all ranks, as one flat tensor; a rank without a micro-batch adds zeros."""
    if world_size() == 1:
        return
    flat = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
    )
    sum_over_ranks(flat)
    for p, grad in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = grad.view_as(p)


def sum_numbers(numbers: dict[str, float]) -> dict[str, float]:
    """Each number's sum over all ranks. A rank without a micro-batch may lack some."""
    total: Counter[str] = Counter()
    for rank_numbers in all_gather(numbers):
        total.update(rank_numbers)
    return dict(total)


def on_rank_0(work: Callable[..., T], *arguments) -> T | None:
    """Call this in every rank; only rank 0 does the work. The others wait, fail if it fails, and get None."""
    with fail_together(phase=True):
        return work(*arguments) if rank() == 0 else None


def by_rank_0(method: Callable[..., T]) -> Callable[..., T | None]:
    """A decorator: every rank calls the method, and only rank 0 carries it out, as in `on_rank_0`."""

    @wraps(method)
    def on_every_rank(*arguments):
        return on_rank_0(method, *arguments)

    return on_every_rank


@contextmanager
def fail_together(phase: bool = False) -> Iterator[None]:
    """All ranks leave the block together, and a ValueError or OSError in one of them is raised in all.
    phase: the ranks may arrive days apart, because one of them still plays."""
    own_error = None
    try:
        yield
    except RankLost:
        raise
    except (ValueError, OSError) as error:
        own_error = error
    for message in all_gather(own_error and str(own_error), phase):
        if message is not None:
            raise own_error or ValueError(message)


def all_gather(value: T, phase: bool = False) -> list[T]:
    """The values of all ranks, in their order; a value is anything that JSON can hold. phase: see `fail_together`."""
    if world_size() == 1:
        return [value]
    group, text = _groups["phase"] if phase else None, json.dumps(value).encode()
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(world_size())]
    with _detect_lost_ranks():
        dist.all_gather(sizes, torch.tensor([len(text)]), group=group)
        frame = torch.frombuffer(bytearray(text.ljust(int(max(sizes)))), dtype=torch.uint8)
        frames = [torch.zeros_like(frame) for _ in sizes]
        dist.all_gather(frames, frame, group=group)
    return [json.loads(frame.numpy().tobytes()) for frame in frames]


@contextmanager
def process_group() -> Iterator[None]:
    """Inside this block the processes that torchrun started can reach each other. Does nothing without torchrun."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in os.environ:
        yield
        return

    def terminate(*_):
        raise _Terminated

    handler_before = signal.signal(signal.SIGTERM, terminate)
    cuda = torch.cuda.is_available()
    if cuda:  # from here on "cuda" means this rank's GPU
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    try:
        with _detect_lost_ranks():
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=STEP_TIMEOUT)
            _groups["phase"] = dist.new_group(timeout=PHASE_TIMEOUT, backend="gloo")
        with ExitStack() as stack:
            if rank() > 0:  # silent, without progress bars; errors are printed outside this block
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(redirect_stdout(nowhere))
                stack.enter_context(redirect_stderr(nowhere))
            yield
    except _Terminated:
        raise RankLost(
            f"stopped by torchrun, because another process ended or by request; {GO_ON}"
        ) from None
    finally:
        _groups.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        signal.signal(signal.SIGTERM, handler_before)


@contextmanager
def _detect_lost_ranks() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # from gloo or NCCL: the connection was closed, or the time is up
        raise RankLost(
            f"another process of this run has ended or does not answer "
            f"({first_line(error)}); {GO_ON}"
        ) from None
