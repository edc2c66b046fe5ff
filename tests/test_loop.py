"""`train.py loop`: rounds on real pages, each in its folder; stopped anywhere it ends with the same files."""

import json
from dataclasses import asdict, replace

import pytest

import train
from minidpo.config import LoopCommand
from minidpo.episodes import read
from minidpo.files import read_json, write_json
from minidpo.options import DPO, SFT, Machine

SMALL = LoopCommand(tasks="enter-text,click-option", demonstrations=2, instances=3, group=4, episodes=3,
                    sampled=1, validation=2, sft=SFT(steps=2), dpo=DPO(steps=2, lr=1e-3),
                    imitation=SFT(steps=2), machine=Machine(pages=4, device="cpu"))


def files(folder):
    """What a loop leaves behind, without times."""
    kept = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".jsonl" and "metrics" not in name and "pairs" not in name:
            kept[name] = [replace(episode, policy="") for episode in read(path)]
        elif path.suffix == ".safetensors" and "reference" not in name:
            kept[name] = path.read_bytes()
    return kept


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory):
    out = tmp_path_factory.mktemp("loop") / "run"
    return out, train.loop(replace(SMALL, rounds=2, out=out, reference="sft", dpo=replace(
        SMALL.dpo, pairs="mixture")))


def test_each_round_has_a_folder_and_the_best_on_validation_is_evaluated(two_rounds):
    out, result = two_rounds
    assert {"rollouts.jsonl", "stepwise.jsonl", "golden.jsonl", "dpo", "result.json"} <= {
        path.name for path in (out / "round-1").iterdir()}
    assert len(result["validation"]) == 3
    best = max(range(1, 3), key=lambda k: (result["validation"][k], -k))
    assert result["kept_round"] == best and {"sft", "dpo", "gain_points", "p_value"} <= result.keys()
    first, second = (read_json(out / f"round-{k}" / "dpo" / "config.json") for k in (1, 2))
    assert first["reference"] is None and second["reference"] == str(out / "sft" / "adapter")
    assert second["adapter"] == str(out / "round-1" / "dpo" / "adapter")
    seeds = [{e.seed for e in read(out / f"round-{k}" / "rollouts.jsonl")} for k in (1, 2)]
    assert seeds == [{2_000_000, 2_000_001, 2_000_002}, {2_000_003, 2_000_004, 2_000_005}]
    pairs = [json.loads(line) for line in (out / "round-1" / "dpo" / "pairs.jsonl").read_text().splitlines()]
    assert {pair["source"] for pair in pairs} <= {"outcome", "expert", "stepwise"}
    assert (out / "report.html").is_file()


@pytest.mark.slow
def test_stopped_after_any_stage_it_ends_with_the_same_files(two_rounds, tmp_path, monkeypatch):
    out, _ = two_rounds
    whole, timed = files(out), train.Clock.time
    config = replace(SMALL, rounds=2, out=tmp_path / "run", reference="sft", dpo=replace(
        SMALL.dpo, pairs="mixture"))
    for stop_after in range(1, 20, 3):
        left = [stop_after]

        def time(self, *what):
            result = timed(self, *what)
            left[0] -= 1
            if not left[0]:
                raise Stopped
            return result

        monkeypatch.setattr(train.Clock, "time", time)
        try:
            train.loop(config)
        except Stopped:
            continue
        break
    monkeypatch.setattr(train.Clock, "time", timed)
    train.loop(config)
    assert files(tmp_path / "run") == whole


def test_what_two_loops_have_in_common_is_not_made_again(two_rounds, tmp_path, monkeypatch):
    out, result = two_rounds
    for name in ("collect", "dpo"):
        monkeypatch.setattr(train, name, lambda *_, **__: pytest.fail("it was made again"))
    monkeypatch.setattr(train.Circle, "explore", lambda *_: ([out / "round-1" / "rollouts.jsonl"], None))
    monkeypatch.setattr(train, "collect", lambda command, counts: {})
    config = replace(SMALL, out=tmp_path / "run", start=out, learn="bc")
    imitated = train.loop(config)
    assert imitated["sft"] == result["sft"] and "bc" in imitated
    assert not (tmp_path / "run" / "sft").exists()


def test_a_start_with_another_first_policy_is_refused_and_says_what_differs(tmp_path):
    (tmp_path / "start").mkdir()
    write_json(tmp_path / "start" / "config.json", json.loads(json.dumps(asdict(SMALL), default=str)))
    other = replace(SMALL, start=tmp_path / "start", seed=2, sft=SFT(steps=3))
    with pytest.raises(ValueError, match=r"start began with other settings \(seed, sft\): give the same"):
        train.began_alike(other)
    alike = replace(SMALL, start=tmp_path / "start")
    assert train.began_alike(alike) == {"exploration", "validation", "evaluation"}
    assert train.began_alike(replace(alike, group=5, episodes=9)) == {"validation"}
    assert train.began_alike(replace(alike, machine=Machine(pages=9, device="cpu"))) != set()
    assert train.began_alike(SMALL) == set()


@pytest.mark.parametrize("changes, says", [
    ({"focus": True}, "focus looks at the round before"),
    ({"learn": "rft", "reference": "sft"}, "learn rft has no reference"),
    ({"curriculum": 1.5}, "curriculum is a success rate"),
    ({"demonstrations": -1}, "demonstrations must be at least 0"),
])
def test_settings_of_a_loop_that_make_no_sense_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        replace(SMALL, **changes)


def test_a_first_round_without_a_pair_is_an_error_and_a_later_one_the_end(
        two_rounds, tmp_path, monkeypatch, capsys):
    out, _ = two_rounds
    learn = train.Circle.learn

    def nothing(self, number, *rest):
        if number == self.config.rounds:
            raise train.NothingToPrefer("no pair in 6 groups")
        return learn(self, number, *rest)

    monkeypatch.setattr(train.Circle, "learn", nothing)
    monkeypatch.setattr(train, "finish", lambda *given: given)
    monkeypatch.setattr(train.Circle, "validate", lambda *_: {"enter-text": 0.5, "click-option": 0.5})
    monkeypatch.setattr(train.Circle, "explore", lambda *_: ([out / "round-1" / "rollouts.jsonl"], None))
    with pytest.raises(train.NothingToPrefer):
        train.loop(replace(SMALL, start=out, out=tmp_path / "one"))
    _, _, trained, kept, success = train.loop(replace(SMALL, start=out, out=tmp_path / "two", rounds=2))
    assert (len(trained), kept, success) == (1, 0, [0.5, 0.5])
    assert "round 2: no pair in 6 groups; so the loop ends here" in capsys.readouterr().out


def test_loops_of_different_seeds_never_play_the_same_pages():
    for changes in ({"seed": 101}, {"rounds": 5, "instances": 2001},
                    {"rounds": 5, "instances": 1001, "focus": True}):
        with pytest.raises(ValueError, match="would play the same pages"):
            train.loop(replace(SMALL, **changes))
    one, two = (train.Circle(replace(SMALL, seed=seed, rounds=2, focus=True)) for seed in (1, 2))
    last = one.first(one.block, 2) + one.block
    assert last <= two.first(two.block) and one.block == 3 * 2
