"""Reference values of TRL's reward, GRPO and RLOO trainers: advantages, losses and gradients of small cases.

    /path/to/peer/python benchmarks/trl_policy.py --out tests/oracles/policy_gradient.json

Needs trl, transformers and datasets (written against TRL 1.16.0) and nothing of minidpo, so that it runs in
an environment of its own. The advantages are those of whole trainers: a model of random weights answers, and
the reward function pays what REWARDS says. The losses are the trainers' own methods on log-probs drawn here,
in float64; only the forward pass is replaced. `tests/objective/test_policy_parity.py` compares.
"""

import argparse
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer, RewardTrainer, RLOOConfig, RLOOTrainer

GROUP = 4
REWARDS = [
    1.0,
    0.0,
    0.0,
    1.0,
    1.0,
    0.0,
    0.0,
    0.0,
    0.5,
    0.5,
    0.5,
    0.5,
    0.3,
    -1.2,
    2.5,
    0.7,
]  # four groups
LENGTHS = [5, 3, 1, 4, 2, 5]  # of the six completions whose losses are taken
LONGEST = 8  # what TRL's dr_grpo divides by
CLIP = [(0.2, 0.2), (0.2, 0.28)]
MARGINS = [0.0, 0.5, 1.0, 3.0, 0.0, 0.25]
NAMES = ("logps", "old_logps", "ref_logps")


def make_trainer(kind, config_of, **options):
    """A trainer of a tiny random model, whose k-th answer is paid REWARDS[k]."""
    words = {word: n for n, word in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefgh"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    processing = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(words),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )
    folder = tempfile.mkdtemp()
    model.save_pretrained(
        folder
    )  # a trainer with a KL reads its reference from where the model came from
    config = config_of(
        output_dir=folder,
        per_device_train_batch_size=len(REWARDS),
        use_cpu=True,
        num_generations=GROUP,
        max_completion_length=LONGEST,
        report_to=[],
        bf16=False,
        gradient_checkpointing=False,
        **options,
    )
    prompts = [" ".join("abcdefgh"[k : k + 2]) for k in range(len(REWARDS) // GROUP)]
    return kind(
        model=folder,
        reward_funcs=lambda completions, **_: REWARDS[: len(completions)],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=processing,
    )


def advantages_of(trainer):
    """What the trainer makes of REWARDS, through its own generation and scoring."""
    rows = [row for row in trainer.train_dataset for _ in range(GROUP)]
    return trainer._generate_and_score_completions(rows)["advantages"].tolist()


def draw_inputs():
    """Log-probs near each other, so that some ratios lie in the band and some on either side."""
    draw = torch.Generator().manual_seed(24)
    shape, numbers = (len(LENGTHS), max(LENGTHS)), {}
    numbers["logps"] = -3 * torch.rand(shape, generator=draw, dtype=torch.float64)
    for name in NAMES[1:]:
        step = torch.randn(shape, generator=draw, dtype=torch.float64)
        numbers[name] = (numbers["logps"] + 0.3 * step).clamp(max=0)
    advantage = torch.tensor([1.5, -0.5, -0.5, 0.7, -0.7, 0.0], dtype=torch.float64)
    return numbers, advantage, torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


def loss_of(trainer, numbers, advantage, mask):
    """The trainer's loss of these log-probs, and its gradient by each of them that counts."""
    leaf = numbers["logps"].clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        leaf,
        torch.zeros_like(leaf),
        None,
    )
    trainer.model.eval()
    nothing = torch.zeros_like(mask, dtype=torch.int64)
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": nothing,
            "prompt_mask": nothing,
            "completion_ids": nothing,
            "completion_mask": mask.long(),
            "advantages": advantage,
            "old_per_token_logps": numbers["old_logps"],
            "ref_per_token_logps": numbers["ref_logps"],
            "num_items_in_batch": mask.sum(),
            "old_logps": (numbers["old_logps"] * mask).sum(1),
        },
    )
    loss.backward()
    return {"loss": loss.item(), "gradient": leaf.grad[mask].tolist()}


def reward_loss(margin):
    """RewardTrainer's loss of six pairs, with these margins or without."""
    draw = torch.Generator().manual_seed(25)
    rewards = (
        3 * torch.randn(2 * len(MARGINS), generator=draw, dtype=torch.float64)
    ).requires_grad_()
    metrics = {
        name: [] for name in ("min_reward", "mean_reward", "max_reward", "accuracy", "margin")
    }
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=Accelerator(cpu=True),
        args=SimpleNamespace(center_rewards_coefficient=None),
        _total_train_tokens=0,
        _metrics={"eval": metrics},
    )
    inputs = {} if margin is None else {"margin": torch.tensor(margin, dtype=torch.float64)}

    def model(**_):
        return SimpleNamespace(logits=rewards[:, None])

    loss = RewardTrainer.compute_loss(trainer, model, inputs)
    loss.backward()
    chosen, rejected = rewards.detach().chunk(2)
    return {
        "chosen": chosen.tolist(),
        "rejected": rejected.tolist(),
        "margin": margin,
        "loss": loss.item(),
        "gradient": rewards.grad.tolist(),
        "accuracy": metrics["accuracy"][0],
    }


def main():
    """Compute all values and write them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    numbers, advantage, mask = draw_inputs()
    advantages = {
        f"grpo.{scale}": advantages_of(make_trainer(GRPOTrainer, GRPOConfig, scale_rewards=scale))
        for scale in ("group", "none")
    }
    advantages["rloo"] = advantages_of(make_trainer(RLOOTrainer, RLOOConfig, beta=0.0))
    losses = []
    for low, high in CLIP:
        band = {"epsilon": low, "epsilon_high": high}
        for kind in ("grpo", "bnpo", "dapo", "dr_grpo"):
            for beta, corrected in ((0.0, False), (0.1, False), (0.1, True)):
                trainer = make_trainer(
                    GRPOTrainer,
                    GRPOConfig,
                    loss_type=kind,
                    beta=beta,
                    use_bias_correction_kl=corrected,
                    **band,
                )
                losses.append(
                    {
                        "kind": kind,
                        "low": low,
                        "high": high,
                        "kl": beta,
                        "corrected": corrected,
                        **loss_of(trainer, numbers, advantage, mask),
                    }
                )
        trainer = make_trainer(RLOOTrainer, RLOOConfig, beta=0.0, **band)
        losses.append(
            {
                "kind": "rloo",
                "low": low,
                "high": high,
                "kl": 0.0,
                "corrected": False,
                **loss_of(trainer, numbers, advantage, mask),
            }
        )
    found = {
        "made_by": "benchmarks/trl_policy.py",
        "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
        "group": GROUP,
        "rewards": REWARDS,
        "advantages": advantages,
        "lengths": LENGTHS,
        "longest": LONGEST,
        "advantage": advantage.tolist(),
        **{name: numbers[name][mask].tolist() for name in NAMES},
        "losses": losses,
        "reward_model": [
            reward_loss(None),
            reward_loss(MARGINS),
            reward_loss([1.0] * len(MARGINS)),
        ],
    }
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
    out.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
