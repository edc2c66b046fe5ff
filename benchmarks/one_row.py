"""One conversation at a time: tokens a second of plain, packed and 8-bit weights, each with guesses and without.

Run it: python benchmarks/one_row.py --model MODEL.gguf --adapter FOLDER --episodes runs/NAME/04-play.jsonl

Every way answers the same first pages of the episodes greedily; ways take turns, and each has its fastest round.
The time is that of writing: the step that reads a prompt is left out. `--divergence` compares, on the tokens of
whole episodes, what each way thinks with what plain weights do.
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import envs  # noqa: E402
from minidpo.data import episodes  # noqa: E402
from minidpo.data.prompt import dialogue_of, next_prompt  # noqa: E402
from minidpo.memory.loading import open_policy  # noqa: E402
from minidpo.memory.machine import Machine  # noqa: E402
from minidpo.memory.packing import pack  # noqa: E402
from minidpo.model.decoder import Transformer  # noqa: E402
from minidpo.model.guesses import Guesses  # noqa: E402
from minidpo.model.sampling import Request, Sampler  # noqa: E402
from minidpo.results.circumstances import circumstances  # noqa: E402

SYSTEM = envs.world("miniwob").system_prompt
WAYS = ("plain", "packed", "int8")


def opened(way: str, model: str, adapter: Path | None):
    """The policy's model with its weights held in this way, its chat and the adapter."""
    machine = Machine(device="cpu", act_dtype="int8" if way == "int8" else "float32", pages=1)
    policy, chat, _ = open_policy(model, adapter, machine)
    return (pack(policy) if way == "packed" else policy), chat


def written(sampler: Sampler, prompt: tuple[int, ...], new: int, guess: bool) -> tuple:
    """Seconds, tokens and passes of writing an answer. The prompt is read once for all calls."""
    next_ones = Guesses(others=False).next
    sampler.guesses.next = next_ones if guess else lambda *_: ()
    sampler.ask(0, Request(prompt, (0.5,) * new))
    answers, passes = sampler.step(), 0
    began, before = time.perf_counter(), len(sampler.writing[0].ids)
    while not answers:
        answers = sampler.step()
        passes += 1
    return time.perf_counter() - began, len(answers[0].ids) - before, passes


@torch.inference_mode()
def thinks(model: Transformer, ids: list[int]) -> torch.Tensor:
    """log π of each next token, (T,V)."""
    return model.head(model(torch.tensor([ids]))[0]).log_softmax(-1)


def divergence(models: dict[str, Transformer], dialogues: list) -> dict:
    """For each way: KL from plain weights in nats a token, over all tokens; how often both think the same token
    likeliest; the mean difference of log π over the tokens that the agent wrote."""
    found = {way: [] for way in models if way != "plain"}
    for dialogue in dialogues:
        plain = thinks(models["plain"], dialogue.ids)
        wrote = torch.tensor(dialogue.turns[1:]) >= 0
        token = torch.tensor(dialogue.ids[1:])[:, None]
        for way, rows in found.items():
            other = thinks(models[way], dialogue.ids)
            moved = (other - plain)[:-1].gather(1, token)[wrote, 0].abs()
            rows.append(
                (
                    (plain.exp() * (plain - other)).sum(-1),
                    (plain.argmax(-1) == other.argmax(-1)).float(),
                    moved,
                )
            )
    names = ("kl_nats_a_token", "same_likeliest", "written_logp_moved")
    return {
        way: {name: torch.cat(column).mean().item() for name, column in zip(names, zip(*rows))}
        for way, rows in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--episodes", type=Path, required=True)
    parser.add_argument("--pages", type=int, default=4, help="prompts that are answered")
    parser.add_argument("--new", type=int, default=48, help="the most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--divergence", type=int, default=0, metavar="EPISODES")
    options = parser.parse_args()
    played = episodes.read(options.episodes)
    models = {}
    for way in options.ways:
        models[way], chat = opened(way, options.model, options.adapter)
    result = {"model": options.model, **circumstances("torch")}
    some = played[:: max(1, len(played) // options.pages)][: options.pages]
    prompts = [
        tuple(chat.prompt(next_prompt(one.instruction, [], one.turns[0].observation, SYSTEM, ())))
        for one in some
    ]
    samplers = {
        way: [Sampler(model, 1, chat.end, temperature=0.0) for _ in prompts]
        for way, model in models.items()
    }
    best: dict[str, dict] = {}
    for _ in range(1 + options.rounds):  # the first reads the prompts
        for way, guess in itertools.product(models, (False, True)):
            parts = [
                written(sampler, prompt, options.new, guess)
                for sampler, prompt in zip(samplers[way], prompts)
            ]
            seconds, tokens, passes = map(sum, zip(*parts))
            row = {"tokens_per_s": tokens / seconds, "tokens_a_pass": tokens / passes}
            name = f"{way}, {'guesses' if guess else 'no guesses'}"
            best[name] = max(best.get(name, row), row, key=lambda row: row["tokens_per_s"])
    result["writing"] = best
    if options.divergence:
        some = played[:: max(1, len(played) // options.divergence)][: options.divergence]
        dialogues = [dialogue_of(one, chat, SYSTEM) for one in some]
        result["divergence"] = divergence(models, dialogues)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
