"""A base that answers the toy world in the right form and opens any box: a fifth of its episodes are solved."""

import functools
import random
from pathlib import Path

import tiny
import torch
from tokenizers import Tokenizer

import envs
from benchmarks.make_nano import train_tokenizer
from envs.toy import COLOURS, SENTENCES
from minidpo.acting.policies import Sampling
from minidpo.data.batch import batch_scores
from minidpo.data.episodes import Episode, Turn
from minidpo.data.prompt import dialogues_of, write
from minidpo.experiment import ExperimentOptions
from minidpo.learning.sft import Demonstrations, sft_batches, sft_objective
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import Machine
from minidpo.model.chat import Chat
from minidpo.model.checkpoint import save
from minidpo.model.decoder import Transformer

WORLD = envs.world("toy")
HERE = Machine(device="cpu", dtype="float32")


def options(base: Path, out: Path, **changes) -> ExperimentOptions:
    """A small experiment on this base."""
    return ExperimentOptions(
        **{
            "model": str(base),
            "world": "toy",
            "tasks": "open-one",
            "out": out,
            "validation": 4,
            "episodes": 4,
            "sampled": 1,
            "least_instances": 1,
            "machine": HERE,
            "lora": LoRAConfig(rank=4),
            "sampling": Sampling(max_new_tokens=40),
            **changes,
        }
    )


@functools.cache
def tokenizer_json() -> str:
    answers = [answer(box, n) for box in COLOURS for n in range(1, 6)]
    words = ["system user assistant task: page: error:", WORLD.system_prompt, *SENTENCES.values()]
    return train_tokenizer(["\n".join([*words, *answers])], 420).to_str()


def answer(box: str, number: int) -> str:
    return write(f'button "{box}" [{number}]', f'CLICK(ref="{number}")')


def guess(rng: random.Random, seed: int) -> Episode:
    """Any box is opened, whatever the task."""
    boxes = rng.sample(COLOURS, 5)
    number = rng.randint(1, 5)
    page = "\n".join(f'button "{box}" [{n}]' for n, box in enumerate(boxes, 1))
    turn = Turn(page, answer(boxes[number - 1], number), f'CLICK(ref="{number}")')
    task = SENTENCES["open-one"].format(rng.choice(boxes))
    return Episode("open-one", seed, 0, task, (turn,), "failed", 0.0, "anyone")


def base(folder: Path, steps: int = 70) -> Path:
    """A model folder. It takes some seconds to learn the form."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    chat, rng = Chat(Tokenizer.from_str(tokenizer_json())), random.Random(1)
    guesses = [guess(rng, n) for n in range(64)]
    dialogues, names = dialogues_of(guesses, chat, 1024, WORLD.system_prompt)
    data = Demonstrations(dialogues, names, [1.0] * len(names))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Transformer(tiny.config(420))
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, 0.0, 0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        picked = [n % 64 for n in range(8 * step, 8 * step + 8)]
        for batch in sft_batches(data, picked, torch.device("cpu"), 4096):
            loss, _ = sft_objective(batch, batch_scores(model, batch.trees))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save(model.requires_grad_(False).eval(), folder)
    return folder
