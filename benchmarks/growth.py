"""What a step of DPO costs as work grows, beside TRL's: seconds, and memory beside the loaded model.

    python benchmarks/growth.py --peer-python PYTHON/WITH/TRL --work FOLDER [--parts pairs,length,group]

Random weights in SmolLM2's shape, random ids, the same base, adapter, pairs and batches on both sides, the reference
cached on both, all pairs in one optimizer step. Half of an episode is the prompt that its group shares.

    pairs   1 to 64 pairs of one group of 16 episodes, 8 of them good, 256 tokens each
    length  one pair, episodes of 200 to 4,000 tokens
    group   2 to 32 episodes of 256 tokens, each in one pair

A pair goes through TRL at a time (--micro), 768 tokens through ours. The losses must agree. A step of TRL's that
would take longer than --limit seconds, by the rate of the point before, is left out. What was measured stays in
FOLDER, and a run that was stopped goes on there. Writes benchmarks/results/growth.json, and draws all of it in
docs/growth.svg.
"""

import argparse
import math
import os
import sys
from functools import partial
from pathlib import Path

from parts import Figures, peer_versions, run_parts
from records import RESULTS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import checkpoints  # noqa: E402
import qwen2_7b_cuda  # noqa: E402
import torch  # noqa: E402
import works  # noqa: E402

from minidpo.system.files import read_json, write_text  # noqa: E402

EPISODE = 256  # tokens
AXES = {
    "pairs": ("pairs of a group of 16", (1, 2, 4, 8, 16, 32, 64)),
    "length": ("tokens of an episode", (200, 500, 1000, 2000, 4000)),
    "group": ("episodes of a group", (2, 4, 8, 16, 32)),
}
MEASURES = {"s": "seconds of a step", "mib": "memory of training, MiB"}
COLOURS = {"minidpo": "#0072b2", "trl": "#d55e00"}
WIDTH, HEIGHT, MARGIN = 300, 220, 56  # of a panel


def pairs_of(axis: str, at: int) -> list[dict]:
    """The pairs of a step. Its episodes are used as evenly as can be."""
    if axis == "length":
        return works.synthetic(at // 2, at // 2, 1)
    side = 8 if axis == "pairs" else at // 2
    pairs = works.synthetic(EPISODE // 2, EPISODE // 2, 1, good=side, bad=side)
    diagonals = [good * side + (good + n) % side for n in range(side) for good in range(side)]
    return [pairs[i] for i in diagonals[: at if axis == "pairs" else side]]


def tokens(pairs: list[dict]) -> int:
    """What TRL computes."""
    return sum(2 * len(p["prompt_ids"]) + len(p["chosen_ids"] + p["rejected_ids"]) for p in pairs)


def grow(args: argparse.Namespace, axis: str) -> Figures:
    """Both sides along an axis."""
    base, rate = args.work / "base", math.inf
    if not (base / "config.json").is_file():
        checkpoints.make(base, checkpoints.SHAPES[args.shape])
    sides = [("minidpo", sys.executable, ()), ("trl", args.peer_python, ("--micro", args.micro))]
    for at in AXES[axis][1]:
        pairs, losses = pairs_of(axis, at), {}
        folder = works.prepare(args.work / f"{axis}-{at}", base, "dpo", lambda pairs=pairs: pairs)
        for side, python, more in sides[: 1 if args.missing else 2]:
            if side == "trl" and tokens(pairs) / rate > args.limit:
                print(f"{axis} {at} trl: left out, over {args.limit:g} s a step", flush=True)
                continue
            measure = partial(
                works.run_side, python, f"{side}_side.py", folder, len(pairs), args, args.steps
            )
            name = f"{side}_{args.dtype}_{args.steps}.json"
            run = works.once(folder / name, partial(measure, *more))
            seconds, losses[side] = works.step_s(run), run["losses"]
            rate = tokens(pairs) / seconds if side == "trl" else rate
            print(f"{axis} {at} {side}: {seconds:.3g} s", flush=True)
            yield {
                f"{axis}_{at}_{side}_s": seconds,
                f"{axis}_{at}_{side}_mib": works.training_mib(run),
            }
        if len(losses) == 2:
            apart = max(abs(one - other) for one, other in zip(*losses.values()))
            assert apart < (1e-3 if args.dtype == "float32" else 0.05), f"losses differ: {apart}"


# ---- the plot ----


def plot(figures: dict[str, float]) -> str:
    """An SVG: a column for each axis, a row for seconds and one for memory, all scales logarithmic."""
    panels = []
    for row, (measure, name) in enumerate(MEASURES.items()):
        for column, axis in enumerate(AXES):
            points = {
                side: [
                    (at, figures[key])
                    for at in AXES[axis][1]
                    if (key := f"{axis}_{at}_{side}_{measure}") in figures
                ]
                for side in COLOURS
            }
            place = f"translate({column * WIDTH} {row * HEIGHT + 24})"
            panels.append(f'<g transform="{place}">{panel(axis, name, points)}</g>')
    names = "".join(
        f'<text x="{MARGIN + 90 * n}" y="16" fill="{colour}">{side.replace("trl", "TRL")}</text>'
        for n, (side, colour) in enumerate(COLOURS.items())
    )
    size = f'viewBox="0 0 {3 * WIDTH} {2 * HEIGHT + 24}"'
    style = 'font-family="sans-serif" font-size="11" fill="#333"'
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    body = "\n".join([background, names, *panels])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{body}\n</svg>\n'


def panel(axis: str, measure: str, points: dict[str, list[tuple[int, float]]]) -> str:
    """One of them: ticks, a line and dots for each side."""
    title, ats = AXES[axis]
    values = [y for line in points.values() for _, y in line] or [1.0]
    low, high = min(values) / 1.2, max(values) * 1.2
    right, bottom = WIDTH - 12, HEIGHT - 44

    def x_of(at: float) -> float:
        share = math.log(at / ats[0]) / math.log(ats[-1] / ats[0])
        return round(MARGIN + share * (right - MARGIN), 1)

    def y_of(value: float) -> float:
        share = math.log(value / low) / math.log(high / low)
        return round(bottom - share * (bottom - 12), 1)

    ticks = [m * 10.0**power for power in range(-4, 7) for m in (1, 2, 5)]
    marks = [
        f'<path d="M{MARGIN} {y_of(tick)}H{right}" stroke="#ddd"/>'
        f'<text x="{MARGIN - 6}" y="{y_of(tick) + 4}" text-anchor="end">{tick:,g}</text>'
        for tick in ticks
        if low <= tick <= high
    ]
    marks += [
        f'<text x="{x_of(at)}" y="{bottom + 16}" text-anchor="middle">{at:,}</text>' for at in ats
    ]
    middle = (MARGIN + right) // 2
    marks.append(f'<text x="{middle}" y="{bottom + 32}" text-anchor="middle">{title}</text>')
    marks.append(f'<text x="{MARGIN}" y="6">{measure}</text>')
    for side, line in points.items():
        places = [(x_of(at), y_of(value)) for at, value in line]
        path = " ".join(f"{x},{y}" for x, y in places)
        marks.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[side]}"/>')
        marks += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{COLOURS[side]}"/>' for x, y in places]
    return "".join(marks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--peer-python", default=sys.executable, help=f"a Python with {', '.join(works.TRL)}"
    )
    parser.add_argument("--parts", default=",".join(AXES), help="which axes")
    parser.add_argument(
        "--work", type=Path, help="folder for what is made and measured (default: temporary)"
    )
    parser.add_argument("--shape", default="smollm2", choices=checkpoints.SHAPES)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=2, help="of which the first warms up")
    parser.add_argument("--micro", default="1", help="pairs that go through TRL at a time")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a step of TRL's")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=RESULTS / "growth.json", help="result file")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "growth.svg")
    args = parser.parse_args()
    if unknown := [name for name in args.parts.split(",") if name not in AXES]:
        parser.error(f"--parts takes some of {', '.join(AXES)}, got {', '.join(unknown)}")
    args.missing, args.device = qwen2_7b_cuda.lacking(args.peer_python, works.TRL), "cpu"
    if args.missing:
        print(f"{args.peer_python} lacks {', '.join(args.missing)}: this project's side alone")
    versions = {"torch": torch.__version__}
    if not args.missing:
        versions |= peer_versions(args.peer_python, list(works.TRL))
    args.work = args.work and args.work.resolve()
    try:
        run_parts({axis: partial(grow, axis=axis) for axis in AXES}, args, versions)
    finally:  # it exits with its parts' state
        write_text(args.plot, plot(read_json(args.out)["figures"]))


if __name__ == "__main__":
    main()
