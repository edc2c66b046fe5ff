"""A policy small enough to train in a test: tokenizer, random model, checkpoint, and episodes to read."""

import functools
from pathlib import Path

import torch
from tokenizers import Tokenizer

import envs
from benchmarks.make_nano import train_tokenizer
from minidpo.data.episodes import Episode, Turn
from minidpo.data.prompt import write
from minidpo.memory import lora
from minidpo.memory.frozen import FrozenLinear, FrozenTable
from minidpo.memory.lora import LoRAConfig
from minidpo.model.chat import Chat
from minidpo.model.checkpoint import save
from minidpo.model.decoder import ModelConfig, Transformer

torch.set_num_threads(1)  # for matrices as small as these a second thread costs more than it brings

WORLD = envs.world("miniwob")
SYSTEM_PROMPT = WORLD.system_prompt
PAGE = 'text "Sign in"\ninput text #user [1]\nbutton "Submit" [2]\nlink "naïve 你好 🙂" [3]'
CLICK_1 = write("input text #user [1]", 'CLICK(ref="1")')
CLICK_2 = write('button "Submit" [2]', 'CLICK(ref="2")')


def config(vocab=420, **changes) -> ModelConfig:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
    }
    return ModelConfig(vocab, **{**sizes, **changes})


def adapted(dtype=torch.float64, **changes) -> Transformer:
    """A random model with an adapter that does something."""
    policy = model(dtype=dtype, **changes)
    lora.attach(policy, LoRAConfig(rank=3), torch.Generator().manual_seed(2))
    with torch.no_grad():
        for layer in lora.layers(policy).values():
            layer.lora_B.normal_(0, 0.2, generator=torch.Generator().manual_seed(3))
    return policy


def model(seed=1, dtype=torch.float32, **changes) -> Transformer:
    """A random model with opinions: its probabilities are far from uniform, its biases from 0."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        policy = Transformer(config(**changes)).to(dtype)
        with torch.no_grad():
            for name, weight in policy.named_parameters():
                weight.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return policy.requires_grad_(False).eval()


def is_quantised(model) -> bool:
    """Whether some of the model's weights are codes."""
    return any(isinstance(module, (FrozenLinear, FrozenTable)) for module in model.modules())


@functools.cache
def tokenizer_json() -> str:
    text = f"system\nuser\nassistant\n{SYSTEM_PROMPT}\n{PAGE}\n{CLICK_1}\n{CLICK_2}"
    return train_tokenizer([text], 420).to_str()


def chat() -> Chat:
    return Chat(Tokenizer.from_str(tokenizer_json()))


def checkpoint(folder: Path) -> Path:
    """A model folder as the hub lays it out."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    save(model(), folder)
    return folder


def episode(
    answers=(CLICK_2,), outcome="solved", seed=1, index=0, task="click-button", **changes
) -> Episode:
    """The agent gave these answers to the same page."""
    turns = tuple(Turn(PAGE, answer, 'CLICK(ref="2")') for answer in answers)
    return Episode(
        **{
            "task": task,
            "seed": seed,
            "index": index,
            "instruction": "Click on Submit.",
            "turns": turns,
            "outcome": outcome,
            "reward": float(outcome == "solved"),
            "policy": "tiny",
            **changes,
        }
    )
