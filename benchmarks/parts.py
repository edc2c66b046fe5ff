"""A benchmark in parts: each writes its figures as they come, and one that fails costs no other."""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from pathlib import Path

from records import command, machine_name, record

Figures = Iterator[dict[str, float | str]]  # a part's, as they are measured
Part = Callable[[argparse.Namespace], Figures]


def run_parts(
    parts: Mapping[str, Part],
    args: argparse.Namespace,
    versions: dict[str, str],
    device: str | None = None,
    about: Callable[[argparse.Namespace], dict] | None = None,
) -> None:
    """Run the parts that `args.parts` names and print a table; figures of other parts stay. Exits with 1 if
    one failed. args.work None: a temporary folder, which is deleted. about: what the parts measure."""
    names = args.parts.split(",")
    temporary = args.work is None
    args.work = Path(tempfile.mkdtemp(prefix="parts_")) if temporary else args.work
    args.work.mkdir(parents=True, exist_ok=True)
    old = json.loads(args.out.read_text()) if args.out.is_file() else {"figures": {}, "parts": {}}
    figures, states = old["figures"], old["parts"]
    circumstances = {
        "date": date.today().isoformat(),
        "machine": machine_name(device),
        "versions": versions,
        "command": command(),
    }
    if about is not None:
        circumstances["about"] = about(args)
    for name in names:
        print(f"== {name}", flush=True)
        began = time.perf_counter()
        prefixed = [key for key in figures if key.startswith(f"{name}_")]  # in the oldest records
        own = states[name].get("figures", prefixed) if name in states else []
        figures = {key: value for key, value in figures.items() if key not in own}
        states[name] = {"figures": []}
        for found, state in results(parts[name], args):
            figures |= found
            states[name] = {
                "state": state,
                "seconds": round(time.perf_counter() - began),
                **circumstances,
                "figures": [*states[name]["figures"], *found],
            }
            record(args.out, figures, versions, device, parts=states)
    if temporary:
        shutil.rmtree(args.work, ignore_errors=True)
    print(table(figures, {name: states[name] for name in names}))
    sys.exit(any(states[name]["state"] != "done" for name in names))


def results(part: Part, args: argparse.Namespace) -> Iterator[tuple[dict[str, float | str], str]]:
    """The part's figures as they come, each with its state: "running", then "done" or in a line why not."""
    try:
        for figures in part(args):
            yield figures, "running"
        yield {}, "done"
    except subprocess.CalledProcessError as error:
        traceback.print_exc()
        yield {}, f"failed: {Path(error.cmd[1]).name} ended with {error.returncode}"
    except Exception as error:  # one part's failure must not cost the others
        traceback.print_exc()
        yield (
            {},
            f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        )


def table(figures: dict[str, float | str], states: dict[str, dict]) -> str:
    """What was measured, part by part, and what failed."""
    lines = []
    for name, state in states.items():
        lines.append(f"{name}: {state['state']} ({state['seconds']:.0f} s)")
        for key in sorted(set(state["figures"])):
            value = figures[key] if isinstance(figures[key], str) else f"{figures[key]:,.4g}"
            lines.append(f"  {key:60} {value:>14}")
    return "\n".join(lines)


def peer_versions(python: str, packages: list[str]) -> dict[str, str]:
    """The packages' versions in another Python."""
    code = "import sys\nfrom importlib.metadata import version\nprint(*map(version, sys.argv[1:]))"
    done = subprocess.run([python, "-c", code, *packages], text=True, stdout=subprocess.PIPE)
    return dict(zip(packages, done.stdout.split()))
