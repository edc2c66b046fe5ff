"""Laws of what is computed of a trajectory's tokens or turns, and of LoRA's merged matrix."""

import math

import torch
from hypothesis import strategies as st

from minidpo.laws.for_all import close, f64, for_all, same, tensor_of, unchanged

logps = st.integers(-9, 0).map(float)
weights = st.sampled_from([0.0, 1.0, 0.5, -2.0])
tokens = st.lists(
    st.tuples(logps, st.integers(0, 2), weights), max_size=6
)  # logp, trajectory, weight


# scores(logps (T,) float64, segment (T,) int64 in 0..n-1, weight (T,), n) -> (n,); n >= 1, T may be 0


def score_of(scores, tokens, n=3):
    """The scores of n trajectories, (n,), and the leaf logps (T,)."""
    logps = f64([logp for logp, _, _ in tokens]).requires_grad_()
    segment = torch.tensor([segment for _, segment, _ in tokens], dtype=torch.int64)
    return tensor_of(scores(logps, segment, f64([weight for *_, weight in tokens]), n), (n,)), logps


@for_all(token=st.tuples(logps, st.integers(0, 2), weights))
def gives_a_token_alone_its_weight_times_its_log_prob(scores, token):
    """To its own trajectory; the score of one without tokens is 0."""
    found, _ = score_of(scores, [token])
    wanted = f64([token[0] * token[2] if i == token[1] else 0.0 for i in range(3)])
    close(found, wanted, "the score of trajectory")


@for_all(one=tokens, other=tokens)
def adds_up_over_any_partition_of_the_tokens(scores, one, other):
    whole, _ = score_of(scores, one + other)
    close(
        score_of(scores, one)[0] + score_of(scores, other)[0],
        whole,
        "summed over two parts the score of",
    )


@for_all(tokens=tokens)
def has_each_tokens_weight_as_its_gradient(scores, tokens):
    """d score / d logp_t = weight_t; for a token of weight 0 that is 0."""
    found, leaf = score_of(scores, tokens)
    (grad,) = torch.autograd.grad(found.sum() + 0 * leaf.sum(), leaf)
    close(grad, f64([weight for *_, weight in tokens]), "the gradient of token")


@for_all(tokens=tokens, junk=st.sampled_from([-math.inf, math.inf, math.nan]))
def ignores_a_token_of_weight_0_whatever_its_log_prob(scores, tokens, junk):
    """In value and gradient: the page's tokens have weight 0, and a model may find one impossible."""
    clean, _ = score_of(scores, tokens)
    found, leaf = score_of(scores, [(junk, 0, 0.0), *tokens])
    close(found, clean, "beside such a token the score of trajectory")
    found.sum().backward()
    close(leaf.grad[:1], f64([0.0]), "its gradient")


@for_all(tokens=tokens)
def is_minus_infinity_where_a_token_that_counts_is_impossible(scores, tokens):
    """What the agent cannot have said is no certain answer: its log-prob is not left out."""
    found, _ = score_of(scores, [(-math.inf, 0, 1.0), *tokens])
    assert found[0] == -math.inf, f"it is {found[0].item():.6g}"


SCORES = (
    gives_a_token_alone_its_weight_times_its_log_prob,
    adds_up_over_any_partition_of_the_tokens,
    has_each_tokens_weight_as_its_gradient,
    ignores_a_token_of_weight_0_whatever_its_log_prob,
    is_minus_infinity_where_a_token_that_counts_is_impossible,
)


# turn_weights(n_turns, gamma) -> (n_turns,) float64; n_turns >= 1, 0 <= gamma <= 1

turns, gammas = st.integers(1, 6), st.one_of(st.sampled_from([0.0, 1.0, 0.5]), st.floats(0, 1))


@for_all(n_turns=turns, gamma=gammas)
def gives_the_first_turn_the_weight_1(turn_weights, n_turns, gamma):
    same(
        tensor_of(turn_weights(n_turns, gamma), (n_turns,))[0].item(),
        1.0,
        "its weight, and the one wanted",
    )


@for_all(n_turns=turns, gamma=gammas)
def loses_gamma_times_as_much_with_each_turn(turn_weights, n_turns, gamma):
    """φ(t+1) - φ(t+2) = γ (φ(t) - φ(t+1)), where φ(N) = 0 stands behind the last turn."""
    weight = tensor_of(turn_weights(n_turns, gamma), (n_turns,))
    lost = -torch.cat([weight, f64([0.0])]).diff()
    close(lost[1:], gamma * lost[:-1], "what is lost after turn 1 +")


@for_all(n_turns=turns, digits=st.integers(5, 12))
def keeps_its_digits_near_gamma_1(turn_weights, n_turns, digits):
    """For γ = 1 - 10^-digits it is (γᵗ + .. + γᴺ⁻¹) / (1 + .. + γᴺ⁻¹), the same, up to 1e-12."""
    gamma = 1 - 10.0**-digits
    powers = gamma ** torch.arange(n_turns, dtype=torch.float64)
    wanted = powers.flip(0).cumsum(0).flip(0) / powers.sum()
    close(tensor_of(turn_weights(n_turns, gamma), (n_turns,)), wanted, "the weight of turn", 1e-12)


TURNS = (
    gives_the_first_turn_the_weight_1,
    loses_gamma_times_as_much_with_each_turn,
    keeps_its_digits_near_gamma_1,
)


# merged(weight (out,in), a (R,in), b (out,R), alpha) -> (out,in) float64; alpha > 0

numbers = st.integers(-3, 3)


def matrices(rank, values):
    """weight (2,3), a (R,3), b (2,R), filled with these numbers in turn."""
    sizes = [(2, 3), (rank, 3), (2, rank)]
    return [f64([values[i % len(values)] for i in range(m * n)]).view(m, n) for m, n in sizes]


cases = {
    "rank": st.integers(1, 4),
    "values": st.lists(numbers, min_size=5, max_size=7),
    "alpha": st.sampled_from([1.0, 2.0, 16.0]),
}


@for_all(**cases)
def is_the_weight_bit_for_bit_where_b_is_0(merged, rank, values, alpha):
    weight, a, b = matrices(rank, values)
    found = tensor_of(merged(weight, a, torch.zeros_like(b), alpha), (2, 3))
    assert torch.equal(found, weight), f"gives {found.tolist()} for {weight.tolist()}"


@for_all(**cases)
def acts_as_the_two_thin_products_beside_the_wide_one(merged, rank, values, alpha):
    """merged @ x = W x + (α/R) B (A x), for three columns x."""
    weight, a, b = matrices(rank, values)
    x = f64([[1.0, 0.0, 2.0], [2.0, 1.0, 0.0], [4.0, 3.0, 1.0]])
    close(
        tensor_of(merged(weight.clone(), a, b, alpha), (2, 3)) @ x,
        weight @ x + b @ (a @ x) * alpha / rank,
        "merged @ x",
    )


@for_all(**cases)
def leaves_the_matrices_as_they_were(merged, rank, values, alpha):
    given = matrices(rank, values)
    merged(*given, alpha)
    unchanged(("weight", "a", "b"), given, matrices(rank, values))


LORA = (
    is_the_weight_bit_for_bit_where_b_is_0,
    acts_as_the_two_thin_products_beside_the_wide_one,
    leaves_the_matrices_as_they_were,
)
