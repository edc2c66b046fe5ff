"""The GPU half of qwen2_7b.py: DPO beside TRL's, and rollouts, with the allocator held to 7.6 GiB.

    python benchmarks/qwen2_7b.py --make --device cuda --peer-python PYTHON [--parts dpo,apart,rollouts]

    dpo        both sides, a pair a step. A pair of TRL's has a prompt: here 512 tokens, and two answers of
               512, 2 x 1,024 tokens as TRL counts and computes them. This project reads the prompt once,
               1,536 tokens in all. Tokens/s are TRL's count on both sides.
    apart      this project alone on pairs that share their first token only: 2,047 of 2 x 1,024 to compute
    rollouts   a group of eight episodes as collect.py plays it, four turns of 48 tokens each. A GPU machine
               has no browser: every turn shows the text of a real page (social-media-all, seed 1, in
               page.txt) again, with the turn's number, and what the model writes is no action, so no page
               is ever acted on.

If TRL does not fit below the cap, `trl_out_of_memory` is 1 and its figures are those without the cap. Peaks
are of training, or of the rollouts; `_earlier_peak_gib` is that of loading and of the reference's pass.
`planned_` is what the memory plan foresees, less its CUDA context, which is not the allocator's. With
--parts, the figures of the others stay as they were recorded.
"""

import asyncio
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch  # works has put this project on the path
from records import RESULTS, record
from sides import forget_peak, peak_mib
from works import prepare, run_side, step_s, synthetic

from envs import world
from envs.protocol import Observation
from minidpo.acting.jobs import Job
from minidpo.acting.policies import ModelPolicy, Sampling
from minidpo.acting.rollout import play
from minidpo.memory.loading import open_policy
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import GIB, Machine
from minidpo.memory.plan import Load, Setup, step_plan
from minidpo.model.checkpoint import read_config

CAP_GIB, STEPS, REPEATS = 7.6, 20, 2
PAIRS = {"dpo": (512, 512), "apart": (1, 1023)}  # tokens of the prompt and of each answer
PAGES, TURNS, WRITTEN = 8, 4, 48
PARTS = (*PAIRS, "rollouts")
NEEDED = ("torch", "trl", "peft", "transformers", "datasets", "bitsandbytes")


def lacking(python: str, packages: Sequence[str]) -> list[str]:
    """Those of the packages that this Python has not."""
    code = "import importlib.util, sys\nprint(*(n for n in sys.argv[1:] if not importlib.util.find_spec(n)))"
    done = subprocess.run(
        [python, "-c", code, *packages], text=True, check=True, stdout=subprocess.PIPE
    )
    return done.stdout.split()


def trouble(peer: str, parts: list[str]) -> str | None:
    """What is missing here, said before anything is made."""
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU here; without --device cuda this runs on a CPU"
    if set(parts) - set(PARTS):
        return f"--parts takes some of {', '.join(PARTS)}, got {','.join(parts)}"
    if "dpo" in parts and (missing := lacking(peer, NEEDED)):
        return (
            f"{peer} lacks {' '.join(missing)}: give --peer-python one with all of requirements-dev.txt, "
            "or leave dpo out of --parts"
        )
    return None


def make_work(base: Path, work: Path, prompt: int, answer: int) -> None:
    """A folder for both sides, with a pair for each step."""
    prepare(work, base, "dpo", lambda: synthetic(prompt, answer, STEPS))


def planned_gib(base: Path, prompt: int, answer: int) -> float:
    """The plan for a step on one such pair."""
    machine = Machine(device="cuda", quantize="nf4", recompute=True)
    setup = Setup(
        read_config(base)[0], LoRAConfig(), machine, "adamw8bit", torch.bfloat16, cuda=True
    )
    plan = step_plan(setup, Load(1, prompt + 2 * answer, 2 * answer))
    return (plan.peak - plan.held["CUDA context"]) / GIB


def side_figures(name: str, runs: list[dict], tokens: int) -> dict[str, float]:
    """The figures of one side; the losses must begin where policy and reference are the same."""
    for run in runs:
        assert abs(run["losses"][0] - math.log(2)) < 0.05, (
            f"{name}: the first loss is {run['losses'][0]}"
        )
    seconds = statistics.median(map(step_s, runs))
    return {
        f"{name}_tokens_per_s": tokens / seconds,
        f"{name}_step_s": seconds,
        f"{name}_peak_gib": max(run["peak_mib"] for run in runs) / 1024,
        f"{name}_earlier_peak_gib": max(run["earlier_peak_mib"] for run in runs) / 1024,
        f"{name}_weights_gib": runs[0]["before_mib"] / 1024,
        f"{name}_reference_s": statistics.median(run["precompute_s"] for run in runs),
        f"{name}_load_s": runs[-1]["load_s"],  # ours: from the cache, after the first turn
        f"{name}_first_loss": runs[0]["losses"][0],
        f"{name}_last_loss": runs[0]["losses"][-1],
    }


def train(base: Path, work: Path, part: str, device: str, peer: str | None) -> tuple[dict, dict]:
    """The figures of `dpo` or `apart`, and the versions; without a peer, of this project alone."""
    prompt, answer = PAIRS[part]
    make_work(base, work, prompt, answer)
    options = Namespace(threads=torch.get_num_threads(), device=device, dtype="bfloat16")
    cap = ["--cap-gib", str(CAP_GIB)] if device == "cuda" else []
    below, out_of_memory = cap, 0
    if part == "dpo":
        shutil.rmtree(base / "nf4", ignore_errors=True)  # our first turn is to quantise
    ours: list[dict] = []
    trls: list[dict] = []

    def run(python: str, script: str, *more: str) -> dict:
        return run_side(python, script, work, 1, options, STEPS, "--four-bit", *more)

    for turn in range(REPEATS if part == "dpo" else 1):
        ours.append(run(sys.executable, "minidpo_side.py", "--cache", str(base / "nf4"), *cap))
        print(f"{part} minidpo {turn}: {step_s(ours[-1]):.3f} s a step", flush=True)
        if part == "dpo" and peer:
            trl = run(peer, "trl_side.py", *below)
            if "out_of_memory" in trl:
                print(f"TRL does not fit into {CAP_GIB} GiB: once more without the cap", flush=True)
                below, out_of_memory = [], 1
                trl = run(peer, "trl_side.py")
            trls.append(trl)
            print(f"{part} trl {turn}: {step_s(trl):.3f} s a step", flush=True)
    name = "minidpo" if part == "dpo" else "minidpo_apart"
    figures = side_figures(name, ours, 2 * (prompt + answer))
    figures |= {
        f"{name}_computed_tokens": ours[0]["computed_tokens_per_step"],
        name.replace("minidpo", "planned") + "_gib": planned_gib(base, prompt, answer),
    }
    versions = {"minidpo_torch": ours[0]["versions"]["torch"]}
    if part == "dpo":
        figures |= {"minidpo_quantise_s": ours[0]["load_s"], "cap_gib": CAP_GIB}
    if trls:
        assert ours[0]["trainable"] == trls[0]["trainable"]
        figures |= side_figures("trl", trls, 2 * (prompt + answer)) | {
            "trl_out_of_memory": out_of_memory
        }
        figures["tokens_per_s_ratio"] = (
            figures["minidpo_tokens_per_s"] / figures["trl_tokens_per_s"]
        )
        versions |= trls[0]["versions"]
    return figures, versions


class Recorded:
    """A browser that shows the recorded page, whatever is done; an empty one for seed 0. The turn is written
    on it, because an episode that says the same thrice on one page is ended."""

    async def reset(self, task: str, seed: int) -> Observation:
        self.instruction, _, text = (Path(__file__).parent / "page.txt").read_text().partition("\n")
        # in one line, because a page of many is shown once and then as its changes
        self.text, self.turn = text.replace("\n", " ") if seed else "", 0
        return Observation(self.instruction, f"{self.text}{self.turn}")

    async def step(self, action) -> Observation:
        self.turn += 1
        return Observation(self.instruction, f"{self.text}{self.turn}")


async def rollouts(base: Path, adapter: Path, cache: Path, device: str) -> dict[str, float]:
    """A group of eight on recorded pages, after a short warm-up, in this process."""
    machine = Machine(
        device=device, dtype="bfloat16", quantize="nf4", cache=cache, memory_gib=CAP_GIB
    )
    model, chat, _ = open_policy(str(base), adapter, machine)
    miniwob, sampling = world("miniwob"), Sampling(max_new_tokens=WRITTEN)
    policy = ModelPolicy(model, chat, "random", miniwob.system_prompt, sampling, pages=PAGES)
    places, episodes = [Recorded() for _ in range(PAGES)], []

    async def group(seed: int, turns: int, keep) -> None:
        jobs = [Job("recorded", seed, n, turns) for n in range(PAGES)]
        await play(places, jobs, policy, keep, miniwob)

    await group(0, 1, lambda _: None)
    earlier_peak = peak_mib(device)
    forget_peak(device)
    began = time.perf_counter()
    await group(1, TURNS, episodes.append)
    seconds = time.perf_counter() - began
    written = sum(episode.cost.tokens_written for episode in episodes)
    assert [len(episode.turns) for episode in episodes] == [TURNS] * PAGES, (
        "an episode was cut short"
    )
    return {
        "rollout_tokens_per_s": written / seconds,
        "rollout_s": seconds,
        "rollout_written": written,
        "rollout_pages": PAGES,
        "rollout_peak_gib": peak_mib(device) / 1024,
        "rollout_earlier_peak_gib": earlier_peak / 1024,
        "rollout_longest": max(e.cost.tokens_read + e.cost.tokens_written for e in episodes),
    }


def on_gpu(
    base: Path, work: Path, parts: list[str], device: str, peer: str | None
) -> tuple[dict, dict]:
    """The figures of these parts, each side and the rollouts in processes of their own, and the versions. In
    `dpo` the other side runs in the Python `peer`, if that is given."""
    figures, versions = {}, {}
    for part in parts:
        shutil.rmtree(work / part, ignore_errors=True)
        if part == "rollouts":
            make_work(base, work / part, *PAIRS["dpo"])
            paths = [str(path) for path in (base, work / part / "adapter", base / "nf4")]
            done = subprocess.run(
                [sys.executable, __file__, *paths, device],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            figures |= json.loads(done.stdout.splitlines()[-1])
        else:
            more, found = train(base, work / part, part, device, peer)
            figures, versions = figures | more, versions | found
    return figures, versions


def record_parts(
    parts: list[str], figures: dict[str, float], versions: dict[str, str], folder: Path = RESULTS
) -> None:
    """Write the result, with what is recorded of the other parts."""
    out = folder / "qwen2_7b-cuda.json"
    old = (
        json.loads(out.read_text())
        if out.is_file()
        else {"figures": {}, "versions": {}, "dates": {}}
    )
    versions = {**old["versions"], **versions, "torch": torch.__version__}
    record(
        out,
        {**old["figures"], **figures},
        versions,
        torch.cuda.get_device_name(),
        dates={**old["dates"], **dict.fromkeys(parts, date.today().isoformat())},
    )


if __name__ == "__main__":  # the rollouts, in a process of their own
    print(json.dumps(asyncio.run(rollouts(*map(Path, sys.argv[1:4]), sys.argv[4]))))
