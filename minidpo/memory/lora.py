"""LoRA: the base is frozen, and a thin map learns beside each of its linear maps.

y = W x + (α/R) B A x, with A (R,in) random and B (out,R) zero, so training starts exactly at the base. Only
R (in + out) numbers a map train; every other weight saves its gradient and AdamW's two moments. At R = 16,
Qwen2-0.5B trains 8.8 M of 494 M weights, 0.1 GB in place of 5.9. Files have PEFT's layout and names.

Hu et al. 2021, arXiv:2106.09685, Eq. 3. Differs from the paper: A is Kaiming-uniform as in their code and
PEFT (the paper says Gaussian), and by default all linear maps of a block are adapted, not attention alone.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from minidpo.model.checkpoint import locate
from minidpo.system.files import read_json, write_json
from minidpo.system.tensors import (
    FLOATS,
    fingerprint,
    name_of,
    open_weights,
    require_finite,
    write_weights,
)
from minidpo.system.tensors import read_weights as read_tensors

CONFIG, WEIGHTS = FILES = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of PEFT's tensor names, because PEFT wraps a model twice
# Keys in the weights' metadata, which PEFT does not read: SHA-256 of the base's weights, their dtype if all
# have one, and SHA-256 of the adapter.
BASE_FINGERPRINT, BASE_DTYPE, ADAPTER_FINGERPRINT = "base_fingerprint", "base_dtype", "fingerprint"
# Keys of PEFT's config that are read or change nothing, and the values with which two others are plain LoRA;
# any other key that is set is refused
KNOWN = {
    "peft_type",
    "task_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "inference_mode",
    "base_model_name_or_path",
    "auto_mapping",
    "layers_pattern",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "use_rslora",
}
# "pissa" would change the base too
PLAIN = {"bias": ("none",), "init_lora_weights": (True, "gaussian")}
# how PEFT names an A or a B of a block's map
A_OR_B = re.compile(re.escape(PREFIX) + r"model\.layers\.\d+\.\w+\.\w+\.lora_[AB]\.weight")
# what other tensors of an adapter are, by a part of their name
OTHERS = {
    "lora_embedding_": "LoRA of an embedding",
    "lora_magnitude_vector": "a magnitude of DoRA",
    ".bias": "a bias",
    "modules_to_save": "a whole weight, no A or B of LoRA",
}


@dataclass(frozen=True)
class LoRAConfig:
    """The shape of an adapter."""

    rank: int = 16
    "R, the width of the thin maps"
    alpha: float = 32.0
    "the update is scaled by alpha / rank"
    dropout: float = 0.0
    "probability of dropping a number of the thin maps' input, in SFT alone (and in rounds that imitate)"
    targets: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    "linear maps of a block to adapt: the last part of a name, or a whole name"

    def __post_init__(self):
        if (
            self.rank < 1
            or not 0 < self.alpha < math.inf
            or not 0 <= self.dropout < 1
            or not self.targets
        ):
            raise ValueError(
                f"LoRA needs rank >= 1, alpha > 0, 0 <= dropout < 1 and targets, got {self}"
            )


class LoRALinear(nn.Module):
    """A linear map and its update: base(x) + (α/R) B A x, for x (...,in).

    `base` is any module with in_features, out_features and weight. A and B are fp32 even beside a bf16 base,
    because bf16's 8 bits lose a step of 1e-5. Their products run in x's dtype, as all products do.
    """

    def __init__(self, base: nn.Module, config: LoRAConfig, generator: torch.Generator):
        super().__init__()
        self.base, self.config, self.scale = base, config, config.alpha / config.rank
        # fp64 beside an fp64 base. A is drawn in fp32 on the generator's device: one seed, one A, everywhere.
        like = {
            "device": base.weight.device,
            "dtype": torch.promote_types(base.weight.dtype, torch.float32),
        }
        a = torch.empty(config.rank, base.in_features, device=generator.device, dtype=torch.float32)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        self.lora_A = nn.Parameter(a.to(**like))  # (R,in)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, config.rank, **like))

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        x = F.dropout(x, self.config.dropout, self.training)
        x = F.linear(x, self.lora_A.to(x.dtype))  # (...,R)
        return torch.add(y, F.linear(x, self.lora_B.to(x.dtype)), alpha=self.scale)  # (...,out)


def layers(model: nn.Module) -> dict[str, LoRALinear]:
    """The adapted maps of a model by name, in the model's order; empty if it has no adapter."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)
    }


def targets(model: nn.Module, config: LoRAConfig) -> dict[str, nn.Module]:
    """The blocks' linear maps that `config` asks for, by name. Raises ValueError if one is not there, or the
    model has an adapter already. The head is no target: model/head reads its matrix past any wrapper."""
    if layers(model):
        raise ValueError("the model carries an adapter already: merge it, or load the base again")
    maps = {
        name: m
        for name, m in model.named_modules()
        if ".layers." in name and hasattr(m, "in_features")
    }
    endings = tuple(f".{target}" for target in config.targets)  # PEFT's rule
    for target, ending in zip(config.targets, endings):
        if not any(f".{name}".endswith(ending) for name in maps):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in maps}))
            raise ValueError(
                f"LoRA target {target!r} is not in the model's blocks; there are {known}"
            )
    return {name: module for name, module in maps.items() if f".{name}".endswith(endings)}


def attach(model: nn.Module, config: LoRAConfig, generator: torch.Generator) -> None:
    """Freeze the model and put an update beside each target. Raises ValueError as `targets` does."""
    maps = targets(model, config)
    model.requires_grad_(False)
    for name, module in maps.items():
        model.set_submodule(name, LoRALinear(module, config, generator))


def parameters(model: nn.Module) -> list[nn.Parameter]:
    """A and B of every adapted map: everything that trains."""
    return [p for layer in layers(model).values() for p in (layer.lora_A, layer.lora_B)]


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add each update to its base's weight and remove it: the model is a plain one then."""
    for name, layer in tqdm(layers(model).items(), "merging", unit="matrix", delay=2, leave=False):
        weight = layer.base.weight
        assert isinstance(weight, Tensor), (
            f"{name}: a quantised base takes no update: expand it first"
        )
        # summed in A's dtype, rounded once
        weight.copy_(weight + layer.scale * layer.lora_B @ layer.lora_A)
        model.set_submodule(name, layer.base)


def detach(model: nn.Module) -> None:
    """Remove the adapter: the model is the base again."""
    for name, layer in layers(model).items():
        model.set_submodule(name, layer.base)


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The base's weights under their checkpoint names, whether an adapter is attached or not."""
    return {
        name.replace(".base.", "."): tensor
        for name, tensor in model.state_dict().items()
        if not name.endswith((".lora_A", ".lora_B"))
    }


def fingerprint_of_base(model: nn.Module) -> str:
    """Of the base's weights, in the dtype that they were rounded to as they were read."""
    return fingerprint(base_tensors(model), getattr(model, "read_in", None))


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The adapter's weights under PEFT's names, such as base_model.model.q.lora_A.weight."""
    return {
        f"{PREFIX}{name}.weight": tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name.endswith((".lora_A", ".lora_B"))
    }


def save(
    model: nn.Module, folder: str | Path, base_name: str, base_fingerprint: str | None = None
) -> None:
    """Write the adapter as PEFT does. With `base_fingerprint`, `load` refuses any other base."""
    config = next(iter(layers(model).values())).config
    base = {BASE_FINGERPRINT: base_fingerprint} if base_fingerprint else {}
    if len(dtypes := {tensor.dtype for tensor in base_tensors(model).values()}) == 1:
        base[BASE_DTYPE] = name_of(getattr(model, "read_in", None) or dtypes.pop())
    write(
        folder,
        adapter_tensors(model),
        base,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_name,
            "r": config.rank,
            "lora_alpha": config.alpha,
            "lora_dropout": config.dropout,
            "target_modules": list(config.targets),
            "bias": "none",
            "use_rslora": False,
            "use_dora": False,
            "init_lora_weights": True,
            "inference_mode": True,
        },
    )


def write(
    folder: str | Path, tensors: Mapping[str, Tensor], base: Mapping[str, str], settings: dict
) -> None:
    """Write an adapter's two files: its tensors, with what is known of their base, and PEFT's settings."""
    write_weights(
        Path(folder) / WEIGHTS,
        tensors,
        {**base, "format": "pt", ADAPTER_FINGERPRINT: fingerprint(tensors)},
    )
    write_json(Path(folder) / CONFIG, settings)


def located(folder: str | Path, files: Sequence[str] = FILES) -> Path:
    """Where an adapter's files lie. Raises ValueError if there is none."""
    where = locate(folder, files)
    if not (where / CONFIG).is_file():
        raise ValueError(
            f"{folder}: no {CONFIG} here, so this is not an adapter folder (a run's is its {where / 'adapter'})"
        )
    return where


def read_config(folder: str | Path) -> LoRAConfig:
    """The adapter's shape from PEFT's config. Raises ValueError with file and key if it is not plain LoRA."""
    raw = read_json(path := located(folder) / CONFIG)
    if raw.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type is {raw.get('peft_type')!r}, only LORA is implemented")
    for key, value in raw.items():
        if key not in KNOWN and value and value not in PLAIN.get(key, ()):
            raise ValueError(
                f"{path}: {key} is {value!r}, which is not implemented: plain LoRA only"
            )
    try:
        rank, alpha, dropout = raw["r"], float(raw["lora_alpha"]), float(raw["lora_dropout"])
        if raw.get("use_rslora"):
            # rsLoRA scales by α/√R, so it is LoRA with another α (arXiv:2312.03732)
            alpha *= max(rank, 1) ** 0.5
        names = raw["target_modules"]
        if not isinstance(names, list):
            raise TypeError(f"{names!r} is no list")
        return LoRAConfig(rank, alpha, dropout, tuple(sorted(names)))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected numbers r, lora_alpha, lora_dropout and a list target_modules: {error!r}"
        ) from None


def base_dtype(folder: str | Path) -> str | None:
    """The dtype of the base that an adapter was trained beside; None if its file does not say so."""
    with open_weights(located(folder) / WEIGHTS) as file:
        return (file.metadata() or {}).get(BASE_DTYPE)


def read_weights(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The adapter's weights by name, and the metadata beside them. Raises ValueError if it is damaged or holds
    anything but a plain adapter."""
    stored, metadata = read_tensors(path := located(folder) / WEIGHTS)
    if not stored:
        raise ValueError(f"{path}: holds no LoRA weights")
    for name, tensor in stored.items():
        _require_plain(path, name, tensor)
    checksum = metadata.get(ADAPTER_FINGERPRINT)
    if checksum and checksum != fingerprint(stored):
        raise ValueError(f"{path}: damaged: its checksum is wrong")
    return stored, metadata


def _require_plain(path: Path, name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor that is not an A or a B, whole and under PEFT's name for it."""
    if not A_OR_B.fullmatch(name):
        beside = next((what for part, what in OTHERS.items() if part in name), None)
        if beside is None and "lora" in name.lower():
            raise ValueError(
                f"{path}: its tensors have other names than PEFT gives them: {name}, but expected "
                f"such as {PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight: save it with "
                "PEFT's save_pretrained"
            )
        raise ValueError(
            f"{path}: tensor {name} is {beside or OTHERS['modules_to_save']}, which is not "
            "implemented: train an adapter of linear maps alone"
        )
    if not tensor.numel():
        raise ValueError(
            f"{path}: tensor {name} has the shape {tuple(tensor.shape)}: it was not saved whole, as "
            "happens with DeepSpeed's ZeRO-3: gather its weights as you save it"
        )
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{path}: tensor {name} is {name_of(tensor.dtype)}, not floating point")


def load(model: nn.Module, folder: str | Path, base: str | None = None) -> None:
    """Attach an adapter that `save` or PEFT wrote, from a folder or the hub. base: the fingerprint of the
    model's base, if it is known: to read all of a 7B for it takes a while. Raises ValueError, the model
    unchanged, if the adapter is damaged, not implemented or made for another base."""
    config = read_config(folder := locate(folder, FILES))
    stored, metadata = read_weights(folder)
    path, made_for = folder / WEIGHTS, metadata.get(BASE_FINGERPRINT)
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    expected, maps = {}, targets(model, config)
    for name, module in maps.items():
        expected[f"{PREFIX}{name}.lora_A.weight"] = (config.rank, module.in_features)
        expected[f"{PREFIX}{name}.lora_B.weight"] = (module.out_features, config.rank)
    for name in sorted(shapes.keys() | expected.keys()):
        if (got := shapes.get(name)) != (wanted := expected.get(name)):
            raise ValueError(
                f"{path}: made for another base: tensor {name} has shape {got} in the adapter, "
                f"{wanted} in this model (None: it is not there)"
            )
    dtype = torch.promote_types(next(iter(maps.values())).weight.dtype, torch.float32)
    for name in stored:
        stored[name] = stored[name].to(dtype)
        require_finite(path, name, stored[name])
    if made_for and made_for != (base or fingerprint_of_base(model)):
        raise ValueError(
            f"{path}: made for another base: its weights are not this model's, or "
            "--machine.dtype or --machine.quantize is another (dtype auto is that of its base)"
        )
    attach(model, config, torch.Generator())
    with torch.no_grad():
        for name, tensor in adapter_tensors(model).items():
            tensor.copy_(stored[name])


def switch_adapter(model: nn.Module, folder: str | Path, base: str | None = None) -> None:
    """Put this adapter in place of the model's, without dropout: so the first step equals a reference.
    base: as in `load`."""
    detach(model)
    load(model, folder, base)
    model.eval()


def describe(model: nn.Module) -> str:
    """How many weights train, and the MiB that these and the frozen ones take."""
    trained = parameters(model)
    count = sum(p.numel() for p in trained)
    mib, frozen = (
        sum(tensor.nbytes for tensor in tensors) / 2**20
        for tensors in (trained, base_tensors(model).values())
    )
    return f"trains {count:,} weights ({mib:,.1f} MiB) beside {frozen:,.1f} MiB of frozen ones"
