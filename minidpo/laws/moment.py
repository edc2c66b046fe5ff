"""Laws of a second moment in 8 bits: moment(v (n,) float32) gives codes (n,) uint8, a scale for each 256
numbers, (⌈n/256⌉,) float32, and what they decode to, (n,) float32. Each v is 0 or in 1e-16 .. 1e16; n >= 1.
"""

import torch
from hypothesis import strategies as st

from minidpo.laws.for_all import close, for_all, tensor_of
from minidpo.memory.adamw8bit import BLOCK, dynamic_map

numbers = st.one_of(
    st.just(0.0),
    st.sampled_from([1.0, 1e-4, 1e-8, 1e-12, 1e4, 1e8]),
    st.floats(1e-3, 1).map(lambda x: float(f"{x:.3g}")),
)
moments = st.lists(numbers, min_size=1, max_size=5)


def stored(moment, v):
    """v, its codes and scales, and what they decode to."""
    v = torch.tensor(v)
    codes, scale, decoded = moment(v.clone())
    dtype = tensor_of(codes, v.shape, "the codes").dtype
    assert dtype == torch.uint8, f"the codes are {dtype}, wanted uint8"
    tensor_of(scale, (-(-len(v) // BLOCK),), "the scale")
    tensor_of(decoded, v.shape, "what is decoded")
    assert decoded.isfinite().all(), f"comes back as {decoded.tolist()}"
    return v, codes, scale, decoded


@for_all(v=moments)
def keeps_a_moment_of_0(moment, v):
    v, _, _, decoded = stored(moment, v)
    close(decoded[v == 0], v[v == 0], "a 0")


@for_all(v=moments, live=st.sampled_from([1.0, 1e-4, 1e-8, 1e-12]))
def keeps_a_live_moment_above_0(moment, v, live):
    """Beside 1e8, too. Else the weight would move by m/ε, thousands of learning rates."""
    v, _, _, decoded = stored(moment, [*v, live, 1e8])
    assert (decoded[v > 0] > 0).all(), (
        f"{v[(v > 0) & (decoded == 0)][0].item():.6g} comes back as 0"
    )


@for_all(v=moments)
def keeps_the_largest(moment, v):
    v, _, _, decoded = stored(moment, v)
    largest, found = v.max().item(), decoded[v.argmax()].item()
    assert abs(found - largest) <= 1e-5 * largest, f"{largest:.6g} comes back as {found:.6g}"


@for_all(v=moments)
def gives_each_root_the_nearest_of_the_levels(moment, v):
    """√v is nearest to level · √(largest v), of dynamic_map(signed=False); between the level 0 and the
    next one it gets the next."""
    v, _, _, decoded = stored(moment, v)
    levels, largest = dynamic_map(signed=False).double(), v.double().max().sqrt()
    share = v.double().sqrt() / torch.where(largest > 0, largest, 1.0)
    found = decoded.double().sqrt() / torch.where(largest > 0, largest, 1.0)
    wanted = (share[:, None] - levels).abs().amin(1)
    for i in range(len(v)):
        if share[i] >= levels[1]:
            assert abs(found[i] - share[i]) <= wanted[i] + 1e-6, (
                f"the root's share of the largest is {share[i]:.6g}, its level {found[i]:.6g}"
            )
        elif v[i] > 0:
            assert abs(found[i] - levels[1]) <= 1e-9, (
                f"the share {share[i]:.3g} has the level {found[i]:.6g}"
            )


@for_all(v=moments, power=st.integers(-5, 5))
def a_power_of_four_moves_no_code(moment, v, power):
    close(
        stored(moment, [x * 4.0**power for x in v])[1], stored(moment, v)[1], "the code of number"
    )


@for_all(v=moments, other=moments)
def gives_each_256_numbers_a_scale_of_their_own(moment, v, other):
    """v fills a block with zeros behind it, `other` follows in the next."""
    v = v + [0.0] * (BLOCK - len(v))
    alone = torch.cat([stored(moment, v)[3], stored(moment, other)[3]])
    close(stored(moment, v + other)[3], alone, "beside another block number", 1e-6)


@for_all(v=moments)
def decodes_to_what_codes_and_scales_stand_for(moment, v):
    """The square of level · scale, levels as in dynamic_map(signed=False)."""
    v, codes, scale, decoded = stored(moment, v)
    roots = dynamic_map(signed=False)[codes.int()] * scale.repeat_interleave(BLOCK)[: len(v)]
    close(decoded, roots**2, "number", 1e-6)


LAWS = (
    keeps_a_moment_of_0,
    keeps_a_live_moment_above_0,
    keeps_the_largest,
    gives_each_root_the_nearest_of_the_levels,
    a_power_of_four_moves_no_code,
    gives_each_256_numbers_a_scale_of_their_own,
    decodes_to_what_codes_and_scales_stand_for,
)
