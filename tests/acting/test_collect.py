"""What collect.py writes to its file and what it refuses to go on with; on toy pages, without a browser."""

from contextlib import asynccontextmanager

import pytest
from test_rollout import Script, Stairs

from minidpo.acting import collect
from minidpo.acting.policies import Job
from minidpo.data.episodes import read

STEPS = tuple(f'action: CLICK(ref="{n}")' for n in (1, 2, 3))


@pytest.fixture(autouse=True)
def pages(monkeypatch):
    @asynccontextmanager
    async def browser(count, headless=True):
        yield type("Pages", (), {"envs": [Stairs() for _ in range(count)]})

    monkeypatch.setattr(collect, "RemoteBrowser", browser)
    monkeypatch.setattr(collect, "progress", lambda *_, ended: 0.25 + ended / 2)


def test_a_failure_is_written_with_how_near_it_came(tmp_path):
    wanted = [Job("stairs", seed, n, 8) for seed in range(5) for n in range(2)]
    counts = collect.play_to_file(Script(), wanted, tmp_path / "a.jsonl", 2, "")
    assert counts["episodes"] == 10
    found = {(e.outcome, e.progress) for e in read(tmp_path / "a.jsonl")}
    assert {("solved", None), ("failed", 0.75)} <= found
    assert found <= {("solved", None), ("failed", 0.75), ("limit", 0.25)}


def test_a_file_does_not_go_on_with_other_forced_steps_or_another_way_to_sample(tmp_path):
    wanted = [Job("stairs", 1, 0, 8, STEPS[:1])]
    collect.play_to_file(Script(["next"]), wanted, tmp_path / "a.jsonl", 1, "")
    with pytest.raises(ValueError, match="began with 1 forced steps, not 2"):
        other = [wanted[0]._replace(forced=STEPS[:2])]
        collect.play_to_file(Script(["next"]), other, tmp_path / "a.jsonl", 1, "")
    other = Script(["next"])
    other.sampling = {"seed": 8}
    with pytest.raises(ValueError, match="holds episodes by script"):
        collect.play_to_file(other, wanted, tmp_path / "a.jsonl", 1, "")
