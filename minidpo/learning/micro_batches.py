"""Micro-batches: the trees of a step, packed into passes within a token budget and shared among processes.

`data` is anything with `dialogues` and `instances`: preferences or rollouts. A unit must stay together: it is a
pair of trajectories, or a single one. All units of an instance share a tree.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from tqdm import tqdm

from minidpo.data.batch import Batch, batches_within, collate
from minidpo.data.tree import Group, grow_groups
from minidpo.memory.machine import Machine
from minidpo.model.decoder import Transformer
from minidpo.system.processes import all_gather, rank_parts, refuse_torchrun, sum_over_ranks
from minidpo.system.tensors import to_device


def passes_within(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """This process's passes over trajectories of these lengths: their numbers, at most `budget` tokens a pass."""
    return rank_parts(batches_within(lengths, budget), lengths)


def with_fixed_passes(machine: Machine) -> Machine:
    """The machine with passes of a fixed size, for dropout. Dropout is drawn once a pass, so the size of a pass must
    not depend on the free memory or the number of processes."""
    refuse_torchrun("dropout is drawn a pass at a time, and would differ")
    return replace(machine, micro_tokens=machine.pass_tokens())


def instance_trees(data, units: Sequence[Sequence[int]], machine: Machine) -> list[Group]:
    """The trees of data's dialogues and instances. units: pairs or single trajectories, by number."""
    return grow_groups(
        units, [dialogue.ids for dialogue in data.dialogues], data.instances, machine.split_above
    )


def collate_groups(data, groups: Sequence[Group], *weights) -> Batch:
    """Grown trees as one batch, on the CPU; weights: as in `data/batch.collate`."""
    members = [[data.dialogues[d] for d in group.trajectories] for group in groups]
    return collate(members, *weights, trees=[group.tree for group in groups])


def largest_tree(data, units: Sequence[Sequence[int]], machine: Machine) -> int:
    """Tokens of the largest tree that these units can need; of a tree that is walked depth first, its longest path."""
    trees = [group.tree for group in instance_trees(data, units, machine)]
    largest = max(
        len(tree.ids) if len(tree.ids) <= machine.walk_above else max(map(len, tree.paths))
        for tree in trees
    )
    split = len(trees) > len({data.instances[unit[0]] for unit in units})
    return (
        max(largest, machine.tree_tokens) if split else largest
    )  # a step's own units may fill a whole tree


def micro_batches(data, units: Sequence[Sequence[int]], machine: Machine) -> list[list[Group]]:
    """This process's micro-batches of a step's trees."""
    groups = instance_trees(data, units, machine)
    lengths = [len(group.tree.ids) for group in groups]
    budget = machine.pass_tokens()
    # a tree that is walked depth first is alone in its batch
    packed = batches_within(
        [n if n <= machine.walk_above else max(n, budget) for n in lengths], budget
    )
    return [[groups[g] for g in part] for part in rank_parts(packed, lengths)]


@torch.no_grad()
def over_all(
    data, lengths: Sequence[int], model: Transformer, machine: Machine, read, *weights
) -> Tensor:
    """The numbers that read(batch) gives for all trajectories, lengths[d] for trajectory d; batches are collated
    with `weights`. Returns (sum of lengths,) in the order of the trajectories, on the model's device."""
    device, begins = model.head_weight.device, torch.tensor([0, *lengths]).cumsum(0)
    values = torch.zeros(sum(lengths), device=device)
    parts = micro_batches(data, [(d,) for d in range(len(lengths))], machine)
    for groups in tqdm(parts, "scoring", unit="batch", delay=2, leave=False):
        places = torch.cat(
            [begins[d] + torch.arange(lengths[d]) for g in groups for d in g.trajectories]
        )
        batch = to_device(collate_groups(data, groups, *weights), device)
        values[to_device(places, device)] = read(batch).to(values.dtype)
    all_gather(None, phase=True)  # waits for the slowest process to finish its whole share
    sum_over_ranks(values)  # each process has filled in its own numbers
    return values
