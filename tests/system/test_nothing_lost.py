"""What can happen to a file: damaged, or shared by two processes; and nothing that is read can run."""

import random
import re
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
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    other = subprocess.run([sys.executable, "-c", code, tmp_path / ".lock"], capture_output=True)
    assert b"BlockingIOError" in other.stderr


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
    run.save_state(3, {"param.weight": torch.arange(6.0).view(2, 3)})
    data = run.state.read_bytes()
    for _ in range(150):
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
    for _ in range(150):
        path.write_bytes(broken := damaged(data, rng))
        if broken != data:
            with pytest.raises(ValueError, match="reference.safetensors: .*delete it"):
                cached(path, "key", lambda: pytest.fail("scored again"))
        assert path.read_bytes() == broken


# ---- versions, and what is read at all ----


UNSAFE = re.compile(
    r"(import|from) (c?pickle|_pickle|dill|cloudpickle|joblib|shelve|marshal|yaml)\b"
    r"|torch\.(load|save)\(|\b(numpy|np)\.load\(|\b__import__\("
    r"|(all_gather|gather|scatter)_object\(|broadcast_object_list\(|read_pickle\("
    r"|(?<![\w.])(eval|exec)\("
)


def test_nothing_that_is_read_can_run():
    """Pickles under all their names, and Python or YAML as data."""
    found = {path: match[0] for path in SOURCES if (match := UNSAFE.search(path.read_text()))}
    assert found == {}
    assert UNSAFE.search("import pickle") and UNSAFE.search("x = torch.load(f)")
