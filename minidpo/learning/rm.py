"""Reward models: a number for an episode, learned from pairs, or a number for each of its turns.

In place of log-probs, a scalar head reads the hidden state of the agent's last token in the episode or in each
turn (Ouyang et al. 2022, arXiv:2203.02155). `reward_model` learns from pairs, on DPO's trees; the head starts at
0, so its first loss is ln 2. `step_model` learns the value after each turn; after the last turn that is the
verdict. Some instances are held out. On them we measure accuracy and calibration or, for turns, the squared
error, and how often the attempt with the most reward was solved (best of n).
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, permutations
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minidpo.data.batch import Batch
from minidpo.data.episodes import Episode, grouped
from minidpo.data.interval import wilson
from minidpo.data.pairs import NothingToLearn
from minidpo.learning.loss_table import Loss, LossParameters
from minidpo.learning.micro_batches import over_all
from minidpo.learning.preferences import (
    PairBatch,
    PairLoss,
    Preferences,
    pair_batches,
    pair_loss,
    tokenise,
)
from minidpo.learning.rollouts import Rollouts, entry_batches, entry_values
from minidpo.learning.trainer import Optimizer, StepSettings, check_finite, train
from minidpo.learning.training_run import (
    example_indices,
    finish,
    finished,
    in_steps,
    open_learner,
    optimizer_of,
)
from minidpo.memory import lora
from minidpo.memory.context import Context
from minidpo.memory.loading import open_chat, open_model, to_compute
from minidpo.memory.machine import Machine
from minidpo.model import scalar_head
from minidpo.model.chat import Dialogue
from minidpo.model.decoder import Transformer
from minidpo.model.scalar_head import ScalarHead
from minidpo.objective.reward_model import (
    bradley_terry_loss,
    calibration_error,
    reliability,
    step_reward_loss,
)
from minidpo.system.ranges import Positive, Share
from minidpo.system.result_file import write_result
from minidpo.system.run_folder import RunFolder

LOSS = Loss(
    lambda chosen, rejected, *_: bradley_terry_loss(chosen, rejected),
    "sum",
    LossParameters(),
    needs_reference=False,
)
SETTINGS = PairLoss(LOSS, LOSS.defaults, 0.0, "end")


@dataclass(frozen=True)
class RewardModel(Optimizer):
    """A scalar head and an adapter that order episodes, or value turns."""

    batch: Positive[int] = 16
    lr: Positive[float] = 2e-4
    held_out: Share[Positive[float]] = 0.2
    "share of the instances that is held out, to measure how far the model can be trusted"


def reward_model(
    run: RunFolder,
    context: Context,
    pairs: Sequence,
    options: RewardModel,
    *,
    start: Path,
    attempts: Sequence[Episode] = (),
) -> Path:
    """Train a reward model on pairs, from the adapter `start`. Returns its folder, with the head.

    attempts: the agent's episodes; those of held-out instances measure what best-of-n would gain.
    Ouyang et al. 2022, arXiv:2203.02155, Eq. 1. Differs from the paper: the head starts at 0 and has no bias.
    """
    if run.finished:
        return finished(run)
    chosen = [pair.chosen for pair in pairs]
    learned, unseen = divided(pairs, chosen, options.held_out, context.seed)
    read = (*open_chat(context.model), context.world.system_prompt)
    train_data, test_data = (
        OrderedPairs(read_at_ends(tokenise(part, *read, "end"))) for part in (learned, unseen)
    )
    judged = {pair.chosen.instance for pair in unseen}
    tried = [e for e in attempts if e.instance in judged and e.turns]
    tried_data = read_at_ends(Rollouts.of(tried, *read))
    instances = [pair.chosen.instance for pair in learned]
    model = train_head(run, context, train_data, instances, options, start)
    found = test_data.judge(model.rewards(test_data.data))
    if tried:
        found["best_of_n"] = best_of_n(tried, model.rewards(tried_data).tolist())
    return keep(run, context, model, "reward", found)


def step_model(
    run: RunFolder,
    context: Context,
    episodes: Sequence[Episode],
    values: Sequence[Sequence[float]],
    options: RewardModel,
    *,
    start: Path,
) -> Path:
    """Train a reward model of turns on step values, from the adapter `start`. Returns its folder, with the head.

    values: the `step_values` of each episode, turns + 1 numbers, none of them None. A turn's reward is fitted to
    the value after it, by mean squared error. Xiong et al. 2024 (IPR), arXiv:2406.11176, section 3.2. Differs
    from the paper as `step_values` does.
    """
    if run.finished:
        return finished(run)
    if len({value for of_episode in values for value in of_episode[1:]}) < 2:
        raise NothingToLearn(
            "no turn has another value after it than the others, so none was better: explore more, "
            "or other tasks"
        )
    valued = list(zip(episodes, values, strict=True))
    learned, unseen = divided(valued, episodes, options.held_out, context.seed)
    read = (*open_chat(context.model), context.world.system_prompt)
    train_data, test_data = (
        ValuedTurns(
            read_at_ends(Rollouts.of([e for e, _ in part], *read), every_turn=True),
            [torch.tensor(values[1:]) for _, values in part],
        )
        for part in (learned, unseen)
    )
    model = train_head(run, context, train_data, train_data.data.instances, options, start)
    return keep(run, context, model, "step", test_data.judge(model.rewards(test_data.data)))


class Scorer(NamedTuple):
    """A policy without its vocabulary head: a scalar head reads a number from its hidden states."""

    policy: Transformer
    head: ScalarHead
    machine: Machine

    def read(self, trees: Batch) -> Tensor:
        """The number of each token that counts, (M,)."""
        return entry_values(self.policy, self.head, self.machine, trees)

    def rewards(self, data: "Preferences | Rollouts") -> Tensor:
        """The numbers of all dialogues, on the CPU."""
        counts = [len(dialogue.written) for dialogue in data.dialogues]
        found = over_all(data, counts, self.policy, self.machine, self.read).cpu()
        check_finite(torch.stack([part.sum() for part in found.split(counts)]), data.names)
        return found


def train_head(
    run: RunFolder,
    context: Context,
    learned: "OrderedPairs | ValuedTurns",
    instances: Sequence[tuple[str, int]],
    options: RewardModel,
    start: Path,
) -> Scorer:
    """Train an adapter and a new head on examples; `instances` has one for each example."""
    options = in_steps(options, len(instances))
    largest_tree = learned.data.largest_tree
    policy, machine = open_learner(run, context, options, largest_tree, start, heads="scalar")
    model = Scorer(policy, ScalarHead(policy), machine)
    lora.switch_adapter(policy, start, run.base)
    run.begin()
    print(lora.describe(policy))

    def step_batches(step: int) -> Iterator[PairBatch | TurnBatch]:
        picked = example_indices(
            step, options.batch, len(instances), context.seed, labels=instances
        )
        return learned.batches(picked, machine, policy.head_weight.device)

    parts = nn.ModuleDict({"policy": policy, "head": model.head})
    train(
        run,
        parts,
        optimizer_of(options, parts),
        batches=step_batches,
        score=lambda batch: model.read(batch.trees),
        objective=learned.objective,
        settings=StepSettings(options, context.seed, "reward model"),
    )
    return model


def keep(run: RunFolder, context: Context, model: Scorer, kind: str, found: dict) -> Path:
    """Write the held-out results, the head and the adapter. Returns the folder of the last two."""
    run.call(write_result, run.folder / "result.json", found)
    run.call(model.head.save, run.folder / "adapter", kind)
    folder = finish(run, model.policy, context.model)
    for part in ("held_out", "best_of_n"):
        numbers = found.get(part, {}).items()
        told = [f"{name.replace('_', ' ')} {round(value, 4):,}" for name, value in numbers]
        if told:
            print(f"{part.replace('_', ' ')}: {', '.join(told)}")
    return folder


# ---- reading rewards from a trained model ----


def episode_rewards(context: Context, folder: Path, episodes: Sequence[Episode]) -> list[float]:
    """Each episode's reward by the reward model in a folder; -inf for one without turns."""
    spoken = [e for e in episodes if e.turns]
    data = Rollouts.of(spoken, *open_chat(context.model), context.world.system_prompt)
    found = iter(open_scorer(context, folder, "reward").rewards(read_at_ends(data)).tolist())
    return [next(found) if e.turns else -math.inf for e in episodes]


def step_rewards(context: Context, folder: Path, episodes: Sequence[Episode]) -> list[Tensor]:
    """Each turn's reward by the step model in a folder, (turns,) for each episode."""
    data = Rollouts.of(episodes, *open_chat(context.model), context.world.system_prompt)
    found = open_scorer(context, folder, "step").rewards(read_at_ends(data, every_turn=True))
    return list(found.split([len(e.turns) for e in episodes]))


def open_scorer(context: Context, folder: Path, kind: str) -> Scorer:
    """The model in a folder. Raises ValueError if it has no head of this kind."""
    where = require_reward_model(folder, kind)
    machine = to_compute(context.machine, folder)
    policy = open_model(context.model, machine)
    lora.switch_adapter(policy, where)
    head = ScalarHead(policy)
    head.load(where, kind)
    return Scorer(policy, head, machine)


def require_reward_model(folder: Path, kind: str = "reward") -> Path:
    """The folder with a reward model's files. Raises ValueError if the adapter has no head of this kind."""
    where = lora.located(folder, (*lora.FILES, scalar_head.FILE))
    if scalar_head.kind_in(where) != kind:
        raise ValueError(
            f"{folder}: no {kind} head here; train.py rm makes a reward model, in OUT/adapter"
        )
    lora.read_weights(where)  # fail now: the model is opened only after all episodes are played
    return where


# ---- examples ----


def divided(examples: Sequence, sides: Sequence, share: float, seed: int) -> tuple[list, list]:
    """The examples to learn from and those held out; sides: an episode or conversation of each example.

    We hold out all instances of a share of the first prompts, of at least one, because many seeds may show the
    same page. Which prompts these are depends only on the seed and on the prompts. Raises NothingToLearn if
    nothing is left to learn from.
    """
    prompts = {side.first_prompt for side in sides}
    order = sorted(prompts, key=lambda prompt: random.Random(f"{seed} {prompt}").random())
    number = max(1, round(share * len(order)))
    if number >= len(order):
        raise NothingToLearn(
            f"all {len({side.instance for side in sides})} instances to learn from would be held "
            "out: explore more, whose first pages differ, or lower held_out"
        )
    held_out = set(order[:number])
    instances = {side.instance for side in sides if side.first_prompt in held_out}
    learned, unseen = [], []
    for example, side in zip(examples, sides):
        (unseen if side.instance in instances else learned).append(example)
    return learned, unseen


def read_at_ends(data, every_turn: bool = False):
    """The same Preferences or Rollouts with only one token that counts in the last turn, or in each turn.

    It is the place after the agent's last token of the turn. What token stands there does not matter: the head
    reads the state that would predict it, which is the state of the last token.
    """
    dialogues = []
    for ids, turns in data.dialogues:
        # of each turn, the place after its last token
        after = {turn: t + 1 for t, turn in enumerate(turns) if turn >= 0}
        last = max(after.values())
        counts = [-1] * (last + 1)
        for number, end in enumerate(after.values() if every_turn else [last]):
            counts[end] = number
        dialogues.append(Dialogue([*ids[:last], ids[last - 1]], counts))
    return data._replace(dialogues=dialogues)


class OrderedPairs(NamedTuple):
    """DPO's pairs; the chosen should have more reward. Rewards are (dialogues,)."""

    data: Preferences

    def batches(
        self, picked: Sequence[int], machine: Machine, device: torch.device
    ) -> Iterator[PairBatch]:
        no_reference = torch.zeros(len(self.data.dialogues))
        return pair_batches(self.data, picked, no_reference, SETTINGS, machine, device)

    def objective(self, batch: PairBatch, rewards: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's part of the step's loss, a mean over pairs, and of the logged numbers."""
        loss, numbers = pair_loss(SETTINGS, batch, rewards)
        return loss, {name: value for name, value in numbers.items() if not name.startswith("logp")}

    def judge(self, rewards: Tensor) -> dict:
        """How far the rewards can be trusted: over all pairs, and in bins of similar confidence."""
        chosen, rejected = rewards[torch.tensor(self.data.pairs)].unbind(1)  # (pairs,) both
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
    value: Tensor  # (M,) after each turn


class ValuedTurns(NamedTuple):
    """The agent's episodes; a turn's reward should be the value after it. Rewards are (all turns,)."""

    data: Rollouts
    values: list[Tensor]  # (turns,) of each episode: V_{t+1} of turn t

    def batches(
        self, picked: Sequence[int], machine: Machine, device: torch.device
    ) -> Iterator[TurnBatch]:
        for parts in entry_batches(self.data, picked, (self.values,), machine, device):
            yield TurnBatch(*parts)

    def objective(self, batch: TurnBatch, rewards: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's part of the step's loss, a mean over turns."""
        return step_reward_loss(rewards, batch.value).sum() / batch.step_turns, {}

    def judge(self, rewards: Tensor) -> dict:
        """The squared error, that of the best constant beside it, and the accuracy of the order.

        Accuracy: among pairs of an instance's turns with different values, the share that the rewards order as
        the values do; a tie counts half.
        """
        values = torch.cat(self.values)
        instances = [i for i, after in zip(self.data.instances, self.values) for _ in after]
        turns = sorted(zip(instances, values.tolist(), rewards.tolist()))
        right = [
            (r > s) + (r == s) / 2
            for _, group in groupby(turns, key=lambda turn: turn[0])
            for (_, v, r), (_, w, s) in permutations(group, 2)
            if v > w
        ]
        held_out = {
            "turns": len(turns),
            "instances": len(set(instances)),
            "squared_error": step_reward_loss(rewards, values).mean().item(),
            "squared_error_of_a_constant": values.var(correction=0).item(),
            "pairs": len(right),
        }
        if right:
            held_out["accuracy"] = sum(right) / len(right)
        return {"held_out": held_out}


# ---- best of n on held-out instances ----


def best_of_n(attempts: Sequence[Episode], rewards: Sequence[float]) -> dict[str, float]:
    """How often the attempt with the most reward in its instance was solved, with a 95 % interval.

    Beside it a random pick's share and an oracle's. Attempts with equal rewards count by their mean.

    >>> from minidpo.data.episodes import Episode
    >>> two = [Episode("t", 1, n, "", (), ("solved", "failed")[n], 0.0, "") for n in range(2)]
    >>> found = best_of_n(two, [0.3, -0.2]); found["picked"], found["random"], found["oracle"]
    (1.0, 0.5, 1.0)
    """
    shares = []  # of each instance, the share solved by the best attempts, by all, and whether by any
    for group in grouped(zip(attempts, rewards, strict=True), lambda e: e[0].instance).values():
        most = max(reward for _, reward in group)
        best = [attempt.solved for attempt, reward in group if reward == most]
        solved = [attempt.solved for attempt, _ in group]
        shares.append((sum(best) / len(best), sum(solved) / len(solved), any(solved)))
    picked, at_random, oracle = (sum(column) for column in zip(*shares))
    n = len(shares)
    low, high = wilson(picked, n)
    return {
        "instances": n,
        "attempts": len(attempts),
        "picked": picked / n,
        "low": low,
        "high": high,
        "random": at_random / n,
        "oracle": oracle / n,
    }
