"""The runner: plays an algorithm's policies on validation instances and leaves the best, the first included.

A page yields policies. Each is validated; when the last `patience` were not better than the best before them,
the run ends. Then the first policy and the best one play held-out instances, the same for both. A run never
leaves an agent that it measured to be worse: if no policy was better than the first, the first is left.
"""

import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import envs
from envs import panel
from minidpo.acting.causes import cause
from minidpo.data.episodes import Episode
from minidpo.data.pairs import NothingToLearn
from minidpo.experiment import Experiment, ExperimentOptions, Policy
from minidpo.memory import lora
from minidpo.memory.machine import device_of
from minidpo.memory.plan import acting_setup, setup_of
from minidpo.model import scalar_head
from minidpo.results.circumstances import circumstances
from minidpo.results.replay import shown_pairs, write_report
from minidpo.results.success import compare, result_metrics, summary
from minidpo.results.table import table
from minidpo.system import processes
from minidpo.system.command_line import as_started
from minidpo.system.files import replacing, write_json
from minidpo.system.result_file import write_result
from minidpo.system.run_folder import records
from minidpo.system.tracking import Tracking


def run_algorithm(
    name: str, algorithm: Callable, options, setup: ExperimentOptions, command: str = ""
) -> dict:
    """Run a page and leave its best policy in `setup.out`/adapter. Returns what result.json holds.

    name: of the algorithm, for result and report. command: how to make the same again. Raises ValueError if the
    page yields no policy, NothingToLearn if there is nothing to learn from before its first one.
    """
    world = envs.world(setup.world)
    tasks = envs.resolve(world, setup.tasks)
    world.require()
    acting_setup(setup_of(setup.model, setup.machine))  # a machine that cannot act is refused now
    processes.require_own_gpu(device_of(setup.machine))
    with Experiment(setup, world, tasks) as run:
        settings = {"algorithm": name, **asdict(setup), **asdict(options)}
        processes.on_rank_0(write_json, run.folder / "config.json", {"version": 1, **settings})
        tracking = Tracking(run.folder, settings)
        processes.on_rank_0(tracking.begin)
        found = validated(run, name, algorithm(run, options))
        best = index_of_best([success for _, success in found])
        result = measure(run, found, best) | {
            "algorithm": name,
            "command": command,
            **circumstances("torch", "playwright", "miniwob", "tokenizers"),
        }
        run.log(result_metrics(result))
        processes.on_rank_0(leave, run, name, found, best, result)
        processes.on_rank_0(tracking.finish)
    return result


def validated(run: Experiment, name: str, policies) -> list[tuple[Policy, float]]:
    """The policies that a page yields, each with its success on validation, until patience ends."""
    found: list[tuple[Policy, float]] = []
    try:
        for policy in policies:
            if not isinstance(policy, Policy):
                raise ValueError(
                    f"{name} yielded {policy!r:.60}, which is no policy of its experiment"
                )
            success = run.validate(policy)
            before = ", ".join(f"{100 * earlier:.1f}" for _, earlier in found)
            shown = f" (before: {before})" if found else ""
            print(f"{policy.name}: {100 * success:.1f} % on validation{shown}")
            found.append((policy, success))
            if should_stop([rate for _, rate in found], run.options.patience):
                print(
                    f"none of the last {run.options.patience} policies was better: the run ends here"
                )
                break
    except NothingToLearn as error:
        if not found:
            raise
        print(f"{error}; the run ends here")
    if not found:
        raise ValueError(
            f"{name} yielded no policy: a page is a generator that yields at least one"
        )
    return found


def index_of_best(validation: Sequence[float]) -> int:
    """The index of the highest success; of equal ones the first.

    >>> index_of_best([0.7, 0.9, 0.8, 0.9])
    1
    """
    return validation.index(max(validation))


def should_stop(validation: Sequence[float], patience: int) -> bool:
    """Whether none of the last `patience` policies was better than everything before them.

    >>> should_stop([0.5, 0.7, 0.7], patience=2), should_stop([0.5, 0.7, 0.7, 0.6], patience=2)
    (False, True)
    """
    return len(validation) - 1 - index_of_best(validation) >= patience


def measure(run: Experiment, found: list[tuple[Policy, float]], best: int) -> dict:
    """Play the first policy and the best one on held-out instances, greedily and at temperature 1."""
    first, kept = found[0][0], found[best][0]
    policies = [first] if kept.sha256 == first.sha256 else [first, kept]
    greedy: dict[str, list[Episode]] = {}
    agents = {}
    for policy in policies:
        greedy[policy.name] = run.held_out(policy, run.options.episodes, 0.0)
        sampled = run.held_out(policy, run.options.sampled, 1.0)
        told = partial(cause, run.world)
        agents[policy.name] = summary(greedy[policy.name], sampled, run.seen, told)
    run.greedy = greedy
    result = {
        "headline": headline(found, best),
        "agents": agents,
        "validation": {policy.name: success for policy, success in found},
        "kept": kept.name,
        "panel": {
            "validation": panel.sha256(run.panel("validation", run.options.validation)),
            "test": panel.sha256(run.panel("test", run.options.episodes)),
        },
        "seed": run.seed,
        "seconds": run.seconds,
    }
    if len(policies) == 2:
        result["comparison"] = compare(greedy[first.name], greedy[kept.name])
        for name in ("gain_points", "p_value"):
            result[name] = result["comparison"][name]
    result["figures"] = figures(result)
    return result


def headline(found: list[tuple[Policy, float]], best: int) -> str:
    """What the run leaves, in a sentence: the first line of table and report."""
    first, kept = found[0][0].name, found[best][0].name
    if len(found) == 1:
        return f"{first} is the only policy: it is kept."
    if best == 0:
        return f"No round was better than {first} on validation: {first} is kept."
    return f"{kept} is kept, the best of {len(found)} policies on validation."


def figures(result: dict) -> dict[str, float]:
    """The figures of a run, flat like those of a benchmark; `won` and `lost` count instances."""
    flat = {}
    for agent, rates in result["agents"].items():
        flat[f"{agent}_success"] = rates["all"]["success"]
        flat[f"{agent}_sampled_success"] = rates["sampled"]["success"]
    if "comparison" in result:
        names = {"gain_points": "gain_points", "won": "only_after", "lost": "only_before"}
        names["p_value"] = "p_value"
        flat |= {name: result["comparison"][key] for name, key in names.items()}
    return flat | {"seconds": round(sum(result["seconds"].values()), 1)}


def leave(
    run: Experiment, name: str, found: list[tuple[Policy, float]], best: int, result: dict
) -> None:
    """Write the adapter, result.json and report.html, and print the table and what to do next."""
    out, first, kept = run.folder, found[0][0], found[best][0]
    if kept.adapter is not None:
        copy_adapter(kept.adapter, out / "adapter")
    write_result(out / "result.json", result)
    print("\n" + table(result))
    pairs = []
    if kept.name in run.pairs:
        chosen, until, start = run.pairs[kept.name]
        agents = (start.name, kept.name)
        pairs = shown_pairs(
            run.context, chosen, start.adapter, kept.adapter, agents=agents, until=until
        )
    settings = {"model": run.options.model, "algorithm": name, "seed": run.seed, "kept": kept.name}
    curves = {stage: records(folder) for stage, folder in run.curves.items()}
    write_report(
        out / "report.html",
        result,
        run.greedy,
        world=run.world,
        title=f"{name} on {len(run.tasks)} {run.world.name} tasks",
        about=f"Base model: {run.options.model}",
        settings=settings | result["versions"],
        curves=curves | {"stages": run.metrics},
        pairs=pairs,
    )
    o = run.options
    again = ["--model", o.model, "--world", o.world, "--tasks", o.tasks, "--out", "runs/evaluation"]
    again += ["--adapters", f"{first.name}={first.adapter or ''}", f"{name}={out / 'adapter'}"]
    print(f"""
{sum(result["seconds"].values()):.0f} seconds in all
report    {out / "report.html"}
adapter   {out / "adapter"}   ({kept.name})
next      {as_started(".venv/bin/python evaluate.py")} {shlex.join(again)}""")


def copy_adapter(adapter: Path, folder: Path) -> None:
    """Copy an adapter, and its head if it has one. A folder without a configuration is no adapter, so a kill
    leaves none that is half of another."""
    (folder / lora.CONFIG).unlink(missing_ok=True)
    heads = [path.name for path in adapter.glob(scalar_head.FILE)]
    for name in (*heads, lora.WEIGHTS, lora.CONFIG):
        with replacing(folder / name) as written:
            shutil.copyfile(adapter / name, written)
