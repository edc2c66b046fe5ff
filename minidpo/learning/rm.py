"""A reward model: a number for an episode, learned from pairs of which one went better.

Its pairs and trees are DPO's. In place of log-probs a scalar head reads the hidden state of the agent's last
token (Ouyang et al. 2022, arXiv:2203.02155). The head begins at 0, so the first loss is ln 2. Some instances
are held out: on their pairs it is measured how often the model is right, and whether as often as it is sure;
on all their attempts, how often the one that it would pick was solved (Best-of-N without an oracle).
"""

import random
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from minidpo.config import LossParameters, RMCommand
from minidpo.data import trl_files
from minidpo.data.batch import Batch, read_states
from minidpo.data.episodes import Episode, by_instance, read
from minidpo.data.interval import wilson
from minidpo.data.pairs import NothingToLearn
from minidpo.data.prompt import dialogues_of
from minidpo.learning.dpo import load_pairs, open_pairs_run, record_pairs, switch_adapter
from minidpo.learning.grpo import Rollouts
from minidpo.learning.loss_table import Loss
from minidpo.learning.preferences import (PairBatch, PairLoss, Preferences, collate_groups, over_all,
                                          pair_batches, pair_loss, tokenise)
from minidpo.learning.selection import by_expert
from minidpo.learning.sft import example_indices, finish, in_steps, optimizers_of, resync_finished
from minidpo.learning.trainer import Schedule, train
from minidpo.memory import lora
from minidpo.memory.loading import as_trained, open_chat, open_model
from minidpo.memory.plan import dpo_load, require_step, setup_of
from minidpo.model.chat import Dialogue
from minidpo.model.scalar_head import ScalarHead
from minidpo.objective.reward_model import bradley_terry_loss, calibration_error
from minidpo.system import processes
from minidpo.system.result_file import read_result, write_result
from minidpo.system.run_folder import RunFolder
from minidpo.system.tensors import fingerprint

LOSS = Loss(lambda chosen, rejected, *_: bradley_terry_loss(chosen, rejected), "sum", LossParameters(),
            needs_reference=False)


def rm(config: RMCommand) -> dict:
    """Train a reward model. Returns the last step's log, and what the held-out pairs say."""
    options, until = config.rm, config.rm.until or "end"
    settings = PairLoss(LOSS, LossParameters(), 0.0, until)
    parts = split_instances(load_pairs(config, until), options.held_out, config.seed)
    run = open_pairs_run(config)
    if run.finished:
        return resync_finished(run) | print_calibration(run)
    chat, limit = open_chat(config.model)
    data, held_out = (read_at_the_end(tokenise(pairs, chat, limit, until)) for pairs in parts)
    attempts = attempts_at(held_out, config)
    judged = read_at_the_end(
        Rollouts(*dialogues_of(attempts, chat, limit), [e.instance for e in attempts], []))
    options = in_steps(options, len(data.pairs))
    machine = as_trained(config.machine, config.adapter)
    machine = require_step(
        setup_of(config.model, machine, lora.read_config(config.adapter), options.optimizer),
        lambda m: dpo_load(m, max(
            d.largest_tree(m) for d in (data, held_out, judged) if d.dialogues), heads="scalar"))
    policy = open_model(config.model, machine)
    run.base, head = fingerprint(policy.state_dict()), ScalarHead(policy)
    switch_adapter(policy, config.adapter)
    processes.on_rank_0(run.begin)
    record_pairs(run, parts[0], data)
    print(lora.describe(policy))
    labels = [data.instances[chosen] for chosen, _ in data.pairs]
    no_reference = torch.zeros(len(data.dialogues))

    def step_batches(step: int) -> Iterator[PairBatch]:
        picked = example_indices(step, options.batch, len(data.pairs), config.seed, labels=labels)
        return pair_batches(data, picked, no_reference, settings, machine, head.weight.device)

    def objective(batch: PairBatch, rewards: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, numbers = pair_loss(settings, batch, rewards)
        return loss, {name: value for name, value in numbers.items() if not name.startswith("logp")}

    def rewards_of(trees: Batch) -> Tensor:
        return read_states(policy, trees, lambda hidden, _: head(hidden), machine.walk_above)[trees.column]

    model = nn.ModuleDict({"policy": policy, "head": head})
    train(run, model, optimizers_of(options, model), batches=step_batches, objective=objective,
          score=lambda batch: rewards_of(batch.trees), schedule=Schedule(options, config.seed, "RM"))
    of_pairs, of_attempts = (over_all(d, [1] * len(d.dialogues), policy, machine, partial(
        collate_groups, d.dialogues), rewards_of).cpu() for d in (held_out, judged))
    found = {"held_out": calibration(held_out, of_pairs)}
    if attempts:
        found["best_of_n"] = best_of_n(attempts, of_attempts.tolist())
    processes.on_rank_0(write_result, run.folder / "result.json", found)
    processes.on_rank_0(head.save, run.folder / "adapter", "reward")
    return finish(run, policy, config.model) | print_calibration(run)


def split_instances(pairs: Sequence, share: float, seed: int) -> tuple[list, list]:
    """The pairs to train on, and those of a share of the instances, one at least, to judge by. Which these
    are depends on the seed and on their own names."""
    order = sorted({pair.chosen.instance for pair in pairs},
                   key=lambda instance: random.Random(f"{seed} {instance}").random())
    held_out = set(order[:max(1, round(share * len(order)))])
    if len(held_out) == len(order):
        raise NothingToLearn(f"all {len(order)} instances that have a pair would be held out: explore more "
                             "instances, or lower --rm.held-out")
    return ([pair for pair in pairs if pair.chosen.instance not in held_out],
            [pair for pair in pairs if pair.chosen.instance in held_out])


def read_at_the_end(data):
    """The same Preferences or Rollouts with one token that counts in each. It stands behind the agent's last
    and nobody reads it: what would predict it, the state of the agent's last token, is what the head reads.
    """
    dialogues = []
    for dialogue in data.dialogues:
        end = max(t for t, turn in enumerate(dialogue.turns, 1) if turn >= 0)
        dialogues.append(Dialogue([*dialogue.ids[:end], dialogue.ids[end - 1]], [-1] * end + [0]))
    return data._replace(dialogues=dialogues)


def calibration(held_out: Preferences, rewards: Tensor) -> dict:
    """How far rewards (dialogues,) can be trusted, by their pairs."""
    chosen, rejected = (rewards[list(side)] for side in zip(*held_out.pairs))
    right = (chosen > rejected).double() + (chosen == rejected) / 2  # a tie is half right
    return {"pairs": len(chosen), "instances": len(set(held_out.instances)), "accuracy": right.mean().item(),
            "calibration_error": calibration_error(chosen, rejected).item()}


def attempts_at(held_out: Preferences, config: RMCommand) -> list[Episode]:
    """All that the agent played of the held-out instances by itself; none of conversations."""
    if trl_files.are_trl_files(config.data):
        return []
    instances = set(held_out.instances)
    return [e for path in config.data for e in read(path)
            if e.instance in instances and e.turns and not e.forced and not by_expert(e)]


def best_of_n(attempts: Sequence[Episode], rewards: Sequence[float]) -> dict[str, float]:
    """How often the attempt with the most reward of its instance was solved, with a 95 % interval, beside a
    random pick of each and an oracle's. Among equal rewards it picks at random: the mean is counted.

    >>> from minidpo.data.episodes import Episode
    >>> two = [Episode("t", 1, n, "", (), ("solved", "failed")[n], 0.0, "") for n in range(2)]
    >>> found = best_of_n(two, [0.3, -0.2]); found["picked"], found["random"], found["oracle"]
    (1.0, 0.5, 1.0)
    """
    reward_of = {id(attempt): reward for attempt, reward in zip(attempts, rewards, strict=True)}
    shares = []  # of each instance, those solved: of the best, of all, of any
    for group in by_instance(attempts).values():
        most = max(reward_of[id(e)] for e in group)
        best = [e.solved for e in group if reward_of[id(e)] == most]
        solved = [e.solved for e in group]
        shares.append((sum(best) / len(best), sum(solved) / len(solved), any(solved)))
    picked, at_random, oracle = (sum(column) for column in zip(*shares))
    low, high = wilson(picked, n := len(shares))
    return {"instances": n, "attempts": len(attempts), "picked": picked / n, "low": low, "high": high,
            "random": at_random / n, "oracle": oracle / n}


def print_calibration(run: RunFolder) -> dict:
    """What the held-out attempts and pairs say, a line each. Returns the pairs'."""
    result = read_result(run.folder / "result.json")
    if best := result.get("best_of_n"):
        print(f"picks the best of {best['attempts'] / best['instances']:.3g} attempts at {best['instances']} "
              f"held-out instances: {best['picked']:.1%} solved ({best['low']:.1%} - {best['high']:.1%}), a "
              f"random pick {best['random']:.1%}, the page's own verdict {best['oracle']:.1%}")
    found = result["held_out"]
    print("held out:", ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in found.items()))
    return {"held_out": found}
