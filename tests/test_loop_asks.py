"""What a loop asks its stages for: splits, players, data and settings. Nothing is played or trained."""

import math
from dataclasses import replace

import pytest
import tiny
import torch

from envs.miniwob.experts.by_task import EXPERTS
from minidpo import loop
from minidpo.config import DPO, GRPO, PPO, SFT, LoopCommand, Sampling, SFTCommand
from minidpo.learning.training_run import adapter_sha256
from minidpo.memory.lora import CONFIG, FILES, WEIGHTS, LoRAConfig
from minidpo.memory.machine import Machine
from minidpo.system.files import write_json
from minidpo.system.result_file import read_result
from minidpo.system.run_folder import records
from minidpo.system.tensors import write_weights


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """asked(**changes): the commands of a loop, by stage, in order."""

    def run(**changes):
        log = []

        def collect(command, counts):
            log.append(("collect", command, counts))
            command.out.parent.mkdir(parents=True, exist_ok=True)
            outcomes = {"enter-text": ("solved", "failed"), "click-option": ("failed", "failed")}
            # of those that begin with golden steps one, of enter-text, drew none
            command.out.write_text(
                "".join(
                    tiny.episode(
                        (task,) * (1 + forced),
                        outcome,
                        index=n,
                        task=task,
                        seed=7,
                        instruction=task,
                        forced=forced,
                    ).to_json()
                    + "\n"
                    for task in outcomes
                    for n, outcome in enumerate(outcomes[task])
                    for forced in [
                        int(command.golden is not None and (task, n) != ("enter-text", 1))
                    ]
                )
            )
            return {"episodes": 4}

        def play(command, name, adapter):
            log.append(("play", command, name, adapter))
            seeds = loop.SEEDS[command.split][: command.episodes]
            command.out.mkdir(parents=True, exist_ok=True)
            (command.out / f"{name}.jsonl").write_text(
                "".join(
                    tiny.episode(
                        outcome="solved" if task == "enter-text" and not seed % 2 else "failed",
                        task=task,
                        seed=seed,
                        policy=f"{adapter}@0",
                    ).to_json()
                    + "\n"
                    for task in ("enter-text", "click-option")
                    for seed in seeds
                )
            )

        def train(command):
            log.append(("train", command))
            for name in FILES:
                write_json(command.out / "adapter" / name, {})

        for name, fake in (
            ("collect", collect),
            ("play_held_out", play),
            ("sft", train),
            ("dpo", train),
            ("grpo", train),
            ("ppo", train),
            ("average", train),
            ("make_report", lambda *_: None),
            ("shown_pairs", lambda *call: setattr(run, "shown", call) or []),
        ):
            monkeypatch.setattr(loop, name, fake)
        config = LoopCommand(
            tasks="enter-text,click-option",
            demonstrations=2,
            instances=3,
            group=4,
            rounds=2,
            episodes=3,
            sampled=1,
            validation=2,
            out=tmp_path / "run",
        )
        loop.loop(replace(config, **changes))
        return tmp_path / "run", log

    run.path = tmp_path
    return run


def test_each_use_of_a_task_has_its_split_and_its_way_to_play(asked):
    _, log = asked()
    explored = [(c.policy, c.split, c.first) for kind, c, *_ in log if kind == "collect"]
    assert explored == [("expert", "demos", 0), ("model", "rollouts", 0), ("model", "rollouts", 3)]
    played = [
        (c.split, c.episodes, c.temperature, c.out.name) for kind, c, *_ in log if kind == "play"
    ]
    assert (
        played
        == [("validation", 2, 0.0, "validation")] * 3
        + [("test", 3, 0.0, "evaluation"), ("test", 1, 1.0, "sampled")] * 2
    )


def test_settings_of_the_loop_are_those_of_every_stage(asked):
    machine, long = Machine(device="cpu", pages=3), Sampling(max_new_tokens=50)
    for learn in ("dpo", "rft"):
        out, log = asked(
            seed=2,
            lora=LoRAConfig(rank=3),
            machine=machine,
            sampling=long,
            learn=learn,
            rounds=1,
            out=asked.path / learn,
        )
        commands = [command for _, command, *_ in log]
        assert {(c.seed, c.machine, c.model) for c in commands} == {(2, machine, "minidpo/nano")}
        assert {c.lora for kind, c, *_ in log if kind == "train" and isinstance(c, SFTCommand)} == {
            LoRAConfig(rank=3)
        }
        assert {c.max_new_tokens for kind, c, *_ in log if kind == "play"} == {50}
        assert {c.sampling for kind, c, *_ in log if kind == "collect" and c.policy == "model"} == {
            long
        }


def test_a_gain_is_from_the_first_policy_to_the_round_that_is_kept(asked, monkeypatch):
    """DPO solves the three test instances of click-option as well, of which SFT solves none."""
    monkeypatch.setattr(
        loop,
        "held_out",
        lambda command, name, read=loop.held_out: [
            replace(e, outcome="solved") if name == "dpo" and e.task == "click-option" else e
            for e in read(command, name)
        ],
    )
    out, _ = asked(rounds=1)
    result = read_result(out / "result.json")
    comparison = result["comparison"]
    assert (comparison["only_after"], comparison["only_before"]) == (3, 0)
    assert (
        result["gain_points"] == comparison["gain_points"] == 50 and result["figures"]["won"] == 3
    )
    training, _, _, before, after = (
        asked.shown
    )  # and the colours of the report's pairs go the same way
    assert training == out / "round-1" / "dpo"
    assert (before, after) == (out / "sft" / "adapter", training / "adapter")


def test_examples_are_other_instances_than_the_demonstrations_and_stand_before_every_episode(asked):
    out, log = asked(shots=2, rounds=1)
    (_, made, _), (_, demos, _), (_, explored, _) = (
        entry for entry in log if entry[0] == "collect"
    )
    assert (made.policy, made.split, made.first, made.instances, made.shots) == (
        "expert",
        "demos",
        2,
        6,
        0,
    )
    assert (demos.policy, demos.split, demos.first, demos.instances) == ("expert", "demos", 0, 2)
    played = [entry[1] for entry in log if entry[0] == "play"]
    assert {(c.shots, c.examples) for c in (demos, explored, *played)} == {
        (2, out / "examples.jsonl")
    }
    _, log = asked(shots=1, demonstrations_in_total=3, rounds=1, out=asked.path / "dealt")
    assert log[0][1].first == 2  # three for two tasks: two of the first
    with pytest.raises(ValueError, match="began with other settings .*shots"):
        asked(shots=1, rounds=1, start=out, out=asked.path / "again")
    (out / "sft" / "done").touch()
    _, log = asked(shots=2, rounds=1, group=3, start=out, out=asked.path / "more")
    explored = next(entry[1] for entry in log if entry[0] == "collect")
    assert explored.policy == "model" and explored.examples == out / "examples.jsonl"


def test_a_task_that_the_browser_gave_up_is_in_no_mean_over_tasks(asked, monkeypatch):
    monkeypatch.setattr(
        loop,
        "held_out",
        lambda command, name, read=loop.held_out: [
            episode for episode in read(command, name) if episode.task != "click-option"
        ],
    )
    with pytest.raises(
        ValueError, match="round-0.jsonl: no episode of click-option could be played"
    ):
        asked()
    assert not (
        asked.path / "run" / "validation" / "round-0.done"
    ).exists()  # the next start plays it anew


def test_episodes_of_what_an_adapter_was_before_it_was_trained_anew_are_not_its_own(asked):
    out, _ = asked()
    adapter, marker = out / "round-1" / "dpo" / "adapter", out / "validation" / "round-1.done"
    assert marker.read_text().split() == ["complete", *adapter_sha256(adapter)]
    marker.write_text("complete\n")  # of an earlier version
    assert not [entry for entry in asked()[1] if entry[0] == "play"]
    marker.write_text("complete 0 1\n")
    with pytest.raises(
        ValueError,
        match="round-1.jsonl was played before .*round-1/dpo/adapter was trained "
        "anew: delete round-1.jsonl and round-1.done, so",
    ):
        asked()


def test_a_round_logs_whether_first_answers_depend_on_the_page(asked):
    """Each of two tasks has an answer of its own: log 2 nats, the most there is."""
    out, _ = asked(rounds=1)
    explored, *_ = records(out)
    assert explored["explored_answer_information"] == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    "learn, start, weighting, distinct",
    [
        ("rft", False, "solved", True),
        ("bc", True, "solved", False),
        ("rwr", True, "advantage", False),
        ("vwr", True, "value", False),
        ("evolve", False, "reward", True),
        ("dagger", False, "solved", True),
    ],
)
def test_what_a_learner_imitates_and_from_where(asked, learn, start, weighting, distinct):
    out, log = asked(learn=learn, imitation=SFT(steps=2))
    first, one, two = (command for kind, command, *_ in log if kind == "train")
    files = [out / f"round-{n}" / "rollouts.jsonl" for n in (1, 2)]
    if learn == "dagger":
        files = [out / f"round-{n}" / "dagger.jsonl" for n in (1, 2)]
    values = (out / "round-2" / "values.jsonl",) * (learn == "vwr")  # how it goes on from each step
    assert two.data == ((out / "demos.jsonl", *files) if distinct else (files[1], *values))
    assert one.adapter == (out / "sft" / "adapter" if start else None)
    assert two.adapter == (out / "round-1" / learn / "adapter" if start else None)
    assert (two.sft.weighting, two.sft.distinct, two.sft.steps) == (weighting, distinct, 2)


def test_imitation_of_a_round_may_go_on_with_the_demonstrations_as_well(asked):
    out, log = asked(learn="bc", imitation=SFT(steps=2), keep_demonstrations=True)
    _, one, two = (command for kind, command, *_ in log if kind == "train")
    assert [c.data for c in (one, two)] == [
        (out / "demos.jsonl", out / f"round-{n}" / "rollouts.jsonl") for n in (1, 2)
    ]
    assert two.adapter == out / "round-1" / "bc" / "adapter" and two.sft.distinct


@pytest.mark.parametrize("learn", ["grpo", "rloo", "gigpo"])
def test_policy_gradients_go_on_from_the_agent_that_played_with_the_advantage_of_their_name(
    asked, learn
):
    out, log = asked(learn=learn, grpo=GRPO(steps=3, kl=0.1), reference="sft")
    _, one, two = (command for kind, command, *_ in log if kind == "train")
    assert [c.data for c in (one, two)] == [
        (out / f"round-{n}" / "rollouts.jsonl",) for n in (1, 2)
    ]
    assert (one.adapter, one.reference) == (out / "sft" / "adapter", None)
    assert (two.adapter, two.reference) == (
        out / "round-1" / learn / "adapter",
        out / "sft" / "adapter",
    )
    assert (two.grpo.advantage, two.grpo.steps, two.grpo.kl) == (learn, 3, 0.1)


def test_ppo_goes_on_from_the_agent_that_played_and_from_its_value_head(asked):
    """Which lies beside its adapter."""
    out, log = asked(learn="ppo", ppo=PPO(steps=3, kl=0.1), reference="sft")
    _, one, two = (command for kind, command, *_ in log if kind == "train")
    assert (one.adapter, one.reference) == (out / "sft" / "adapter", None)
    assert (two.adapter, two.reference) == (
        out / "round-1" / "ppo" / "adapter",
        out / "sft" / "adapter",
    )
    assert two.data == (out / "round-2" / "rollouts.jsonl",) and (two.ppo.steps, two.ppo.kl) == (
        3,
        0.1,
    )
    _, log = asked(learn="ppo", ppo=PPO(steps=3, step_weight=0.5), out=asked.path / "steps")
    *_, two = (command for kind, command, *_ in log if kind == "train")
    assert [path.name for path in two.data] == ["rollouts.jsonl", "values.jsonl"]


def test_a_curriculum_and_a_focus_decide_what_is_explored(asked, monkeypatch):
    """On validation enter-text is solved every second time, click-option never; so are they explored."""
    _, log = asked(curriculum=0.7, rounds=1)
    assert [entry[2] for entry in log if entry[0] == "collect"] == [None, {"enter-text": 3}]
    for rounds in (1, 2):
        _, log = asked(focus=True, rounds=rounds, out=asked.path / f"focus-{rounds}")
        counts = [entry[2] for entry in log if entry[0] == "collect"]
        assert counts == [None] + rounds * [{"enter-text": 5, "click-option": 1}]
    monkeypatch.setattr(loop.schedule, "outcome_variance", lambda episodes: {"click-option": 0.2})
    _, log = asked(
        focus=True, rounds=2, out=asked.path / "mixed"
    )  # the first round's own groups say more
    assert [entry[2] for entry in log if entry[0] == "collect"][2] == {
        "enter-text": 3,
        "click-option": 3,
    }
    of_one = loop.schedule.round_instances(
        LoopCommand(focus=True, instances=8),
        ("long", "short"),
        {"long": 1.0, "short": 0.5},
        {"short": 0.2},
    )
    assert of_one == {
        "long": 2,
        "short": 14,
    }  # no group of `long` was mixed, or could be: always solved
    of_none = loop.schedule.round_instances(
        LoopCommand(focus=True, instances=8), ("a", "b"), {"a": 1.0}, {}
    )
    assert of_none == {"a": 2, "b": 14}  # whose validation the browser gave up


def test_what_a_round_leaves_may_be_the_mean_of_what_it_began_with_and_what_it_trained(asked):
    out, log = asked(average=True)
    trained = [command for kind, command, *_ in log if kind == "train"]
    means = [out / f"round-{n}" / "average" / "adapter" for n in (1, 2)]
    adapters = [out / f"round-{n}" / "dpo" / "adapter" for n in (1, 2)]
    sft, one, mean_one, two, mean_two = trained
    assert (
        mean_one.adapters == (out / "sft" / "adapter", adapters[0])
        and mean_one.out == means[0].parent
    )
    assert mean_two.adapters == (means[0], adapters[1]) and mean_two.out == means[1].parent
    assert (one.adapter, two.adapter) == (out / "sft" / "adapter", means[0]) and not two.reference
    explored = [entry[1].adapter for entry in log if entry[0] == "collect"][1:]
    assert explored == [out / "sft" / "adapter", means[0]]  # and so does each round's exploring
    played = [entry[3] for entry in log if entry[0] == "play"]
    assert played == [
        out / "sft" / "adapter",
        *means,
        *[out / "sft" / "adapter"] * 2,
        *[means[0]] * 2,
    ]


def test_a_loop_goes_on_from_an_adapter_in_place_of_sft(asked):
    given = asked.path / "given"
    write_json(given / CONFIG, {})
    write_weights(given / WEIGHTS, {"a": torch.zeros(1)}, {"format": "pt"})
    out, log = asked(adapter=given, rounds=1)
    assert [kind for kind, *_ in log] == ["collect", "train", *["play"] * 4]
    (_, explore, _), (_, train), *plays = log
    assert (explore.policy, explore.split, explore.adapter) == ("model", "rollouts", given)
    assert train.adapter == given
    assert [(name, adapter) for _, _, name, adapter in plays[::2]] == [
        ("start", given),
        ("dpo", out / "round-1" / "dpo" / "adapter"),
    ]
    _, log = asked(
        adapter=given,
        rounds=1,
        explore="demonstrations",
        instances=24,
        dpo=DPO(pairs="eto"),
        out=asked.path / "eto",
    )
    assert [kind for kind, *_ in log][:3] == ["collect", "collect", "train"] and log[0][
        1
    ].policy == "expert"
    _, log = asked(adapter=given, rounds=1, average=True, out=asked.path / "mean")
    *_, mean = (command for kind, command, *_ in log if kind == "train")
    assert mean.adapters == (given, asked.path / "mean" / "round-1" / "dpo" / "adapter")
    write_weights(
        given / WEIGHTS, {"a": torch.zeros(1)}, {"format": "pt", "base_dtype": "bfloat16"}
    )
    with pytest.raises(
        ValueError, match="beside a base of bfloat16, so it has no mean with what is trained"
    ):
        asked(
            adapter=given, average=True, out=asked.path / "other", machine=Machine(dtype="float32")
        )
    asked(
        adapter=given,
        rounds=1,
        average=True,
        out=asked.path / "rounded",
        machine=Machine(dtype="rounded"),
    )


def test_self_play_begins_with_what_the_base_says_each_thing_once(asked):
    out, log = asked(demonstrations=0, rounds=1)
    (_, show, _), *_ = log
    assert (show.policy, show.split, show.adapter) == ("model", "demos", None)
    first = next(command for kind, command, *_ in log if kind == "train")
    assert first.sft.distinct and first.data == (out / "selfplay.jsonl",)


def test_the_same_instances_are_explored_in_every_round_by_other_samples(asked):
    _, log = asked(explore="same")
    show, *explored = (command for kind, command, *_ in log if kind == "collect")
    assert [(c.split, c.first, c.instances, c.index, c.group) for c in explored] == [
        ("rollouts", 0, 3, 0, 4),
        ("rollouts", 0, 3, 4, 4),
    ]


def test_the_demonstrations_own_instances_are_explored_and_their_episodes_are_the_golden_ones(
    asked,
):
    out, log = asked(explore="demonstrations", dpo=DPO(pairs="eto"), instances=24, group=1, seed=2)
    show, *explored = (entry[1:] for entry in log if entry[0] == "collect")
    assert (show[0].split, show[0].first, show[0].instances) == ("demos", 10_000, 2)
    everywhere = {"enter-text": 2, "click-option": 2}
    assert [(c.policy, c.split, c.first, c.index, counts) for c, counts in explored] == [
        ("model", "demos", 10_000, 0, everywhere),
        ("model", "demos", 10_000, 1, everywhere),
    ]
    first, *rounds = (command for kind, command, *_ in log if kind == "train")
    assert [command.golden for command in rounds] == [out / "demos.jsonl"] * 2


def test_demonstrations_in_total_are_dealt_out_and_explored_where_they_are(asked):
    _, log = asked(demonstrations_in_total=3, explore="demonstrations", instances=24, rounds=1)
    assert [counts for kind, _, counts in (e for e in log if e[0] == "collect")] == [
        {"enter-text": 2, "click-option": 1}
    ] * 2
    _, log = asked(demonstrations_in_total=1, rounds=1, out=asked.path / "one")
    assert [counts for kind, _, counts in (e for e in log if e[0] == "collect")] == [
        {"enter-text": 1},
        None,
    ]


def test_a_golden_episode_of_the_same_instances_is_of_the_round_and_its_index_is_0(asked):
    _, log = asked(explore="same", dpo=DPO(pairs="expert"))
    _, *golden = [c for kind, c, *_ in log if kind == "collect" and c.policy == "expert"]
    assert [(c.split, c.first, c.index, c.group) for c in golden] == [("rollouts", 0, 0, 1)] * 2


@pytest.mark.parametrize("explore, states", [(None, None), ("same", 1)])
def test_dagger_asks_the_experts_what_to_do_in_the_states_of_the_rounds_own_rollouts(
    asked, explore, states
):
    hot = Sampling(temperature=1.5)
    out, log = asked(
        learn="dagger", imitation=SFT(steps=2), explore=explore, states=states, sampling=hot
    )
    played = [c for kind, c, *_ in log if kind == "collect"][1:]
    assert [c.policy for c in played] == ["model", "dagger"] * 2
    for n in (1, 2):
        agent, expert = played[2 * n - 2 : 2 * n]
        assert expert.states == (agent.out,) and agent.out == out / f"round-{n}" / "rollouts.jsonl"
        assert (agent.sampling, expert.sampling) == (hot, Sampling())
        places = [(c.split, c.first, c.instances, c.group, c.index) for c in (agent, expert)]
        assert places[1] == (*places[0][:3], states or agent.group, 0) and expert.adapter is None


@pytest.mark.parametrize("explore", [None, "demonstrations"])
def test_for_dagger_pairs_the_agent_explores_freely_and_the_experts_answers_are_golden(
    asked, explore
):
    instances = {"instances": LoopCommand.instances} if explore else {}
    out, log = asked(dpo=DPO(pairs="dagger"), explore=explore, states=3, **instances)
    played = [c for kind, c, *_ in log if kind == "collect"][1:]
    assert [c.policy for c in played] == ["model", "dagger"] * 2
    _, *trained = [c for kind, c, *_ in log if kind == "train"]
    for n, command in enumerate(trained):
        agent, expert = played[2 * n : 2 * n + 2]
        assert agent.golden is None and agent.group == 4 and expert.states == (agent.out,)
        assert (expert.split, expert.first, expert.group) == (agent.split, agent.first, 3)
        assert (command.data, command.golden) == ((agent.out,), expert.out)
        assert expert.out == out / f"round-{n + 1}" / "dagger.jsonl"


@pytest.mark.parametrize(
    "options",
    [
        {"learn": "dagger"},
        *({"dpo": DPO(pairs=pairs)} for pairs in ("dagger", "expert", "stepwise")),
    ],
)
def test_a_task_without_an_expert_is_refused_before_anything_is_explored(
    asked, monkeypatch, options
):
    monkeypatch.delitem(EXPERTS, "click-option")
    with pytest.raises(
        ValueError, match="no scripted expert for click-option: take the tasks that have one"
    ):
        asked(demonstrations=0, **options)
    assert not (asked.path / "run").exists()


@pytest.mark.parametrize("keep", [False, True])
def test_failures_of_all_rounds_before_are_kept_if_asked_for(asked, keep):
    out, log = asked(explore="same", rounds=3, patience=3, keep_failures=keep)
    _, *rounds = [c for kind, c, *_ in log if kind == "train"]
    files = [out / f"round-{n}" / "rollouts.jsonl" for n in (1, 2, 3)]
    assert [c.data for c in rounds] == [(file,) for file in files]
    assert [c.failures for c in rounds] == [tuple(files[:n]) if keep else () for n in range(3)]


def test_segments_explore_from_golden_thirds_alone(asked):
    out, log = asked(dpo=DPO(pairs="segments"), rounds=1)
    golden, explored = [c for kind, c, *_ in log if kind == "collect"][1:]
    assert (golden.policy, explored.policy, explored.group) == ("expert", "model", 4)
    assert explored.golden_steps == "thirds"
    assert explored.golden == golden.out == out / "round-1" / "golden.jsonl"


@pytest.mark.parametrize("pairs, indices", [("stepwise", [0, 4]), ("mixture", [2, 6])])
def test_golden_steps_are_drawn_or_every_one_is_explored_if_asked_for(asked, pairs, indices):
    for steps in ("drawn", "every"):
        _, log = asked(
            dpo=DPO(pairs=pairs), golden_steps=steps, explore="same", out=asked.path / steps
        )
        played = [c for kind, c, *_ in log if kind == "collect" and c.golden]
        assert [(c.golden_steps, c.index) for c in played] == [(steps, index) for index in indices]


def test_for_pairs_by_value_the_steps_of_the_rollouts_are_continued_by_who_played_them(asked):
    out, log = asked(dpo=DPO(pairs="value"), values=3, explore="same")
    _, one, onward, two, _ = [c for kind, c, *_ in log if kind == "collect"]
    assert (onward.values, onward.recorded) == (
        3,
        one.out,
    ) and onward.out == out / "round-1" / "values.jsonl"
    assert (onward.adapter, onward.sampling, onward.seed) == (one.adapter, one.sampling, one.seed)
    assert one.values is None and two.index == one.group
    trained = [c for kind, c in (entry[:2] for entry in log) if kind == "train"][1]
    assert trained.data == (one.out, onward.out) and trained.golden is None


@pytest.mark.parametrize("pairs, counted", [("value", 4), ("stepwise", 3)])
def test_what_began_with_given_steps_counts_as_exploring_where_a_task_has_nothing_else(
    asked, monkeypatch, pairs, counted
):
    seen = []
    monkeypatch.setattr(
        loop.schedule, "outcome_variance", lambda episodes: seen.append(episodes) or {}
    )
    asked(dpo=DPO(pairs=pairs), rounds=1)
    assert [len(episodes) for episodes in seen] == [counted]
    assert {e.task for e in seen[0]} == {"enter-text", "click-option"}
