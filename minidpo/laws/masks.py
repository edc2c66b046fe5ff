"""Laws of what a token may read: keys of a cache, ancestors in a prefix tree; and of the tree itself."""

from itertools import accumulate

import torch
from hypothesis import strategies as st

from minidpo.laws.for_all import for_all, tensor_of


def mask_of(found, shape):
    assert tensor_of(found, shape).dtype == torch.bool, f"is {found.dtype}, wanted bool"
    return found


# visible(lengths (B,) int64, new, columns) -> (B,new,columns) bool; every length + new <= columns, new >= 1

caches = {
    "lengths": st.lists(st.integers(0, 4), min_size=1, max_size=3),
    "new": st.integers(1, 4),
    "spare": st.integers(0, 2),
}


def visible_of(visible, lengths, new, spare):
    columns = max(lengths) + new + spare
    return mask_of(visible(torch.tensor(lengths), new, columns), (len(lengths), new, columns))


@for_all(**caches)
def shows_a_query_its_position_plus_1_keys(visible, lengths, new, spare):
    """Query i of a row stands behind the row's cached tokens, so it reads length + i + 1 keys."""
    counts = visible_of(visible, lengths, new, spare).sum(2).tolist()
    for row, (length, found) in enumerate(zip(lengths, counts, strict=True)):
        for i, count in enumerate(found):
            assert count == length + i + 1, (
                f"query {i} of row {row} reads {count} keys, wanted {length + i + 1}"
            )


@for_all(**caches)
def shows_the_first_keys_without_a_gap(visible, lengths, new, spare):
    found = visible_of(visible, lengths, new, spare).int()
    assert (found.diff(dim=2) <= 0).all(), (
        f"a key is hidden before one that is read: {found.tolist()}"
    )


CACHE = (shows_a_query_its_position_plus_1_keys, shows_the_first_keys_without_a_gap)


# ancestors(ends (B,T) int64) -> (B,T,T) bool, query by key. Tokens stand depth first; ends[k] is the first
# token behind k that is no descendant of k; several roots may stand side by side; T >= 1.

# how far each token's parent stands above the token before it: 0 is a child of that one
climbs = st.lists(st.integers(0, 3), min_size=1, max_size=7)


def tree_of(climbs):
    """Each token's depth, its parent (-1: it is a root), and its end."""
    depths = list(accumulate(climbs, lambda depth, climb: max(0, depth + 1 - climb), initial=-1))[
        1:
    ]
    parents = [
        max((j for j in range(i) if depths[j] == depth - 1), default=-1)
        for i, depth in enumerate(depths)
    ]
    ends = [
        next((j for j in range(i + 1, len(depths)) if depths[j] <= depths[i]), len(depths))
        for i in range(len(depths))
    ]
    return depths, parents, ends


def seen(ancestors, climbs):
    """For each token the set of those that it reads."""
    _, _, ends = tree_of(climbs)
    found = mask_of(ancestors(torch.tensor([ends])), (1, len(ends), len(ends)))[0]
    return [set(row.nonzero()[:, 0].tolist()) for row in found]


@for_all(climbs=climbs)
def lets_a_token_read_itself(ancestors, climbs):
    for token, read in enumerate(seen(ancestors, climbs)):
        assert token in read, f"token {token} does not, with ends {tree_of(climbs)[2]}"


@for_all(climbs=climbs)
def lets_a_token_read_all_that_its_parent_reads(ancestors, climbs):
    read, (_, parents, ends) = seen(ancestors, climbs), tree_of(climbs)
    for token, parent in enumerate(parents):
        lost = read[parent] - read[token] if parent >= 0 else ()
        assert not lost, (
            f"token {token} does not read {lost}, which its parent {parent} reads, with ends {ends}"
        )


@for_all(climbs=climbs)
def lets_a_token_read_as_many_as_its_depth_and_itself(ancestors, climbs):
    depths, _, ends = tree_of(climbs)
    for token, read in enumerate(seen(ancestors, climbs)):
        assert len(read) == depths[token] + 1, (
            f"token {token} at depth {depths[token]} reads {read}, with ends {ends}"
        )


@for_all(climbs=climbs)
def reads_no_other_tree_of_the_batch(ancestors, climbs):
    _, _, ends = tree_of(climbs)
    chain = [len(ends)] * len(ends)
    together = mask_of(ancestors(torch.tensor([ends, chain])), (2, len(ends), len(ends)))
    for row, tree in enumerate((ends, chain)):
        alone = ancestors(torch.tensor([tree]))[0]
        assert torch.equal(together[row], alone), (
            f"tree {row} of {[ends, chain]} is another beside the other"
        )


ANCESTORS = (
    lets_a_token_read_itself,
    lets_a_token_read_all_that_its_parent_reads,
    lets_a_token_read_as_many_as_its_depth_and_itself,
    reads_no_other_tree_of_the_batch,
)


# grow(trajectories: lists of token ids, none empty) -> (ids, depths, ends, paths), four lists

trees = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=4)


@for_all(trajectories=trees)
def spells_each_trajectory_along_its_path(grow, trajectories):
    """paths[i] names the tokens of trajectory i from the root on, at the depths 0, 1, 2 and so on."""
    ids, depths, _, paths = grow(trajectories)
    assert len(paths) == len(trajectories), (
        f"gives {len(paths)} paths for {len(trajectories)} trajectories"
    )
    for row, path in zip(trajectories, paths, strict=True):
        spelled, at = [ids[token] for token in path], [depths[token] for token in path]
        assert spelled == row, f"spells {spelled} for {row}"
        assert at == list(range(len(row))), f"{row} has the depths {at}"


@for_all(trajectories=trees)
def holds_a_common_beginning_once(grow, trajectories):
    ids, depths, ends, _ = grow(trajectories)
    wanted = len({tuple(row[: t + 1]) for row in trajectories for t in range(len(row))})
    assert len(ids) == len(depths) == len(ends) == wanted, (
        f"has {len(ids)} ids, {len(depths)} depths and {len(ends)} ends, wanted {wanted} of each"
    )


@for_all(trajectories=trees)
def puts_the_descendants_of_a_token_right_behind_it_up_to_its_end(grow, trajectories):
    """Token j is on a path through k and not before k, if and only if k <= j < ends[k]."""
    _, _, ends, paths = grow(trajectories)
    for k, end in enumerate(ends):
        below = {token for path in paths if k in path for token in path[path.index(k) :]}
        assert below == set(range(k, end)), (
            f"ends[{k}] is {end}; it and its descendants are {sorted(below)}"
        )


GROW = (
    spells_each_trajectory_along_its_path,
    holds_a_common_beginning_once,
    puts_the_descendants_of_a_token_right_behind_it_up_to_its_end,
)
