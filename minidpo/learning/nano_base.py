"""40. The small base: how the model that ships with minidpo was made.

It plays the part of a pretrained model and is made from nothing, in three stages. Web work is copying (the
button's name from the task, its number from the page), and a small model trained on demonstrations alone
never finds out how; so it first learns nothing but to continue a span that it has seen before, over an
alphabet that doubles until it is the whole vocabulary. Then it reads careful demonstrations, and last clumsy
ones, good habits and bad, and learns to write what their author wrote. Matrices are trained by Muon (Jordan
et al. 2024), everything else by AdamW. Next: 41 rounds.
"""

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm

from minidpo.config import BaseCommand
from minidpo.data.batch import batch_scores, collate
from minidpo.data.episodes import Episode
from minidpo.data.prompt import dialogues_of, episode_messages
from minidpo.learning.sft import Demonstrations, SFTBatch, example_indices, sft_batches, sft_objective
from minidpo.learning.trainer import Schedule, train
from minidpo.memory.machine import device_and_dtype
from minidpo.model import checkpoint
from minidpo.model.chat import Chat, Dialogue
from minidpo.model.decoder import Qwen2, Qwen2Config
from minidpo.system.files import replacing
from minidpo.system.run_folder import RunFolder

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# A word, a digit, the step from an element's text to its number, or one other character. Qwen2's own pattern
# glues a quote or blank to the word after it, so that the same word has other tokens in the task than on the
# page, and cannot be copied token by token.
PIECE = r'\p{L}+|\p{N}|" \[|[^\p{L}\p{N}]'


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over `texts` with Qwen2's special tokens as the last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECE), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(SPECIAL), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def initialise(model: Qwen2, generator: torch.Generator) -> None:
    """Matrices normal with deviation 0.02, biases 0, norms 1."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, 0.0, 0.02, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def optimizers(model: Qwen2, muon_lr: float, adamw_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embeddings, biases and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or ".layers." not in n]
    return [torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=adamw_lr, weight_decay=0.0)]


class CopyBatch(NamedTuple):
    """Rows (B,T) and which of their tokens can be known from what stands before them."""

    ids: Tensor
    known: Tensor  # (B,T) bool
    tokens: int


def span_batch(generator: torch.Generator, rows: int, alphabet: int, symbols: int = 24,
               spans: int = 8) -> CopyBatch:
    """`symbols` different random tokens out of `alphabet`, then `spans` pieces of that row, 4 to 12 long.

    All but the first token of a piece follow from the row: find the token just read, go on behind it.
    """
    order = torch.rand(rows, alphabet, generator=generator).argsort(1)[:, :symbols]
    parts, known = [order], [torch.zeros(rows, symbols, dtype=torch.bool)]
    for _ in range(spans):
        length = int(torch.randint(4, 13, (), generator=generator))
        start = torch.randint(0, symbols - length, (rows, 1), generator=generator)
        parts.append(order.gather(1, start + torch.arange(length)))
        known.append(torch.ones(rows, length, dtype=torch.bool))
        known[-1][:, 0] = False
    ids = torch.cat(parts, 1)
    return CopyBatch(ids, torch.cat(known, 1), ids.numel())


def line_batch(generator: torch.Generator, rows: int, alphabet: int, lines: int = 10) -> CopyBatch:
    """`lines` lines `name name | number /`, then as many again at random: `"Submit" [3]` without the words.

    The bar is the same in all lines of a row, so behind it the token just read does not tell which number
    comes: the model must find the bar whose name was the same. Of a line that comes again all but its first
    token is known.
    """
    symbols = torch.rand(rows, alphabet, generator=generator).argsort(1)[:, :3 * lines + 2]
    first, second, number = symbols[:, :-2].chunk(3, 1)  # (rows,lines) each
    bar, end = (symbols[:, -i, None].expand(-1, lines) for i in (1, 2))
    page = torch.stack([first, second, bar, number, end], -1)  # (rows,lines,5)
    again = page.gather(1, torch.randint(0, lines, (rows, lines, 1), generator=generator).expand(-1, -1, 5))
    ids = torch.cat([page.flatten(1), again.flatten(1)], 1)
    known = torch.zeros_like(page, dtype=torch.bool).repeat(1, 2, 1)
    known[:, lines:, 1:] = True
    return CopyBatch(ids, known.flatten(1), ids.numel())


def learn_to_copy(model: Qwen2, make: Callable[..., CopyBatch], steps: int, rows: int, muon_lr: float,
                  adamw_lr: float, seed: int, alphabet: int, log: Callable[[dict], None],
                  target: float = 0.95) -> int:
    """Train on batches of `make` until `target` of the known tokens are right over the whole vocabulary.

    The alphabet starts at `alphabet` and doubles whenever 80 % are right. Returns the steps used;
    ValueError if `steps` do not do.
    """
    generator = torch.Generator().manual_seed(seed)
    stage = optimizers(model, muon_lr, adamw_lr)
    vocabulary, accuracy, device = model.config.vocab_size, 0.0, model.head_weight.device
    for step in range(1, steps + 1):
        batch = make(generator, rows, alphabet)
        batch = batch._replace(ids=batch.ids.to(device), known=batch.known.to(device))
        hidden = model(batch.ids)[:, :-1][batch.known[:, 1:]]
        logits, targets = model.head(hidden), batch.ids[:, 1:][batch.known[:, 1:]]
        loss = nn.functional.cross_entropy(logits, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in zip(stage, (muon_lr, adamw_lr)):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, step / 20)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        right = (logits.argmax(-1) == targets).float().mean().item()
        accuracy = 0.8 * accuracy + 0.2 * right
        log({"step": step, "alphabet": alphabet, "loss": loss.item(), "accuracy": right})
        if alphabet == vocabulary and accuracy > target:
            return step
        if alphabet < vocabulary and accuracy > 0.8:
            alphabet, accuracy = min(2 * alphabet, vocabulary), 0.0
    raise ValueError(f"copying was not learned in {steps} steps (alphabet {alphabet}, "
                     f"accuracy {accuracy:.2f}); give it more steps")


def imitate(model: Qwen2, dialogues: Sequence[Dialogue], names: Sequence[str], run: RunFolder, config: BaseCommand,
            steps: int, share: float) -> None:
    """Train on the agent's tokens of `dialogues`; `share` scales the imitation learning rates."""
    data = Demonstrations(dialogues, names, [1.0] * len(dialogues))

    def step_batches(step: int) -> Iterable[SFTBatch]:
        picked = example_indices(step, config.batch, len(dialogues), config.seed)
        return sft_batches(data, picked, model.head_weight.device, config.machine.micro_tokens)

    muon_and_adamw = optimizers(model, share * config.imitation_muon_lr, share * config.imitation_adamw_lr)
    schedule = Schedule(steps, config.warmup, clip=1.0, seed=config.seed, save_every=50, title=run.folder.name)
    train(run, model, muon_and_adamw, batches=step_batches, score=lambda batch: batch_scores(model, batch.trees),
          objective=sft_objective, schedule=schedule)


def make_base(config: BaseCommand, careful: Sequence[Episode], clumsy: Sequence[Episode]) -> dict:
    """Tokenizer, copying, imitation: careful episodes first, then clumsy ones. The model goes to OUT/model.

    Each stage leaves a model folder, and a stage whose folder is there is not done again. Returns the
    accuracy a token on careful episodes that were not trained on: after the careful stage, and of the
    finished model.
    """
    out, held_out, careful = config.out, careful[::25], [e for i, e in enumerate(careful) if i % 25]
    device, _ = device_and_dtype(config.machine)
    if not (out / "tokenizer.json").is_file():
        texts = (message.content for episode in [*careful, *clumsy] for message in episode_messages(episode))
        with replacing(out / "tokenizer.json") as temporary:
            if config.tokenizer is not None:
                shutil.copyfile(config.tokenizer, temporary)
            else:
                train_tokenizer(texts, config.vocab).save(str(temporary))
    chat = Chat.load(out)
    if (size := chat.tokenizer.get_vocab_size()) > config.vocab:
        raise ValueError(f"{out / 'tokenizer.json'} has {size} tokens, "
                         f"more than the {config.vocab} of --vocab")

    def stage(name: str, before: str | None, work: Callable[[Qwen2], object]) -> None:
        if (out / name / "config.json").is_file():
            return
        if before is None:
            model = Qwen2(Qwen2Config(config.vocab, config.width, config.mlp, config.layers, config.heads, 2,
                                      tie_word_embeddings=True, rope_theta=config.rope_theta,
                                      max_position_embeddings=config.context))
            initialise(model, torch.Generator().manual_seed(config.seed))
            model.to(device)
        else:
            model = checkpoint.load(out / before, torch.float32, device)
        work(model)
        checkpoint.save(model.requires_grad_(False), out / name, out / "tokenizer.json")

    def copying(make: Callable[..., CopyBatch], alphabet: int, share: float):
        def work(model: Qwen2) -> None:
            run = RunFolder(out / f"copy-{make.__name__}", asdict(config))
            run.begin()
            run.load_state()  # there is none: what was logged before a kill comes again
            with tqdm(total=config.copy_steps, desc=make.__name__, unit="step") as bar:  # or fewer
                learn_to_copy(model, make, config.copy_steps, config.copy_rows, share * config.muon_lr,
                              share * config.adamw_lr, config.seed, alphabet, lambda record: (
                                  run.log(record), bar.set_postfix(record, refresh=False), bar.update()))
        return work

    def imitating(episodes: Sequence[Episode], steps: int, share: float, name: str):
        known = dialogues_of(episodes, chat, config.context)
        return lambda model: imitate(model, *known, RunFolder(out / name, asdict(config)), config, steps, share)

    stage("copier-spans", None, copying(span_batch, min(32, config.vocab), 1.0))
    stage("copier", "copier-spans", copying(line_batch, config.vocab, 0.6))
    stage("careful", "copier", imitating(careful, config.steps, 1.0, "imitate-careful"))
    stage("model", "careful", imitating(clumsy, config.habit_steps, 0.35, "imitate-clumsy"))
    held, _ = dialogues_of(held_out, chat, config.context)
    accuracy = {name: token_accuracy(checkpoint.load(out / name, torch.float32, device), held)
                for name in ("careful", "model")}
    return {f"{name}_{kind}": value for name, kinds in accuracy.items() for kind, value in kinds.items()}


@torch.no_grad()
def token_accuracy(model: Qwen2, dialogues: Sequence[Dialogue]) -> dict:
    """Share of the agent's tokens that are the model's first choice: of all, and of those that can be copied.

    A token counts as copied when it and the token before it stood side by side earlier in the dialogue.
    """
    right = {"all": [], "copied": []}
    for dialogue in tqdm(dialogues, "accuracy", unit="episode", delay=2, leave=False):
        tree = collate([[dialogue]]).to(model.head_weight.device)
        guess = model.head(model(tree.ids)[0][tree.predict]).argmax(-1)
        for at, hit in zip(tree.predict.tolist(), (guess == tree.targets).tolist()):
            right["all"].append(hit)
            pair = (dialogue.ids[at], dialogue.ids[at + 1])
            if pair in zip(dialogue.ids[:at], dialogue.ids[1:at]):
                right["copied"].append(hit)
    return {f"accuracy_{kind}": sum(hits) / max(1, len(hits)) for kind, hits in right.items()}
