"""33. The budget: where every MiB goes, before one is spent.

Most terms are bytes that can be counted: weights, adapter, gradients, the optimizer's state, block inputs.
What a block needs while it is computed again depends on what autograd keeps and on when it lets go, so the
model's own code is run, forward and backward, on tensors without data, and the bytes alive are added up
(chapter 32): the plan cannot drift from the model. Next: 34 opening.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from minidpo.memory import lora
from minidpo.memory.adamw8bit import CHUNK, state_bytes
from minidpo.memory.alive import Alive, FusedAttention
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import Machine
from minidpo.memory.quantised import quantise_layout
from minidpo.model.decoder import Qwen2, Qwen2Config, rotary_angles
from minidpo.model.head import token_logps

MIB, GIB = 2**20, 2**30
# Estimates of what nothing here can count: an NVIDIA driver with cuBLAS loaded, and what the allocator cannot
# use between blocks of other sizes, as a share of what comes and goes.
CONTEXT, FRAGMENTS = 450 * MIB, 0.10
STEP = 32  # tokens: how finely the longest trajectory is sought


class Setup(NamedTuple):
    """What a plan is for: all that decides how many bytes a training step needs."""

    config: Qwen2Config
    adapter: LoRAConfig
    machine: Machine
    optimizer: str  # adamw or adamw8bit
    dtype: torch.dtype
    cuda: bool


class Load(NamedTuple):
    """What goes through the model together."""

    rows: int  # B, trees side by side
    length: int  # T, tokens of the longest
    written: int  # tokens in all of them that the agent wrote
    branched: bool = True  # whether attention needs a mask


def sft_load(machine: Machine, episode: int = 0) -> Load:
    """The most that SFT puts through the model at once, where `episode` tokens are the longest."""
    n = max(machine.micro_tokens, episode)
    return Load(1, n, n, branched=False)


def dpo_load(machine: Machine, tree: int | None = None) -> Load:
    """The same for DPO, where `tree` tokens are the largest tree; by default, what a tree may have."""
    n = max(machine.micro_tokens, machine.tree_tokens if tree is None else tree)
    return Load(1, n, n)


class Plan(NamedTuple):
    """Bytes by name: what is `held` all the time, and the `phases`, of which one at a time is added."""

    held: dict[str, float]
    phases: dict[str, float]

    @property
    def peak(self) -> float:
        return sum(self.held.values()) + max(self.phases.values())


def skeleton(setup: Setup) -> Qwen2:
    """The model that is to be trained, in shapes alone."""
    with torch.device("meta"):
        model = Qwen2(setup.config).to(setup.dtype)
    if setup.machine.quantize:
        quantise_layout(model, setup.dtype)
    lora.attach(model, setup.adapter, torch.Generator())
    return model


def step_plan(setup: Setup, load: Load, model: Qwen2 | None = None) -> Plan:
    """A training step's bytes; `model` is the `skeleton`, made here if it is not given.

    The phases exclude each other: the head's forward and backward, a block's, the optimizer's step. Gradients
    count in full, because a step of several micro-batches begins each but the first with all of them.
    """
    model = skeleton(setup) if model is None else model
    size, n = setup.dtype.itemsize, load.rows * load.length
    weights, adapter = weights_of(model), lora.parameters(model)
    lora_bytes = sum(p.nbytes for p in adapter)
    state = sum(state_bytes(p.numel()) if setup.optimizer == "adamw8bit" else 2 * p.nbytes for p in adapter)
    inside, at_work = _block(model, setup, load)
    kept, L = n * setup.config.hidden_size * size, setup.config.num_hidden_layers
    if setup.machine.recompute:
        blocks = {"block inputs": (2 if setup.machine.offload else L) * kept}  # offloaded: those on their way
    else:
        blocks, at_work = {"what blocks keep": L * inside}, at_work - inside
    mask = load.rows * load.length**2 * (size + 1) if load.branched else 0  # as numbers and, forward, as bool
    # PyTorch's own AdamW makes one more copy of all on a GPU, where it takes all tensors together
    largest = max(p.numel() for p in adapter)
    scratch = 8 * largest if not setup.cuda else lora_bytes
    held = {**weights, "adapter, gradients": lora_bytes, "optimizer": state, **blocks, "attention mask": mask}
    phases = {"head and its logits": _head(model, setup, load),
              "one block, computed again" if setup.machine.recompute else "one block, backward": at_work,
              "optimizer step": 64 * min(CHUNK, largest) if setup.optimizer == "adamw8bit" else scratch}
    return Plan(held | _beside(setup, max(phases.values()) + sum(blocks.values()) + mask), phases)


def acting_plan(setup: Setup, tokens: int) -> Plan:
    """The bytes of `pages` agents at work, each with an episode of so many tokens.

    A base in full has the adapter merged. Room for keys and values grows by half beside the old one;
    beginnings are kept once more, for other episodes of a group.
    """
    model, config, pages = skeleton(setup), setup.config, setup.machine.page_count()
    weights = weights_of(model) | ({} if setup.machine.quantize else {"adapter, weights": 0})
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * setup.dtype.itemsize
    kv *= pages * tokens
    with torch.no_grad():
        _, reading = _block(model, setup, Load(1, tokens, 0, branched=False))
    phases = {"one block, reading": reading, "keys and values, growing": kv,
              "logits": 30 * pages * config.vocab_size}  # as they are, and as fp32 and fp64 probabilities
    held = {**weights, "keys and values": 1.5 * kv, "shared beginnings": kv}
    return Plan(held | _beside(setup, max(phases.values()) + kv), phases)


def weights_of(model: Qwen2) -> dict[str, float]:
    """Bytes of a skeleton's weights, by kind."""
    weights = {"blocks, weights": 0, "vocabulary, weights": 0, "adapter, weights": 0}
    for name, tensor in model.state_dict().items():
        part = ("adapter" if ".lora_" in name else
                "vocabulary" if "embed" in name or "head" in name else "blocks")
        weights[f"{part}, weights"] += tensor.nbytes
    return weights


def _beside(setup: Setup, moving: float) -> dict[str, float]:
    """What is there besides tensors, of which so many bytes come and go."""
    return ({"fragments": FRAGMENTS * moving, "CUDA context": CONTEXT} if setup.cuda else
            {"this program": memory_now()})


def _block(model: Qwen2, setup: Setup, load: Load) -> tuple[int, int]:
    """Bytes that one block keeps for its backward pass, and the most that it has at once."""
    meta = {"device": "meta", "dtype": setup.dtype}
    x = torch.empty(load.rows, load.length, setup.config.hidden_size, **meta, requires_grad=True)
    mask = torch.empty(load.rows, 1, load.length, load.length, **meta) if load.branched else None
    positions = torch.empty(load.rows, load.length, device="meta", dtype=torch.long)
    angles = rotary_angles(positions, setup.config.head_dim, setup.config.rope_theta, setup.dtype)
    block = model.model.layers[0]
    for p in lora.parameters(block):
        p.grad = torch.empty_like(p)  # of the micro-batch before: they are counted elsewhere
    with FusedAttention(setup.cuda), Alive() as alive:
        y = block(x, *angles, mask, None, 0)
        inside = alive.now
        if torch.is_grad_enabled():
            y.backward(torch.empty_like(y))
    return inside, alive.peak


def _head(model: Qwen2, setup: Setup, load: Load) -> int:
    """The most bytes that the last norm and the head have at once, forward and backward."""
    shape = (load.rows, load.length, setup.config.hidden_size)
    with Alive() as alive:
        x = torch.empty(shape, device="meta", dtype=setup.dtype, requires_grad=True)
        predict = torch.empty(load.written, device="meta", dtype=torch.long)
        hidden = model.model.norm(x).flatten(0, 1)[predict]
        token_logps(hidden, model.head_weight, predict).sum().backward()
    return alive.peak


def memory_now() -> float:
    """What this process has in memory, in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def longest(setup: Setup, limit: float, pair: bool) -> int:
    """The longest trajectory that fits, in tokens, or pair without a common beginning; 0 if none does."""
    model, fits = skeleton(setup), 0
    above = setup.config.max_position_embeddings // STEP + 1  # that many steps are too long for the model
    while above - fits > 1:
        n = (fits + above) // 2
        load = Load(1, (1 + pair) * n * STEP, (1 + pair) * n * STEP, pair)
        fits, above = (n, above) if step_plan(setup, load, model).peak <= limit else (fits, n)
    return fits * STEP


def advice(setup: Setup, load_of: Callable[[Machine], Load]) -> list[tuple[str, float]]:
    """The settings that would save something, and how many bytes, most first."""
    machine, rank = setup.machine, setup.adapter.rank
    micro, tree = (-(-tokens // 2) for tokens in (machine.micro_tokens, machine.tree_tokens))
    tries = {
        "--machine.quantize nf4": setup._replace(machine=replace(machine, quantize="nf4")),
        "--machine.recompute": setup._replace(machine=replace(machine, recompute=True)),
        "the option optimizer = adamw8bit": setup._replace(optimizer="adamw8bit"),
        f"an adapter of rank {rank // 2}": setup._replace(
            adapter=replace(setup.adapter, rank=max(1, rank // 2))),
        f"--machine.micro-tokens {micro} with --machine.tree-tokens {tree}":
            setup._replace(machine=replace(machine, micro_tokens=micro, tree_tokens=tree))}
    if setup.cuda and machine.recompute:
        tries["--machine.offload"] = setup._replace(machine=replace(machine, offload=True))
    now = step_plan(setup, load_of(machine)).peak
    saved = {name: now - step_plan(other, load_of(other.machine)).peak for name, other in tries.items()}
    worth = [(name, bytes) for name, bytes in saved.items() if bytes >= MIB / 2]  # less would read as 0 MiB
    return sorted(worth, key=lambda entry: -entry[1])


def helps(setup: Setup, load_of: Callable[[Machine], Load]) -> str:
    """The three settings that would help most."""
    found = [f"{name} saves {bytes / MIB:,.0f} MiB" for name, bytes in advice(setup, load_of)[:3]]
    return "; ".join(found) or "nothing that could be set helps: take a smaller model"


def require(setup: Setup, load_of: Callable[[Machine], Load], limit: float) -> None:
    """Raises ValueError, naming what helps most, if a training step needs more than `limit` bytes."""
    peak = step_plan(setup, load_of(setup.machine)).peak
    if peak > limit:
        raise ValueError(f"a training step would take {peak / MIB:,.0f} MiB, but there are "
                         f"{limit / MIB:,.0f}: {helps(setup, load_of)}")


def verdict(stage: str, setup: Setup, load_of: Callable[[Machine], Load], limit: float) -> str:
    """A line that says whether it fits into `limit` bytes, and what would."""
    load = load_of(setup.machine)
    left = limit - step_plan(setup, load).peak
    if left < 0:
        return (f"{stage} does not fit into {limit / MIB:,.0f} MiB, {-left / MIB:,.0f} too many: "
                f"{helps(setup, load_of)}")
    of = "pair without a common beginning that fits is 2 x" if load.branched else "episode that fits is"
    return (f"{stage} fits into {limit / MIB:,.0f} MiB, {left / MIB:,.0f} are left; the longest {of} "
            f"{longest(setup, limit, load.branched):,} tokens")


def table(plans: dict[str, Plan]) -> str:
    """A column a plan, in MiB; of the phases only the largest is in the sum."""
    def row(name: str, values: list[float]) -> str:
        return f"{name:<28}" + "".join(f"{value / MIB:>10,.0f}" for value in values)

    held, phases = (dict.fromkeys(name for plan in plans.values() for name in getattr(plan, part))
                    for part in ("held", "phases"))
    return "\n".join([
        f"{'MiB':<28}" + "".join(f"{name:>10}" for name in plans),
        *(row(name, [plan.held.get(name, 0) for plan in plans.values()]) for name in held),
        "and the largest of",
        *(row(f"  {name}", [plan.phases.get(name, 0) for plan in plans.values()]) for name in phases),
        row("peak", [plan.peak for plan in plans.values()])])
