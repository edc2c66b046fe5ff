"""A reward model: a number for an episode, learned from pairs of which one went better.

Its pairs and trees are DPO's. In place of log-probs a scalar head reads the hidden state of the agent's last
token (Ouyang et al. 2022, arXiv:2203.02155). The head begins at 0, so the first loss is ln 2. Some instances
are held out: on their pairs it is measured how often the model is right, and whether as often as it is sure.
"""

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from minidpo.config import LossParameters, RMCommand
from minidpo.data.batch import Batch, read_states
from minidpo.data.pairs import NothingToLearn
from minidpo.learning.dpo import load_pairs, record_pairs, switch_adapter
from minidpo.learning.loss_table import Loss
from minidpo.learning.preferences import (PairBatch, PairLoss, Preferences, over_all, pair_batches, pair_loss,
                                          tokenise)
from minidpo.learning.sft import example_indices, finish, in_steps, open_run, optimizer_of, resync_finished
from minidpo.learning.trainer import Schedule, train
from minidpo.memory import lora
from minidpo.memory.loading import open_chat, open_model
from minidpo.memory.plan import dpo_load, require_step, setup_of
from minidpo.model.chat import Dialogue
from minidpo.model.scalar_head import ScalarHead
from minidpo.objective.reward_model import bradley_terry_loss, calibration_error
from minidpo.system import processes
from minidpo.system.result_file import read_result, write_result
from minidpo.system.run_folder import RunFolder
from minidpo.system.tensors import fingerprint

LOSS = Loss(bradley_terry_loss, lambda rewards, p, z: bradley_terry_loss(*rewards[:2]), "sum",
            LossParameters(), needs_reference=False)


def rm(config: RMCommand) -> dict:
    """Train a reward model. Returns the last step's log, and what the held-out pairs say."""
    options, machine, until = config.rm, config.machine, config.rm.until or "end"
    settings = PairLoss(LOSS, LossParameters(), 0.0, until)
    parts = split_instances(load_pairs(config, until), options.held_out, config.seed)
    run = open_run(config, (*config.data, *([config.golden] if config.golden else [])))
    if run.finished:
        return resync_finished(run) | print_calibration(run)
    chat, limit = open_chat(config.model)
    data, held_out = (read_at_the_end(tokenise(pairs, chat, limit, until)) for pairs in parts)
    options = in_steps(options, len(data.pairs))
    machine = require_step(
        setup_of(config.model, machine, lora.read_config(config.adapter), options.optimizer),
        lambda m: dpo_load(m, max(data.largest_tree(m), held_out.largest_tree(m)), heads="scalar"))
    policy = open_model(config.model, machine)
    base, head = fingerprint(policy.state_dict()), ScalarHead(policy)
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
    train(run, model, [optimizer_of(options, model)], batches=step_batches, objective=objective,
          score=lambda batch: rewards_of(batch.trees), schedule=Schedule(options, config.seed, "RM"))
    rewards = over_all(held_out, [1] * len(held_out.dialogues), policy, machine,
                       lambda groups: held_out.collate(groups, settings), rewards_of)
    found = {"held_out": calibration(held_out, rewards.cpu())}
    processes.on_rank_0(write_result, run.folder / "result.json", found)
    processes.on_rank_0(head.save, run.folder / "adapter", "reward")
    return finish(run, policy, config.model, base) | print_calibration(run)


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


def read_at_the_end(data: Preferences) -> Preferences:
    """The same trajectories, of which one token counts. It stands behind the agent's last and nobody reads
    it: what would predict it, the state of the agent's last token, is what the head reads."""
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


def print_calibration(run: RunFolder) -> dict:
    """One line of what the held-out pairs say. Returns it."""
    found = read_result(run.folder / "result.json")["held_out"]
    print("held out:", ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in found.items()))
    return {"held_out": found}
