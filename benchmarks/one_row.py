"""One conversation at a time: tokens a second of plain, packed and 8-bit weights, each with guesses and without.

Run it: python benchmarks/one_row.py --model MODEL.gguf --adapter FOLDER --episodes runs/NAME/04-play.jsonl

Every way answers the same first pages of the episodes greedily; ways take turns, and each pass of an answer has
its fastest time of all rounds. Prompts are read once, with a first token. `--divergence` compares, on the tokens of
whole episodes, each way's log-probs with those of plain weights.
"""

import argparse
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


def written(
    sampler: Sampler, prompt: tuple[int, ...], new: int, guess: bool
) -> tuple[list[float], int]:
    """Seconds of each pass of an answer but the first, which reads the prompt, and its tokens. The sampler is
    new: it would remember what it said."""
    next_ones = Guesses(others=False).next
    sampler.guesses.next = next_ones if guess else lambda *_: ()
    sampler.ask(0, Request(prompt, (0.5,) * new))
    answers, seconds = sampler.step(), []
    before = len(sampler.writing[0].ids)
    while not answers:
        began = time.perf_counter()
        answers = sampler.step()
        seconds.append(time.perf_counter() - began)
    return seconds, len(answers[0].ids) - before


def rates(model: Transformer, stop: int, prompts: list, options) -> dict[str, dict]:
    """Seconds and tokens: of reading the prompts, of the passes without guesses and with them."""

    def new() -> Sampler:
        return Sampler(model, 1, stop, temperature=0.0)

    began = time.perf_counter()
    for sampler, prompt in [(new(), prompt) for prompt in prompts]:
        sampler.ask(0, Request(prompt, (0.5, 0.5)))
        sampler.step()
    reading = {"passes_s": [time.perf_counter() - began], "tokens": sum(map(len, prompts))}
    best = {"reading": reading}
    for _ in range(options.rounds):
        for guess in (False, True):
            parts = [written(new(), prompt, options.new, guess) for prompt in prompts]
            row = {
                "passes_s": [second for seconds, _ in parts for second in seconds],
                "tokens": sum(tokens for _, tokens in parts),
            }
            name = "guesses" if guess else "no guesses"
            best[name] = faster(best.get(name, row), row)
    return best


def faster(one: dict, other: dict) -> dict:
    """Each pass at its fastest: an answer has the same passes in each round."""
    passes = zip(one["passes_s"], other["passes_s"], strict=True)
    return {**one, "passes_s": [min(seconds) for seconds in passes]}


@torch.inference_mode()
def thinks(model: Transformer, ids: list[int]) -> torch.Tensor:
    """log π of each next token, (T,V)."""
    return model.head(model(torch.tensor([ids]))[0]).log_softmax(-1)


def divergence(model: Transformer, dialogues: list, plain: list[torch.Tensor]) -> dict[str, float]:
    """KL from plain weights in nats a token, over all tokens; how often both think the same token likeliest; the
    mean difference of log π over the tokens that the agent wrote."""
    found = []
    for dialogue, before in zip(dialogues, plain):
        after = thinks(model, dialogue.ids)
        wrote = torch.tensor(dialogue.turns[1:]) >= 0
        token = torch.tensor(dialogue.ids[1:])[:, None]
        found.append(
            (
                (before.exp() * (before - after)).sum(-1),
                (before.argmax(-1) == after.argmax(-1)).float(),
                (after - before)[:-1].gather(1, token)[wrote, 0].abs(),
            )
        )
    names = ("kl_nats_a_token", "same_likeliest", "written_logp_moved")
    return {name: torch.cat(column).mean().item() for name, column in zip(names, zip(*found))}


def spread(items: list, count: int) -> list:
    """So many of the items, evenly."""
    return items[:: max(1, len(items) // max(1, count))][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--episodes", type=Path, required=True)
    parser.add_argument("--pages", type=int, default=4, help="prompts that are answered")
    parser.add_argument("--new", type=int, default=48, help="the most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="of a way before the next one's turn")
    parser.add_argument("--turns", type=int, default=2, help="of each way")
    parser.add_argument("--divergence", type=int, default=0, metavar="EPISODES")
    options = parser.parse_args()
    played = episodes.read(options.episodes)
    result = {"model": options.model, **circumstances("torch"), "writing": {}, "divergence": {}}
    best: dict[str, dict] = {}
    plain: list[torch.Tensor] = []
    for turn in range(options.turns):
        for way in WAYS:  # one model at a time: all together would need the memory of all
            model, chat = opened(way, options.model, options.adapter)
            prompts = [
                tuple(
                    chat.prompt(next_prompt(one.instruction, [], one.turns[0].observation, SYSTEM))
                )
                for one in spread(played, options.pages)
            ]
            for name, row in rates(model, chat.end, prompts, options).items():
                name = f"{way}, {name}"
                best[name] = faster(best.get(name, row), row)
            if turn == 0:
                dialogues = [
                    dialogue_of(one, chat, SYSTEM) for one in spread(played, options.divergence)
                ]
                if way == "plain":
                    plain = [thinks(model, dialogue.ids) for dialogue in dialogues]
                elif dialogues:
                    result["divergence"][way] = divergence(model, dialogues, plain)
            del model
    for name, row in best.items():
        result["writing"][name] = {
            "tokens_per_s": row["tokens"] / sum(row["passes_s"]),
            "tokens_a_pass": row["tokens"] / len(row["passes_s"]),
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
