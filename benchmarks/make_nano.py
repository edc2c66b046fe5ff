"""Make the small model that ships with minidpo (minidpo/nano) from nothing: it stands in for a pretrained one.

    python -m benchmarks.make_nano          # about two hours on two cores; the model is runs/nano-base/model

Web work is copying: the button's name from the task, its number from the page. A small model that is trained
on demonstrations alone never learns to copy. So it first learns only that, on random tokens: to continue a
span it has seen before, over an alphabet that doubles until it is the whole vocabulary. Then it imitates
careful demonstrations, and last clumsy ones, with good and bad habits. Each stage leaves a model folder, and a
stage whose folder exists is not repeated.
"""

import argparse
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm

from envs import resolve, world
from envs.miniwob.experts.habits import clumsy
from envs.protocol import Expert
from minidpo.acting.collect import play_to_file
from minidpo.acting.jobs import child_seed, make_jobs, split_instances
from minidpo.acting.policies import ExpertPolicy, RunningEpisode
from minidpo.data.batch import batch_logps, collate
from minidpo.data.episodes import Episode, read
from minidpo.data.prompt import dialogues_of, episode_messages
from minidpo.learning.training_run import example_indices
from minidpo.memory.context import Context
from minidpo.model import checkpoint
from minidpo.model.chat import Chat, Dialogue
from minidpo.model.decoder import ModelConfig, Transformer
from minidpo.system.files import replacing
from minidpo.system.result_file import write_result
from minidpo.system.tensors import to_device

WORLD = world("miniwob")
# The tasks after `demo` only give the model more to read: more pages, longer lists, more tabs.
TASKS = (
    "demo,click-checkboxes-transfer,click-tab-2-medium,click-tab-2-hard,click-collapsible-2,"
    "enter-text-dynamic,login-user-popup"
)
SEED = 1
NOISE = 0.6  # share of a clumsy agent's decisions that are slips
SHAPE = ModelConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    rope_theta=10_000.0,
    max_position_embeddings=4096,
)


@dataclass(frozen=True)
class Recipe:
    """How long each stage is; learning rates are (Muon's, AdamW's)."""

    shape: ModelConfig = SHAPE
    tokenizer: Path | None = Path("minidpo/nano/tokenizer.json")  # None: one is trained
    clumsy: int = 80  # episodes a task
    careful: int = 600
    alphabet: int = 32  # of the first copying stage, at its beginning
    copy_steps: int = 3000  # at most, in each of the two copying stages
    copy_rows: int = 64
    copy_target: float = 0.95  # share of the known tokens that must be right
    copy_rates: tuple[float, float] = (5e-3, 3e-3)
    careful_steps: int = 900
    clumsy_steps: int = 80
    batch: int = 12
    rates: tuple[float, float] = (3e-3, 1.5e-3)


SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# A word, a digit, the step from an element's text to its number, or one other character. Qwen2's own pattern
# joins a quote or blank to the word behind it: then a word has other tokens in the task than on the page, and
# cannot be copied token by token.
PIECE = r'\p{L}+|\p{N}|" \[|[^\p{L}\p{N}]'


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over `texts` with Qwen2's special tokens as the last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def initialise(model: Transformer, generator: torch.Generator) -> None:
    """Draw matrices from a normal distribution of deviation 0.02 and set biases to 0; norms stay 1."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, 0.0, 0.02, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def optimizers(model: Transformer) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices in the blocks, AdamW for embeddings, biases and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or ".layers." not in n]
    return [
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, weight_decay=0.0),
    ]


def span_batch(generator: torch.Generator, rows: int, alphabet: int) -> tuple[Tensor, Tensor]:
    """Rows of tokens, (B,T), and which of these follow from the tokens before them, (B,T) bool: 24 different
    random tokens out of `alphabet`, then eight pieces of that row, 4 to 12 long. All but the first token of a
    piece are known: find where the last token stood before, and take the next."""
    symbols, spans = 24, 8
    order = torch.rand(rows, alphabet, generator=generator).argsort(1)[:, :symbols]
    parts, known = [order], [torch.zeros(rows, symbols, dtype=torch.bool)]
    for _ in range(spans):
        length = int(torch.randint(4, 13, (), generator=generator))
        start = torch.randint(0, symbols - length, (rows, 1), generator=generator)
        parts.append(order.gather(1, start + torch.arange(length)))
        known.append((torch.arange(length) > 0).expand(rows, -1))
    return torch.cat(parts, 1), torch.cat(known, 1)


def line_batch(generator: torch.Generator, rows: int, alphabet: int) -> tuple[Tensor, Tensor]:
    """As `span_batch`: ten lines `name name | number /`, then as many of them again at random: a page of
    `"Submit" [3]`. All lines of a row have the same bar, so the bar alone does not tell which number follows:
    the model must find the line with the same name. In a repeated line all tokens but the first are known."""
    lines = 10
    symbols = torch.rand(rows, alphabet, generator=generator).argsort(1)[:, : 3 * lines + 2]
    first, second, number = symbols[:, :-2].chunk(3, 1)  # (rows,lines) each
    bar, end = (symbols[:, -i, None].expand(-1, lines) for i in (1, 2))
    page = torch.stack([first, second, bar, number, end], -1)  # (rows,lines,5)
    again = page.gather(
        1, torch.randint(0, lines, (rows, lines, 1), generator=generator).expand(-1, -1, 5)
    )
    known = torch.zeros_like(page, dtype=torch.bool).repeat(1, 2, 1)
    known[:, lines:, 1:] = True
    return torch.cat([page.flatten(1), again.flatten(1)], 1), known.flatten(1)


def step(
    model: Transformer,
    muon_and_adamw: Sequence[torch.optim.Optimizer],
    loss: Tensor,
    rates: Iterable[float],
) -> None:
    """One step of both optimizers."""
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, rate in zip(muon_and_adamw, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def learn_to_copy(
    model: Transformer,
    make: Callable[..., tuple[Tensor, Tensor]],
    recipe: Recipe,
    *,
    alphabet: int,
    share: float,
) -> int:
    """Train on batches of `make` until enough of the known tokens are right over the whole vocabulary. The
    alphabet starts at `alphabet` and doubles whenever 80 % are right; `share` scales the learning rates.
    Returns the steps used. Raises ValueError if recipe.copy_steps are too few."""
    generator = torch.Generator().manual_seed(SEED)
    muon_and_adamw = optimizers(model)
    vocabulary, accuracy = model.config.vocab_size, 0.0
    with tqdm(total=recipe.copy_steps, desc=make.__name__, unit="step") as bar:
        for n in range(1, recipe.copy_steps + 1):
            ids, known = make(generator, recipe.copy_rows, alphabet)
            logits, targets = model.head(model(ids)[:, :-1][known[:, 1:]]), ids[:, 1:][known[:, 1:]]
            loss = nn.functional.cross_entropy(logits, targets)
            warmup = share * min(1.0, n / 20)
            step(model, muon_and_adamw, loss, [warmup * rate for rate in recipe.copy_rates])
            right = (logits.argmax(-1) == targets).float().mean().item()
            accuracy = 0.8 * accuracy + 0.2 * right
            bar.set_postfix(alphabet=alphabet, loss=loss.item(), accuracy=right, refresh=False)
            bar.update()
            if alphabet == vocabulary and accuracy > recipe.copy_target:
                return n
            if alphabet < vocabulary and accuracy > 0.8:
                alphabet, accuracy = min(2 * alphabet, vocabulary), 0.0
    raise ValueError(
        f"copying was not learned in {recipe.copy_steps} steps (alphabet {alphabet}, "
        f"accuracy {accuracy:.2f}); give it more steps"
    )


def imitate(
    model: Transformer, dialogues: Sequence[Dialogue], recipe: Recipe, *, steps: int, share: float
) -> None:
    """Train on what the agent wrote: the mean of -log π over its tokens, half a cosine after a warm-up."""
    muon_and_adamw = optimizers(model)
    for n in tqdm(range(steps), "imitation", unit="step"):
        picked = example_indices(n, recipe.batch, len(dialogues), SEED)
        batches = [collate([[dialogues[i]]]) for i in picked]
        tokens = sum(len(batch.targets) for batch in batches)
        loss = -sum(batch_logps(model, batch).sum() for batch in batches) / tokens
        cosine = (1 + torch.cos(torch.tensor(torch.pi * n / steps)).item()) / 2
        scale = share * min((n + 1) / 20, cosine)
        step(model, muon_and_adamw, loss, [scale * rate for rate in recipe.rates])


class Clumsy(ExpertPolicy):
    """The experts with bad habits; each turn has its own random stream of slips."""

    def __init__(self, noise: float, seed: int):
        super().__init__(WORLD, seed)
        self.noise, self.name = noise, f"clumsy {noise}"
        self.sampling = {"noise": noise, "seed": seed}

    def expert(self, episode: RunningEpisode) -> Expert:
        seed = child_seed(self.seed, *episode.job.key, len(episode.turns))
        return clumsy(super().expert(episode), self.noise, random.Random(seed))


def play(policy: ExpertPolicy, first: int, count: int, out: Path) -> list[Episode]:
    """The policy on so many instances of each task, from number `first` of the seeds of `base` on."""
    tasks = dict.fromkeys(resolve(WORLD, TASKS), count)
    jobs = make_jobs(WORLD, split_instances(WORLD, tasks, "base", first))
    play_to_file(policy, jobs, out, context=Context("", WORLD, SEED), title=policy.name)
    return read(out)


def make_chat(folder: Path, recipe: Recipe, episodes: Sequence[Episode]) -> Chat:
    """The tokenizer in the folder: the recipe's, or one that is trained on the episodes."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        if recipe.tokenizer is not None:
            text = recipe.tokenizer.read_text(encoding="utf-8")
        else:
            messages = (
                m.content for e in episodes for m in episode_messages(e, WORLD.system_prompt)
            )
            text = train_tokenizer(messages, recipe.shape.vocab_size).to_str()
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return Chat.load(folder)


def make_model(
    out: Path, recipe: Recipe, careful: Sequence[Episode], clumsy: Sequence[Episode]
) -> dict:
    """The stages one after the other; the last is OUT/model. Returns the accuracy a token on careful episodes
    that were not trained on: after the careful stage, and of the finished model."""
    chat = make_chat(out, recipe, [*careful, *clumsy])
    limit = recipe.shape.max_position_embeddings

    def tokens(episodes: Sequence[Episode]) -> list[Dialogue]:
        return dialogues_of(episodes, chat, limit, WORLD.system_prompt)[0]

    held_out = tokens(careful[::25])
    taught = [e for n, e in enumerate(careful) if n % 25]
    size = recipe.shape.vocab_size
    stages = {
        "copier-spans": lambda model: learn_to_copy(
            model, span_batch, recipe, alphabet=recipe.alphabet, share=1.0
        ),
        "copier": lambda model: learn_to_copy(model, line_batch, recipe, alphabet=size, share=0.6),
        "careful": lambda model: imitate(
            model, tokens(taught), recipe, steps=recipe.careful_steps, share=1.0
        ),
        "model": lambda model: imitate(
            model, tokens(clumsy), recipe, steps=recipe.clumsy_steps, share=0.35
        ),
    }
    model = Transformer(recipe.shape)
    initialise(model, torch.Generator().manual_seed(SEED))
    accuracy = {}
    for name, work in stages.items():
        if (out / name / "config.json").is_file():
            model = checkpoint.load(out / name, torch.float32)
        else:
            work(model.requires_grad_(True))
            checkpoint.save(model.requires_grad_(False), out / name, out / "tokenizer.json")
        if name in ("careful", "model"):
            accuracy |= {f"{name}_{k}": v for k, v in token_accuracy(model, held_out).items()}
    return accuracy


@torch.no_grad()
def token_accuracy(model: Transformer, dialogues: Sequence[Dialogue]) -> dict:
    """Share of the agent's tokens that are the model's first choice: of all, and of those that can be copied,
    because the token and the one before it stood side by side earlier in the dialogue."""
    hits = {"all": [], "copied": []}
    for dialogue in tqdm(dialogues, "accuracy", unit="episode", delay=2, leave=False):
        tree = to_device(collate([[dialogue]]), model.head_weight.device)
        guess = model.head(model(tree.ids)[0][tree.predict]).argmax(-1)
        for t, hit in zip(tree.predict.tolist(), (guess == tree.targets).tolist()):
            hits["all"].append(hit)
            pair = (dialogue.ids[t], dialogue.ids[t + 1])
            if pair in zip(dialogue.ids[:t], dialogue.ids[1:t]):
                hits["copied"].append(hit)
    return {f"accuracy_{kind}": sum(values) / max(1, len(values)) for kind, values in hits.items()}


def main() -> None:
    """Play clumsy and careful demonstrations, then make the model."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    recipe, out = Recipe(), Path("runs/nano-base")
    clumsy_episodes = play(Clumsy(NOISE, SEED), 0, recipe.clumsy, out / "clumsy.jsonl")
    careful = play(ExpertPolicy(WORLD, SEED), recipe.clumsy, recipe.careful, out / "careful.jsonl")
    result = make_model(out, recipe, careful, clumsy_episodes)
    write_result(out / "result.json", result)
    print(f"{out / 'model'}: {result}")


if __name__ == "__main__":
    main()
