"""Supervised fine-tuning: LoRA adapters from episodes that are imitated.

`sft` reads as the algorithm. Behind it stand the choice of episodes, a step's batches, and what
`learning/dpo` needs too: the order of examples, the optimizer, how a run ends.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from torch import Tensor, nn

from minidpo.config import SFT, Optimizer, PairsCommand, RolloutsCommand, SFTCommand
from minidpo.data import trl_files
from minidpo.data.batch import Batch, batch_scores, batches_within, collate
from minidpo.data.episodes import Episode, by_instance, read_all
from minidpo.data.pairs import NothingToLearn, check_prompts
from minidpo.data.prompt import dialogues_of
from minidpo.learning.selection import capped, selected_by_reward, valued_episodes
from minidpo.learning.trainer import Schedule, train
from minidpo.memory import lora
from minidpo.memory.adamw8bit import AdamW8bit
from minidpo.memory.loading import as_trained, open_chat, open_to_train
from minidpo.memory.machine import to_device
from minidpo.memory.muon import Muon
from minidpo.memory.plan import sft_load
from minidpo.model.chat import Dialogue
from minidpo.model.decoder import Transformer
from minidpo.objective.losses import advantage_weights, sft_loss, value_weights
from minidpo.system import processes
from minidpo.system.files import file_sha256
from minidpo.system.run_folder import RunFolder, records


def sft(config: SFTCommand) -> dict:
    """Train an adapter to say what was said in the episodes. Returns the last step's log."""
    options = config.sft
    episodes, weights, by_turn = load_demonstrations(config)
    run = open_run(config, config.data)
    if run.finished:
        return resync_finished(run)
    shape = lora.read_config(config.adapter) if config.adapter else config.lora
    asked = replace(config.lora, targets=tuple(sorted(config.lora.targets)))  # as `read_config` has them
    if config.adapter and config.lora != lora.LoRAConfig() and asked != shape:
        raise ValueError(f"--adapter {config.adapter} has a shape of its own: leave out lora's options")
    chat, limit = open_chat(config.model)
    data = Demonstrations(*dialogues_of(episodes, chat, limit), weights, by_turn)
    options = in_steps(options, len(data.dialogues))
    machine = as_trained(config.machine, config.adapter)
    if shape.dropout:  # is drawn a micro-batch at a time, so the free memory must not decide on these
        processes.refuse_torchrun("dropout is drawn a micro-batch at a time, and would be drawn otherwise")
        machine = replace(machine, micro_tokens=machine.pass_tokens())
        run.drawn = str(machine.micro_tokens)
    longest = max(len(dialogue.ids) for dialogue in data.dialogues)
    policy, machine, run.base = open_to_train(config.model, machine, shape, options.optimizer,
                                              lambda m: sft_load(m, longest))
    if config.adapter:
        lora.load(policy, config.adapter)
    else:
        lora.attach(policy, shape, torch.Generator().manual_seed(config.seed))
    print(lora.describe(policy))

    def step_batches(step: int) -> Iterator[SFTBatch]:
        picked = example_indices(step, options.batch, len(data.dialogues), config.seed)
        return sft_batches(data, picked, policy.head_weight.device, machine.micro_tokens)

    train(run, policy.train(), optimizers_of(options, policy), batches=step_batches,
          score=lambda batch: batch_scores(policy, batch.trees), objective=sft_objective,
          schedule=Schedule(options, config.seed, "SFT"))
    return finish(run, policy, config.model)


class Demonstrations(NamedTuple):
    """What is imitated, as token ids, with what each counts."""

    dialogues: list[Dialogue]
    names: list[str]
    weights: list[float]
    by_turn: Sequence[Tensor] = ()  # (turns,) of each, weights beside these; (): all turns alike


def load_demonstrations(config: SFTCommand) -> tuple[list, list[float], list[Tensor]]:
    """The episodes or conversations to imitate, each with its weight, and of weighting value with those of
    its turns; NothingToLearn if there is none."""
    options = config.sft
    if trl_files.are_trl_files(config.data):
        selecting = options.changed("weighting", "select", "per_instance", "per_task", "distinct")
        refuse_for_conversations([f"sft.{option}" for option in selecting])
        conversations = trl_files.read_demonstrations(config.data)
        return conversations, [1.0] * len(conversations), []
    played = read_all(config.data)
    if options.weighting == "value":
        episodes, by_turn = valued(played, config.data)
        if not episodes:
            raise NothingToLearn(f"{' '.join(map(str, config.data))}: each step has the value 0, so none is "
                                 "worth imitating: explore more, or easier tasks")
        return episodes, [1.0] * len(episodes), by_turn
    episodes, weights = imitated(played, options, config.seed)
    if not episodes:
        has_threshold = options.weighting == "reward" or options.select != "threshold"
        raise NothingToLearn(f"{' '.join(map(str, config.data))}: none of {len(played)} episodes is to be "
                             f"imitated, the highest reward is {max(e.reward for e in played):g}: explore "
                             "more" + ", lower the threshold or raise the ratio" * has_threshold)
    return episodes, weights, []


def refuse_for_conversations(given: Sequence[str]) -> None:
    """Raises ValueError if an option is given that only episodes can answer."""
    if given:
        raise ValueError(f"--{given[0].replace('_', '-')} needs episodes, as collect.py writes them, and "
                         "--data holds conversations: leave it out")


def imitated(episodes: Sequence[Episode], options: SFT, seed: int = 1) -> tuple[list[Episode], list[float]]:
    """The episodes to imitate, each with its weight. Of one that is relabelled, and was solved from there,
    the expert's first answer alone: the others answer to states that no agent reached."""
    episodes = [e.up_to(e.forced + 1) if e.relabelled else e for e in episodes
                if not e.relabelled or (e.solved and len(e.turns) > e.forced)]
    chosen = [e for e in episodes if e.turns and (e.solved or options.weighting == "advantage")]
    if options.weighting == "reward" or options.select != "threshold":
        chosen = selected_by_reward(episodes, options, seed=seed)
    if options.distinct:
        # of equal ones the first, so a demonstration; relabelled ones, of which one answer counts, apart
        chosen = list({(e.instance, e.said, e.relabelled): e for e in chosen[::-1]}.values())[::-1]
    chosen = capped(chosen, options.per_instance, options.per_task, seed=seed)
    if options.weighting == "reward":
        return chosen, [e.reward for e in chosen]
    if options.weighting == "solved" or not chosen:
        return chosen, [1.0] * len(chosen)
    check_prompts(chosen)
    number = {instance: n for n, instance in enumerate(by_instance(chosen))}
    reward = torch.tensor([float(e.solved) for e in chosen])
    group = torch.tensor([number[e.instance] for e in chosen])
    return chosen, advantage_weights(reward, group, options.temperature).tolist()


def valued(played: Sequence[Episode], files: Sequence[Path]) -> tuple[list[Episode], list[Tensor]]:
    """The `valued_episodes`, solved or not, of which a turn counts, with their turns' `value_weights`."""
    found = [(e, weights) for e, values in valued_episodes(played, files, "sft.weighting value")
             if (weights := value_weights(torch.tensor(values))).any()]
    return [e for e, _ in found], [weights for _, weights in found]


class SFTBatch(NamedTuple):
    """A micro-batch: trees of a single trajectory each."""

    trees: Batch
    weights: Tensor  # of each score
    names: list[str]
    step_tokens: int  # that the agent wrote in the whole step


def sft_batches(data: Demonstrations, picked: Sequence[int], device: torch.device,
                micro_tokens: int) -> Iterator[SFTBatch]:
    """The dialogues picked for a step as micro-batches that know how many tokens the whole step has."""
    written = sum(len(data.dialogues[i].written) for i in picked)
    lengths = [len(data.dialogues[i].ids) for i in picked]
    for part in processes.rank_parts(batches_within(lengths, micro_tokens), lengths):
        trees = collate([data.dialogues[picked[n]]] for n in part)
        if data.by_turn:  # W's entries follow the tokens that were written, trajectory by trajectory
            entries = [data.by_turn[i][data.dialogues[i].written] for i in (picked[n] for n in part)]
            trees = trees._replace(weight=trees.weight * torch.cat(entries))
        weights = torch.tensor([data.weights[picked[n]] for n in part])
        names = [data.names[picked[n]] for n in part]
        yield to_device(SFTBatch(trees, weights, names, written), device)


def sft_objective(batch: SFTBatch, scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of the step's loss."""
    return sft_loss(batch.weights * scores, batch.step_tokens), {}


def example_indices(step: int, batch: int, n: int, seed: int, *, labels: Sequence | None = None) -> list[int]:
    """Which of n examples step `step` (from 0) uses: epoch after epoch, each in an order of its own. With
    `labels`, one for each example, an epoch takes the examples of a label together, labels in a random order,
    however many examples they have: what shares its beginning meets in a step."""
    places = range(step * batch, (step + 1) * batch)
    orders = {}
    for epoch in {place // n for place in places}:
        generator = numpy.random.default_rng([seed, epoch])
        order = generator.permutation(n).tolist()
        if labels is not None:
            names = list(dict.fromkeys(labels))
            place = dict(zip(names, generator.permutation(len(names)).tolist()))
            order.sort(key=lambda i: place[labels[i]])
        orders[epoch] = order
    return [orders[place // n][place % n] for place in places]


def in_steps(options: Optimizer, examples: int) -> Optimizer:
    """The same options with epochs and warm-up ratio as steps, both rounded up.

    >>> chosen = in_steps(SFT(epochs=3, batch=64, warmup_ratio=0.03), 1_000)
    >>> chosen.steps, chosen.warmup
    (47, 2)
    >>> in_steps(SFT(epochs=0.07, batch=1), 100).steps
    7
    """
    def up(share: float) -> int:
        return math.ceil(round(share, 9))  # 0.07 * 100 is a little more than 7

    steps = options.steps if options.epochs is None else up(options.epochs * examples / options.batch)
    warmup = options.warmup if options.warmup_ratio is None else up(options.warmup_ratio * steps)
    return replace(options, steps=steps, warmup=warmup)


def optimizers_of(options: Optimizer, model: nn.Module) -> list[torch.optim.Optimizer]:
    """AdamW for what trains, an adapter and perhaps a head, its moments in 32 bits or in 8; or Muon for the
    adapter and AdamW for the head."""
    numbers = {"lr": options.lr, "weight_decay": options.weight_decay}
    adapter = [p for name, p in model.named_parameters() if p.requires_grad and "lora_" in name]
    rest = [p for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]
    if options.optimizer == "muon":
        return [Muon(adapter, numbers), *([torch.optim.AdamW(rest, **numbers)] if rest else [])]
    kind = {"adamw": torch.optim.AdamW, "adamw8bit": AdamW8bit}[options.optimizer]
    return [kind([p for p in model.parameters() if p.requires_grad], **numbers)]


def open_run(config: SFTCommand | PairsCommand | RolloutsCommand, inputs: Sequence[Path],
             more_sha256: Mapping[str, list[str] | None] | None = None, **adapters: Path | None) -> RunFolder:
    """The run's folder, which knows its inputs by content; adapters: others than the one it starts from.
    Raises ValueError if it holds another run, or an adapter that this one reads."""
    adapters = {"adapter": config.adapter, **adapters}
    keep_adapters(config.out, *adapters.values())
    settings = {**asdict(config), **(more_sha256 or {}),
                "data_sha256": [file_sha256(path) for path in inputs],
                **{f"{name}_sha256": adapter_sha256(adapter) for name, adapter in adapters.items()}}
    return RunFolder(config.out, settings, defaults=asdict(type(config)()))


def keep_adapters(out: Path, *given: Path | None) -> None:
    """Raise ValueError if a run in `out` would overwrite one of the adapters that it is given."""
    if (out / "adapter").resolve() in [adapter.resolve() for adapter in given if adapter]:
        raise ValueError(f"--out {out} would overwrite an adapter that it reads: give another")


def adapter_sha256(adapter: Path | None) -> list[str] | None:
    """SHA-256 of an adapter's files."""
    return None if adapter is None else [file_sha256(lora.located(adapter) / name) for name in lora.FILES]


def finish(run: RunFolder, policy: Transformer, source: str) -> dict:
    """Save the adapter of the base `source` and finish the run. Returns the last step's log."""
    processes.on_rank_0(lora.save, policy, run.folder / "adapter", source, run.base)
    processes.on_rank_0(run.finish)
    return print_summary(run)


def resync_finished(run: RunFolder) -> dict:
    """Bring paths and tracker of a finished run up to date. Returns the last step's log."""
    if not (run.folder / "adapter" / lora.CONFIG).is_file():
        raise ValueError(f"{run.folder} is done, but its adapter is gone: delete {run.folder / 'done'}, and "
                         "the same command trains it again")
    processes.on_rank_0(run.resync_finished)
    return print_summary(run, ", done already (another --out trains again)")


def print_summary(run: RunFolder, more: str = "") -> dict:
    """Print where the adapter is. Returns the last step's log."""
    log = records(run.folder)
    loss = f"loss {log[-1]['loss']:.4f}" if log else "nothing was changed"
    print(f"{run.folder / 'adapter'}: {len(log)} steps, {loss}{more}")
    return log[-1] if log else {"step": 0}
