"""Gradient checkpointing gives the same gradients bit for bit, and keeps less."""

import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidpo.memory import lora, recompute

seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=settings.default.max_examples // 5)


def trainable(seed=0, blocks=2):
    model = tiny.model(seed, vocab=11, num_hidden_layers=blocks)
    return model.requires_grad_(True).train()


def loss_and_gradients(model, seed, ids, mask=None):
    model.zero_grad()
    torch.manual_seed(seed)  # of dropout
    loss = model.head(model(ids, mask=mask)).logsumexp(-1).mean()
    loss.backward()
    after = torch.rand(1)  # the random state that the next step finds
    return [
        loss.detach(),
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        after,
    ]


def problem(seed, T, dropout, masked):
    """A model, with an adapter that does something unless `dropout` is None, token ids and a mask."""
    model = trainable(seed)
    if dropout is not None:
        lora.attach(
            model, lora.LoRAConfig(rank=2, dropout=dropout), torch.Generator().manual_seed(seed)
        )
        for layer in lora.layers(model).values():
            torch.nn.init.normal_(layer.lora_B)
    ids = torch.randint(11, (2, T))
    mask = (torch.rand(2, T, T) < 0.7).tril() | torch.eye(T, dtype=torch.bool) if masked else None
    return model, ids, mask


@given(seeds, st.integers(1, 9), st.sampled_from([None, 0.0, 0.5]), st.booleans(), st.booleans())
@few
def test_loss_and_gradients_are_the_same_bit_for_bit(seed, T, dropout, masked, offload):
    """With all weights training, or LoRA alone, with or without dropout, with the causal mask or another;
    inputs of blocks wait here or on the host."""
    model, ids, mask = problem(seed, T, dropout, masked)
    plain = loss_and_gradients(model, seed, ids, mask)
    recompute.switch(model, True, offload)
    again = loss_and_gradients(model, seed, ids, mask)
    assert len(plain) == len(again) > 2 and all(map(torch.equal, plain, again))
    recompute.switch(model, False)
    assert all(map(torch.equal, plain, loss_and_gradients(model, seed, ids, mask)))


def kept_for_backward(model, ids):
    """Numbers a token that autograd holds between forward and backward, weights and masks not counted."""
    kept, alive = {}, []
    owned = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def pack(tensor):
        alive.append(tensor)  # or a freed one's address could come back as another's
        if tensor.untyped_storage().data_ptr() not in owned:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids)
    return sum(kept.values()) / 4 / ids.numel()


def test_each_further_block_keeps_its_input_and_nothing_else():
    ids = torch.randint(11, (2, 32))
    plain = [kept_for_backward(trainable(blocks=blocks), ids) for blocks in (1, 2)]
    models = [trainable(blocks=blocks) for blocks in (1, 2)]
    for model in models:
        recompute.switch(model, True)
    lean = [kept_for_backward(model, ids) for model in models]
    assert lean[1] - lean[0] == 32  # C
    assert plain[1] - plain[0] > 10 * 32
