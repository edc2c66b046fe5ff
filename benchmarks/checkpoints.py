"""Checkpoints of random weights in published shapes, for what is measured and not what is learnt."""

import random
import shutil
from pathlib import Path

import torch

from benchmarks.make_nano import initialise
from minidpo.memory import lora
from minidpo.memory.plan import PUBLISHED
from minidpo.model.chat import Dialogue
from minidpo.model.checkpoint import INDEX, config_json
from minidpo.model.decoder import ModelConfig, Transformer
from minidpo.system.files import write_json
from minidpo.system.tensors import write_weights

TOKENIZER = Path(__file__).parents[1] / "minidpo" / "nano" / "tokenizer.json"
SHARD = 3_950_000_000  # bytes of a file, about the hub's
SHAPES = {
    "tiny": ModelConfig(4096, 64, 96, 2, 4, 2, tie_word_embeddings=True),
    "smollm2": ModelConfig(
        49_152,
        576,
        1536,
        30,
        9,
        3,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        model_type="llama",
    ),
    **{
        f"qwen2-{size.lower()}": PUBLISHED[f"Qwen/Qwen2-{size}-Instruct"]
        for size in ("0.5B", "1.5B", "7B")
    },
}


def with_adapter(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    """A model of random weights, frozen, with an adapter that trains; the same weights each time."""
    model = Transformer(config)
    initialise(model, torch.Generator().manual_seed(0))
    model.to(dtype).requires_grad_(False).eval()
    lora.attach(model, lora.LoRAConfig(), torch.Generator().manual_seed(1))
    return model


def conversation(tokens: int, seed: int) -> Dialogue:
    """Random tokens, of which the agent wrote the second half."""
    ids = random.Random(seed).choices(range(2, 4096), k=tokens)
    return Dialogue(ids, [-1] * (tokens // 2) + [0] * (tokens - tokens // 2))


def make(folder: Path, config: ModelConfig) -> None:
    """Write it in bf16, a file at a time; each tensor begins elsewhere in one pool of random numbers."""
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in Transformer(config).state_dict().items()}
    files: list[list[str]] = [[]]
    for name in shapes:
        if sum(2 * shapes[other].numel() for other in (*files[-1], name)) > SHARD:
            files.append([])
        files[-1].append(name)
    needed = sum(2 * shape.numel() for shape in shapes.values())
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder).free < 1.4 * needed:  # its quantised copy may come beside it
        raise SystemExit(
            f"{folder}: checkpoint and quantised copy take {1.4 * needed / 1e9:.0f} GB of disk, "
            "which are not free: give another --folder"
        )
    pool = torch.randn(2**26, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()

    def drawn(name: str) -> torch.Tensor:
        if "norm" in name or name.endswith("bias"):
            return torch.full(shapes[name], float("norm" in name), dtype=torch.bfloat16)
        n, start = shapes[name].numel(), random.Random(name).randrange(len(pool))
        # a copy: a view would keep the whole pool, once for each tensor
        return pool.roll(start).repeat(-(-n // len(pool)))[:n].clone().view(shapes[name])

    names = [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    for file, members in zip(names, files):
        write_weights(folder / file, {name: drawn(name) for name in members}, {"format": "pt"})
        print(f"{folder / file}: written", flush=True)
    home = {name: file for file, members in zip(names, files) for name in members}
    write_json(folder / INDEX, {"metadata": {"total_size": needed}, "weight_map": home})
    shutil.copy(TOKENIZER, folder)
    write_json(
        folder / "config.json", config_json(config, torch.bfloat16)
    )  # last: then the folder is whole
