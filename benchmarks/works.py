"""What both sides of a training are given, and how one is run: in a process of its own, at its best settings."""

import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from minidpo.memory import lora  # noqa: E402
from minidpo.memory.lora import LoRAConfig  # noqa: E402
from minidpo.model import checkpoint  # noqa: E402
from minidpo.model.decoder import Transformer  # noqa: E402
from minidpo.system.files import read_json, write_json  # noqa: E402
from minidpo.system.threads import SPINS, VARIABLES  # noqa: E402

# threads wait as in train.py, or as they do without minidpo; what the user has set counts on both sides
BRIEFLY = {"GOMP_SPINCOUNT": str(SPINS)}
USERS = {name: value for name, value in os.environ.items() if BRIEFLY.get(name) != value}
ENVIRONMENTS = {
    "ours": USERS if any(name in USERS for name in VARIABLES) else USERS | BRIEFLY,
    "peer": USERS,
}
TRL = ("trl", "peft", "transformers", "datasets")
Settings = dict[str, tuple[str, ...]]  # a side's, by name


def synthetic(prompt: int, answer: int, groups: int, good: int = 1, bad: int = 1) -> list[dict]:
    """Random ids: `groups` prompts with `good` + `bad` answers each; a pair for each good and bad one."""
    rng = random.Random(0)

    def draw(n: int) -> list[int]:
        return [rng.randrange(2, 4096) for _ in range(n)]

    pairs = []
    for group in range(groups):
        first, answers = draw(prompt), [draw(answer) for _ in range(good + bad)]
        pairs += [
            {"group": group, "prompt_ids": first, "chosen_ids": chosen, "rejected_ids": rejected}
            for chosen in answers[:good]
            for rejected in answers[good:]
        ]
    return pairs


def rollouts(file: Path, source: str, instances: int = 4) -> list[dict]:
    """All pairs of whole episodes that the shipped model played on real pages, eight an instance, in the
    tokens of the model `source`. The episodes are kept in `file`."""
    import envs
    from minidpo.commands.play import CollectCommand, collect
    from minidpo.data.episodes import read
    from minidpo.data.pairs import choose, outcome_pairs
    from minidpo.learning.dpo import DPO
    from minidpo.learning.preferences import tokenise
    from minidpo.memory.loading import open_chat
    from minidpo.memory.machine import Machine

    tasks = "login-user,click-checkboxes,enter-password,click-tab-2,form-sequence-2"
    machine = Machine(device="cpu")
    collect(CollectCommand(tasks=tasks, instances=instances, out=file, machine=machine))
    chat, limit = open_chat(source)
    chosen = choose(outcome_pairs(read(file)), DPO.pairs_per_instance, seed=0)
    data = tokenise(chosen, chat, limit, envs.world("miniwob").system_prompt, "end")
    pairs = []
    for sides in sorted(data.pairs, key=lambda pair: data.instances[pair[0]]):
        chosen, rejected = (data.dialogues[i] for i in sides)
        begin = next(t for t, turn in enumerate(chosen.turns) if turn >= 0)
        task, seed = data.instances[sides[0]]
        pairs.append(
            {
                "group": f"{task} {seed}",
                "prompt_ids": chosen.ids[:begin],
                "chosen_ids": chosen.ids[begin:],
                "chosen_turns": chosen.turns[begin:],
                "rejected_ids": rejected.ids[begin:],
                "rejected_turns": rejected.turns[begin:],
            }
        )
    return pairs


def make_adapter(base: Path, folder: Path) -> None:
    """A first adapter, B = 0, made without the base's weights."""
    with torch.device("meta"):  # an adapter needs the base's shapes alone
        model = Transformer(checkpoint.read_config(base)[0])
    lora.attach(model, LoRAConfig(), torch.Generator())
    # the adapter that `attach` would give a base with weights
    generator = torch.Generator().manual_seed(1)
    for layer in lora.layers(model).values():
        a = nn.init.kaiming_uniform_(
            torch.empty(layer.lora_A.shape), math.sqrt(5), generator=generator
        )
        layer.lora_A, layer.lora_B = nn.Parameter(a), nn.Parameter(torch.zeros(layer.lora_B.shape))
    lora.save(model, folder, "base")


def prepare(work: Path, base: Path, learner: str, examples: Callable[[], list[dict]]) -> Path:
    """A folder for both sides: the base, a first adapter, what they learn from. What is there stays."""
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "base").exists():
        (work / "base").symlink_to(base.resolve())
    if not (work / "adapter").exists():
        make_adapter(base, work / "adapter")
    if not (file := work / f"{learner}.json").exists():
        write_json(file, examples())
    return work


def run_side(
    python: str, script: str, work: Path, batch: int, args: Namespace, steps: int, *more: str
) -> dict:
    out = work / "out.json"
    options = f"--work {work} --out {out} --batch {batch} --steps {steps} --lr 1e-3"
    where = f"--threads {args.threads} --device {args.device} --dtype {args.dtype}"
    command = [python, str(ROOT / "benchmarks" / script), *shlex.split(f"{options} {where}"), *more]
    whose = "peer" if script == "trl_side.py" else "ours"
    subprocess.run(command, check=True, env=ENVIRONMENTS[whose])
    return json.loads(out.read_text())


def step_s(run: dict) -> float:
    """Seconds of a step: the median, without the first of several, which warms up."""
    return statistics.median(run["step_s"][1:] or run["step_s"])


def training_mib(run: dict) -> float:
    """What training takes at most beside the loaded model."""
    return run["peak_mib"] - run["before_mib"]


def once(file: Path, measure: Callable[[], dict]) -> dict:
    """What was measured, read from the file if an earlier process came so far."""
    if not file.is_file():
        write_json(file, measure())
    return read_json(file)


def search(chains: Sequence[Settings], run: Callable[[str, tuple[str, ...]], dict]):
    """The name of the fastest settings, and all runs by name. A chain goes on as long as each of its settings
    is 3 % faster than the best so far and the kernel does not end it."""
    runs: dict[str, dict] = {}
    best = ""
    for chain in chains:
        for name, words in chain.items():
            try:
                found = run(name, words)
            except subprocess.CalledProcessError as error:
                if error.returncode != -9 or not best:
                    raise
                print(f"{name}: killed, for want of memory", flush=True)
                break
            runs[name] = found
            if best and step_s(found) > 0.97 * step_s(runs[best]):
                break
            best = name
    return best, runs


def settings_of(side: str, learner: str, batch: int) -> list[Settings]:
    """What is tried of each side: tokens of a pass of ours; examples of a pass of TRL's, padded to the longest
    or, where its trainer can, laid end to end."""
    if side == "minidpo":
        larger, smaller = (
            {f"passes_of_{n}_tokens": ("--micro-tokens", str(n)) for n in sizes}
            for sizes in ((768, 1536, 3072), (384, 192))
        )
        return [larger, smaller]
    divisors = [n for n in range(1, batch + 1) if batch % n == 0]
    chains = [{f"passes_of_{n}": ("--micro", str(n)) for n in divisors}]
    if learner == "sft":
        free = {
            f"passes_of_{n}_without_padding": ("--micro", str(n), "--padding-free")
            for n in divisors[1:]
        }
        chains.append(free)
    return chains
