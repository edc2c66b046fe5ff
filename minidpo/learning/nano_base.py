"""How the base model that ships with minidpo was made, from nothing: it stands in for a pretrained one.

Web work is copying: the button's name from the task, its number from the page. A small model that is trained
on demonstrations alone never learns to copy. So it first learns only that, on random tokens: to continue a
span it has seen before, over an alphabet that doubles until it is the whole vocabulary. Then it imitates
careful demonstrations, and last clumsy ones, with good and bad habits.
"""

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm

from minidpo.config import BaseCommand, Optimizer
from minidpo.data.batch import batch_scores, collate
from minidpo.data.episodes import Episode
from minidpo.data.prompt import dialogues_of, episode_messages
from minidpo.learning.sft import Demonstrations, SFTBatch, sft_batches, sft_objective
from minidpo.learning.trainer import StepSettings, train
from minidpo.learning.training_run import example_indices
from minidpo.memory.machine import device_and_dtype
from minidpo.model import checkpoint
from minidpo.model.chat import Chat, Dialogue
from minidpo.model.decoder import ModelConfig, Transformer
from minidpo.system.files import replacing
from minidpo.system.run_folder import RunFolder
from minidpo.system.tensors import to_device

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


def optimizers(model: Transformer, muon_lr: float, adamw_lr: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices in the blocks, AdamW for embeddings, biases and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or ".layers." not in n]
    return [
        torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=adamw_lr, weight_decay=0.0),
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


def learn_to_copy(
    model: Transformer,
    make: Callable[..., tuple[Tensor, Tensor]],
    config: BaseCommand,
    *,
    alphabet: int,
    share: float,
    target: float = 0.95,
) -> int:
    """Train on batches of `make` until `target` of the known tokens are right over the whole vocabulary. The
    alphabet starts at `alphabet` and doubles whenever 80 % are right; `share` scales the learning rates. Logs
    to OUT/copy-NAME. Returns the steps used. Raises ValueError if config.copy_steps are too few."""
    run = RunFolder(config.out / f"copy-{make.__name__}", asdict(config))
    run.begin()
    run.truncate_log(0)  # a killed stage begins again, so its steps are logged again
    generator = torch.Generator().manual_seed(config.seed)
    muon_lr, adamw_lr = share * config.muon_lr, share * config.adamw_lr
    muon_and_adamw = optimizers(model, muon_lr, adamw_lr)
    vocabulary, accuracy, device = model.config.vocab_size, 0.0, model.head_weight.device
    with tqdm(total=config.copy_steps, desc=make.__name__, unit="step") as bar:
        for step in range(1, config.copy_steps + 1):
            ids, known = (
                tensor.to(device) for tensor in make(generator, config.copy_rows, alphabet)
            )
            logits, targets = model.head(model(ids)[:, :-1][known[:, 1:]]), ids[:, 1:][known[:, 1:]]
            loss = nn.functional.cross_entropy(logits, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, rate in zip(muon_and_adamw, (muon_lr, adamw_lr)):
                optimizer.param_groups[0]["lr"] = rate * min(1.0, step / 20)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            right = (logits.argmax(-1) == targets).float().mean().item()
            accuracy = 0.8 * accuracy + 0.2 * right
            run.log(
                record := {
                    "step": step,
                    "alphabet": alphabet,
                    "loss": loss.item(),
                    "accuracy": right,
                }
            )
            bar.set_postfix(record, refresh=False)
            bar.update()
            if alphabet == vocabulary and accuracy > target:
                return step
            if alphabet < vocabulary and accuracy > 0.8:
                alphabet, accuracy = min(2 * alphabet, vocabulary), 0.0
    raise ValueError(
        f"copying was not learned in {config.copy_steps} steps (alphabet {alphabet}, "
        f"accuracy {accuracy:.2f}); give it more steps"
    )


def imitate(
    model: Transformer,
    chat: Chat,
    episodes: Sequence[Episode],
    config: BaseCommand,
    *,
    name: str,
    steps: int,
    share: float,
) -> None:
    """Train on what the agent writes in `episodes`; `share` scales the learning rates. Logs to OUT/name."""
    data = Demonstrations(*dialogues_of(episodes, chat, config.context), [1.0] * len(episodes))

    def step_batches(step: int) -> Iterable[SFTBatch]:
        picked = example_indices(step, config.batch, len(episodes), config.seed)
        return sft_batches(data, picked, model.head_weight.device, config.machine.pass_tokens())

    muon_and_adamw = optimizers(
        model, share * config.imitation_muon_lr, share * config.imitation_adamw_lr
    )
    options = Optimizer(steps, warmup=config.warmup, clip=1.0, save_every=50)
    train(
        RunFolder(config.out / name, asdict(config)),
        model,
        muon_and_adamw,
        batches=step_batches,
        score=lambda batch: batch_scores(model, batch.trees),
        objective=sft_objective,
        settings=StepSettings(options, config.seed, name),
    )


def make_base(config: BaseCommand, careful: Sequence[Episode], clumsy: Sequence[Episode]) -> dict:
    """Make a tokenizer; then a model that copies, imitates careful episodes, and last clumsy ones: OUT/model.
    Each stage leaves a model folder, and a stage whose folder exists is not repeated. Returns the accuracy a
    token on careful episodes that were not trained on: after the careful stage, and of the finished model."""
    held_out, careful = careful[::25], [e for i, e in enumerate(careful) if i % 25]
    chat, (device, _) = make_chat(config, [*careful, *clumsy]), device_and_dtype(config.machine)
    stages = {
        "copier-spans": lambda model: learn_to_copy(
            model, span_batch, config, alphabet=min(32, config.vocab), share=1.0
        ),
        "copier": lambda model: learn_to_copy(
            model, line_batch, config, alphabet=config.vocab, share=0.6
        ),
        "careful": lambda model: imitate(
            model, chat, careful, config, name="imitate-careful", steps=config.steps, share=1.0
        ),
        "model": lambda model: imitate(
            model, chat, clumsy, config, name="imitate-clumsy", steps=config.habit_steps, share=0.35
        ),
    }
    folder = None  # of the stage before
    for name, work in stages.items():
        if not (config.out / name / "config.json").is_file():
            model = (
                checkpoint.load(folder, torch.float32, device)
                if folder
                else new_model(config).to(device)
            )
            work(model)
            checkpoint.save(
                model.requires_grad_(False), config.out / name, config.out / "tokenizer.json"
            )
        folder = config.out / name
    dialogues, _ = dialogues_of(held_out, chat, config.context)
    accuracy = {}
    for name in ("careful", "model"):
        model = checkpoint.load(config.out / name, torch.float32, device)
        accuracy |= {
            f"{name}_{kind}": value for kind, value in token_accuracy(model, dialogues).items()
        }
    return accuracy


def make_chat(config: BaseCommand, episodes: Sequence[Episode]) -> Chat:
    """The tokenizer in OUT: config.tokenizer, or trained on the episodes. ValueError if over config.vocab."""
    path = config.out / "tokenizer.json"
    if not path.is_file():
        with replacing(path) as temporary:
            if config.tokenizer is not None:
                shutil.copyfile(config.tokenizer, temporary)
            else:
                texts = (
                    message.content for episode in episodes for message in episode_messages(episode)
                )
                train_tokenizer(texts, config.vocab).save(str(temporary))
    chat = Chat.load(config.out)
    if (size := chat.tokenizer.get_vocab_size()) > config.vocab:
        raise ValueError(f"{path} has {size} tokens, more than the {config.vocab} of --vocab")
    return chat


def new_model(config: BaseCommand) -> Transformer:
    """A model with random weights. Raises ValueError if the numbers of its shape do not fit each other."""
    model = Transformer(
        ModelConfig(
            config.vocab,
            config.width,
            config.mlp,
            config.layers,
            config.heads,
            2,
            tie_word_embeddings=True,
            rope_theta=config.rope_theta,
            max_position_embeddings=config.context,
        )
    )
    initialise(model, torch.Generator().manual_seed(config.seed))
    return model


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
