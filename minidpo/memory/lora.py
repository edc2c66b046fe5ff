"""9. LoRA: the base stays as it is, and beside each linear map a thin one learns.

y = W x + (α/R) B A x, with A (R,in) random and B (R columns) zero, so training starts at the base exactly.
Saves the gradient and AdamW's two moments, 12 bytes a weight in fp32, of all but R (in + out) numbers a map:
at R = 16 on Qwen2-0.5B 8.8 M train of 494 M, 0.1 GB in place of 5.9. Costs two thin products a map. The files
are PEFT's, names and all, so an adapter goes either way. Next: 10 nf4.

Hu et al. 2021, arXiv:2106.09685, Eq. 3. Differs from the paper: A is Kaiming-uniform as in their code and
PEFT (the paper says Gaussian), and all linear maps of a block are adapted by default, not attention alone.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from minidpo.model.checkpoint import locate
from minidpo.system.files import read_json, write_json
from minidpo.system.tensors import fingerprint, open_weights, write_weights

CONFIG, WEIGHTS = FILES = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT wraps a model twice, and its tensor names tell
FINGERPRINT, OWN = "base_fingerprint", "fingerprint"  # in the weights' metadata, which PEFT does not read
# Keys of PEFT's config that are read or change nothing, and two with the values that are plain LoRA ("pissa"
# changes the base too). Any other key that is set is refused, even one not invented yet.
KNOWN = {"peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "target_modules", "inference_mode",
         "base_model_name_or_path", "auto_mapping", "layers_pattern", "megatron_core", "peft_version",
         "qalora_group_size", "revision", "use_rslora"}
PLAIN = {"bias": ("none",), "init_lora_weights": (True, "gaussian")}


@dataclass(frozen=True)
class LoRAConfig:
    """The shape of an adapter."""

    rank: int = 16
    "R, the width of the thin maps"
    alpha: float = 32.0
    "the update is scaled by alpha / rank"
    dropout: float = 0.0
    "of the input of the thin maps, while training"
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    "linear maps of a block to adapt: the last part of their names, or whole names"

    def __post_init__(self):
        if self.rank < 1 or self.alpha <= 0 or not 0 <= self.dropout < 1 or not self.targets:
            raise ValueError(f"LoRA needs rank >= 1, alpha > 0, 0 <= dropout < 1 and targets, got {self}")


class LoRALinear(nn.Module):
    """A linear map and its update: base(x) + (α/R) B A x, for x (...,in).

    `base` may be any module with in_features, out_features and weight. A and B are fp32 even beside a bf16
    base, because a step of 1e-5 vanishes in 8 bits; their products run in x's dtype, as all products do. (A
    bf16 copy of an fp32 master would take as many bytes, with its gradient, and as long: docs/log.md.)
    """

    def __init__(self, base: nn.Module, config: LoRAConfig, generator: torch.Generator):
        super().__init__()
        self.base, self.config, self.enabled = base, config, True
        self.scale = config.alpha / config.rank
        # fp64 beside an fp64 base; drawn in fp32 where the generator lives: one seed, one A, on any device
        like = {"device": base.weight.device, "dtype": torch.promote_types(base.weight.dtype, torch.float32)}
        a = torch.empty(config.rank, base.in_features, device=generator.device, dtype=torch.float32)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        self.lora_A = nn.Parameter(a.to(**like))  # (R,in)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, config.rank, **like))

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        if not self.enabled:
            return y
        x = F.dropout(x, self.config.dropout, self.training)
        x = F.linear(x, self.lora_A.to(x.dtype))  # (...,R)
        return torch.add(y, F.linear(x, self.lora_B.to(x.dtype)), alpha=self.scale)  # (...,out)


def layers(model: nn.Module) -> dict[str, LoRALinear]:
    """The adapted maps of a model by name, in the model's order; none if it has no adapter."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def targets(model: nn.Module, config: LoRAConfig) -> dict[str, nn.Module]:
    """The linear maps that `config` asks for, by name, in the model's order.

    Raises ValueError if a target names none inside the blocks, or the model has an adapter already. The head
    is no target: chapter 1 reads its matrix past any wrapper, so an adapter on it would never be applied.
    """
    if layers(model):
        raise ValueError("the model carries an adapter already: merge it, or load the base again")
    maps = {name: module for name, module in model.named_modules()
            if ".layers." in name and hasattr(module, "in_features")}
    chosen: set[str] = set()
    for target in config.targets:
        found = {name for name in maps if f".{name}".endswith(f".{target}")}  # PEFT's rule
        if not found:
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in maps))
            raise ValueError(f"LoRA target {target!r} is not in the model's blocks; there are {known}")
        chosen |= found
    return {name: module for name, module in maps.items() if name in chosen}


def attach(model: nn.Module, config: LoRAConfig, generator: torch.Generator) -> None:
    """Freeze the model and put an update beside each target. Raises ValueError as `targets` does."""
    chosen = targets(model, config)
    model.requires_grad_(False)
    for name, module in chosen.items():
        model.set_submodule(name, LoRALinear(module, config, generator))


def parameters(model: nn.Module) -> list[nn.Parameter]:
    """A and B of every adapted map: all that trains."""
    return [p for layer in layers(model).values() for p in (layer.lora_A, layer.lora_B)]


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """The base alone, bit for bit; leaving restores what was found, so that it nests."""
    found = {layer: layer.enabled for layer in layers(model).values()}
    try:
        for layer in found:
            layer.enabled = False
        yield
    finally:
        for layer, enabled in found.items():
            layer.enabled = enabled


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add each update to its base for good: what is left is a plain model."""
    for name, layer in tqdm(layers(model).items(), "merging", unit="matrix", delay=2, leave=False):
        weight = layer.base.weight
        assert isinstance(weight, Tensor), f"{name}: a quantised base takes no update: expand it (14)"
        weight.copy_(weight + layer.scale * layer.lora_B @ layer.lora_A)  # summed in A's dtype, rounded once
        model.set_submodule(name, layer.base)


def detach(model: nn.Module) -> None:
    """Take the adapter off: what is left is the base alone."""
    for name, layer in layers(model).items():
        model.set_submodule(name, layer.base)


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The base's weights under their checkpoint names, with an adapter attached or without."""
    return {name.replace(".base.", "."): tensor for name, tensor in model.state_dict().items()
            if not name.endswith((".lora_A", ".lora_B"))}


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The adapter's weights under PEFT's names.

    >>> layer = LoRALinear(nn.Linear(2, 3), LoRAConfig(), torch.Generator())
    >>> list(adapter_tensors(nn.ModuleDict({"q": layer})))
    ['base_model.model.q.lora_A.weight', 'base_model.model.q.lora_B.weight']
    """
    return {f"{PREFIX}{name}.{part}.weight": getattr(layer, part)
            for name, layer in layers(model).items() for part in ("lora_A", "lora_B")}


def save(model: nn.Module, folder: str | Path, base_name: str, base_fingerprint: str | None = None) -> None:
    """Write the adapter as PEFT does; with `base_fingerprint`, `load` will refuse any other base."""
    if not layers(model):
        raise ValueError(f"{folder}: no adapter to write, the model carries none")
    folder, config = Path(folder), next(iter(layers(model).values())).config
    tensors, made_for = adapter_tensors(model), {FINGERPRINT: base_fingerprint} if base_fingerprint else {}
    write_weights(folder / WEIGHTS, tensors, {"format": "pt", OWN: fingerprint(tensors), **made_for})
    write_json(folder / CONFIG, {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_name, "r": config.rank,
        "lora_alpha": config.alpha, "lora_dropout": config.dropout, "target_modules": list(config.targets),
        "bias": "none", "use_rslora": False, "use_dora": False, "init_lora_weights": True,
        "inference_mode": True})


def read_config(folder: str | Path) -> LoRAConfig:
    """The adapter's shape from PEFT's config. Raises ValueError naming file and key if not plain LoRA."""
    raw = read_json(path := locate(folder, FILES) / CONFIG)
    if raw.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type is {raw.get('peft_type')!r}, only LORA is implemented")
    for key, value in raw.items():
        if key not in KNOWN and value and value not in PLAIN.get(key, ()):
            raise ValueError(f"{path}: {key} is {value!r}, which is not implemented: plain LoRA only")
    rank, alpha, dropout, names = map(raw.get, ("r", "lora_alpha", "lora_dropout", "target_modules"))
    if type(rank) is not int or {type(alpha), type(dropout)} - {int, float} or type(names) is not list:
        raise ValueError(f"{path}: expected numbers r, lora_alpha, lora_dropout and a list target_modules, "
                         f"got {rank!r}, {alpha!r}, {dropout!r} and {names!r}")
    if raw.get("use_rslora"):
        alpha *= max(rank, 1) ** 0.5  # rsLoRA scales by α/√R: plain LoRA with another α (arXiv:2312.03732)
    return LoRAConfig(rank, float(alpha), float(dropout), tuple(sorted(names)))


def load(model: nn.Module, folder: str | Path) -> None:
    """Attach an adapter that `save` or PEFT wrote, in a folder or on the hub, ready to train on.

    Raises ValueError, the model untouched, if it is damaged, of a kind not implemented, or made for another
    base: other maps, other shapes, or, where it carries a fingerprint, other weights.
    """
    config = read_config(folder)
    with open_weights(path := locate(folder, FILES) / WEIGHTS) as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}
        made_for, own = map((file.metadata() or {}).get, (FINGERPRINT, OWN))
    if own and own != fingerprint(stored):
        raise ValueError(f"{path}: damaged: its checksum is wrong")
    try:
        chosen = targets(model, config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    shapes = {f"{PREFIX}{name}.lora_{part}.weight": shape
              for name, m in chosen.items()
              for part, shape in [("A", (config.rank, m.in_features)), ("B", (m.out_features, config.rank))]}
    for name in sorted(shapes.keys() | stored.keys()):
        got, wanted = tuple(stored[name].shape) if name in stored else None, shapes.get(name)
        if got != wanted:
            raise ValueError(f"{path}: made for another base: tensor {name} has shape {got} in the adapter, "
                             f"{wanted} in this model (None: it is not there)")
    if made_for and made_for != fingerprint(base_tensors(model)):
        raise ValueError(f"{path}: made for another base: other weights than this model's, or another "
                         "--machine.dtype or --machine.quantize")
    attach(model, config, torch.Generator())
    with torch.no_grad():
        for name, tensor in adapter_tensors(model).items():
            tensor.copy_(stored[name])


def describe(model: nn.Module) -> str:
    """What trains and what the weights weigh: a line for the sum and one for each group."""
    groups: dict[str, list[tuple[Tensor, int]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        group = ("adapter" if ".lora_" in name else "embedding" if "embed_tokens" in name
                 else "head" if "lm_head" in name else "blocks")
        owner = model.get_submodule(name.rpartition(".")[0])
        if not hasattr(owner, "codes"):
            count = tensor.numel()
        else:  # a quantised matrix (chapter 10): its codes are its weights, its scales are none
            count = owner.numel() if name.endswith(".codes") else 0
        groups.setdefault(group, []).append((tensor, count))
    both = [(count, tensor.requires_grad) for tensors in groups.values() for tensor, count in tensors]
    lines = [f"trains {sum(n for n, trained in both if trained):,} of {sum(n for n, _ in both):,} weights"]
    for group, tensors in groups.items():
        count, mib = sum(n for _, n in tensors), sum(t.nbytes for t, _ in tensors) / 2**20
        dtypes = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor, _ in tensors}))
        state = "trained" if any(t.requires_grad for t, _ in tensors) else "frozen"
        lines.append(f"{group:<10}{count:>14,} {dtypes:<9}{mib:>10.1f} MiB {state}")
    return "\n".join(lines)
