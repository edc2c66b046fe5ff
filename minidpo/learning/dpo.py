"""DPO and its variants: an adapter from pairs of episodes, of which one went better."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from minidpo.config import DPO, DPOCommand
from minidpo.data import trl_files
from minidpo.data.batch import Budget, batch_scores
from minidpo.data.episodes import read
from minidpo.data.pairs import NEEDS_GOLDEN, Pair, PairRules, Unpaired, make_pairs, noisy, unpaired
from minidpo.learning.kto import mismatched, step_baseline
from minidpo.learning.preferences import (PairBatch, Preferences, pair_batches, pair_loss, pair_loss_of,
                                          tokenise, where_cut)
from minidpo.learning.reference import reference_scores
from minidpo.learning.sft import (adapter_sha256, example_indices, finish, optimizer_of,
                                  refuse_for_conversations, refuse_own_adapter, resync_finished)
from minidpo.learning.trainer import Schedule, train
from minidpo.memory import lora
from minidpo.memory.loading import open_chat, open_model
from minidpo.memory.plan import dpo_load, require_step, setup_of
from minidpo.model.decoder import Qwen2
from minidpo.system import processes
from minidpo.system.files import file_sha256, write_text
from minidpo.system.run_folder import RunFolder
from minidpo.system.tensors import fingerprint


def dpo(config: DPOCommand) -> dict:
    """Train an adapter on pairs. Returns the last step's log."""
    options, machine = config.dpo, config.machine
    settings, until = pair_loss_of(options), where_cut(options, config.reference)
    if config.export:
        return trl_files.write_pairs(load_pairs(config, until), config.out / "pairs-trl.jsonl", until)
    shape = lora.read_config(config.adapter)
    if config.reference:
        lora.read_config(config.reference)  # a bad one is refused before the base is read
    refuse_own_adapter(config)
    pairs = load_pairs(config, until)
    run = open_run(config)
    if run.finished:
        return resync_finished(run)
    chat, limit = open_chat(config.model)
    data = tokenise(pairs, chat, limit, until)
    others = mismatched(data, limit) if settings.loss.needs_baseline else None  # for KTO's baseline
    require_step(setup_of(config.model, machine, shape, options.optimizer),
                 lambda m: dpo_load(m, data.largest_tree(m.tree_tokens)))
    policy = open_model(config.model, machine)
    base, device = fingerprint(policy.state_dict()), policy.head_weight.device
    budget = Budget(machine.micro_tokens, machine.tree_tokens)
    lora.load(policy, config.reference or config.adapter)
    policy.eval()  # no dropout: without another reference, policy and reference are one function at step 0
    processes.on_rank_0(run.begin)
    record_pairs(run, pairs, data)
    ref, ref_others = score_references(policy, data, others, config, run, base)
    if config.reference:  # the policy starts elsewhere
        lora.detach(policy)
        lora.load(policy, config.adapter)
        policy.eval()
    print(lora.describe(policy))
    labels = [data.instances[chosen] for chosen, _ in data.pairs]

    def step_batches(step: int) -> Iterator[PairBatch]:
        picked = example_indices(step, options.batch, len(data.pairs), config.seed, labels=labels)
        baseline = None
        if others is not None:
            baseline = step_baseline(policy, others, ref_others, picked, settings, budget)
        return pair_batches(data, picked, ref, settings, budget, device, baseline)

    train(run, policy, [optimizer_of(options, policy)], batches=step_batches,
          score=lambda batch: batch_scores(policy, batch.trees),
          objective=lambda batch, scores: pair_loss(settings, batch, scores),
          schedule=Schedule.of(options, config.seed, options.loss.upper()))
    return finish(run, policy, config.model, base)


def open_run(config: DPOCommand) -> RunFolder:
    """The run's folder, which knows its inputs by content. Raises ValueError if it holds another run."""
    inputs = (*config.data, *([config.golden] if config.golden else []))
    return RunFolder(config.out, {**asdict(config), "data_sha256": [file_sha256(path) for path in inputs],
                                  "adapter_sha256": adapter_sha256(config.adapter),
                                  "reference_sha256": adapter_sha256(config.reference)})


def load_pairs(config: DPOCommand, until: str) -> list[Pair] | list[Unpaired] | list[trl_files.Preferred]:
    """The pairs that are asked for, from the files named, cut where it is to be done by turns."""
    options = config.dpo
    if trl_files.are_trl_files(config.data):
        return load_preferences(config, until)
    episodes = [episode for path in config.data for episode in read(path)]
    if (options.pairs in NEEDS_GOLDEN) != (config.golden is not None):
        raise ValueError(f"--dpo.pairs {options.pairs} " + ("takes no --golden" if config.golden else
                         "needs --golden FILE: solved episodes of the same instances"))
    if options.pairs == "unpaired":
        return unpaired([e for e in episodes if e.solved or not (options.clean and noisy(e))], config.seed)
    golden = read(config.golden) if config.golden else []
    if golden and not {e.instance for e in golden if e.solved} & {e.instance for e in episodes}:
        raise ValueError(f"{config.golden}: no solved episode of an instance that was explored: collect.py "
                         "--policy expert makes them, for the same --tasks, --first and --instances")
    rules = PairRules(options.pairs_per_instance, options.pairs_per_task, options.pairs, until, options.clean,
                      options.dense)
    return make_pairs(episodes, rules, config.seed, golden)


def load_preferences(config: DPOCommand, until: str) -> list[trl_files.Preferred]:
    """The pairs of TRL's files, which have no answer to options about episodes."""
    options = config.dpo
    if config.golden or config.export:
        raise ValueError(f"--{'golden' if config.golden else 'export'} needs episodes, as collect.py "
                         "writes them, and --data holds conversations: leave it out")
    for name, differs in (("pairs", options.pairs != DPO.pairs),
                          ("pairs_per_instance", options.pairs_per_instance != DPO.pairs_per_instance),
                          ("pairs_per_task", options.pairs_per_task != DPO.pairs_per_task),
                          ("clean", options.clean != DPO.clean), ("dense", options.dense != DPO.dense)):
        refuse_for_conversations(f"dpo.{name}", differs)
    return trl_files.read_preferences(config.data, until)


def record_pairs(run: RunFolder, pairs: Sequence, data: Preferences) -> None:
    """Write where each pair comes from to pairs.jsonl, and print how many there are."""
    lines = "".join(json.dumps(pair.provenance()) + "\n" for pair in pairs)
    processes.on_rank_0(write_text, run.folder / "pairs.jsonl", lines)
    sources = ", ".join(f"{n} {source}" for source, n in Counter(pair.source for pair in pairs).items())
    print(f"{len(pairs)} pairs ({sources}) of {len(data.dialogues)} trajectories, "
          f"{len(set(data.instances))} instances")


def score_references(policy: Qwen2, data: Preferences, others: Preferences | None, config: DPOCommand,
                     run: RunFolder, base: str) -> tuple[Tensor, Tensor | None]:
    """The policy's scores before the first step: of all trajectories, and of KTO's mismatched ones; cached.

    base: fingerprint of the base's weights.
    """
    settings = pair_loss_of(config.dpo)
    budget = Budget(config.machine.micro_tokens, config.machine.tree_tokens)
    adapter = fingerprint(lora.adapter_tensors(policy))
    weights = f"{base} {policy.config} {adapter} {lora.read_config(config.reference or config.adapter)}"

    def score(dialogues: Preferences, name: str) -> Tensor:
        path = run.folder / f"{name}.safetensors"
        return reference_scores(policy, dialogues, path, settings=settings, budget=budget, weights=weights)

    ref = score(data, "reference") if settings.loss.needs_reference else torch.zeros(len(data.dialogues))
    if others is None:
        return ref, None
    return ref, score(others, "reference-baseline").to(policy.head_weight.device)
