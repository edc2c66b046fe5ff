"""GRPO, Dr. GRPO and RLOO keep the laws of minidpo/laws/advantage.py; a mistake breaks each."""

import pytest
import torch

from minidpo.laws import advantage as laws
from minidpo.objective.policy_gradient import group_advantages, leave_one_out_advantages


def group_mean(x, group):
    """Each episode's mean of x over its group."""
    same = (group[:, None] == group).to(x.dtype)
    return same @ x / same.sum(1)


def dr_grpo(reward, group):
    return reward - group_mean(reward, group)


def without_epsilon(reward, group):
    a = dr_grpo(reward, group)
    return a / group_mean(a.square(), group).sqrt()


def over_the_batch(reward, group):
    return reward - reward.mean()


def over_the_batch_after_the_group(reward, group):
    a = dr_grpo(reward, group)
    return a / (a.square().mean().sqrt() + 1e-6)


def neighbours_only(reward, group):
    return reward - torch.where(group == group.roll(1), reward.roll(1), reward)


WRONG = {
    laws.leaves_its_inputs_as_they_were: lambda r, g: r.sub_(group_mean(r, g)),
    laws.sums_to_0_in_each_group: over_the_batch,
    laws.is_0_where_all_rewards_of_a_group_are_equal: without_epsilon,
    laws.is_unmoved_when_all_rewards_of_a_group_shift: lambda r, g: (
        r / (1 + group_mean(r.abs(), g))
    ),
    laws.reads_no_other_group: over_the_batch_after_the_group,
    laws.goes_with_its_episode_into_any_order: neighbours_only,
    laws.rises_with_the_reward: lambda r, g: -dr_grpo(r, g),
}


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize(
    "advantage",
    [
        group_advantages,
        leave_one_out_advantages,
        lambda reward, group: group_advantages(reward, group, scale=False),
    ],
)
def test_ours_keep_all_laws(law, advantage):
    law(advantage)


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_each_law_is_broken_by_a_mistake(law):
    with pytest.raises(AssertionError):
        law(WRONG[law])
