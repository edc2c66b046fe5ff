"""GRPO and its relatives: an adapter from its own episodes, each weighed by its advantage over others.

No pairs and no value function: an episode is compared with those of the same instance (`group_advantages`),
with GiGPO a turn also with those on the same page. Several steps use the same rollouts, so the loss has the
ratio to the policy that played and clips it. That policy's log-probs are made by the code that trains, before
the first step: at that step every ratio is 1 up to the rounding of trees of other shapes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minidpo.config import GRPO, GRPOCommand, PolicyGradient, PPOCommand
from minidpo.data.batch import Batch, batch_logps, read_states
from minidpo.data.episodes import Episode, by_instance, read_all
from minidpo.data.information import answer_information
from minidpo.data.pairs import NothingToLearn, check_prompts
from minidpo.data.prompt import dialogues_of
from minidpo.learning.dpo import switch_adapter
from minidpo.learning.preferences import collate_groups, instance_trees, largest_tree, micro_batches, over_all
from minidpo.learning.reference import cached, identity, key
from minidpo.learning.selection import by_expert, one_agent
from minidpo.learning.trainer import Schedule, check_finite, train
from minidpo.learning.training_run import (example_indices, finish, in_steps, open_run, optimizers_of,
                                           resync_finished)
from minidpo.memory import lora
from minidpo.memory.loading import as_trained, open_chat, open_to_train
from minidpo.memory.machine import Machine, to_device
from minidpo.memory.plan import dpo_load
from minidpo.model.chat import Dialogue
from minidpo.model.decoder import Transformer
from minidpo.model.scalar_head import ScalarHead
from minidpo.objective.policy_gradient import (clipped_loss, entropy, gae, group_advantages, kl_k3,
                                               leave_one_out_advantages, state_advantages)
from minidpo.system import processes
from minidpo.system.run_folder import RunFolder

OTHER_AGENT = 0.3  # nats a token, in the mean; acting in bf16 and training in fp32 differ by hundredths


def grpo(config: GRPOCommand) -> dict:
    """Train an adapter on its own rollouts. Returns the last step's log."""
    options = config.grpo
    played = read_all(config.data)
    episodes = mixed_groups(played, config.data)
    run = open_run(config, config.data, reference=config.reference)
    if run.finished:
        return resync_finished(run)
    chat, limit = open_chat(config.model)
    data = Rollouts(*dialogues_of(episodes, chat, limit), [e.instance for e in episodes],
                    turn_advantages(episodes, options))
    options = in_steps(replace(options, batch=min(options.batch, len(episodes))), len(episodes))
    machine = as_trained(config.machine, config.adapter, config.reference)
    shape = lora.read_config(config.adapter)
    policy, machine, run.base = open_to_train(config.model, machine, shape, options.optimizer,
                                              lambda m: dpo_load(m, data.largest_tree(m)))
    processes.on_rank_0(run.begin)
    old, ref = logps_before(config, episodes, partial(logps_once, policy, data, machine, run))
    print(lora.describe(policy))

    def step_batches(step: int) -> Iterator[RolloutBatch]:
        picked = example_indices(step, options.batch, len(data.dialogues), config.seed, labels=data.instances)
        return rollout_batches(data, picked, old, ref, machine, policy.head_weight.device)

    train(run, policy, optimizers_of(options, policy), batches=step_batches,
          score=lambda batch: entry_logps(policy, batch.trees, machine),
          objective=lambda batch, logps: clipped_objective(options, batch, logps),
          schedule=Schedule(options, config.seed, options.advantage.upper(), group_numbers(played)))
    return finish(run, policy, config.model)


class Rollouts(NamedTuple):
    """An agent's episodes as token ids, with an advantage for each of their turns."""

    dialogues: list[Dialogue]
    names: list[str]
    instances: list[tuple[str, int]]
    advantages: list[Tensor]  # (turns,) of each

    def largest_tree(self, machine: Machine) -> int:
        """Tokens of the largest tree that a step may meet."""
        return largest_tree(instance_trees(self, [(d,) for d in range(len(self.names))], machine), machine)


def own_rollouts(episodes: Sequence[Episode], files: Sequence[Path]) -> list[Episode]:
    """Those in which something was said. ValueError for an episode that was not all the agent's own."""
    if given := next((e for e in episodes if e.forced or by_expert(e)), None):
        raise ValueError(f"{given.name}: not all of it was played by the agent: policy gradients need its "
                         "own rollouts from the start, as collect.py --adapter writes them")
    neutral = {"temperature": 1, "top_p": 1, "temperatures": []}  # the distribution neither sharpened nor cut
    if given := next((e for e in episodes if any(e.sampling.get(name, value) != value
                                                 for name, value in neutral.items())), None):
        raise ValueError(f"{given.name}: sampled with {given.sampling}, but policy gradients take it for a "
                         "sample of the policy itself: collect at temperature 1, top-p 1")
    one_agent(episodes, files)
    check_prompts(episodes)
    return [episode for episode in episodes if episode.turns]


def mixed_groups(episodes: Sequence[Episode], files: Sequence[Path]) -> list[Episode]:
    """The episodes of instances that were solved at times and failed at times; the others have no advantage.
    GiGPO's paper keeps instances that were always solved, too: there the shorter way from a state has one.
    Here all learners read the same. Raises NothingToLearn without any, ValueError as `own_rollouts` does."""
    groups = by_instance(own_rollouts(episodes, files))
    mixed = [group for group in groups.values() if len({e.solved for e in group}) > 1]
    print(f"{len(mixed)} of {len(groups)} groups have both outcomes")
    if not mixed:
        raise NothingToLearn(f"{' '.join(map(str, files))}: no instance was both solved and failed, so no "
                             "episode has an advantage: explore more instances, or at a higher temperature")
    return [episode for group in mixed for episode in group]


def group_numbers(episodes: Sequence[Episode]) -> dict[str, float]:
    """What is logged of the rollouts: the share of groups with both outcomes, and the `answer_information` in
    nats, where it can be told. It falls to 0 when the agent no longer looks at the page."""
    groups = by_instance([episode for episode in episodes if episode.turns]).values()
    information = answer_information(episodes)
    return {"mixed_group_share": sum(len({e.solved for e in group}) > 1 for group in groups) / len(groups),
            **({} if information is None else {"answer_information": information})}


def turn_advantages(episodes: Sequence[Episode], options: GRPO) -> list[Tensor]:
    """The advantage of each turn of each episode, (turns,) each."""
    number = {instance: n for n, instance in enumerate(by_instance(episodes))}
    reward = torch.tensor([float(e.solved) for e in episodes])
    group = torch.tensor([number[e.instance] for e in episodes])
    if options.advantage == "rloo":
        advantage = leave_one_out_advantages(reward, group)
    else:
        advantage = group_advantages(reward, group, scale=options.advantage == "grpo")
    turns = [len(e.turns) for e in episodes]
    episode = torch.arange(len(episodes)).repeat_interleave(torch.tensor(turns))
    if options.advantage != "gigpo":
        return list(advantage[episode].split(turns))
    seen: dict[tuple, int] = {}
    state = torch.tensor([seen.setdefault((e.instance, turn.observation), len(seen))
                          for e in episodes for turn in e.turns])
    paid = [torch.tensor([0.0] * (len(e.turns) - 1) + [float(e.solved)]) for e in episodes]
    returns = torch.cat([gae(rewards, 0 * rewards, options.gamma, lam=1.0) for rewards in paid])  # no values
    return list(state_advantages(advantage, episode, returns, state, options.state_weight).split(turns))


class RolloutBatch(NamedTuple):
    """A micro-batch: episodes in their trees. A token that several wrote is an entry of each of them."""

    trees: Batch
    names: list[str]  # of each entry
    advantage: Tensor  # (M,)
    old: Tensor  # (M,) log π of the policy that played
    ref: Tensor  # (M,) of the reference
    step_tokens: int  # entries of the whole step
    episodes: Sequence[int] = ()  # their numbers, in the order of the entries


def rollout_batches(data: Rollouts, picked: Sequence[int], old: Sequence[Tensor], ref: Sequence[Tensor],
                    machine: Machine, device: torch.device) -> Iterator[RolloutBatch]:
    """A step's episodes, by number, in micro-batches; old, ref: log-probs of what was written in each. One
    that a step meets twice, at the end of an epoch and at the beginning of the next, counts once."""
    picked = list(dict.fromkeys(picked))
    written = sum(len(old[d]) for d in picked)
    for groups in micro_batches(data, [(d,) for d in picked], machine):
        inside = [d for group in groups for d in group.trajectories]
        trees = collate_groups(data.dialogues, groups)
        turns = [torch.tensor(data.dialogues[d].written) for d in inside]
        advantage = torch.cat([data.advantages[d][turn] for d, turn in zip(inside, turns)])
        names = [data.names[d] for d, turn in zip(inside, turns) for _ in turn]
        yield to_device(RolloutBatch(trees, names, advantage, torch.cat([old[d] for d in inside]),
                                     torch.cat([ref[d] for d in inside]), written, inside), device)


def clipped_objective(options: PolicyGradient, batch: RolloutBatch, logps: Tensor, *,
                      weigh_kl: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of the step's loss, a mean over all tokens that the agent wrote, and the log.

    That is the mean of TRL's `bnpo` and `dapo`, for RLOO too, where TRL has one ratio a sequence. GRPO has a
    mean of episodes' means. Its k3 stands alone as in its paper; `weigh_kl`, for PPO: it is weighed by the
    ratio, as TRL's by default, so that its gradient is that of KL(policy || reference).
    """
    ratio, kl = (logps - batch.old).exp(), kl_k3(logps, batch.ref)
    losses = clipped_loss(logps, batch.old, batch.advantage, options.low, options.high)
    if options.kl:
        losses = losses + options.kl * (ratio * kl if weigh_kl else kl)
    pushed_up = batch.advantage > 0
    clipped = (pushed_up & (ratio > 1 + options.high)) | ((batch.advantage < 0) & (ratio < 1 - options.low))
    # the policy as it is now would have written these tokens `ratio` times as often
    numbers = {"kl_to_reference": ratio * kl, "clip_share": clipped.to(kl.dtype),
               "entropy": entropy(logps.detach(), batch.old), "ratio": ratio}
    return (losses.sum() / batch.step_tokens,
            {name: values.sum() / batch.step_tokens for name, values in numbers.items()})


def entry_logps(model: Transformer, trees: Batch, machine: Machine) -> Tensor:
    """log π of each token that the agent wrote, (M,), episode by episode; a shared one stands for each."""
    return batch_logps(model, trees, machine.walk_above)[trees.column]


def entry_values(model: Transformer, head: ScalarHead, machine: Machine, trees: Batch) -> Tensor:
    """The head's number before each token that counts, (M,), likewise."""
    return read_states(model, trees, lambda hidden, _: head(hidden), machine.walk_above)[trees.column]


def logps_once(policy: Transformer, data: Rollouts, machine: Machine, run: RunFolder, adapter: Path,
               name: str) -> list[Tensor]:
    """log π of what was written in each episode, with this adapter: from the folder's file of that name, or
    computed and kept there. The policy has the adapter from then on."""
    switch_adapter(policy, adapter)
    wanted = key(identity(policy, run.base, lora.read_config(adapter)), data.dialogues, "tokens")
    return entries_once(policy, data, machine, lambda trees: entry_logps(policy, trees, machine),
                        run.folder / name, wanted)


def logps_before(config: GRPOCommand | PPOCommand, episodes: Sequence[Episode],
                 logps_of: Callable[[Path, str], list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """log π of what was written, (written,) of each episode, by the agent that played, and by the reference:
    the same agent, unless another is named. The policy is the one that played from then on."""
    ref = logps_of(config.reference, "reference.safetensors") if config.reference else []
    old = logps_of(config.adapter, "rollouts.safetensors")
    check_player(episodes, old, config.adapter)
    return old, ref or old


def check_player(episodes: Sequence[Episode], old: Sequence[Tensor], adapter: Path) -> None:
    """Raise ValueError if what was recorded in playing, log π of each token, is far from what this adapter
    says, (written,) of each episode: then another agent played, and a ratio to this one means nothing."""
    recorded = [torch.tensor([logp for turn in e.turns for logp in turn.logps or ()]) for e in episodes]
    gaps = [(played - logps.cpu()).abs() for played, logps in zip(recorded, old, strict=True)
            if played.shape == logps.shape]
    if gaps and (gap := torch.cat(gaps).mean().item()) > OTHER_AGENT:
        raise ValueError(f"these rollouts were played by another agent than --adapter {adapter}: its log-"
                         f"probs are {gap:.1f} nats a token from the recorded ones; name the one that played")


def entries_once(policy: Transformer, data: Rollouts, machine: Machine, score: Callable[[Batch], Tensor],
                 path: Path, wanted: str) -> list[Tensor]:
    """A number for each token that was written in each episode, as `score` gives them for a batch: from the
    file in `path`, if its key is `wanted`, or computed and kept there."""
    lengths = [len(dialogue.written) for dialogue in data.dialogues]

    def compute() -> Tensor:
        values = over_all(data, lengths, policy, machine, partial(collate_groups, data.dialogues), score)
        check_finite(torch.stack([part.sum() for part in values.split(lengths)]), data.names)
        return values

    return list(cached(path, wanted, compute).split(lengths))
