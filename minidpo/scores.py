"""1. Scores: the only way from a model to a loss.

A trajectory is a row of tokens of which the agent wrote some, turn by turn. Every objective here reads
nothing of the model but weighted sums of the log-probs of those tokens, `score = W @ logp`: DPO's W is 1,
SimPO's 1/length, DMPO's a weight for each turn. So log-probs are made in one place, `token_logps`, masks and
weights are applied in one place, `scores`, and a loss is a line of algebra on the result. Next: 2 losses.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


LOGITS = 2**25  # that exist at once: 128 MiB in float32, 220 tokens of Qwen2's vocabulary


def token_logps(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int | None = None) -> Tensor:
    """log softmax(hidden @ weightᵀ)[target] of each token, in nats, `chunk` rows of logits at a time.

    hidden (T,C): the states at the positions that *predict* the tokens, so a row's last state has no place
    here; weight (V,C): the head; targets (T,) int64. Returns (T,). Products run in the inputs' dtype, the
    log-softmax in float32 (float64 if the inputs are). Saves the (T,V) logits and their gradient, the largest
    tensors of a training step, down to (chunk,V); costs the head's product once more in backward. A frozen
    head gets no gradient matrix. The chunk, LOGITS numbers unless given, changes nothing but the rounding.
    Raises ValueError if chunk < 1.

    >>> token_logps(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1]))
    tensor([-0.6931, -0.3133])
    """
    if chunk is None:
        chunk = max(1, LOGITS // len(weight))
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    return _TokenLogps.apply(hidden, weight, targets, chunk)


class _TokenLogps(torch.autograd.Function):
    """The chunked head; backward makes each chunk's logits again instead of keeping them."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.chunk = chunk
        logps = []
        for h, target in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            logits = _shifted_logits(h, weight)  # (t,V)
            logp = logits.gather(1, target[:, None]).squeeze(1)  # (t,), before exp_ overwrites it
            logps.append(logp - logits.exp_().sum(1).log())
        return torch.cat(logps)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logps: Tensor):
        """∂logp/∂logits = onehot(target) - softmax(logits)."""
        hidden, weight, targets = ctx.saved_tensors
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        grad_hidden = []
        # float32 even if the head is bfloat16, where many small addends would vanish; autograd casts it back
        grad_weight = torch.zeros_like(weight, dtype=grad_logps.dtype) if wants_weight else None
        parts = (x.split(ctx.chunk) for x in (hidden, targets[:, None], grad_logps[:, None]))
        for h, target, grad in zip(*parts, strict=True):
            softmax = _shifted_logits(h, weight).exp_()  # (t,V), up to its sum
            grad_logits = softmax.mul_(-grad / softmax.sum(1, keepdim=True)).scatter_add_(1, target, grad)
            grad_logits = grad_logits.to(h.dtype)
            if wants_hidden:
                grad_hidden.append(grad_logits @ weight)  # (t,C)
            if wants_weight:
                grad_weight += grad_logits.t() @ h  # (V,C)
        return torch.cat(grad_hidden) if wants_hidden else None, grad_weight, None, None


def _shifted_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden (t,C), weight (V,C) -> logits (t,V) in at least float32, each row shifted to a maximum of 0."""
    logits = hidden @ weight.t()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.sub_(logits.amax(1, keepdim=True))  # in place, as all that follows: one buffer, not four


def scores(logps: Tensor, segment: Tensor, weight: Tensor, n: int) -> Tensor:
    """score = W @ logp: for each of n trajectories the weighted sum of its tokens' log-probs.

    W is given by its entries, one a token: segment (T,) int64, the trajectory 0..n-1 that the token belongs
    to, and weight (T,), its weight there. logps (T,) is what `token_logps` gives. Returns (n,) in its dtype.
    A token that several trajectories share is listed once for each of them: pass logps[token]. A token of
    weight 0 carries neither value nor gradient, whatever its log-prob is.

    >>> logps, segment = torch.tensor([-1.0, -2.0, -torch.inf]), torch.tensor([0, 1, 1])
    >>> scores(logps, segment, weight=torch.tensor([1.0, 0.5, 0.0]), n=2)
    tensor([-1., -1.])
    """
    # where(), not the product alone: 0 * -inf is nan, and one banned token would poison the sum
    terms = torch.where(weight != 0, weight * logps.double(), 0.0)
    # In float64 the order of addition does not show in the float32 that comes out. CUDA's atomic adds have no
    # order, and the same run must give the same numbers twice.
    return terms.new_zeros(n).index_add(0, segment, terms).to(logps.dtype)


def sum_weights(action_mask: Tensor, segment: Tensor, n: int) -> Tensor:
    """W = 1 on the agent's tokens, 0 elsewhere: the score is log π(trajectory), as DPO and SFT read it.

    action_mask (T,) bool, True where the agent wrote the token; segment (T,) and n as in `scores`. Returns
    (T,) float64. Raises ValueError for a trajectory in which the agent wrote nothing.

    >>> sum_weights(torch.tensor([False, True, True]), torch.tensor([0, 0, 1]), n=2)
    tensor([0., 1., 1.], dtype=torch.float64)
    """
    lengths(action_mask, segment, n)
    return action_mask.double()


def mean_weights(action_mask: Tensor, segment: Tensor, n: int) -> Tensor:
    """W = 1/length on the agent's tokens, 0 elsewhere: the score is their mean log-prob, as SimPO reads it.

    Arguments, result and error as in `sum_weights`; the length counts the agent's own tokens only.

    >>> mean_weights(torch.tensor([False, True, True]), torch.tensor([0, 0, 0]), n=1)
    tensor([0.0000, 0.5000, 0.5000], dtype=torch.float64)
    """
    return action_mask.double() / lengths(action_mask, segment, n)[segment]


def lengths(action_mask: Tensor, segment: Tensor, n: int) -> Tensor:
    """How many tokens the agent wrote in each trajectory: (n,) int64. Raises ValueError where it wrote none.

    >>> lengths(torch.tensor([False, True, True]), torch.tensor([0, 0, 0]), n=1)
    tensor([2])
    """
    counts = torch.bincount(segment[action_mask], minlength=n)  # (n,)
    if not counts.all():
        raise ValueError(f"trajectory {counts.argmin()} of {n} has no token that the agent wrote and so no "
                         "score: drop it, or truncate its prompt instead of its answers")
    return counts
