"""What can happen to a file: damaged, or shared by two processes; and nothing that is read can run."""

import ast
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minidpo.data.episodes import Writer
from minidpo.learning.reference import cached
from minidpo.system.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
SOURCES = [*ROOT.glob("*.py"), *(ROOT / "minidpo").rglob("*.py"), *(ROOT / "envs").rglob("*.py")]


def content(folder):
    """Every file of a folder, but the lock."""
    return {
        path: path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file() and path.name != ".lock"
    }


class Held:
    """A file that another process holds a lock on."""

    def __init__(self, path, kind):
        path.parent.mkdir(parents=True, exist_ok=True)
        code = f"import fcntl; file = open({str(path)!r}, 'a'); fcntl.{kind}(file, fcntl.LOCK_EX)"
        self.process = subprocess.Popen(
            [sys.executable, "-uc", f"{code}; print('held'); input()"],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout.readline() == "held\n"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


def test_a_run_folder_and_a_file_of_episodes_have_one_process_and_are_free_when_it_was_killed(
    tmp_path,
):
    lock, episodes = tmp_path / "run" / ".lock", tmp_path / "a.jsonl"
    with Held(lock, "lockf"), Held(episodes, "flock"):
        with pytest.raises(ValueError, match="another process is writing to it"):
            RunFolder(tmp_path / "run", {}).begin()
        with pytest.raises(ValueError, match=r"a\.jsonl: another process is writing to it"):
            Writer(episodes)
        assert content(tmp_path) == {episodes: b""}
    RunFolder(tmp_path / "run", {}).begin()
    with Writer(episodes) as writer:
        assert not writer.done


def test_a_run_may_begin_twice_in_its_own_process_and_keeps_its_lock(tmp_path):
    run = RunFolder(tmp_path, {})
    run.begin()
    run.begin()
    code = f"from minidpo.system.run_folder import RunFolder; RunFolder({str(tmp_path)!r}, {{}}).begin()"
    other = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (
        other.stderr.splitlines()[-1] == f"ValueError: {tmp_path}: another process is writing to it"
    )


# ---- damage ----


def damaged(data, rng):
    """Cut short, a bit flipped somewhere, or a piece overwritten."""
    at = rng.randrange(len(data))
    return rng.choice(
        [
            data[:at],
            data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
            data[:at] + bytes(min(16, len(data) - at)) + data[at + 16 :],
        ]
    )


def test_no_damage_to_a_state_goes_unnoticed(tmp_path):
    run, rng = RunFolder(tmp_path, {}), random.Random(1)
    run.begin()
    run.save_state(
        3, {"param.weight": torch.arange(6.0).view(2, 3), "optimizer.0.0.step": torch.tensor(3.0)}
    )
    data = run.state.read_bytes()
    for _ in range(400):
        run.state.write_bytes(broken := damaged(data, rng))
        if broken != data:
            with pytest.raises(ValueError, match="state.safetensors: .*; delete it to start again"):
                run.load_state()
    run.state.write_bytes(data)
    assert run.load_state()[0] == 3


def test_no_damage_to_the_references_scores_goes_unnoticed(tmp_path):
    path, rng, scores = (
        tmp_path / "reference.safetensors",
        random.Random(2),
        torch.tensor([-1.5, -0.1]),
    )
    cached(path, "key", lambda: scores)
    data = path.read_bytes()
    for _ in range(400):
        path.write_bytes(broken := damaged(data, rng))
        if broken != data:
            with pytest.raises(ValueError, match="reference.safetensors: .*delete it"):
                cached(path, "key", lambda: pytest.fail("scored again"))
        assert path.read_bytes() == broken


# ---- versions, and what is read at all ----


def forbidden(tree):
    """What would run what it reads: pickles under all their names, and Python or YAML as data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {getattr(node, "module", None) or "", *(alias.name for alias in node.names)}
            yield from (
                name
                for name in names
                if name.split(".")[0]
                in (
                    "pickle",
                    "cPickle",
                    "_pickle",
                    "dill",
                    "cloudpickle",
                    "joblib",
                    "shelve",
                    "marshal",
                    "yaml",
                )
            )
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in (
                "eval",
                "exec",
                "torch.load",
                "torch.save",
                "numpy.load",
                "np.load",
                "__import__",
            ):
                yield called
            if called.rpartition(".")[2] in (
                "all_gather_object",
                "broadcast_object_list",
                "gather_object",
                "scatter_object_list",
                "read_pickle",
            ):
                yield called


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_is_read_can_run(path):
    assert list(forbidden(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from torch import nn; torch.load(f)",
        "eval(x)",
        "from dill import loads",
        "numpy.load(f, allow_pickle=True)",
        "dist.all_gather_object(a, b)",
    ],
)
def test_what_could_run_is_found(line):
    assert list(forbidden(ast.parse(line)))
