"""KTO's baseline z₀: trajectories behind another instance's prompt, measured before each step."""

from collections.abc import Sequence

from torch import Tensor

from minidpo.data.batch import to_device
from minidpo.data.pairs import NothingToLearn
from minidpo.learning.preferences import PairLoss, Preferences, score_all
from minidpo.memory.machine import Machine
from minidpo.model.chat import Dialogue
from minidpo.model.decoder import Qwen2
from minidpo.objective.variants import kto_baseline


def mismatched(data: Preferences, limit: int) -> Preferences:
    """Each trajectory behind the first prompt of another one; what exceeds `limit` tokens is cut off."""
    begins = [next(t for t, turn in enumerate(d.turns) if turn >= 0) for d in data.dialogues]
    own_prompts = [tuple(d.ids[:t]) for d, t in zip(data.dialogues, begins)]
    prompts = list(dict.fromkeys(own_prompts))  # two instances may begin alike: prompts must differ
    if len(prompts) < 2:
        raise NothingToLearn("KTO's baseline reads answers behind another instance's prompt, but all pairs "
                             "have the same one: explore more instances")
    other_prompt = {prompt: list(prompts[n - 1]) for n, prompt in enumerate(prompts)}
    dialogues = []
    for dialogue, t, prompt in zip(data.dialogues, begins, own_prompts):
        begin = other_prompt[prompt]
        dialogues.append(Dialogue((begin + dialogue.ids[t:])[:limit],
                                  ([-1] * len(begin) + dialogue.turns[t:])[:limit]))
    return data._replace(dialogues=dialogues)


def step_baseline(model: Qwen2, others: Preferences | None, ref: Tensor | None, picked: Sequence[int],
                  settings: PairLoss, machine: Machine) -> Tensor | None:
    """z₀, (), of a step's `mismatched` trajectories and their reference scores, or None without them."""
    if others is None:
        return None
    numbers = list(dict.fromkeys(d for p in picked for d in others.pairs[p]))
    of_step = Preferences([others.dialogues[d] for d in numbers], [others.names[d] for d in numbers],
                          [others.instances[d] for d in numbers], pairs=[], solved=[])
    return kto_baseline(score_all(model, of_step, settings, machine),
                        to_device(ref[numbers], model.head_weight.device))
