"""DPO and its variants: an adapter from pairs of episodes, of which one went better."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from minidpo.config import DPOCommand, PairsCommand, RMCommand
from minidpo.data import trl_files
from minidpo.data.batch import batch_scores
from minidpo.data.episodes import read, read_all
from minidpo.data.pairs import (
    NEEDS_GOLDEN,
    NothingToLearn,
    Pair,
    PairRules,
    check_prompts,
    is_about_successes,
    make_pairs,
    noisy,
    unpaired,
    unpaired_successes,
)
from minidpo.data.prompt import dialogues_of
from minidpo.learning.preferences import (
    PairBatch,
    PairLoss,
    Preferences,
    mismatched,
    pair_batches,
    pair_loss,
    pair_loss_of,
    step_baseline,
    tokenise,
)
from minidpo.learning.reference import identity, reference_scores
from minidpo.learning.sft import Demonstrations, SFTBatch, sft_batches, sft_objective
from minidpo.learning.trainer import StepSettings, train
from minidpo.learning.training_run import (
    example_indices,
    finish,
    in_steps,
    open_run,
    optimizers_of,
    refuse_for_conversations,
    resync_finished,
)
from minidpo.memory import lora
from minidpo.memory.loading import open_chat, open_to_train, to_compute
from minidpo.memory.plan import dpo_load
from minidpo.model.chat import Chat
from minidpo.system import processes
from minidpo.system.files import file_sha256, write_text
from minidpo.system.run_folder import RunFolder


def dpo(config: DPOCommand) -> dict:
    """Train an adapter on pairs. Returns the last step's log."""
    options, reference = config.dpo, config.reference or config.adapter
    settings = pair_loss_of(options, config.reference is not None)
    pairs = load_pairs(config, settings.until)
    if config.export:
        path = config.out / "pairs-trl.jsonl"
        return processes.on_rank_0(trl_files.write_pairs, pairs, path, settings.until)
    shape, reference_shape = lora.read_config(config.adapter), lora.read_config(reference)
    machine = to_compute(config.machine, config.adapter, config.reference)
    run = open_pairs_run(config, reference=config.reference)
    if run.finished:
        return resync_finished(run)
    chat, limit = open_chat(config.model)
    data = tokenise(pairs, chat, limit, settings.until)
    options = in_steps(options, len(data.pairs))
    rehearsal = rehearsed(config, pairs, chat, limit)
    longest = max((len(dialogue.ids) for dialogue in rehearsal.dialogues), default=0)
    baseline_data = (
        mismatched(data, limit) if settings.loss.needs_baseline else None
    )  # for KTO's baseline
    policy, machine, run.base = open_to_train(
        config.model,
        machine,
        shape,
        options.optimizer,
        lambda m: dpo_load(m, max(data.largest_tree(m), longest)),
    )
    device = policy.head_weight.device
    lora.switch_adapter(policy, reference, run.base)
    processes.on_rank_0(run.begin)
    record_pairs(run, pairs, data)
    weights = identity(policy, run.base, reference_shape)
    reference_of = partial(
        reference_scores, policy, settings=settings, machine=machine, weights=weights
    )
    ref = reference_of(data, run.folder / "reference.safetensors")
    ref_baseline = (
        None
        if baseline_data is None
        else reference_of(baseline_data, run.folder / "reference-baseline.safetensors")
    )
    if config.reference:  # the policy does not start at its reference
        lora.switch_adapter(policy, config.adapter, run.base)
    print(lora.describe(policy))
    labels = [data.instances[chosen] for chosen, _ in data.pairs]

    def step_batches(step: int) -> Iterator[PairBatch | SFTBatch]:
        picked = example_indices(step, options.batch, len(data.pairs), config.seed, labels=labels)
        baseline = step_baseline(policy, baseline_data, ref_baseline, picked, settings, machine)
        yield from pair_batches(data, picked, ref, settings, machine, device, baseline)
        if n := len(rehearsal.dialogues):
            picked = example_indices(step, min(options.rehearse, n), n, config.seed)
            yield from sft_batches(rehearsal, picked, device, machine.pass_tokens())

    train(
        run,
        policy,
        optimizers_of(options, policy),
        batches=step_batches,
        score=lambda batch: batch_scores(policy, batch.trees, machine.walk_above),
        objective=partial(pair_or_rehearsal_loss, settings),
        settings=StepSettings(options, config.seed, options.loss.upper()),
    )
    return finish(run, policy, config.model)


def pair_or_rehearsal_loss(
    settings: PairLoss, batch: PairBatch | SFTBatch, scores: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of the step's loss, and the numbers to log. A rehearsed batch has the SFT loss
    times nll: its instances have no rejected side, so pairs alone would let them be forgotten."""
    if isinstance(batch, PairBatch):
        return pair_loss(settings, batch, scores)
    loss = settings.nll * sft_objective(batch, scores)[0]
    return loss, {"rehearsal": loss}


def load_pairs(
    config: DPOCommand | RMCommand, until: str
) -> list[Pair] | list[trl_files.Preferred]:
    """The pairs that are asked for. Here they are cut if `until` is "turn"; "token" waits for `tokenise`."""
    options, name = (config.rm, "rm") if isinstance(config, RMCommand) else (config.dpo, "dpo")
    if trl_files.are_trl_files(config.data):
        of_pairs = options.changed(
            "pairs",
            "clean",
            "dense",
            "noisy",
            "margin",
            "rehearse",
            "pairs_per_instance",
            "pairs_per_task",
        )
        refuse_for_conversations(
            [
                *config.changed("golden", "failures", "export"),
                *(f"{name}.{option}" for option in of_pairs),
            ]
        )
        return trl_files.read_preferences(config.data, until)
    episodes = read_all(config.data)
    earlier = read_all(config.failures)
    failures = [episode for episode in earlier if not episode.solved]
    golden = read(config.golden) if config.golden else []
    if earlier and not {e.instance for e in earlier} & {e.instance for e in episodes}:
        raise ValueError(
            f"{' '.join(map(str, config.failures))}: no episode of an instance that was "
            "explored: name rollouts of the same instances, or leave failures out"
        )
    is_dagger = options.pairs == "dagger"
    by_agent = [*episodes, *failures, *([] if is_dagger else golden)]
    if relabelled := next((e for e in by_agent if e.relabelled), None):
        raise ValueError(
            f"{relabelled.name}: an expert's answer to a state (collect.py --policy dagger) is "
            f"imitated by train.py sft, or preferred as --golden of --{name}.pairs dagger: "
            "--data and other pairs need the agent's own rollouts"
        )
    if config.failures and is_about_successes(options.pairs, options.dense):
        raise ValueError(
            f"--{name}.pairs {options.pairs} asks what solved, and of --failures only what "
            "failed is read: leave failures out, or add those files to --data"
        )
    if (options.pairs in NEEDS_GOLDEN) != (config.golden is not None):
        raise ValueError(
            f"--{name}.pairs {options.pairs} "
            + (
                "takes no --golden"
                if config.golden
                else "needs --golden FILE: solved episodes of the same instances"
                + ", by collect.py --policy dagger" * is_dagger
            )
        )
    if is_dagger and (wrong := next((e for e in golden if not e.relabelled), None)):
        raise ValueError(
            f"{config.golden}: {wrong.name} is by {wrong.policy}, but --{name}.pairs dagger "
            "needs experts' answers in the states of --data: collect.py --policy dagger"
        )
    if options.pairs == "unpaired":
        played = [*episodes, *failures]
        kept = [e for e in played if e.solved or not (options.clean if noisy(e) else options.noisy)]
        if len(kept) < len(played) and all(e.solved for e in kept):
            raise NothingToLearn(
                f"--{name}.{'clean' if options.clean else 'noisy'} leaves out all failures: drop it"
            )
        return unpaired(kept, config.seed)
    check_prompts([*episodes, *failures, *golden])
    if options.pairs in ("outcome", "expert", "eto", "efficient") and all(
        e.forced for e in episodes
    ):
        raise NothingToLearn(
            f"all episodes began with given steps, which --{name}.pairs {options.pairs} "
            f"leaves out: --{name}.pairs stepwise, segments and value read these"
        )
    if golden and not {e.instance for e in golden if e.solved} & {e.instance for e in episodes}:
        raise NothingToLearn(
            f"{config.golden}: no solved episode of an instance that was explored: "
            f"collect.py --policy {'dagger' if is_dagger else 'expert'} makes them, for the "
            "same --tasks, --first and --instances"
        )
    rules = PairRules(
        options.pairs_per_instance,
        options.pairs_per_task,
        options.pairs,
        until,
        clean=options.clean,
        dense=options.dense,
        noisy=options.noisy,
        margin=options.margin,
    )
    return make_pairs(episodes, rules, config.seed, golden, failures)


def rehearsed(config: DPOCommand, pairs: Sequence, chat: Chat, limit: int) -> Demonstrations:
    """The tokens of `unpaired_successes`; none if `rehearse` is 0."""
    if not config.dpo.rehearse:
        return Demonstrations([], [], [])
    episodes = read_all(config.data)
    dialogues, names = dialogues_of(unpaired_successes(episodes, pairs, config.seed), chat, limit)
    print(f"{len(names)} solved episodes of instances without a pair are rehearsed")
    return Demonstrations(dialogues, names, [1.0] * len(names))


def open_pairs_run(config: PairsCommand, **adapters: Path | None) -> RunFolder:
    """`open_run` for all the files that `load_pairs` reads."""
    inputs = (*config.data, *([config.golden] if config.golden else []))
    failures = [file_sha256(path) for path in config.failures] or None
    return open_run(config, inputs, {"failures_sha256": failures}, **adapters)


def record_pairs(run: RunFolder, pairs: Sequence, data: Preferences) -> None:
    """Write where each pair comes from to pairs.jsonl, and print how many there are."""
    lines = "".join(json.dumps(pair.provenance()) + "\n" for pair in pairs)
    processes.on_rank_0(write_text, run.folder / "pairs.jsonl", lines)
    sources = ", ".join(
        f"{n} {source}" for source, n in Counter(pair.source for pair in pairs).items()
    )
    print(
        f"{len(pairs)} pairs ({sources}) of {len(data.dialogues)} trajectories, "
        f"{len(set(data.instances))} instances"
    )
