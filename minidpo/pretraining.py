"""27. The small base: how the model that ships with minidpo was made.

It plays the part of a pretrained model and is made from nothing, in two stages. Web work is copying (the button's
name from the task, its number from the page), and a small model trained on demonstrations alone never finds out how;
so it first learns nothing but to continue a span that it has seen before, over an alphabet that doubles until it is
the whole vocabulary. Then it reads clumsy demonstrations, good habits and bad ones, and learns to write what their
author wrote. Matrices are trained by Muon (Jordan et al. 2024), everything else by AdamW. Next: the scripts.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm

from minidpo import pretrained
from minidpo.agent import episode_messages
from minidpo.chat import Chat, Dialogue
from minidpo.config import BaseCommand
from minidpo.episodes import Episode
from minidpo.files import replacing
from minidpo.qwen2 import Qwen2, Qwen2Config
from minidpo.rows import batch_logps, collate, pack
from minidpo.runs import Run
from minidpo.stages import SFTBatch, device_and_dtype, dialogues_of, drawn
from minidpo.trainer import train

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# A word, a digit, the step from an element's text to its number, or one other character. Qwen2's own pattern glues a quote or blank to the word after it, so
# that the same word has other tokens in the task than on the page, and cannot be copied token by token.
PIECE = r'\p{L}+|\p{N}|" \[|[^\p{L}\p{N}]'


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over `texts` with Qwen2's special tokens as the last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECE), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
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


def copy_batch(generator: torch.Generator, rows: int, alphabet: int, symbols: int = 24, spans: int = 8) -> CopyBatch:
    """`symbols` different random tokens out of `alphabet`, then `spans` pieces of that row again, 4 to 12 long.

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


def learn_to_copy(model: Qwen2, steps: int, rows: int, muon_lr: float, adamw_lr: float, seed: int,
                  log: Callable[[dict], None], target: float = 0.95) -> int:
    """The first stage. Doubles the alphabet from 32 whenever 80 % of the copied tokens are right, and ends when
    `target` of them are right over the whole vocabulary. Returns the steps used; ValueError if `steps` do not do."""
    generator = torch.Generator().manual_seed(seed)
    stage = optimizers(model, muon_lr, adamw_lr)
    alphabet, accuracy = min(32, model.config.vocab_size), 0.0
    for step in range(1, steps + 1):
        batch = copy_batch(generator, rows, alphabet)
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
        if alphabet == model.config.vocab_size and accuracy > target:
            return step
        if alphabet < model.config.vocab_size and accuracy > 0.8:
            alphabet, accuracy = min(2 * alphabet, model.config.vocab_size), 0.0
    raise ValueError(f"copying was not learned in {steps} steps (alphabet {alphabet}, accuracy {accuracy:.2f}); "
                     "give it more steps")


def make_base(config: BaseCommand, episodes: Sequence[Episode]) -> dict:
    """Tokenizer, copying, imitation; the model goes to OUT/model. Returns held-out accuracy a token, per kind."""
    held_out, used = episodes[::25], [episode for i, episode in enumerate(episodes) if i % 25]
    run, folder = Run(config.out, asdict(config)), config.out / "model"
    tokenizer_file = config.out / "tokenizer.json"
    if not tokenizer_file.is_file():
        texts = (message.content for episode in used for message in episode_messages(episode))
        with replacing(tokenizer_file) as temporary:
            train_tokenizer(texts, config.vocab).save(str(temporary))
    chat = Chat.load(config.out)
    device, _ = device_and_dtype(config.machine)
    if not (config.out / "copier" / "config.json").is_file():
        model = Qwen2(Qwen2Config(config.vocab, config.width, config.mlp, config.layers, config.heads, 2,
                                  tie_word_embeddings=True, rope_theta=config.rope_theta,
                                  max_position_embeddings=config.context))
        initialise(model, torch.Generator().manual_seed(config.seed))
        with tqdm(desc="copying", unit="step") as bar:
            learn_to_copy(model.to(device), config.copy_steps, config.copy_rows, config.muon_lr, config.adamw_lr, config.seed,
                          lambda record: (bar.update(), bar.set_postfix(record, refresh=False)))
        pretrained.save(model, config.out / "copier", tokenizer_file)
    model = pretrained.load(config.out / "copier", torch.float32, device)
    dialogues = dialogues_of(used, chat, config.context)

    def batches(step: int):
        picked = [dialogues[i] for i in drawn(step, config.batch, len(dialogues), config.seed)]
        written = sum(turn >= 0 for dialogue in picked for turn in dialogue.turns)
        for part in pack([len(dialogue.ids) for dialogue in picked], config.machine.micro_tokens):
            rows = collate([picked[i] for i in part], device)
            yield SFTBatch(rows, written, rows.tokens)

    def objective(batch: SFTBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return -batch_logps(model, batch.rows).sum() / batch.step_tokens, {}

    if not run.finished:
        train(run, model, optimizers(model, config.muon_lr, config.adamw_lr), config.steps, batches, objective,
              config.warmup, 1.0, config.seed, 100, "imitating")
        pretrained.save(model, folder, tokenizer_file)
        run.finish()
    return token_accuracy(pretrained.load(folder, torch.float32, device), dialogues_of(held_out, chat, config.context))


@torch.no_grad()
def token_accuracy(model: Qwen2, dialogues: Sequence[Dialogue]) -> dict:
    """Share of the agent's tokens that are the model's first choice: of all, and of those that can be copied.

    A token counts as copied when it and the token before it stood side by side earlier in the dialogue.
    """
    right = {"all": [], "copied": []}
    for dialogue in dialogues:
        rows = collate([dialogue], model.head_weight.device)
        guess = model.head(model(rows.ids)[0][rows.predict]).argmax(-1)
        for at, hit in zip(rows.predict.tolist(), (guess == rows.targets).tolist()):
            right["all"].append(hit)
            pair = (dialogue.ids[at], dialogue.ids[at + 1])
            if pair in zip(dialogue.ids[:at], dialogue.ids[1:at]):
                right["copied"].append(hit)
    return {f"accuracy_{kind}": sum(hits) / max(1, len(hits)) for kind, hits in right.items()}
