"""23. Parallel: the processes that torchrun started, as one run.

Each has the whole model and takes its share of a step's micro-batches; the gradients are added up, and all
make the same step, so that the parameters stay equal without ever being sent. On pages each plays instances
of its own in a browser of its own. Rank 0 alone writes and speaks. What goes between them is numbers and
JSON. Alone, without torchrun, there is one rank, and nothing here does anything. Next: 24 trainer.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")
STEP = timedelta(minutes=30)  # how long a rank may keep the others waiting within a step
PHASE = timedelta(days=30)  # and where one still plays: a rank that dies is noticed at once all the same
FRAME = 2048  # bytes that are sent in any case
AGAIN = "the same command goes on from what is saved"
_groups: dict[str, dist.ProcessGroup] = {}


class RankLost(OSError):
    """Another rank has ended, or does not answer."""


class _Terminated(KeyboardInterrupt):
    """torchrun ends this process. An interrupt, because an event loop lets nothing else through."""


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this one, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def refuse_torchrun(what: str) -> None:
    """Refuse under torchrun what only one process can do."""
    if world_size() > 1:
        raise ValueError(f"{what} in {world_size()} processes; start it without torchrun")


@contextmanager
def process_group() -> Iterator[None]:
    """Inside, the processes that torchrun started know each other. Alone it does nothing."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in os.environ:
        yield
        return

    def told(*_):
        raise _Terminated

    before = signal.signal(signal.SIGTERM, told)
    cuda = torch.cuda.is_available()
    if cuda:  # what is asked to run on "cuda" runs on this one
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    try:
        _call(dist.init_process_group, "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=STEP)
        _groups["phase"] = _call(dist.new_group, timeout=PHASE, backend="gloo")
        with ExitStack() as stack:
            if rank() > 0:
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(redirect_stdout(nowhere))
                stack.enter_context(redirect_stderr(nowhere))  # bars; errors are told further out
            yield
    except _Terminated:
        raise RankLost(f"stopped by torchrun: another process has ended, or it was told to; {AGAIN}") from None
    finally:
        _groups.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        signal.signal(signal.SIGTERM, before)


def _call(work: Callable[..., T], *arguments, **options) -> T:
    try:
        return work(*arguments, **options)
    except RuntimeError as error:  # gloo's and NCCL's: the connection was closed, or the time is up
        reason = str(error).splitlines()[0]
        raise RankLost(f"another process of this run has ended or does not answer ({reason}); {AGAIN}") from None


def all_gather(mine: T, phase: bool = False) -> list[T]:
    """What each rank has to say, in their order: anything that JSON can hold."""
    if world_size() == 1:
        return [mine]
    group = _groups["phase"] if phase else None
    text = json.dumps(mine).encode()
    text, room = len(text).to_bytes(8, "little") + text, FRAME
    while True:  # once, or where somebody has more to say twice
        frame = torch.frombuffer(bytearray(text[:room].ljust(room)), dtype=torch.uint8)
        frames = [torch.zeros_like(frame) for _ in range(world_size())]
        _call(dist.all_gather, frames, frame, group=group)
        texts = [frame.numpy().tobytes() for frame in frames]
        ends = [8 + int.from_bytes(said[:8], "little") for said in texts]
        if max(ends) <= room:
            return [json.loads(said[8:end]) for said, end in zip(texts, ends)]
        room = max(ends)


@contextmanager
def fail_together(phase: bool = False) -> Iterator[None]:
    """No rank leaves the block before all have come to its end; an error in one is raised in all."""
    if world_size() == 1:
        yield
        return
    problem = None
    try:
        yield
    except RankLost:
        raise
    except (ValueError, OSError) as error:
        problem = error
    said = all_gather(None if problem is None else str(problem), phase)
    if problem is not None:
        raise problem
    for text in said:
        if text is not None:
            raise ValueError(text)


def on_rank_0(work: Callable[..., T], *arguments) -> T | None:
    """Do this in rank 0; the others go on when it is done, or fail with it."""
    with fail_together(phase=True):
        return work(*arguments) if rank() == 0 else None


# ---- training ----


def assign_ranks(costs: Sequence[int], ranks: int) -> list[int]:
    """Which rank takes which part, the dearest first and each to who has least.

    >>> assign_ranks([3, 9, 5, 4], ranks=2)
    [0, 0, 1, 1]
    """
    loads, owner = [0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner[i] = loads.index(min(loads))
        loads[owner[i]] += costs[i]
    return owner


def rank_parts(parts: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """This rank's of the micro-batches; parts and lengths as in `tree.pack`.

    They are the micro-batches of one process, to the last bit: only the order in which they are added up
    differs.
    """
    costs = [len(part) * max(lengths[i] for i in part) for part in parts]
    return [part for part, owner in zip(parts, assign_ranks(costs, world_size())) if owner == rank()]


def sum_over_ranks(tensor: Tensor) -> None:
    """Put the sum over all ranks in its place, the same to the last bit in each."""
    if world_size() == 1:
        return
    if tensor.is_cuda and (tensor.get_device() != torch.cuda.current_device()
                           or int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()):
        raise ValueError("under torchrun each process needs a GPU of its own: start no more than there are "
                         f"({torch.cuda.device_count()}), and leave out --machine.device or let it be cuda")
    _call(dist.all_reduce, tensor)


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Add up the gradients of all ranks, in one piece; a rank without a micro-batch brings zeros."""
    if world_size() == 1:
        return
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    sum_over_ranks(flat)
    for p, grad in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = grad.view_as(p)


def sum_numbers(numbers: dict[str, float]) -> dict[str, float]:
    """Each number's sum over all ranks; one that has no micro-batch has no numbers either."""
    total: dict[str, float] = {}
    for said in all_gather(numbers):
        for name, value in said.items():
            total[name] = total[name] + value if name in total else value
    return total
