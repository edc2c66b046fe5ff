"""A reward model: a number for an episode, learned from pairs of which one went better, or from step values.

Its pairs and trees are DPO's. In place of log-probs a scalar head reads the hidden state of the agent's last
token (Ouyang et al. 2022, arXiv:2203.02155). The head begins at 0, so the first loss of pairs is ln 2. From
step values it learns, at each turn's last token, the value behind it; behind the last is the verdict. Some
instances are held out: on them it is measured how often the model is right, and whether as often as it is
sure, or how near the values it is; on all their attempts, how often the one that it would pick was solved
(Best-of-N without an oracle).
"""

import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, permutations
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minidpo.config import LossParameters, RMCommand
from minidpo.data import trl_files
from minidpo.data.batch import Batch
from minidpo.data.episodes import Episode, by_instance, read_all
from minidpo.data.interval import wilson
from minidpo.data.pairs import NothingToLearn, check_prompts
from minidpo.learning.dpo import load_pairs, open_pairs_run, record_pairs
from minidpo.learning.loss_table import Loss
from minidpo.learning.preferences import (
    PairBatch,
    PairLoss,
    Preferences,
    over_all,
    pair_batches,
    pair_loss,
    tokenise,
)
from minidpo.learning.rollouts import Rollouts, entry_batches, entry_values
from minidpo.learning.selection import by_expert, valued_episodes
from minidpo.learning.trainer import StepSettings, train
from minidpo.learning.training_run import (
    example_indices,
    finish,
    in_steps,
    optimizers_of,
    refuse_for_conversations,
    resync_finished,
)
from minidpo.memory import lora
from minidpo.memory.loading import open_chat, open_model, open_to_train, to_compute
from minidpo.memory.machine import Machine
from minidpo.memory.plan import dpo_load
from minidpo.model import scalar_head
from minidpo.model.chat import Chat, Dialogue
from minidpo.model.decoder import Transformer
from minidpo.model.scalar_head import ScalarHead
from minidpo.objective.reward_model import (
    bradley_terry_loss,
    calibration_error,
    reliability,
    step_reward_loss,
)
from minidpo.system import processes
from minidpo.system.result_file import read_result, write_result
from minidpo.system.run_folder import RunFolder

LOSS = Loss(
    lambda chosen, rejected, *_: bradley_terry_loss(chosen, rejected),
    "sum",
    LossParameters(),
    needs_reference=False,
)
SETTINGS = PairLoss(LOSS, LOSS.defaults, 0.0, "end")  # pairs are cut when they are loaded


def rm(config: RMCommand) -> dict:
    """Train a reward model. Returns the last step's log, and what the held-out instances say."""
    options, of_values = config.rm, config.rm.targets == "values"
    examples = load_valued(config.data) if of_values else load_pairs(config, options.until or "end")
    sides = [example[0] if of_values else example.chosen for example in examples]
    instances = [side.instance for side in sides]
    held_out = held_out_instances(
        {s.instance: s.first_prompt for s in sides}, options.held_out, config.seed
    )
    run = open_pairs_run(config)
    if run.finished:
        return resync_finished(run) | print_held_out(run)
    chat, limit = open_chat(config.model)
    parts = [
        [
            example
            for example, instance in zip(examples, instances)
            if (instance in held_out) == judging
        ]
        for judging in (False, True)
    ]
    learned, unseen = (
        (ValuedTurns if of_values else OrderedPairs).of(part, chat, limit) for part in parts
    )
    attempts = attempts_at(held_out, config.data)
    judged = read_at_ends(Rollouts.of(attempts, chat, limit))
    options, labels = in_steps(options, len(parts[0])), [i for i in instances if i not in held_out]
    machine, shape = to_compute(config.machine, config.adapter), lora.read_config(config.adapter)
    policy, machine, run.base = open_to_train(
        config.model,
        machine,
        shape,
        options.optimizer,
        lambda m: dpo_load(m, learned.data.largest_tree(m), heads="scalar"),
    )
    head = ScalarHead(policy)
    lora.switch_adapter(policy, config.adapter, run.base)
    processes.on_rank_0(run.begin)
    if not of_values:
        record_pairs(run, parts[0], learned.data)
    print(lora.describe(policy))

    def step_batches(step: int) -> Iterator[PairBatch | TurnBatch]:
        picked = example_indices(step, options.batch, len(labels), config.seed, labels=labels)
        return learned.batches(picked, machine, head.weight.device)

    model = nn.ModuleDict({"policy": policy, "head": head})
    train(
        run,
        model,
        optimizers_of(options, model),
        batches=step_batches,
        objective=learned.objective,
        score=lambda batch: entry_values(policy, head, machine, batch.trees),
        settings=StepSettings(options, config.seed, "RM"),
    )
    of_examples, of_attempts = (
        rewards_over(d, policy, head, machine) for d in (unseen.data, judged)
    )
    found = unseen.judge(of_examples) | (
        {"best_of_n": best_of_n(attempts, of_attempts.tolist())} if attempts else {}
    )
    processes.on_rank_0(write_result, run.folder / "result.json", found)
    processes.on_rank_0(head.save, run.folder / "adapter", "reward")
    return finish(run, policy, config.model) | print_held_out(run)


def rewards_over(
    data: Preferences | Rollouts, policy: Transformer, head: ScalarHead, machine: Machine
) -> Tensor:
    """`entry_values` of all dialogues, on the CPU."""
    counts = [len(dialogue.written) for dialogue in data.dialogues]
    return over_all(
        data, counts, policy, machine, partial(entry_values, policy, head, machine)
    ).cpu()


def episode_rewards(
    model: str, machine: Machine, folder: Path, episodes: Sequence[Episode]
) -> list[float]:
    """The reward of each episode by a reward model, whose adapter is in this folder; -inf without a turn."""
    data = read_at_ends(Rollouts.of([e for e in episodes if e.turns], *open_chat(model)))
    machine, where = to_compute(machine, folder), require_reward_model(folder)
    policy = open_model(model, machine)
    lora.switch_adapter(policy, where)
    head = ScalarHead(policy)
    head.load(where, "reward")
    found = iter(rewards_over(data, policy, head, machine).tolist())
    return [next(found) if episode.turns else -math.inf for episode in episodes]


def require_reward_model(folder: Path) -> Path:
    """Where the files of a reward model lie. Raises ValueError if this adapter is none."""
    where = lora.located(folder, (*lora.FILES, scalar_head.FILE))
    if scalar_head.kind_in(where) != "reward":
        raise ValueError(
            f"{folder}: no reward model's head here; train.py rm makes one, in OUT/adapter"
        )
    return where


def held_out_instances(
    prompts: Mapping[tuple[str, int], tuple], share: float, seed: int
) -> set[tuple[str, int]]:
    """A share of the instances to judge by: those of as large a share of the prompts, one at least, because
    many seeds may show one page. Which these are depends on the seed and on the prompts themselves."""
    order = sorted(
        set(prompts.values()), key=lambda prompt: random.Random(f"{seed} {prompt}").random()
    )
    if (number := max(1, round(share * len(order)))) == len(order):
        raise NothingToLearn(
            f"all {len(prompts)} instances to learn from would be held out: explore more, "
            "whose first pages differ, or lower --rm.held-out"
        )
    held_out = set(order[:number])
    return {instance for instance, prompt in prompts.items() if prompt in held_out}


def read_at_ends(data, turns: slice = slice(-1, None)):
    """The same Preferences or Rollouts with one token that counts for each of these turns, by default for the
    last. It stands behind the agent's last of the turn and nobody reads it: what would predict it, the state
    of that last token, is what the head reads."""
    dialogues = []
    for dialogue in data.dialogues:
        ends = [
            t
            for t, (turn, following) in enumerate(zip(dialogue.turns, [*dialogue.turns[1:], -1]), 1)
            if turn >= 0 and turn != following
        ]
        counts = [-1] * (ends[-1] + 1)
        for number, end in enumerate(ends[turns]):
            counts[end] = number
        dialogues.append(Dialogue([*dialogue.ids[: ends[-1]], dialogue.ids[ends[-1] - 1]], counts))
    return data._replace(dialogues=dialogues)


class OrderedPairs(NamedTuple):
    """DPO's pairs, of which the chosen is to have more reward. Rewards are (dialogues,)."""

    data: Preferences

    @classmethod
    def of(cls, pairs: Sequence, chat: Chat, limit: int) -> "OrderedPairs":
        return cls(read_at_ends(tokenise(pairs, chat, limit, "end")))

    def batches(
        self, picked: Sequence[int], machine: Machine, device: torch.device
    ) -> Iterator[PairBatch]:
        no_reference = torch.zeros(len(self.data.dialogues))
        return pair_batches(self.data, picked, no_reference, SETTINGS, machine, device)

    def objective(self, batch: PairBatch, rewards: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's part of the step's loss, a mean over pairs, and of what is logged."""
        loss, numbers = pair_loss(SETTINGS, batch, rewards)
        return loss, {name: value for name, value in numbers.items() if not name.startswith("logp")}

    def judge(self, rewards: Tensor) -> dict:
        """How far the rewards can be trusted, by the pairs, and by those of which they are about as sure."""
        chosen, rejected = (rewards[list(side)] for side in zip(*self.data.pairs))
        bins = reliability(chosen, rejected)  # (3,bins)
        return {
            "held_out": {
                "pairs": len(chosen),
                "instances": len(set(self.data.instances)),
                "accuracy": bins[1].sum().item() / len(chosen),
                "calibration_error": calibration_error(chosen, rejected).item(),
            },
            "reliability": [
                {"confidence": confidence / n, "right": right / n, "pairs": int(n)}
                for confidence, right, n in bins.t().tolist()
                if n
            ],
        }


class TurnBatch(NamedTuple):
    """A micro-batch, as `entry_batches` makes it."""

    trees: Batch
    names: list[str]  # of each turn
    step_turns: int  # in the whole step
    value: Tensor  # (M,) behind each turn


class ValuedTurns(NamedTuple):
    """The agent's episodes; the reward of a turn is to be the value behind it. Rewards are (turns of all,).

    Values as in Xiong et al. 2024 (IPR), arXiv:2406.11176, section 3.2. Differs from the paper: as
    `step_values` do.
    """

    data: Rollouts
    values: list[Tensor]  # (turns,) of each episode: V_{t+1} of turn t

    @classmethod
    def of(
        cls, valued: Sequence[tuple[Episode, list[float]]], chat: Chat, limit: int
    ) -> "ValuedTurns":
        data = Rollouts.of([episode for episode, _ in valued], chat, limit)
        return cls(
            read_at_ends(data, slice(None)), [torch.tensor(values[1:]) for _, values in valued]
        )

    def batches(
        self, picked: Sequence[int], machine: Machine, device: torch.device
    ) -> Iterator[TurnBatch]:
        return map(
            TurnBatch._make, entry_batches(self.data, picked, (self.values,), machine, device)
        )

    def objective(self, batch: TurnBatch, rewards: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's part of the step's loss, a mean over turns."""
        return step_reward_loss(rewards, batch.value).sum() / batch.step_turns, {}

    def judge(self, rewards: Tensor) -> dict:
        """How near the rewards are, beside the best single number; and of the pairs of an instance's turns
        with different values, the share that they order right, a tie by half."""
        values = torch.cat(self.values)
        instances = [i for i, behind in zip(self.data.instances, self.values) for _ in behind]
        turns = sorted(zip(instances, values.tolist(), rewards.tolist()))
        right = [
            (r > s) + (r == s) / 2
            for _, group in groupby(turns, key=lambda turn: turn[0])
            for (_, v, r), (_, w, s) in permutations(group, 2)
            if v > w
        ]
        order = {"accuracy": sum(right) / len(right)} if right else {}
        return {
            "held_out": {
                "turns": len(turns),
                "instances": len(set(instances)),
                "squared_error": step_reward_loss(rewards, values).mean().item(),
                "squared_error_of_a_constant": values.var(correction=0).item(),
                "pairs": len(right),
                **order,
            }
        }


def load_valued(files: Sequence[Path]) -> list[tuple[Episode, list[float]]]:
    """The `valued_episodes`. Raises NothingToLearn as these do, or if no turn was better than another."""
    if trl_files.are_trl_files(files):
        refuse_for_conversations(["rm.targets"])
    played = read_all(files)
    check_prompts([e for e in played if not by_expert(e)])
    valued = valued_episodes(played, files, "rm.targets values")
    if len(behind := {value for _, values in valued for value in values[1:]}) < 2:
        raise NothingToLearn(
            f"{' '.join(map(str, files))}: the value behind each turn is {behind.pop():g}, "
            "so none was better than another: explore more, or other tasks"
        )
    return valued


def attempts_at(instances: Collection[tuple[str, int]], files: Sequence[Path]) -> list[Episode]:
    """All that the agent played of these instances by itself; none of conversations."""
    if trl_files.are_trl_files(files):
        return []
    return [
        e
        for e in read_all(files)
        if e.instance in instances and e.turns and not e.forced and not by_expert(e)
    ]


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
    return {
        "instances": n,
        "attempts": len(attempts),
        "picked": picked / n,
        "low": low,
        "high": high,
        "random": at_random / n,
        "oracle": oracle / n,
    }


def print_held_out(run: RunFolder) -> dict:
    """What the held-out instances say: lines of attempts, confidence and the rest, which it returns."""
    result = read_result(run.folder / "result.json")
    if best := result.get("best_of_n"):
        print(
            f"picks the best of {best['attempts'] / best['instances']:.3g} attempts at {best['instances']} "
            f"held-out instances: {best['picked']:.1%} solved ({best['low']:.1%} - {best['high']:.1%}), a "
            f"random pick {best['random']:.1%}, the page's own verdict {best['oracle']:.1%}"
        )
    if bins := result.get("reliability"):
        print(
            "reliability:",
            ", ".join(
                f"sure to {part['confidence']:.1%}, right in {part['right']:.1%} of {part['pairs']}"
                for part in bins
            ),
        )
    found = result["held_out"]
    print(
        "held out:",
        ", ".join(
            f"{name.replace('_', ' ')} {value:{',' if type(value) is int else '.4g'}}"
            for name, value in found.items()
        ),
    )
    return {"held_out": found}
