"""Laws of an advantage: advantage(reward (B,) float, group (B,) int64) gives (B,). Rewards are finite; equal
group numbers, 0 or more, mark the episodes of one instance, in any order; numbers may be missing; B >= 1.

r - mean keeps them all (Dr. GRPO, arXiv:2503.20783), divided by the group's standard deviation as well (GRPO,
arXiv:2402.03300), and so does r - the mean of the others (RLOO, arXiv:2402.14740).
"""

import torch
from hypothesis import strategies as st

from minidpo.laws.for_all import close, f64, for_all, tensor_of, unchanged

rewards = st.one_of(st.integers(0, 1), st.floats(-4, 4, width=16)).map(float)
groups = st.integers(0, 3)
episodes = st.lists(st.tuples(rewards, groups), min_size=1, max_size=8)  # reward, group


def inputs(episodes):
    return f64([reward for reward, _ in episodes]), torch.tensor([group for _, group in episodes])


def advantages(advantage, episodes):
    found = tensor_of(advantage(*inputs(episodes)), (len(episodes),))
    assert found.isfinite().all(), f"gives {found[~found.isfinite()][0].item()}"
    return found


@for_all(episodes=episodes)
def leaves_its_inputs_as_they_were(advantage, episodes):
    given = inputs(episodes)
    advantage(*given)
    unchanged(("reward", "group"), given, inputs(episodes))


@for_all(episodes=episodes)
def sums_to_0_in_each_group(advantage, episodes):
    found, group = advantages(advantage, episodes), torch.tensor([group for _, group in episodes])
    for number in group.unique():
        close(found[group == number].sum(), f64(0.0), f"the sum over group {number.item()}", 1e-6)


@for_all(
    reward=st.one_of(rewards, st.sampled_from([0.1, 0.7, 1 / 3])),
    group=groups,
    count=st.integers(1, 8),
)
def is_0_where_all_rewards_of_a_group_are_equal(advantage, reward, group, count):
    """So a group that always fails, or that has one episode, teaches nothing; up to 1e-6. The mean of three
    rewards of 0.1 is not 0.1 in float64: what is left must not be divided by itself."""
    found = advantages(advantage, [(reward, group)] * count)
    close(found, torch.zeros(count), "the advantage of episode", 1e-6)


@for_all(episodes=episodes, group=groups, shift=st.integers(-3, 3))
def is_unmoved_when_all_rewards_of_a_group_shift(advantage, episodes, group, shift):
    shifted = [(reward + shift * (number == group), number) for reward, number in episodes]
    close(
        advantages(advantage, shifted),
        advantages(advantage, episodes),
        "after the shift episode",
        1e-6,
    )


@for_all(episodes=episodes, group=groups)
def reads_no_other_group(advantage, episodes, group):
    alone = [episode for episode in episodes if episode[1] == group] or episodes[:1]
    members = [i for i, episode in enumerate(episodes) if episode[1] == alone[0][1]]
    found = advantages(advantage, episodes)[members]
    alone = [episodes[i] for i in members]
    close(found, advantages(advantage, alone), "beside other groups the group's episode", 1e-6)


@for_all(episodes=episodes, order=st.permutations(range(8)))
def goes_with_its_episode_into_any_order(advantage, episodes, order):
    order = [i for i in order if i < len(episodes)]
    found = advantages(advantage, [episodes[i] for i in order])
    close(found, advantages(advantage, episodes)[order], "in another order episode", 1e-6)


@for_all(low=rewards, high=rewards, others=st.lists(rewards, max_size=4))
def rises_with_the_reward(advantage, low, high, others):
    """The better of two episodes of a group has the larger advantage, if they are 0.01 apart or more."""
    if high - low >= 0.01:
        a, b, *_ = advantages(advantage, [(reward, 0) for reward in (low, high, *others)]).tolist()
        assert a < b, f"the lower reward has {a:.6g}, the higher {b:.6g}"


LAWS = (
    leaves_its_inputs_as_they_were,
    sums_to_0_in_each_group,
    is_0_where_all_rewards_of_a_group_are_equal,
    is_unmoved_when_all_rewards_of_a_group_shift,
    reads_no_other_group,
    goes_with_its_episode_into_any_order,
    rises_with_the_reward,
)


@for_all(episodes=episodes)
def keeps_the_differences_of_rewards(advantage, episodes):
    """A_i - A_j = r_i - r_j for two episodes of a group, as in Dr. GRPO; GRPO divides, RLOO multiplies."""
    found = advantages(advantage, episodes)
    for i, (reward, group) in enumerate(episodes):
        first = next(j for j, episode in enumerate(episodes) if episode[1] == group)
        close(
            found[i] - found[first],
            f64(reward - episodes[first][0]),
            f"A of {i} - A of {first}",
            1e-6,
        )
