"""The scripts under benchmarks/ run: on little work, so that they still do when somebody wants to measure."""

import asyncio
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))


PEERS = ("peer_generate", "trl_side", "env_peers")  # in other Pythons


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py")))
def test_every_script_can_be_imported(name):
    if name not in PEERS:
        importlib.import_module(f"benchmarks.{name}")


def run(words):
    """A script of benchmarks/ as it is typed, on one thread; its output."""
    script, *arguments = shlex.split(words)
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *arguments],
        text=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_benchmark_of_a_real_model_goes_on_where_it_was_and_keeps_another_models_figures(
    tmp_path,
):
    """Two of its parts on the shipped model, without the peers, which this Python need not have."""
    out = tmp_path / "out.json"
    other = {"state": "done", "seconds": 1, "figures": ["qwen_sft_vs_trl_ratio"]}
    record = {"figures": {"qwen_sft_vs_trl_ratio": 2.5}, "parts": {"qwen_sft": other}}
    out.write_text(json.dumps(record))
    words = f"real_model.py --model minidpo/nano --steps 2 --repeats 1 --threads 1 --out {out}"
    found = []
    for _ in range(2):
        run(f"{words} --parts sft,row --dtypes float32 --work {tmp_path / 'work'}")
        found.append(json.loads(out.read_text()))
    first, again = found
    assert {part["state"] for part in first["parts"].values()} == {"done"}
    figures = first["figures"]
    assert again["figures"].keys() == figures.keys() and first["parts"]["qwen_sft"] == other
    measured = [name for name in figures if "floor" not in name]  # that of training is made anew
    assert {name: again["figures"][name] for name in measured} == {
        name: figures[name] for name in measured
    }
    best = figures["nano_sft_minidpo_float32_best"]
    assert (
        figures[f"nano_sft_minidpo_float32_{best}_tokens_per_s"]
        == figures["nano_sft_minidpo_float32_tokens_per_s"]
    )
    assert figures["qwen_sft_vs_trl_ratio"] == 2.5 and figures["nano_generate_row_of_floor"] > 0
    about = first["parts"]["nano_row"]["about"]
    assert about["weights"] > 2e6 and len(about["sha256"]["model.safetensors"]) == 64


def test_a_search_takes_larger_passes_only_while_they_are_faster():
    import works

    took = {"1": 4.0, "2": 3.0, "4": 2.95, "8": 1.0, "free": 2.0}

    def side(name, words):
        if name == "killed":
            raise subprocess.CalledProcessError(-9, "side")
        return {"step_s": [9.0, took[name]]}

    chains = [dict.fromkeys(names, ()) for names in (("1", "2", "4", "8"), ("free", "killed", "1"))]
    best, runs = works.search(chains, side)
    assert best == "free" and list(runs) == ["1", "2", "4", "free"]


def test_the_plot_of_growth_has_a_line_for_each_side_where_it_was_measured():
    import growth

    figures = {f"pairs_{n}_minidpo_s": 1.0 + n for n in growth.AXES["pairs"][1]}
    figures |= {"pairs_1_trl_s": 2.0, "pairs_2_trl_s": 4.0}
    text = growth.plot(figures)
    lines = [len(points.split()) for points in re.findall(r'polyline points="(.*?)"', text)]
    assert lines == [7, 2] + [0] * 10 and text.count("<circle") == 9
    places = re.findall(r'cx="(.*?)" cy="(.*?)"', text)
    assert all(0 < float(x) < growth.WIDTH and 0 < float(y) < growth.HEIGHT for x, y in places)


def test_growth_uses_the_episodes_of_a_group_evenly():
    import growth

    for at, episodes in ((1, 2), (8, 16), (64, 16)):
        pairs = growth.pairs_of("pairs", at)
        sides = {tuple(pair[side]) for pair in pairs for side in ("chosen_ids", "rejected_ids")}
        assert len(pairs) == at and len(sides) == episodes
    assert growth.tokens(growth.pairs_of("length", 500)) == 1000
    assert len(growth.pairs_of("group", 32)) == 16


@pytest.mark.slow
def test_the_benchmark_of_deep_trees_finds_one_gradient_three_ways(tmp_path):
    run(f"deep_trees.py --shape tiny --repeats 1 --out {tmp_path / 'out.json'}")
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert figures["whole_tokens"] == figures["depth_first_tokens"] < figures["split_tokens"]
    assert figures["depth_first_peak_mib"] < figures["whole_peak_mib"] / 2


@pytest.mark.slow
def test_our_side_of_a_training_learns_the_pairs_that_it_is_given(tmp_path, base):
    import works

    batch = 2
    works.prepare(tmp_path / "w", base, "dpo", lambda: works.synthetic(192, 48, 4))
    run(
        f"minidpo_side.py --work {tmp_path / 'w'} --out {tmp_path / 'out.json'} --batch {batch} --steps 2 --threads 1"
    )
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["losses"][0] == pytest.approx(0.693147, abs=1e-5) and len(result["step_s"]) == 2
    assert result["computed_tokens_per_step"] == batch * (192 + 48 + 48)
    assert 0 < result["before_mib"] < result["peak_mib"]


def test_a_group_of_eight_makes_fifteen_pairs_of_one_prompt():
    import works

    pairs = works.synthetic(20, 5, groups=2, good=3, bad=5)
    assert len(pairs) == 30 and len({tuple(pair["prompt_ids"]) for pair in pairs}) == 2
    assert (
        len({tuple(pair[side]) for pair in pairs for side in ("chosen_ids", "rejected_ids")}) == 16
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base of two blocks with the shipped tokenizer."""
    import checkpoints

    folder = tmp_path_factory.mktemp("base")
    checkpoints.make(folder, checkpoints.SHAPES["tiny"])
    return folder


@pytest.mark.slow
def test_our_side_trains_in_four_bits_from_an_adapter_that_was_made_without_the_base(
    tmp_path, base
):
    import qwen2_7b_cuda as gpu

    gpu.make_work(base, tmp_path / "w", 20, 12)
    run(
        f"minidpo_side.py --work {tmp_path / 'w'} --out {tmp_path / 'out.json'} --batch 1 --steps 2 --threads 1 --dtype bfloat16 --four-bit --cache {tmp_path / 'nf4'}"
    )
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["losses"][0] == pytest.approx(0.693147, abs=1e-5)
    assert (tmp_path / "nf4" / "index.json").is_file()
    assert result["computed_tokens_per_step"] == 20 + 12 + 12 and result["load_s"] > 0


@pytest.mark.parametrize("fits", [True, False])
def test_a_peer_that_runs_out_of_memory_is_measured_without_the_cap_and_that_is_recorded(
    tmp_path, base, monkeypatch, fits
):
    """A pair of 2 x 1,024 tokens a step: 2 s of ours and 4 s of TRL's are 1,024 and 512 tokens/s."""
    import qwen2_7b_cuda as gpu

    calls = []

    def side(python, script, work, batch, args, steps, *more):
        ours, capped = script == "minidpo_side.py", "--cap-gib" in more
        calls.append((script, capped))
        if not ours and capped and not fits:
            return {"out_of_memory": True}
        return {
            "step_s": [9.0] + [2.0 if ours else 4.0] * 2,
            "losses": [0.6931, 0.5],
            "peak_mib": 2048,
            "earlier_peak_mib": 1024,
            "before_mib": 512,
            "precompute_s": 1,
            "load_s": 1,
            "trainable": 7,
            "computed_tokens_per_step": 1536,
            "versions": {"torch": "2"},
        }

    monkeypatch.setattr(gpu, "run_side", side)
    figures, _ = gpu.train(base, tmp_path / "w", "dpo", "cuda", "python")
    ours, trl = ("minidpo_side.py", True), ("trl_side.py", True)
    bare = ("trl_side.py", False)
    assert calls == ([ours, trl, ours, trl] if fits else [ours, trl, bare, ours, bare])
    assert figures["trl_out_of_memory"] == (not fits) and figures["trl_peak_gib"] == 2
    assert figures["minidpo_tokens_per_s"] == 1024 and figures["tokens_per_s_ratio"] == 2
    alone, _ = gpu.train(base, tmp_path / "alone", "dpo", "cuda", None)
    assert alone.keys() == {name for name in figures if "trl" not in name and "ratio" not in name}


def test_rollouts_on_the_recorded_page_are_counted(tmp_path, base, monkeypatch):
    import qwen2_7b_cuda as gpu

    gpu.make_work(base, tmp_path / "w", 2, 2)
    for name, value in {"PAGES": 2, "TURNS": 2, "WRITTEN": 3}.items():
        monkeypatch.setattr(gpu, name, value)
    figures = asyncio.run(gpu.rollouts(base, tmp_path / "w" / "adapter", tmp_path / "nf4", "cpu"))
    assert 4 <= figures["rollout_written"] <= 2 * 2 * 3 and figures["rollout_tokens_per_s"] > 0
    assert (
        2 * 538 < figures["rollout_longest"] < 2 * 700
    )  # the page has 538 tokens, and is shown twice


def test_the_gpu_half_says_in_one_line_that_there_is_no_gpu():
    command = [sys.executable, ROOT / "benchmarks" / "qwen2_7b.py", "--device", "cuda"]
    done = subprocess.run(
        command, text=True, capture_output=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 1 and "sees no GPU" in done.stderr and done.stderr.count("\n") == 1


def test_every_test_for_a_gpu_is_among_those_that_the_script_runs():
    import gpu

    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^(pytestmark = |@)pytest\.mark\.gpu$", path.read_text(), re.MULTILINE)
    }
    assert marked == {*gpu.GPU_TESTS}


@pytest.mark.slow
def test_the_script_for_a_gpu_runs_small_on_a_cpu_and_a_part_that_fails_costs_no_other(
    tmp_path, monkeypatch, capsys
):
    import gpu

    out, work = tmp_path / "gpu.json", tmp_path / "work"
    work.mkdir()
    (work / "tiny-a").write_text("a file where `steps` wants a folder")

    def ends_with(parts):
        monkeypatch.setattr(
            sys,
            "argv",
            [
                "gpu.py",
                "--device",
                "cpu",
                "--tiny",
                "--threads",
                "1",
                "--parts",
                parts,
                "--steps",
                "2",
                "--work",
                str(work),
                "--out",
                str(out),
            ],
        )
        with pytest.raises(SystemExit) as end:
            gpu.main()
        return end.value.code, json.loads(out.read_text())

    code, result = ends_with("steps,scores")
    states = {name: part["state"] for name, part in result["parts"].items()}
    assert code and states == {"steps": states["steps"], "scores": "done"}
    assert states["steps"].startswith("failed: ") and "\nsteps: failed: " in capsys.readouterr().out
    assert result["figures"]["scores_largest_difference"] == 0
    (work / "tiny-a").unlink()
    code, again = ends_with("steps")
    assert not code and again["parts"]["steps"]["state"] == "done"
    assert again["parts"]["scores"] == result["parts"]["scores"]
    assert again["figures"]["steps_tiny_float32_a_minidpo_pairs_per_s"] > 0
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main()
    assert "PyTorch sees no GPU here" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_our_side_of_generate_says_what_a_plain_pass_would(base):
    import torch

    from minidpo.model import checkpoint

    model = checkpoint.load(base).requires_grad_(False)
    prompts = torch.randint(2, 4096, (2, 9), generator=torch.Generator().manual_seed(1)).tolist()
    work = {
        "model": str(base),
        "prompts": prompts,
        "new": 3,
        "temperature": 0.0,
        "repeats": 1,
        "machine": {"device": "cpu"},
        "dtype": "float32",
        "threads": 1,
    }
    sides = {
        side: json.loads(run(f"generate.py {side} {shlex.quote(json.dumps(work))}"))
        for side in ("minidpo", "floor")
    }
    for ids, answer in zip(prompts, sides["minidpo"]["answers"], strict=True):
        for token in answer:
            assert token == int(model.head(model(torch.tensor([ids]))[0, -1]).argmax())
            ids = [*ids, token]
    assert sides["floor"]["seconds"][0] > 0


@pytest.mark.slow
def test_one_row_is_written_in_each_way_and_compared(tmp_path):
    import tiny

    from minidpo.data.episodes import Writer

    with Writer(tmp_path / "episodes.jsonl") as writer:
        writer.add(tiny.episode())
    said = run(
        f"one_row.py --model minidpo/nano --episodes {tmp_path}/episodes.jsonl --pages 1 --rounds 2 "
        "--turns 1 --divergence 1 --new 12"
    )
    result = json.loads(said)
    parts = ("reading", "no guesses", "guesses")
    assert set(result["writing"]) == {
        f"{way}, {part}" for way in ("plain", "packed", "int8") for part in parts
    }
    assert abs(result["divergence"]["packed"]["kl_nats_a_token"]) < 1e-5
    assert 0 < result["divergence"]["int8"]["kl_nats_a_token"] < 0.1


@pytest.mark.slow
def test_the_rollout_benchmark_accounts_for_all_the_time(tmp_path):
    run(
        f"rollout.py --pages 2 --instances 1 --tasks click-button --device cpu --out {tmp_path / 'out.json'}"
    )
    result = json.loads((tmp_path / "out.json").read_text())
    figures = result["figures"]
    shares = [figures[f"2_in_{where}"] for where in ("model", "browser", "python")]
    assert sum(shares) == pytest.approx(1, abs=0.01)
    assert (
        0 < figures["2_model_busy"] < 1
        and figures["2_in_browser"] > 0
        and figures["2_browser_cores"] > 0
    )
    assert set(result) == {"figures", "date", "machine", "versions", "command"}


@pytest.mark.slow
def test_the_head_adds_less_memory_than_the_logits_would():
    ours, full = (float(run(f"head_memory.py --case {way} 256")) for way in ("ours", "full"))
    assert 0 < ours < full / 2


def test_the_driver_and_its_floor_solve_the_same_episodes_with_as_many_actions():
    import env_speed

    rates, _ = asyncio.run(
        env_speed.measure(("enter-text",), (1, 2), turns=1, episodes=4, peers={})
    )
    assert {side for side, _ in rates} == {
        (name, n) for name in ("minidpo", "floor") for n in (1, 2)
    }
    for ((episodes, actions),) in rates.values():
        assert actions == pytest.approx(2 * episodes)  # type, click
    assert env_speed.figures(rates)["vs_floor_ratio"] > 0


def test_speed_is_compared_at_the_best_number_of_pages_of_each_side():
    """10 and 40 against 5 and 10, means 20 and 7.07; the floor is 2 and 1 times as fast."""
    import env_speed

    rates = {}
    for task, ours, floor, farama in (("click-a", 10, 20, 5), ("click-b", 40, 40, 10)):
        rates[("minidpo", 4), task] = [
            (ours, 2 * ours),
            (1, 1),
            (99, 99),
        ]  # the median of the turns counts
        rates[("minidpo", 8), task] = [(1, 2)]
        rates[("floor", 8), task] = [(floor, floor)]
        rates[("farama", 2), task] = [(farama, farama)]
    result = env_speed.figures(rates)
    assert result["minidpo_best_number"] == 4 and result["minidpo_4_click_a_actions_per_s"] == 20
    assert result["vs_farama_ratio"] == pytest.approx(8**0.5)
    assert result["vs_floor_ratio"] == pytest.approx(2**0.5)


@pytest.mark.parametrize("missing", ["farama", "browsergym"])
def test_a_missing_peer_says_how_it_is_made(missing, monkeypatch, capsys):
    import env_speed

    others = [f"--{name}-python={sys.executable}" for name in env_speed.NEEDED if name != missing]
    monkeypatch.setattr(sys, "argv", ["env_speed.py", *others])
    with pytest.raises(SystemExit, match="^2$"):
        env_speed.main()
    assert f"/tmp/{missing}-venv/bin/pip install" in capsys.readouterr().err
