"""What can befall a disk: full, read-only, damaged, shared. One line says it, and what was there stays."""

import ast
import os
import random
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from test_loop import SMALL
from test_sft_dpo import adapter, dpo, folder, sft, undisturbed  # noqa: F401 (fixtures)

from minidpo import loop
from minidpo.acting.collect import collect
from minidpo.config import CollectCommand, EvaluateCommand
from minidpo.data.episodes import Writer, read
from minidpo.learning.reference import cached
from minidpo.learning.schedule import reusable_files
from minidpo.memory import lora
from minidpo.memory.quantised import load_quantised
from minidpo.results.evaluate import evaluate
from minidpo.system.files import read_json, write_json
from minidpo.system.run_folder import RunFolder, records

ROOT = Path(__file__).parents[2]
SOURCES = [*ROOT.glob("*.py"), *(ROOT / "minidpo").rglob("*.py"), *(ROOT / "envs").rglob("*.py")]
IN_OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")
both_stages = pytest.mark.parametrize("stage", [sft, dpo], ids=["sft", "dpo"])


def content(folder):
    """Every file of a folder, but the lock."""
    return {
        path: path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file() and path.name != ".lock"
    }


# ---- a full disk ----


class Mounted:
    """A disk of its own. Needs mounts of its own: `unshare` gives them."""

    def __init__(self, folder):
        self.folder = folder

    def mount(self, *options):
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", ",".join(options), "none", self.folder], check=True
        )

    def full(self, size):
        self.mount(f"size={size}")

    def free(self):
        self.mount("remount,size=64m")


class Limited:
    """No file may grow beyond a size: writing fails in the middle, as on a full disk."""

    def __init__(self, folder):
        self.hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def full(self, size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, self.hard))

    def free(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.hard, self.hard))


def until_full(kind, source, disk, size, out):
    """In a process of its own: train and play on a disk that gets full, then on one with space again."""
    disk, run = {"tmpfs": Mounted, "limit": Limited}[kind](disk), Path(disk) / "run"
    disk.full(int(size))
    said = []
    for stage in (sft, dpo):
        try:
            stage(Path(source), run / stage.__name__, save_every=1)
        except OSError as error:
            said.append(str(error))
    try:
        with Writer(run / "episodes.jsonl") as writer:
            for seed in range(200):
                writer.add(tiny.episode(seed=seed))
    except OSError as error:
        said.append(str(error))
    disk.free()
    for stage in (sft, dpo):
        stage(Path(source), run / stage.__name__, save_every=1)
    with Writer(run / "episodes.jsonl") as writer:
        for seed in range(200):
            writer.add(tiny.episode(seed=seed))
    shutil.copytree(run, out)
    write_json(Path(out) / "said.json", {"said": said})


@pytest.mark.parametrize(
    "kind, size",
    [pytest.param("tmpfs", 40_000, marks=pytest.mark.slow), ("tmpfs", 150_000), ("limit", 30_000)],
)
def test_a_full_disk_is_told_and_with_space_again_everything_ends_as_if_it_had_never_been(
    folder, undisturbed, tmp_path, kind, size
):
    disk, out = tmp_path / "disk", tmp_path / "out"
    disk.mkdir()
    if kind == "tmpfs" and subprocess.run([*IN_OWN_MOUNTS, "true"], capture_output=True).returncode:
        pytest.skip("no mounts of its own on this machine")
    code = "import sys, test_nothing_lost as t; t.until_full(*sys.argv[1:])"
    done = subprocess.run(
        [
            *(IN_OWN_MOUNTS if kind == "tmpfs" else ()),
            sys.executable,
            "-c",
            code,
            kind,
            folder,
            disk,
            str(size),
            out,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = read_json(out / "said.json")
    assert found["said"]
    for line in found["said"]:
        reason = "No space left on device" if kind == "tmpfs" else "File too large"
        assert reason in line and str(disk / "run") in line
    for stage in (sft, dpo):
        expected, log = undisturbed[stage][1:]
        assert {
            name: tensor.tolist() for name, tensor in adapter(out / stage.__name__).items()
        } == expected
        assert [record["loss"] for record in records(out / stage.__name__)] == [
            r["loss"] for r in log
        ]
    assert [episode.seed for episode in read(out / "episodes.jsonl")] == list(range(200))
    hidden = {path.name for path in out.rglob(".*")}
    assert hidden <= {".lock"}


# ---- a folder that cannot be written to ----


@both_stages
def test_a_place_where_no_folder_can_be_is_one_line(folder, tmp_path, stage):  # noqa: F811
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OSError, match="(Not a directory|File exists): '.*file"):
        stage(folder, tmp_path / "file" / "run")
    assert content(tmp_path) == {tmp_path / "file": b"not a folder"}


READ_ONLY = 'mount -t tmpfs none "$0" && mount -o remount,ro "$0" || exit 77; exec "$@"'
COMMANDS = (
    "train.py sft --machine.device cpu --model {folder}/base --data {folder}/demos.jsonl --sft.steps 1",
    "collect.py --policy expert --instances 1 --group 1 --tasks click-button",
    "evaluate.py --machine.device cpu --episodes 1 --tasks click-button",
    "train.py loop --machine.device cpu",
)
IN_TURN = """
import runpy, sys
for command in sys.argv[1:]:
    sys.argv = command.split()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        print("ended", end.code, file=sys.stderr, flush=True)
"""


def test_a_read_only_folder_is_one_line(folder, tmp_path):  # noqa: F811
    """Of each program; they run one after the other in a process that imports torch once."""
    if subprocess.run([*IN_OWN_MOUNTS, "true"], capture_output=True).returncode:
        pytest.skip("no mounts of its own on this machine")
    commands = [f"{command.format(folder=folder)} --out {tmp_path}/run" for command in COMMANDS]
    done = subprocess.run(
        [*IN_OWN_MOUNTS, "sh", "-c", READ_ONLY, tmp_path, sys.executable, "-c", IN_TURN, *commands],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode == 77:
        pytest.skip(f"no file system of its own on this machine: {done.stderr}")
    assert done.returncode == 0 and "Traceback" not in done.stderr
    *told, rest = done.stderr.split("ended 2\n")
    assert len(told) == len(COMMANDS) and rest == ""
    for said in told:
        assert said.splitlines()[-1].startswith("error: [Errno 30] Read-only file system: '")


# ---- two processes ----


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


@both_stages
def test_a_run_folder_has_one_process_and_is_free_when_that_was_killed(
    folder, undisturbed, tmp_path, stage
):
    out = tmp_path / "run"
    with (
        Held(out / ".lock", "lockf"),
        pytest.raises(ValueError, match="run: another process is writing to"),
    ):
        stage(folder, out)
    assert content(out) == {}
    assert stage(folder, out) == undisturbed[stage][1:]


def test_a_loop_folder_has_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "collect", lambda *_: pytest.fail("played"))
    with (
        Held(tmp_path / ".lock", "lockf"),
        pytest.raises(ValueError, match="another process is writing to"),
    ):
        loop.loop(replace(SMALL, out=tmp_path))
    assert content(tmp_path) == {}


def test_a_file_of_episodes_and_so_an_evaluation_has_one_process(tmp_path):
    from minidpo.results import evaluate

    here = replace(SMALL.machine, pages=1)
    with Held(tmp_path / "base.jsonl", "flock"):
        with pytest.raises(ValueError, match="base.jsonl: another process is writing to it"):
            evaluate.evaluate(
                EvaluateCommand(tasks="click-button", episodes=1, out=tmp_path, machine=here)
            )
        with pytest.raises(ValueError, match="base.jsonl: another process is writing to it"):
            collect(
                CollectCommand(policy="expert", tasks="click-button", out=tmp_path / "base.jsonl")
            )
    assert content(tmp_path) == {tmp_path / "base.jsonl": b""}


def test_an_evaluation_keeps_out_of_the_folder_of_a_run(tmp_path):
    run = RunFolder(tmp_path, {"model": "a"})
    run.begin()
    run.log({"step": 1})
    before = content(tmp_path)
    with pytest.raises(ValueError, match="holds a run that is no evaluation: give another --out"):
        evaluate(EvaluateCommand(out=tmp_path, tasks="click-button", episodes=1))
    assert content(tmp_path) == before


def test_a_loop_starts_from_a_loop_only(tmp_path):
    RunFolder(tmp_path / "sft", {"model": "a", "machine": {}}).begin()
    with pytest.raises(
        ValueError, match="sft holds a run that is no loop: start names the folder of one"
    ):
        loop.Loop(replace(SMALL, out=tmp_path / "loop", start=tmp_path / "sft"))


def test_a_run_may_begin_twice_in_its_own_process_and_keeps_its_lock(tmp_path):
    run = RunFolder(tmp_path, {})
    run.begin()
    run.begin()
    code = f"from minidpo.system.run_folder import RunFolder; RunFolder({str(tmp_path)!r}, {{}}).begin()"
    other = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (
        other.stderr.splitlines()[-1] == f"ValueError: {tmp_path}: another process is writing to it"
    )


def test_settings_that_another_process_brought_in_the_meantime_are_not_overwritten(tmp_path):
    late = RunFolder(tmp_path, {"lr": 1})
    RunFolder(tmp_path, {"lr": 2}).begin()
    (tmp_path / "demos.jsonl").touch()
    with pytest.raises(ValueError, match=r"other settings \(lr 2, now 1\)"):
        late.begin()
    assert read_json(tmp_path / "config.json")["lr"] == 2


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


def test_an_adapter_that_was_cut_short_is_refused_wherever_it_was_cut(folder, tmp_path):  # noqa: F811
    cut, rng = shutil.copytree(folder / "adapter", tmp_path / "cut"), random.Random(3)
    for name in lora.FILES:
        data = (cut / name).read_bytes()
        for _ in range(50):
            (cut / name).write_bytes(data[: rng.randrange(len(data) - 2)])
            with pytest.raises(ValueError, match=f"{name}: not"):
                lora.load(tiny.model(), cut)
        (cut / name).write_bytes(data)
    lora.load(tiny.model(), cut)


def test_an_adapter_with_a_flipped_bit_is_refused(folder, tmp_path):  # noqa: F811
    bad, rng = shutil.copytree(folder / "adapter", tmp_path / "bad"), random.Random(4)
    data = (bad / lora.WEIGHTS).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for _ in range(50):
        at = rng.randrange(header, len(data))
        flipped = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        (bad / lora.WEIGHTS).write_bytes(flipped)
        with pytest.raises(
            ValueError, match="adapter_model.safetensors: damaged: its checksum is wrong"
        ):
            lora.load(tiny.model(), bad)


def test_a_log_that_was_lost_or_damaged_is_told_with_its_line(folder, tmp_path):  # noqa: F811
    run = RunFolder(tmp_path, {})
    run.begin()
    run.log({"step": 1})
    with pytest.raises(
        ValueError, match="metrics.jsonl: holds 1 steps, but state.safetensors is of step 2"
    ):
        run.truncate_log(2)
    with open(run.metrics, "a") as file:
        file.write('{"step": 2, "lo\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 2: not JSON"):
        records(run.folder)


def test_a_state_without_its_settings_is_refused_because_it_may_be_another_optimizers(tmp_path):
    run = RunFolder(tmp_path, {"optimizer": "adamw8bit"})
    run.begin()
    run.save_state(1, {"param.weight": torch.ones(1)})
    (tmp_path / "config.json").unlink()
    says = "config.json, which says what run it belongs to, is missing; delete"
    with pytest.raises(ValueError, match=says):
        RunFolder(tmp_path, {"optimizer": "adamw"})


# ---- versions, and what is read at all ----


def test_settings_of_another_version_are_refused_and_those_from_before_it_was_written_are_not(
    tmp_path,
):
    RunFolder(tmp_path, {"lr": 1}).begin()
    assert read_json(tmp_path / "config.json") == {"version": 1, "lr": 1}
    write_json(tmp_path / "config.json", {"lr": 1})
    RunFolder(tmp_path, {"lr": 1})
    write_json(tmp_path / "config.json", {"version": 2, "lr": 1})
    says = "holds a run of format version 2, but this minidpo knows 1: give another folder"
    with pytest.raises(ValueError, match=says):
        RunFolder(tmp_path, {"lr": 1})
    with pytest.raises(ValueError, match=says):
        reusable_files(replace(SMALL, start=tmp_path))


def test_a_reference_of_another_version_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "reference.safetensors"
    with monkeypatch.context() as later:
        later.setattr("minidpo.learning.reference.VERSION", "2")
        cached(path, "key", lambda: torch.ones(2))
    with pytest.raises(
        ValueError, match="reference.safetensors: made by another version of minidpo"
    ):
        cached(path, "key", lambda: torch.ones(2))


def test_quantised_weights_of_another_version_are_refused(folder, tmp_path, monkeypatch):  # noqa: F811
    with monkeypatch.context() as later:
        later.setattr("minidpo.memory.quantised.VERSION", "2")
        load_quantised(folder / "base", torch.float32, "cpu", tmp_path)
    before = content(tmp_path)
    with pytest.raises(
        ValueError, match="of another version of minidpo: give another cache, or delete"
    ):
        load_quantised(folder / "base", torch.float32, "cpu", tmp_path)
    assert content(tmp_path) == before


def test_episodes_of_another_version_are_refused_and_left_alone(tmp_path):
    path = tmp_path / "episodes.jsonl"
    path.write_text(tiny.episode().to_json().replace('"version": 1', '"version": 2') + "\n")
    before = path.read_bytes()
    for use in (read, Writer):
        with pytest.raises(ValueError, match="line 1: not an episode of format version 1"):
            use(path)
    assert path.read_bytes() == before


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
