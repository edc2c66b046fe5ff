"""The memory plan: where every MiB of a training step goes, before one is spent.

Most terms follow from shapes. What a block needs while it runs depends on what autograd keeps and when it
lets go. So the model's own code runs, forward and backward, on tensors of PyTorch's `meta` device, which have
shapes and no data, and the bytes in use are counted: what a CPU allocates, to the byte.
"""

import functools
import weakref
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minidpo.memory import lora, nf4
from minidpo.memory.adamw8bit import CHUNK, GPU_CHUNK, state_bytes
from minidpo.memory.int8 import require_int8
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import (
    CUBLAS,
    CUDA_CONTEXT,
    Machine,
    device_and_dtype,
    device_of,
    dtype_on,
    memory_now,
    row_length,
)
from minidpo.memory.packing import can_pack, saves_time
from minidpo.memory.quantised import quantise_layout, tensor_formats
from minidpo.model import checkpoint, ggml
from minidpo.model.attention import query_blocks
from minidpo.model.decoder import ModelConfig, Transformer, rotary_angles
from minidpo.model.gguf_file import is_gguf
from minidpo.model.head import GPU_TILE, token_logps
from minidpo.model.sampling import DRAWN, SPARE, TOGETHER, WIDTH
from minidpo.model.scalar_head import ScalarHead

# an estimate: the share of transient bytes that an allocator loses in gaps between blocks
FRAGMENTS = 0.10

# Published shapes, so that a plan needs neither the network nor the weights.
PUBLISHED = {
    f"Qwen/Qwen2-{size}{kind}": ModelConfig(
        *shape, tie_word_embeddings=tied, max_position_embeddings=most
    )
    for size, shape, tied in [
        ("0.5B", (151_936, 896, 4864, 24, 14, 2), True),
        ("1.5B", (151_936, 1536, 8960, 28, 12, 2), True),
        ("7B", (152_064, 3584, 18_944, 28, 28, 4), False),
    ]
    for kind, most in (("", 131_072), ("-Instruct", 32_768))
}


class Setup(NamedTuple):
    """Everything about model and machine that decides how many bytes a training step needs."""

    config: ModelConfig
    adapter: LoRAConfig
    machine: Machine
    optimizer: str  # adamw or adamw8bit
    dtype: torch.dtype
    cuda: bool
    formats: tuple[tuple[str, str], ...] = ()  # tensor and format of a GGUF file that is kept

    def on(self, **options) -> "Setup":
        """The same with these options of the machine."""
        return self._replace(machine=replace(self.machine, **options))


class Load(NamedTuple):
    """The tokens that go through the model together: (B,T)."""

    rows: int
    length: int
    written: int  # by the agent, in all rows
    branched: bool = True  # whether attention needs a mask
    heads: str = "vocabulary"  # what reads the states of what was written; or "scalar", or "both"


def sft_load(machine: Machine, longest_episode: int = 0) -> Load:
    """The largest load of SFT, for data whose longest episode has so many tokens."""
    tokens = row_length(max(machine.pass_tokens(), longest_episode))
    return Load(1, tokens, tokens, branched=False)


def dpo_load(machine: Machine, largest_tree: int | None = None, heads: str = "vocabulary") -> Load:
    """The largest load of DPO, for data whose largest tree has so many tokens; by default `tree_tokens`. PPO
    has both heads, a reward model the scalar one, which reads fewer states than are counted here."""
    tree = machine.tree_tokens if largest_tree is None else largest_tree
    micro = machine.pass_tokens()
    rows = max(1, micro // tree)
    tokens = row_length(max(tree, micro // rows))
    return Load(rows, tokens, rows * tokens, heads=heads)


class Plan(NamedTuple):
    """Bytes by name: `held` all the time, and the `phases`, of which only one happens at a time."""

    held: dict[str, float]
    phases: dict[str, float]

    @property
    def peak(self) -> float:
        return sum(self.held.values()) + max(self.phases.values())


def step_plan(setup: Setup, load: Load) -> Plan:
    """The bytes of a training step."""
    model = meta_model(setup)
    layers, itemsize = setup.config.num_hidden_layers, setup.dtype.itemsize
    adapter = lora.parameters(model)
    adapter_bytes, largest = sum(p.nbytes for p in adapter), max(p.numel() for p in adapter)
    tokens = load.rows * load.length
    if setup.optimizer == "adamw8bit":
        state = sum(state_bytes(p.numel()) for p in adapter)
        scratch = 64 * (min(GPU_CHUNK, adapter_bytes // 4) if setup.cuda else min(CHUNK, largest))
    else:  # on a GPU, PyTorch's AdamW takes all tensors together and makes one more copy of them all
        state, scratch = 2 * adapter_bytes, adapter_bytes if setup.cuda else 8 * largest
    for_backward, block_peak = _block_bytes(setup, load, True)
    if setup.machine.recompute:
        on_device = 2 if setup.machine.offload else layers  # offloaded: only those on their way
        activations = {"block inputs": on_device * tokens * setup.config.hidden_size * itemsize}
        block_phase = {"one block, computed again": block_peak}
    else:
        activations = {"what blocks keep": layers * for_backward}
        block_phase = {"one block, backward": block_peak - for_backward}
    if setup.machine.depth_first and load.branched:
        # with their gradients; each segment of a path, counted as four, keeps those of all above it: on a GPU
        # for all heads, and `for_backward` has them once
        repeats = setup.config.num_attention_heads / setup.config.num_key_value_heads
        copies = 2 + (not setup.machine.recompute) * (1.5 * repeats if setup.cuda else 2.5)
        path = copies * _keys_and_values(setup.config, tokens) * itemsize
        activations["keys and values of a path"] = path
    mask = tokens * load.length * (itemsize + 1) if load.branched else 0  # numbers, and bool
    phases = {
        "head and its logits": _head_peak(setup, load),
        **block_phase,
        "optimizer step": scratch,
    }
    # gradients in full: every micro-batch of a step but the first begins with all of them
    held = {
        **weights_of(model),
        "adapter, gradients": adapter_bytes,
        "optimizer": state,
        **activations,
        "attention mask": mask,
    }
    if load.heads != "vocabulary":
        held["scalar head"] = 16 * setup.config.hidden_size  # weights, gradients, two moments
    return Plan(
        held | _overhead(setup, max(phases.values()) + sum(activations.values()) + mask), phases
    )


def _keys_and_values(config: ModelConfig, tokens: int) -> int:
    """How many numbers these are for so many tokens, in all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens


def acting_plan(setup: Setup, tokens: int) -> Plan:
    """The bytes of `pages` agents that act, each in an episode of so many tokens."""
    model, config, pages = meta_model(setup), setup.config, setup.machine.page_count()
    weights, int8 = weights_of(model), setup.machine.act_dtype == "int8"
    if int8:
        weights["blocks, weights"] /= setup.dtype.itemsize
        weights["vocabulary, weights"] += model.head_weight.numel()
    elif not setup.machine.quantize:
        weights["adapter, weights"] = 0  # it is merged
    places = pages if setup.cuda else pages + SPARE
    kv = _keys_and_values(config, places * tokens) * setup.dtype.itemsize
    if (
        not (setup.cuda or setup.machine.quantize or int8)
        and can_pack(torch.empty(0, dtype=setup.dtype))
        and saves_time(model, pages)
    ):
        # memory/packing: all but the products is in fp32, and the head lies packed beside the vocabulary
        kv *= 4 // setup.dtype.itemsize
        tables = 1 if config.tie_word_embeddings else 2
        weights["vocabulary, weights"] = (
            4 * tables + setup.dtype.itemsize
        ) * model.head_weight.numel()
        setup = setup._replace(dtype=torch.float32)
    together = max(tokens, TOGETHER) if setup.cuda else tokens
    _, reading = _block_bytes(setup, Load(1, together, 0, branched=False), False)
    if setup.cuda and config.num_attention_heads != config.num_key_value_heads:
        # `attend` repeats keys and values for each head, because a prompt that goes on is read with a mask
        reading += (
            2 * pages * tokens * config.num_attention_heads * config.head_dim * setup.dtype.itemsize
        )
    _, step = _block_bytes(setup, Load(pages, 1, 0, branched=False), False)
    V = config.vocab_size
    phases = {
        "one block, reading": reading,
        "keys and values, growing": kv / 2,
        # as they are, and as fp32 and fp64 probabilities; of guesses as well
        "logits": 30 * (pages * V if setup.cuda else min(max(pages, WIDTH) * V, max(V, DRAWN))),
    }
    # the room for keys and values grows by half, keys first, the old values beside it
    held = {
        **weights,
        "keys and values": 1.5 * kv,
        **({"a recorded step": step} if setup.cuda else {}),
    }
    return Plan(held | _overhead(setup, max(phases.values()) + kv), phases)


@functools.lru_cache(maxsize=100)
def meta_model(setup: Setup) -> Transformer:
    """The model to train, with its adapter, on the meta device: shapes without data."""
    with torch.device("meta"):
        model = Transformer(setup.config).to(setup.dtype)
    if setup.machine.quantize:
        nf4.tables(torch.device("meta"))  # made once a process: no block keeps them
        quantise_layout(model, setup.dtype, dict(setup.formats))
    lora.attach(model, setup.adapter, torch.Generator())
    return model


def weights_of(model: Transformer) -> dict[str, float]:
    """Bytes of a model's weights, by kind."""
    weights = {"blocks, weights": 0, "vocabulary, weights": 0, "adapter, weights": 0}
    for name, tensor in model.state_dict().items():
        part = "vocabulary" if "embed" in name or "head" in name else "blocks"
        if ".lora_" in name:
            part = "adapter"
        weights[f"{part}, weights"] += tensor.nbytes
    return weights


def _overhead(setup: Setup, transient: float) -> dict[str, float]:
    """Bytes that are not in tensors, when `transient` bytes of tensors come and go."""
    if setup.cuda:
        # forward and backward have a thread each; or reading and recording a step a stream each
        return {
            "fragments": FRAGMENTS * transient,
            "cuBLAS": 2 * CUBLAS,
            "CUDA context": CUDA_CONTEXT,
        }
    return {"this program": memory_now()}


@functools.lru_cache(maxsize=100)
def _block_bytes(setup: Setup, load: Load, training: bool) -> tuple[int, int]:
    """The bytes that one block keeps for its backward pass, and the most that it has at any time."""
    meta = {"device": "meta", "dtype": setup.dtype}
    shape = load.rows, load.length
    x = torch.empty(*shape, setup.config.hidden_size, **meta, requires_grad=True)  # (B,T,C)
    mask = None
    if setup.cuda:
        if load.branched:
            mask = torch.empty(load.rows, 1, load.length, load.length, **meta)
    # as `prepared` does in training; a block of a tree sees no more keys than this
    elif load.branched or (training and setup.dtype == torch.bfloat16):
        mask = query_blocks(None, x)
    positions = torch.empty(shape, device="meta", dtype=torch.long)
    angles = rotary_angles(positions, setup.config.head_dim, setup.config.rope_theta, setup.dtype)
    # SFT alone drops out
    block = meta_model(setup).model.layers[0].train(training and not load.branched)
    for p in lora.parameters(block):
        # the micro-batch before made them: `step_plan` counts them elsewhere
        p.grad = torch.empty_like(p)
    with torch.set_grad_enabled(training), FusedAttention(setup.cuda), ByteCounter() as counter:
        y = block(x, *angles, mask, None, 0)
        for_backward = counter.now
        if training:
            y.backward(torch.empty_like(y))
    return for_backward, counter.peak


@functools.lru_cache(maxsize=100)
def _head_peak(setup: Setup, load: Load) -> int:
    """The most bytes that the last norm and the heads have at any time, forward and backward."""
    model = meta_model(setup)
    shape = (load.rows, load.length, setup.config.hidden_size)
    with ByteCounter() as counter:
        x = torch.empty(shape, device="meta", dtype=setup.dtype, requires_grad=True)
        predict = torch.empty(load.written, device="meta", dtype=torch.long)
        hidden = model.model.norm(x).flatten(0, 1)[predict]
        head = model.head_weight
        rows = None
        if setup.cuda and not isinstance(head, torch.Tensor):
            rows = max(1, GPU_TILE // head.shape[1])
        read = token_logps(hidden, head, predict, rows=rows).sum() if load.heads != "scalar" else 0
        if load.heads != "vocabulary":
            read = read + ScalarHead(model)(hidden).sum()
        read.backward()
    return counter.peak


class ByteCounter(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside: those in use `now`, and their `peak`."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # made outside, or known already: a view costs nothing
        self._meet((args, kwargs), are_new=False)
        result = func(*args, **(kwargs or {}))
        self._meet(result, are_new=True)
        self.peak = max(self.peak, self.now)
        return result

    def _meet(self, values, are_new: bool) -> None:
        for tensor in filter(torch.is_tensor, tree_leaves(values)):
            # views share it, and it is freed with the last of them
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                size = storage.nbytes() if are_new else 0
                self.now += size
                weakref.finalize(storage, self._freed, storage._cdata, size)

    def _freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


class FusedAttention(TorchFunctionMode):
    """Calls a CPU's fused attention by its name: on the meta device PyTorch would take another. It keeps what
    CUDA's kernels keep: inputs, output, and a number per query and head."""

    def __init__(self, cuda: bool):
        super().__init__()
        self.cuda = cuda

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        (q, k, v), mask = args, kwargs["attn_mask"]
        # as `attend`
        if self.cuda and q.shape[1] != k.shape[1] and (mask is not None or q.itemsize > 2):
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return attention(q, k, v, attn_mask=mask)[0]


def setup_of(
    source: str,
    machine: Machine,
    adapter: LoRAConfig = LoRAConfig(),
    optimizer: str = "adamw",
    *,
    here: bool = True,
) -> Setup:
    """The setup of a run on this machine or, unless `here`, on any. Reads the model's shape, from its folder,
    as published, or from the hub, and no weights."""
    if here:
        device_and_dtype(machine)  # raises where cuda is asked for and not there
    machine = acting_in(source, machine)
    cuda = device_of(machine).type == "cuda"
    published = None if Path(source).is_dir() else PUBLISHED.get(source)
    path = Path(source) if published else checkpoint.locate(source, ["config.json"])
    config = published or checkpoint.read_config(path)[0]
    formats = tuple(tensor_formats(path).items()) if machine.quantize == "keep" else ()
    return Setup(config, adapter, machine, optimizer, dtype_on(machine, cuda), cuda, formats)


def acting_in(source: str, machine: Machine) -> Machine:
    """The machine, its act_dtype decided if it is auto: int8 where one page plays on a CPU and the base is a
    GGUF file in fewer than 16 bits a weight, so that 8 lose little."""
    if machine.act_dtype != "auto":
        return machine
    few_bits = False
    if machine.page_count() == 1 and device_of(machine).type == "cpu":
        path = checkpoint.locate(source, ["config.json"])
        few_bits = is_gguf(path) and not ggml.PLAIN.keys() >= set(tensor_formats(path).values())
    return replace(machine, act_dtype="int8" if few_bits else None)


def acting_setup(setup: Setup) -> Setup:
    """The setup to act with, in `act_dtype`. In fp32 on a CPU nothing is quantised: memory/packing needs full
    weights. In int8, fp32 is the dtype of all else. Raises ValueError for an `act_dtype` beside a base that
    stays quantised, and as `require_int8` does."""
    machine, config = setup.machine, setup.config
    if machine.act_dtype == "int8":
        heads = config.num_attention_heads * config.head_dim
        widths = {config.hidden_size, config.intermediate_size, heads}
        require_int8(widths, setup.cuda, machine.page_count())
        return setup._replace(dtype=torch.float32).on(cache=None, quantize=None)
    if machine.act_dtype is not None:
        setup = setup._replace(dtype=checkpoint.DTYPES[machine.act_dtype])
    if not setup.cuda and setup.dtype == torch.float32:
        return setup.on(cache=None, quantize=None)
    if machine.act_dtype is not None and machine.quantize is not None:
        raise ValueError(
            f"a base that stays in {machine.quantize} acts in machine.dtype: drop "
            f"--machine.act-dtype {machine.act_dtype}"
        )
    return setup
