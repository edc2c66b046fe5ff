"""All of MiniWoB++ with one small model: five demonstrations a task, then what it explored.

    python benchmarks/miniwob.py run                             every part with seed 1
    python benchmarks/miniwob.py run --parts unseen-1 --seed 2 --flags "--rounds 1 --sft.steps 660"
    python benchmarks/miniwob.py play --agent second=FOLDER      an adapter from elsewhere plays what `whole` plays
    python benchmarks/miniwob.py play --agent second=FOLDER --sampled 4     at temperature 1, 4 instances a task
    python benchmarks/miniwob.py ship --agent second=FOLDER      this adapter, rounded to bfloat16, is minidpo/miniwob

    whole       `train.py averaged-eto --config configs/miniwob.toml`, on the tasks that have a scripted expert.
                Then SFT and the policy that validation chose play all 125 tasks greedily: 10 held-out instances
                of each, 25 of those on webgum-56
    unseen-K    the same on three quarters of these tasks; both agents play the rest, 10 instances each. Siblings
                (`rates.families`) are on the same side; K = 1, 2, 3 hold out different families

A finished part is a line in results/miniwob.jsonl, in place of an older one of its seed. `--how`, `--learned` and
`--after` say of an agent that plays what it was made of. Under torchrun the processes share the work. The lines of
docs/miniwob.md were made by v1 (commit cf007b6), whose agents but `sft` were trained by hand.
"""

import argparse
import fcntl
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import envs  # noqa: E402
from benchmarks.rates import RESULTS, recorded, split  # noqa: E402
from benchmarks.records import verdicts  # noqa: E402
from benchmarks.tables import INSTANCES  # noqa: E402
from minidpo.acting.causes import causes  # noqa: E402
from minidpo.acting.collect import play_to_file  # noqa: E402
from minidpo.acting.jobs import make_jobs, split_instances  # noqa: E402
from minidpo.acting.policies import Sampling, model_policy  # noqa: E402
from minidpo.algorithms import ALGORITHMS  # noqa: E402
from minidpo.commands.algorithms import parse_page  # noqa: E402
from minidpo.data.episodes import Episode, read  # noqa: E402
from minidpo.experiment import Experiment, ExperimentOptions  # noqa: E402
from minidpo.memory import lora  # noqa: E402
from minidpo.memory.context import Context  # noqa: E402
from minidpo.model.checkpoint import MINIWOB, SMOLLM2_HUB  # noqa: E402
from minidpo.results.circumstances import circumstances  # noqa: E402
from minidpo.runner import index_of_best, validated  # noqa: E402
from minidpo.system import processes  # noqa: E402
from minidpo.system.command_line import main as run_main  # noqa: E402
from minidpo.system.files import file_sha256, read_json, write_text  # noqa: E402
from minidpo.system.tensors import open_weights  # noqa: E402

PAGE = "averaged-eto"
PARTS = ("whole", "unseen-1", "unseen-2", "unseen-3")
FIRST = 25  # held-out instance: on those before it failures were read, and pages and thoughts mended after them
WORLD = envs.world("miniwob")


def options_of(part: str, seed: int, flags: list[str]) -> tuple:
    """The options of the page and of the experiment, for a part."""
    out = ["--seed", str(seed), "--out", f"runs/miniwob/{part}-{seed}"]
    given = ["--config", str(ROOT / "configs/miniwob.toml"), *out, *flags]
    options, setup = parse_page(ALGORITHMS[PAGE], given, f"train.py {PAGE}")
    if part != "whole":
        train, _ = split(envs.resolve(WORLD, setup.tasks), int(part[-1]))
        setup = replace(setup, tasks=",".join(train))
    return options, setup


def counts_of(part: str) -> dict[str, int]:
    """How many held-out instances of which tasks the agents of a part play."""
    if part == "whole":
        return {task: count for suite, count in INSTANCES.items() for task in WORLD.suites[suite]}
    _, held_out = split(WORLD.suites["expert"], int(part[-1]))
    return dict.fromkeys(held_out, INSTANCES["all"])


def play(
    setup: ExperimentOptions,
    name: str,
    adapter: Path,
    counts: Mapping[str, int],
    temperature: float = 0.0,
) -> list[Episode]:
    """The agent's episodes on the held-out instances, in a file that knows its weights."""
    context = Context(setup.model, WORLD, setup.seed, setup.machine)
    pages = setup.machine.page_count()
    policy = model_policy(context, adapter, Sampling(temperature), pages=pages)
    jobs = make_jobs(WORLD, split_instances(WORLD, counts, "test", FIRST))
    file = f"{name}-{file_sha256(adapter / lora.WEIGHTS)[:12]}-{temperature:g}.jsonl"
    out = setup.out / "held-out" / file
    play_to_file(policy, jobs, out, context=context, title=name)
    return read(out)


def with_agent(line: dict, name: str, adapter: Path, episodes: list[Episode]) -> dict:
    """The line with this agent's verdicts, causes of failure and weights."""
    found = {
        "agents": verdicts(episodes, counts_of(line["part"])),
        "causes": causes(WORLD, episodes),
        "weights": file_sha256(adapter / lora.WEIGHTS),
    }
    return line | {key: line.get(key, {}) | {name: each} for key, each in found.items()}


def run_part(part: str, seed: int, flags: list[str]) -> None:
    """Train a part and play its first policy and its best one."""
    options, setup = options_of(part, seed, flags)
    tasks = envs.resolve(WORLD, setup.tasks)
    with Experiment(setup, WORLD, tasks) as run:
        found = validated(run, PAGE, ALGORITHMS[PAGE].run(run, options))
    success = [each for _, each in found]
    line = {
        "part": part,
        "seed": seed,
        "first": FIRST,
        "made": {},
        "seconds": run.seconds,
        "trained_on": tasks,
        "cores": processes.cores(),
        "recipe": [options.sft.steps, options.rounds, "a round of averaged-eto"],
        "flags": " ".join(flags),
        "validation": success,
        "kept_round": index_of_best(success),
        **circumstances("torch", "playwright", "miniwob", "tokenizers"),
    }
    for name, policy in (("sft", found[0][0]), ("rounds", found[index_of_best(success)][0])):
        episodes = play(setup, name, policy.adapter, counts_of(part))
        line = with_agent(line, name, policy.adapter, episodes)
    processes.on_rank_0(add_line, line)


def play_agent(args: argparse.Namespace, name: str, adapter: Path) -> None:
    """An adapter that was trained elsewhere plays what the part's agents play, and joins its line."""
    part = args.parts
    _, setup = options_of(part, args.seed, [])
    same = [e for e in recorded("miniwob") if (e["part"], e["seed"]) == (part, args.seed)]
    if not same:
        raise ValueError(f"{part}, seed {args.seed}, has no line yet: run it first")
    line, counts = same[-1], counts_of(part)
    if args.sampled:
        counts = {task: min(args.sampled, count) for task, count in counts.items()}
        solved = verdicts(play(setup, name, adapter, counts, 1.0), counts)
        line |= {"sampled": line.get("sampled", {}) | {name: {"solved": solved}}}
    else:
        after = args.after.split(",") if args.after else []
        made = {"after": after, "how": args.how, "learned": args.learned, "adapter": str(adapter)}
        line |= {"made": line["made"] | {name: made}}
        line = with_agent(line, name, adapter, play(setup, name, adapter, counts))
    processes.on_rank_0(add_line, line)


def add_line(line: dict) -> None:
    """Write a part's line to results/miniwob.jsonl, in place of older ones of this part and seed."""
    with open(__file__) as lock:  # other parts may end at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        key = line["part"], line["seed"]
        others = [old for old in recorded("miniwob") if (old["part"], old["seed"]) != key]
        text = "".join(json.dumps(each) + "\n" for each in (*others, line))
        write_text(RESULTS / "miniwob.jsonl", text)


def ship(adapter: Path, folder: Path) -> None:
    """Copy an adapter with its weights in bfloat16, half their size, for any copy of its base: the weights of
    the GGUF file and of the hub are not the same to the bit."""
    with open_weights(adapter / lora.WEIGHTS) as file:
        names = list(file.keys())  # what safetensors opens cannot be walked itself
        tensors = {name: file.get_tensor(name).bfloat16() for name in names}
    lora.write(
        folder,
        tensors,
        {lora.BASE_DTYPE: lora.base_dtype(adapter) or "bfloat16"},
        read_json(adapter / lora.CONFIG) | {"base_model_name_or_path": SMOLLM2_HUB},
    )


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "play", "ship"))
    parser.add_argument(
        "--parts", help="run: which, by default all; play: which one, by default whole"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flags", default="", help="run: options over the configuration's")
    parser.add_argument("--agent", metavar="NAME=FOLDER", help="play, ship: an adapter")
    parser.add_argument("--after", metavar="NAMES", help="play: agents that it began with")
    parser.add_argument("--how", default="", help="play: how it was made from there, in words")
    parser.add_argument("--learned", default="", help="play: what it learned from")
    parser.add_argument(
        "--sampled", type=int, help="play at temperature 1, so many instances a task"
    )
    args = parser.parse_args(words)
    if (args.what == "run") == (args.agent is not None):
        parser.error("play and ship need an adapter, --agent NAME=FOLDER, and run takes none")
    name, _, folder = (args.agent or "").partition("=")
    if args.what == "ship":
        processes.on_rank_0(ship, Path(folder), ROOT / MINIWOB)
    elif args.what == "play":
        args.parts = args.parts or "whole"
        play_agent(args, name, Path(folder))
    else:
        for part in (args.parts or ",".join(PARTS)).split(","):
            run_part(part, args.seed, args.flags.split())


if __name__ == "__main__":
    run_main(main)
