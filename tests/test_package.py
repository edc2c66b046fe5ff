"""`pip install .`: the package has all that it needs, and the program does what the scripts do."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from minidpo.system import command_line

ROOT = Path(__file__).parents[1]


def test_every_folder_with_code_or_data_is_named():
    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    folders = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for top in ("minidpo", "envs")
        for path in (ROOT / top).rglob("*.*")
        if "__pycache__" not in path.parts
    }
    assert listed == folders | {"minidpo.configs", "minidpo.configs.papers", "minidpo.docs"}


def test_an_installed_minidpo_brings_its_configurations(tmp_path, monkeypatch):
    monkeypatch.setattr(command_line, "PACKAGED", ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    assert "smollm2" in command_line.toml_flags("configs/demo.toml")
    assert "--threshold" in command_line.toml_flags("configs/papers/agentevol.toml")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.toml").write_text('model = "mine"')
    assert command_line.toml_flags("configs/demo.toml") == ["--model", "mine"]
    for absent in ("configs/none.toml", "elsewhere/nano.toml"):
        says = f"{absent}: the configuration file cannot be read .No such file"
        with pytest.raises(ValueError, match=says):
            command_line.toml_flags(absent)


def test_make_setup_says_what_is_next_and_its_python_finds_the_checkout_from_any_folder(tmp_path):
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "PYTHONPATH"))
    }
    for name in ("checkout", "other"):  # the other one's .venv is a link to the first one's
        (tmp_path / name / "envs" / "miniwob").mkdir(parents=True)
        (tmp_path / name / "envs" / "miniwob" / "install.py").touch()  # there is a browser
        for file in ("Makefile", "requirements.txt"):
            shutil.copy(ROOT / file, tmp_path / name)
    venv = tmp_path / "checkout" / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (tmp_path / "other" / ".venv").symlink_to(venv)
    (venv / "complete").touch()
    for name in ("checkout", "other"):
        done = subprocess.run(
            ["make", "setup"], cwd=tmp_path / name, env=clean, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith("minidpo is set up: make demo ")
    code = "import envs.miniwob.install; print(envs.miniwob.install.__file__)"
    done = subprocess.run(
        [venv / "bin" / "python", "-c", code],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(tmp_path / "checkout" / "envs" / "miniwob" / "install.py"), (
        done.stderr
    )


@pytest.mark.slow
def test_a_wheel_has_all_it_needs_and_plays_elsewhere(tmp_path):
    """Needs the package registry, for setuptools."""
    # elsewhere, because building leaves folders behind
    for name in ("minidpo", "envs", "configs", "docs"):
        shutil.copytree(
            ROOT / name, tmp_path / "source" / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source")
    wheel = ["-m", "pip", "wheel", "--no-deps", "-q", "-w"]
    source = tmp_path / "source"
    subprocess.run([sys.executable, *wheel, tmp_path, source], check=True)
    (path,) = tmp_path.glob("minidpo-*.whl")
    with zipfile.ZipFile(path) as file:
        names = set(file.namelist())
        file.extractall(tmp_path / "site")
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]
    assert {
        "minidpo/nano/model.safetensors",
        "minidpo/miniwob/adapter_model.safetensors",
        "minidpo/configs/demo.toml",
        "minidpo/configs/papers/eto.toml",
        "minidpo/results/report.js",
        "envs/miniwob/browser/tab.js",
        "minidpo/docs/exercises.md",
        "minidpo/docs/your-own-loss.md",
    } <= names
    assert "minidpo/docs/report.png" not in names
    code = "from minidpo.commands import main; main()"
    flags = [
        "--model",
        "minidpo/nano",
        "--tasks",
        "click-button",
        "--instances",
        "1",
        "--group",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, "collect", *flags],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "rollouts.jsonl").read_text().count("\n") == 1
