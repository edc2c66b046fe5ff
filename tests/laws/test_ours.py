"""minidpo's own functions keep the laws of the kit. Losses and advantages: test_loss_laws, test_advantage."""

import pytest
import torch

from minidpo.data.tree import ancestors, grow
from minidpo.laws import code, head, masks, moment, scores
from minidpo.laws.ours import nf4
from minidpo.memory import lora
from minidpo.memory.adamw8bit import dequantise, maps, quantise
from minidpo.model.head import token_logps
from minidpo.model.kvcache import KVCache
from minidpo.objective.scores import scores as trajectory_scores
from minidpo.objective.scores import turn_weights


def merged(weight, a, b, alpha):
    """`lora.merge` of a model whose only map is `weight`."""
    base = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer = lora.LoRALinear(base, lora.LoRAConfig(rank=len(a), alpha=alpha), torch.Generator())
    with torch.no_grad():
        for parameter, given in ((base.weight, weight), (layer.lora_A, a), (layer.lora_B, b)):
            parameter.copy_(given)
        lora.merge(model := torch.nn.ModuleDict({"map": layer}))
    return model["map"].weight.detach()


def visible(lengths, new, columns):
    cache = KVCache(len(lengths), (1, 1, 1), torch.float32, "cpu")
    cache.lengths, cache.columns = lengths, columns
    return cache.visible(new)


def moment_of_adamw(v):
    _, unsigned = maps(v.device)
    codes, scale = quantise(v.sqrt(), unsigned)
    return codes, scale, dequantise(codes, scale, unsigned).square()


OURS = [
    (trajectory_scores, scores.SCORES),
    (turn_weights, scores.TURNS),
    (merged, scores.LORA),
    (token_logps, head.LAWS),
    (visible, masks.CACHE),
    (ancestors, masks.ANCESTORS),
    (grow, masks.GROW),
    (nf4, (*code.LAWS, code.decodes_code_i_to_level_i_of_nf4)),
    (moment_of_adamw, moment.LAWS),
]


@pytest.mark.parametrize(
    "ours, law",
    [
        pytest.param(ours, law, id=f"{ours.__name__}-{law.__name__}")
        for ours, laws in OURS
        for law in laws
    ],
)
def test_ours_keeps_the_law(ours, law):
    law(ours)
