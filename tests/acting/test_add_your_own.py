"""The program in docs/add-your-own.md runs as it stands there."""

import re
from pathlib import Path

from minidpo.data.episodes import read

PAGE = Path(__file__).parents[2] / "docs" / "add-your-own.md"


def test_the_example_of_a_world_plays_its_demonstrations(tmp_path, monkeypatch):
    section = PAGE.read_text(encoding="utf-8").split("\n## A world\n")[1]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert {episode.outcome for episode in read("runs/toy.jsonl")} == {"solved"}
