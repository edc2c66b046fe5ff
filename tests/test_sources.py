"""What a stage learns from: other references, golden episodes, weights, unpaired outcomes."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sft_dpo import HERE, WRONG, adapter, dpo, episodes_file, finished, folder  # noqa: F401 (a fixture)

from minidpo.config import DPO, SFT, DPOCommand, SFTCommand
from minidpo.data.episodes import read
from minidpo.data.pairs import NothingToLearn, unpaired
from minidpo.data.prompt import dialogues_of
from minidpo.data.trl_files import read_preferences
from minidpo.learning.dpo import dpo as train_dpo
from minidpo.learning.dpo import load_pairs
from minidpo.learning.explain import movements
from minidpo.learning.preferences import pair_loss_of, tokenise
from minidpo.learning.sft import Demonstrations, imitated, sft_batches, sft_objective, valued
from minidpo.learning.sft import sft as train_sft
from minidpo.memory import loading, lora
from minidpo.memory.lora import LoRAConfig
from minidpo.objective.losses import advantage_weights
from minidpo.results.replay import trained_pairs
from minidpo.system.files import read_json, write_json

rewards = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0]), st.integers(0, 3)), min_size=1, max_size=12
)


def weights(pairs, temperature=0.5):
    reward, group = zip(*pairs)
    return advantage_weights(
        torch.tensor(reward, dtype=torch.float64), torch.tensor(group), temperature
    )


@given(rewards, st.floats(0.05, 20))
def test_advantage_weights_have_mean_1_and_rise_with_the_reward_within_a_group(pairs, temperature):
    weight = weights(pairs, temperature)
    assert weight.mean().item() == pytest.approx(1)
    for (r, g), w in zip(pairs, weight.tolist()):
        for (other_r, other_g), other in zip(pairs, weight.tolist()):
            if g == other_g:
                assert w / other == pytest.approx(math.exp((r - other_r) / temperature), rel=1e-9)


@given(rewards, st.floats(-5, 5), st.integers(0, 3))
def test_a_groups_rewards_may_all_be_shifted_without_changing_a_weight(pairs, shift, group):
    moved = [(r + shift * (g == group), g) for r, g in pairs]
    torch.testing.assert_close(weights(moved), weights(pairs))


def test_a_group_without_a_difference_weighs_what_the_mean_success_does_and_a_hot_temperature_levels_all():
    pairs = [(1.0, 0), (0.0, 0), (1.0, 1), (1.0, 1), (0.0, 2)]
    weight = weights(pairs)
    assert weight[2] == weight[3] == weight[4] and weight[1] < weight[2] < weight[0]
    torch.testing.assert_close(weights(pairs, 1e9), torch.ones(5, dtype=torch.float64))
    with pytest.raises(ValueError, match="temperature must be finite and > 0, got 0"):
        weights(pairs, 0)


def train(folder, out, data="rollouts.jsonl", start=None, dropout=0.0, **options):  # noqa: F811
    options = SFT(**{"steps": 3, "lr": 1e-3, "warmup": 0, "batch": 8, **options})
    data = tuple(folder / name for name in data.split())
    train_sft(
        SFTCommand(
            str(folder / "base"),
            data,
            start and folder / start,
            out,
            sft=options,
            lora=LoRAConfig(rank=4, dropout=dropout),
            machine=HERE,
        )
    )
    return finished(out)


def test_a_failure_is_imitated_up_to_the_step_that_lost_the_value():
    """Before "b" half of the continuations solve, behind it none; what came after it teaches nothing."""
    failed = tiny.episode("abc", "failed", index=0)
    onward = [
        tiny.episode(said, outcome, index=n, forced=forced)
        for n, (said, outcome, forced) in enumerate(
            [("ax", "solved", 0), ("ax", "solved", 1), ("abc", "failed", 1), ("abc", "failed", 2)],
            start=1,
        )
    ]
    episodes, by_turn = valued([failed, *onward], ())
    assert [e.said for e in episodes] == [
        ("a", "b", "c"),
        ("a", "x"),
    ]  # those whole and the agent's own
    assert [weights.tolist() for weights in by_turn] == [[1.0, 0.0, 0.0], [1.0, 2.0]]
    assert valued([failed, *onward[:2]], ())[0] == [onward[0]]  # nobody went on behind "ab"
    lost = tiny.episode("b", "failed", index=9, seed=2)
    assert valued([failed, *onward, lost], ())[0] == episodes  # no step of it counts
    by_script = [tiny.episode("ay", policy="expert"), tiny.episode("ay", policy="dagger", forced=1)]
    again, same = valued(
        [failed, *onward, *by_script], ()
    )  # how often the agent solves they do not say
    assert again == episodes and [w.tolist() for w in same] == [w.tolist() for w in by_turn]


def test_where_all_solve_weighing_by_value_is_plain_imitation_and_else_a_lost_step_has_no_gradient(
    folder, tmp_path
):
    """Bit for bit: the same adapter and the same log."""
    right, both = (tiny.CLICK_2,), (tiny.CLICK_1, tiny.CLICK_2)
    solved = [
        tiny.episode(said, seed=seed, index=n, forced=forced)
        for seed in range(3)
        for n, (said, forced) in enumerate([(right, 0), (both, 0), (both, 1)])
    ]
    episodes_file(folder / "all.jsonl", solved)
    episodes_file(folder / "own.jsonl", [e for e in solved if not e.forced])
    weighed = train(folder, tmp_path / "value", "all.jsonl", weighting="value")
    assert weighed == train(folder, tmp_path / "plain", "own.jsonl")
    failed = tiny.episode((tiny.CLICK_1, WRONG), "failed", index=1)
    for continuations, says in (
        ([], "no episode with continuations .* for sft.weighting"),
        ([replace(failed, index=2, forced=1)], "each step has the value 0"),
    ):
        episodes_file(folder / "lost.jsonl", [failed, *continuations])
        with pytest.raises(NothingToLearn, match=f"lost.jsonl: {says}"):
            train(folder, tmp_path / "lost", "lost.jsonl", weighting="value")


def test_each_token_counts_by_the_weight_of_its_turn(folder):  # noqa: F811
    episodes = [
        tiny.episode((tiny.CLICK_1, tiny.CLICK_2), index=0),
        tiny.episode((WRONG,), index=1),
    ]
    dialogues, names = dialogues_of(episodes, tiny.chat(), 1024)
    by_turn = [torch.tensor([0.0, 2.0]), torch.tensor([3.0])]
    (batch,) = sft_batches(
        Demonstrations(dialogues, names, [1.0, 1.0], by_turn), [1, 0], torch.device("cpu"), 4096
    )
    written = [[turn for turn in dialogue.turns if turn >= 0] for dialogue in dialogues]
    expected = [3.0] * len(written[1]) + [2.0 * turn for turn in written[0]]
    assert batch.trees.weight.tolist() == expected and batch.step_tokens == len(expected)


def test_fine_tuning_that_goes_on_begins_where_the_adapter_stands(folder, tmp_path):  # noqa: F811
    _, fresh = train(folder, tmp_path / "fresh")
    kept, on = train(folder, tmp_path / "on", start="adapter")
    assert on[0]["loss"] != fresh[0]["loss"]
    given_config = lora.read_config(folder / "adapter")
    assert lora.read_config(tmp_path / "on" / "adapter") == given_config
    model, _ = loading.open_base(str(folder / "base"), HERE)
    lora.load(model, folder / "adapter")
    before = {name: tensor.tolist() for name, tensor in lora.adapter_tensors(model).items()}
    assert before.keys() == kept.keys() and before != kept


def test_several_files_are_one_and_what_was_said_twice_can_count_once(folder, tmp_path):  # noqa: F811
    twice, log = train(
        folder, tmp_path / "twice", "demos.jsonl demos.jsonl", batch=4, distinct=True
    )
    once, again = train(folder, tmp_path / "once", "demos.jsonl", batch=4)
    assert twice == once and log == again
    _, doubled = train(folder, tmp_path / "doubled", "demos.jsonl demos.jsonl", batch=4)
    assert doubled != log  # four of six against four of three: other epochs


def test_weighted_imitation_reads_failures_too_and_learns_the_successes(folder):  # noqa: F811
    """Both instances have 2 successes and 2 failures: weights e and 1/e over (e + 1/e)/2."""
    group = imitated(read(folder / "rollouts.jsonl"), SFT(weighting="advantage"))
    assert [round(w, 4) for w in group[1]] == [1.7616, 1.7616, 0.2384, 0.2384] * 2
    _, cold = imitated(
        read(folder / "rollouts.jsonl"), SFT(weighting="advantage", temperature=0.25)
    )
    assert cold[0] / cold[2] == pytest.approx(math.exp(1 / 0.25))
    assert len(imitated(read(folder / "rollouts.jsonl"), SFT())[0]) == 4


def test_what_is_selected_is_weighted_by_its_reward():
    rewards = enumerate((0.8, 0.4, 0.5))
    played = [replace(tiny.episode(outcome="failed", index=n), reward=r) for n, r in rewards]
    chosen, weight = imitated(played, SFT(weighting="reward", threshold=0.5))
    assert [e.index for e in chosen] == [0, 2] and weight == [0.8, 0.5]


def test_a_threshold_that_nothing_reaches_says_what_to_change(folder, tmp_path):  # noqa: F811
    near = [replace(tiny.episode(outcome="failed", index=n), reward=0.2 * n) for n in range(3)]
    episodes_file(tmp_path / "near.jsonl", near)
    with pytest.raises(
        NothingToLearn,
        match="near.jsonl: none of 3 episodes is to be imitated, the highest "
        "reward is 0.4: explore more, lower the threshold or raise",
    ):
        train(tmp_path, tmp_path / "out", "near.jsonl", weighting="reward", threshold=0.5)


def test_reward_weighted_imitation_trains_on_failures_that_were_paid(folder, tmp_path):  # noqa: F811
    played = read(folder / "rollouts.jsonl")
    episodes_file(
        folder / "paid.jsonl", [replace(e, reward=1.0 if e.solved else 0.5) for e in played]
    )
    _, solved = train(folder, tmp_path / "solved", "paid.jsonl")
    _, evolved = train(folder, tmp_path / "evolved", "paid.jsonl", weighting="reward")
    assert evolved == solved
    _, more = train(folder, tmp_path / "more", "paid.jsonl", weighting="reward", threshold=0.5)
    assert more != solved and all(math.isfinite(record["loss"]) for record in more)


def test_an_episodes_weight_multiplies_its_own_log_prob(folder):  # noqa: F811
    """Scores of -1, -2 .. and weights of 1, 2 .. by episode, in micro-batches of one or two."""
    dialogues, names = dialogues_of(read(folder / "rollouts.jsonl"), tiny.chat(), 1024)
    weights, picked, loss = [n + 1.0 for n in range(len(dialogues))], [5, 0, 3], 0.0
    for batch in sft_batches(
        Demonstrations(dialogues, names, weights), picked, torch.device("cpu"), 400
    ):
        scores = torch.tensor([-float(1 + names.index(name)) for name in batch.names])
        loss += sft_objective(batch, scores)[0].item()
    written = sum(turn >= 0 for i in picked for turn in dialogues[i].turns)
    assert loss == pytest.approx((6 * 6 + 1 * 1 + 4 * 4) / written)


def test_policy_and_reference_exchanged_the_first_margin_changes_its_sign(folder, tmp_path):  # noqa: F811
    train(folder, tmp_path / "other", start="adapter")

    def first(start, reference, out):
        train_dpo(
            DPOCommand(
                str(folder / "base"),
                start,
                reference=reference,
                out=out,
                machine=HERE,
                data=(folder / "rollouts.jsonl",),
                dpo=DPO(steps=1, warmup=0, lr=1e-4),
            )
        )
        return finished(out)[1][0]

    ours, theirs = folder / "adapter", tmp_path / "other" / "adapter"
    there, back = first(ours, theirs, tmp_path / "1"), first(theirs, ours, tmp_path / "2")
    assert abs(there["margin"]) > 1e-4 and there["margin"] == pytest.approx(
        -back["margin"], rel=1e-3
    )
    assert first(ours, ours, tmp_path / "3")["loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_dropout_is_off_whether_a_reference_is_named_or_not(folder, tmp_path):  # noqa: F811
    train(folder, tmp_path / "sft", steps=1, dropout=0.5)
    start = tmp_path / "sft" / "adapter"
    logs = []
    for n, reference in enumerate((None, start)):
        train_dpo(
            DPOCommand(
                str(folder / "base"),
                start,
                reference=reference,
                out=tmp_path / str(n),
                data=(folder / "rollouts.jsonl",),
                machine=HERE,
                dpo=DPO(steps=2, warmup=0, lr=1e-3),
            )
        )
        logs.append(finished(tmp_path / str(n)))
    assert logs[0] == logs[1] and logs[0][1][0]["loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_the_nll_term_imitates_no_failure(folder, tmp_path):  # noqa: F811
    """Two failures, one nearer: with the NLL term and without, the first step is the same."""
    played = [
        tiny.episode((said,), "failed", seed=seed, index=n, progress=float(n))
        for seed in range(2)
        for n, said in enumerate((WRONG, tiny.CLICK_1))
    ]
    episodes_file(tmp_path / "failed.jsonl", played)
    logs = []
    for nll in (0.0, 5.0):
        train_dpo(
            DPOCommand(
                str(folder / "base"),
                folder / "adapter",
                data=(tmp_path / "failed.jsonl",),
                out=tmp_path / str(nll),
                machine=HERE,
                dpo=DPO(steps=2, warmup=0, nll=nll, dense=True),
            )
        )
        logs.append(finished(tmp_path / str(nll)))
    assert logs[0] == logs[1]


def test_rehearsal_adds_nll_times_the_loss_of_sft(folder, tmp_path):  # noqa: F811
    """The first step's loss grows by nll times that of SFT on these episodes."""
    solved = [
        tiny.episode((tiny.CLICK_1, tiny.CLICK_2)[n:], seed=seed) for n, seed in enumerate((7, 8))
    ]
    shared = {"data": (episodes_file(tmp_path / "solved.jsonl", solved),), "machine": HERE}
    train_sft(
        SFTCommand(
            str(folder / "base"),
            adapter=folder / "adapter",
            out=tmp_path / "sft",
            **shared,
            lora=LoRAConfig(rank=4),
            sft=SFT(steps=1, batch=2, lr=1e-4, warmup=0),
        )
    )
    imitation, logs = finished(tmp_path / "sft")[1][0]["loss"], []
    for rehearse in (0, 3):
        train_dpo(
            DPOCommand(
                str(folder / "base"),
                folder / "adapter",
                out=tmp_path / str(rehearse),
                **{**shared, "data": (folder / "rollouts.jsonl", *shared["data"])},
                dpo=DPO(steps=2, warmup=0, nll=0.5, rehearse=rehearse, lr=1e-3),
            )
        )
        logs.append(finished(tmp_path / str(rehearse))[1])
    train_dpo(
        DPOCommand(
            str(folder / "base"),
            folder / "adapter",
            out=tmp_path / "in-turn",
            **{**shared, "data": (folder / "rollouts.jsonl", *shared["data"])},
            dpo=DPO(steps=2, warmup=0, nll=0.5, rehearse=1, lr=1e-9),
        )
    )
    each = [record["rehearsal"] for record in finished(tmp_path / "in-turn")[1]]
    assert each[0] != pytest.approx(each[1], rel=1e-3)  # another episode in each step
    assert "rehearsal" not in logs[0][0]
    assert logs[1][0]["rehearsal"] == pytest.approx(0.5 * imitation, rel=1e-5)
    assert logs[1][0]["loss"] - logs[0][0]["loss"] == pytest.approx(0.5 * imitation, rel=1e-4)
    assert logs[1][1]["rehearsal"] < logs[1][0]["rehearsal"]


def test_golden_episodes_of_other_instances_are_refused(folder, tmp_path):  # noqa: F811
    episodes_file(tmp_path / "golden.jsonl", [tiny.episode(seed=77, policy="expert")])
    with pytest.raises(
        ValueError, match="golden.jsonl: no solved episode of an instance that was explored"
    ):
        train_dpo(
            DPOCommand(
                str(folder / "base"),
                folder / "adapter",
                data=(folder / "rollouts.jsonl",),
                golden=tmp_path / "golden.jsonl",
                out=tmp_path / "run",
                machine=HERE,
                dpo=DPO(pairs="mixture"),
            )
        )


def test_a_reference_that_is_named_is_the_one_it_starts_from_by_default(folder, tmp_path):  # noqa: F811
    plain = dpo(folder, tmp_path / "plain")
    train_dpo(
        DPOCommand(
            str(folder / "base"),
            folder / "adapter",
            reference=folder / "adapter",
            data=(folder / "rollouts.jsonl",),
            out=tmp_path / "named",
            machine=HERE,
            dpo=DPO(steps=5, lr=1e-4, warmup=2, batch=4, save_every=2),
        )
    )
    assert finished(tmp_path / "named") == plain


def spoken(episodes):
    """The same, whose actions are their words."""
    return [
        replace(e, turns=tuple(replace(turn, action=turn.answer) for turn in e.turns))
        for e in episodes
    ]


@pytest.mark.parametrize(
    "source, counts",
    [
        ("expert", {"expert": 8}),
        ("outcome", {"outcome": 8}),
        ("stepwise", {"stepwise": 4}),
        ("unpaired", {"unpaired": 4}),
        ("efficient", {"efficient": 2}),
    ],
)
def test_every_source_trains_and_its_pairs_are_on_record(folder, tmp_path, source, counts):  # noqa: F811
    """Each of 2 instances: successes Submit, Field-Submit; failures Wrong, Field-Wrong; 2 golden episodes."""
    golden = [
        tiny.episode(
            (tiny.CLICK_2,) * n,
            seed=seed,
            policy="expert",
            index=n,
            instruction=f"Click on Submit, {seed}.",
        )
        for seed in range(2)
        for n in (1, 2)
    ]
    episodes_file(tmp_path / "golden.jsonl", spoken(golden))
    episodes_file(tmp_path / "rollouts.jsonl", spoken(read(folder / "rollouts.jsonl")))
    loss = {"loss": "kto"} if source == "unpaired" else {"pairs_per_instance": 9}
    file = tmp_path / "golden.jsonl" if source in ("expert", "stepwise") else None
    train_dpo(
        DPOCommand(
            str(folder / "base"),
            folder / "adapter",
            data=(tmp_path / "rollouts.jsonl",),
            golden=file,
            out=tmp_path / "run",
            machine=HERE,
            dpo=DPO(steps=2, warmup=0, batch=4, pairs=source, **loss),
        )
    )
    told = [
        json.loads(line) for line in (tmp_path / "run" / "pairs.jsonl").read_text().splitlines()
    ]
    assert {source: len(told)} == counts and {pair["source"] for pair in told} == {source}
    assert all(
        pair["chosen"]["policy"] == ("expert" if source == "expert" else pair["chosen"]["policy"])
        for pair in told
    )
    assert [record["step"] for record in finished(tmp_path / "run")[1]] == [1, 2]


def test_a_margin_trains_alike_where_rewards_are_0_and_1_and_on_near_misses_where_they_are_not(
    folder, tmp_path
):
    plain = dpo(folder, tmp_path / "verdict")
    assert dpo(folder, tmp_path / "reward", margin=0.5) == plain
    with pytest.raises(NothingToLearn, match="at most they are 1: set the margin below that$"):
        dpo(folder, tmp_path / "wide", margin=1.0)
    failed = [
        replace(e, outcome="failed", reward=e.reward / 2) for e in read(folder / "rollouts.jsonl")
    ]
    episodes_file(tmp_path / "failed.jsonl", failed)
    command = DPOCommand(
        str(folder / "base"),
        folder / "adapter",
        data=(tmp_path / "failed.jsonl",),
        out=tmp_path / "near",
        machine=HERE,
        dpo=DPO(steps=2, warmup=0, batch=4, margin=0.0, nll=1.0),
    )
    train_dpo(command)
    told = [
        json.loads(line) for line in (tmp_path / "near" / "pairs.jsonl").read_text().splitlines()
    ]
    assert {(pair["chosen"]["reward"], pair["rejected"]["reward"]) for pair in told} == {(0.5, 0.0)}
    first = finished(tmp_path / "near")[1][0]
    assert first["loss"] == pytest.approx(math.log(2))  # a failure is preferred, and not imitated


def test_earlier_failures_are_on_record_and_a_run_knows_them_by_content(folder, tmp_path):  # noqa: F811
    """Now each instance is solved every time; before, each was failed twice by another agent."""
    played = [replace(e, policy="before@1") for e in read(folder / "rollouts.jsonl")]
    episodes_file(tmp_path / "before.jsonl", played)
    episodes_file(tmp_path / "now.jsonl", [replace(e, policy="now@2") for e in played if e.solved])
    command = DPOCommand(
        str(folder / "base"),
        folder / "adapter",
        data=(tmp_path / "now.jsonl",),
        failures=(tmp_path / "before.jsonl",),
        out=tmp_path / "run",
        machine=HERE,
        dpo=DPO(steps=2, warmup=0, batch=4),
    )
    with pytest.raises(NothingToLearn):
        train_dpo(replace(command, failures=()))
    train_dpo(command)
    pairs = trained_pairs(tmp_path / "run")
    assert {(p.chosen.policy, p.rejected.policy) for p in pairs} == {("now@2", "before@1")}
    assert len(pairs) == 8
    (tmp_path / "before.jsonl").rename(tmp_path / "moved.jsonl")
    train_dpo(replace(command, failures=(tmp_path / "moved.jsonl",)))
    episodes_file(tmp_path / "other.jsonl", [e for e in played if e.index > 1 and e.seed])
    with pytest.raises(ValueError, match=r"other settings \(failures of other content\)"):
        train_dpo(replace(command, failures=(tmp_path / "other.jsonl",)))
    episodes_file(tmp_path / "elsewhere.jsonl", [replace(e, seed=99) for e in played])
    with pytest.raises(
        ValueError, match="elsewhere.jsonl: no episode of an instance that was explored"
    ):
        train_dpo(replace(command, failures=(tmp_path / "elsewhere.jsonl",)))
    with pytest.raises(NothingToLearn):  # nothing failed before: so nothing is added
        shutil.copyfile(tmp_path / "now.jsonl", tmp_path / "copy.jsonl")
        load_pairs(replace(command, failures=(tmp_path / "copy.jsonl",)), "end")
    unpaired = replace(
        command, failures=(tmp_path / "other.jsonl",), dpo=DPO(loss="kto", pairs="unpaired")
    )
    assert {p.rejected.policy for p in load_pairs(unpaired, "end")} == {"before@1"}


def test_a_dpo_run_begun_before_there_were_such_options_goes_on(folder, tmp_path):  # noqa: F811
    plain = dpo(folder, tmp_path / "run")
    config = read_json(tmp_path / "run" / "config.json")
    for name in ("failures", "failures_sha256"):
        del config[name]
    write_json(tmp_path / "run" / "config.json", config)
    assert dpo(folder, tmp_path / "run") == plain
    assert len(trained_pairs(tmp_path / "run")) == 8


def relabelled(*said, forced, seed=1, outcome="solved"):
    return tiny.episode(said, outcome, seed=seed, policy="dagger", forced=forced, index=seed)


def test_of_a_relabelled_episode_the_experts_first_answer_is_imitated_and_nothing_else():
    both = (tiny.CLICK_1, WRONG, tiny.CLICK_2)
    unsolved, ended = relabelled(*both, forced=1, outcome="limit"), relabelled(*both, forced=3)
    chosen, _ = imitated([relabelled(*both, forced=1), unsolved, ended], SFT())
    assert [e.said for e in chosen] == [both[:2]]
    (given_too,), _ = dialogues_of([replace(chosen[0], policy="tiny")], tiny.chat(), 1024)
    (counted,), _ = dialogues_of(chosen, tiny.chat(), 1024)
    assert counted.ids == given_too.ids
    assert set(counted.turns) == {-1, 0} and set(given_too.turns) == {-1, 0, 1}
    assert [turn >= 0 for turn in counted.turns] == [turn == 1 for turn in given_too.turns]
    again = [
        relabelled(tiny.CLICK_1, tiny.CLICK_2, end, forced=1, seed=1)
        for end in (WRONG, tiny.CLICK_1)
    ]
    assert len(imitated(again, SFT(distinct=True))[0]) == 1
    advantage, _ = imitated([unsolved, *again], SFT(weighting="advantage"))
    assert [len(e.turns) for e in advantage] == [2, 2]


def test_relabelled_states_train_beside_demonstrations_and_are_no_rollouts(folder, tmp_path):  # noqa: F811
    states = [relabelled(*[tiny.CLICK_1] * n, tiny.CLICK_2, forced=n, seed=n) for n in range(3)]
    shutil.copy(folder / "demos.jsonl", tmp_path)
    shutil.copytree(folder / "base", tmp_path / "base")
    episodes_file(tmp_path / "dagger.jsonl", states)
    _, plain = train(tmp_path, tmp_path / "plain", "demos.jsonl")
    _, more = train(tmp_path, tmp_path / "more", "demos.jsonl dagger.jsonl")
    assert more != plain and all(math.isfinite(record["loss"]) for record in more)
    shown, rollouts = tmp_path / "dagger.jsonl", (folder / "rollouts.jsonl",)
    for command in (
        DPOCommand(data=(shown,)),
        DPOCommand(data=rollouts, golden=shown, dpo=DPO(pairs="expert")),
        DPOCommand(data=(shown,), golden=shown, dpo=DPO(pairs="dagger")),
    ):
        with pytest.raises(
            ValueError, match="an expert's answer to a state .* is imitated by train.py sft"
        ):
            load_pairs(command, "end")
    for golden, says in (
        (None, "needs --golden FILE: .*, by collect.py --policy dagger$"),
        (folder / "demos.jsonl", "demos.jsonl: .* needs experts' answers in the states"),
    ):
        with pytest.raises(
            ValueError, match=f"--dpo.pairs dagger {says}" if golden is None else says
        ):
            load_pairs(DPOCommand(data=rollouts, golden=golden, dpo=DPO(pairs="dagger")), "end")


@pytest.fixture
def answers(tmp_path, folder):  # noqa: F811
    """Of each of two instances the failures Wrong and Field-Wrong, and the expert in both states."""
    failed = [
        tiny.episode((tiny.CLICK_1,) * n + (WRONG,), "failed", seed=seed, index=n)
        for seed in (0, 1)
        for n in (0, 1)
    ]
    experts = [
        replace(relabelled(*[tiny.CLICK_1] * n, tiny.CLICK_2, forced=n, seed=seed), index=n)
        for seed in (0, 1)
        for n in (0, 1)
    ]
    return DPOCommand(
        str(folder / "base"),
        folder / "adapter",
        out=tmp_path / "run",
        machine=HERE,
        data=(episodes_file(tmp_path / "agent.jsonl", spoken(failed)),),
        golden=episodes_file(tmp_path / "answers.jsonl", spoken(experts)),
        dpo=DPO(steps=2, warmup=0, batch=4, nll=1.0, pairs="dagger"),
    )


def test_of_a_dagger_pair_the_two_last_answers_count_and_what_the_agent_did_before_is_given(
    answers,
):
    pairs = load_pairs(answers, "end")
    for until in ("end", "token"):
        data = tokenise(pairs, tiny.chat(), 1024, until)
        for pair, (c, r) in zip(pairs, data.pairs, strict=True):
            chosen, rejected = data.dialogues[c], data.dialogues[r]
            begin = chosen.turns.index(0)
            assert chosen.ids[:begin] == rejected.ids[:begin]
            assert set(chosen.turns[:begin]) == set(rejected.turns[:begin]) == {-1}
            assert rejected.turns[begin] == 0 and {*chosen.turns, *rejected.turns} == {-1, 0}
            assert (tiny.CLICK_1 in tiny.chat().decode(chosen.ids[:begin])) == (
                pair.chosen.forced == 1
            )


def letter_by_letter(episode):
    """As if the agent had sampled each byte as a token of its own, and the end."""
    chat = tiny.chat()
    return replace(
        episode,
        turns=tuple(
            replace(
                turn, ids=(*(i for letter in turn.answer for i in chat.encode(letter)), chat.end)
            )
            for turn in episode.turns
        ),
    )


def test_what_a_dagger_pair_shares_is_as_it_was_sampled_in_training_and_in_the_report(answers):
    agent = [letter_by_letter(e) for e in read(answers.data[0])]
    answers.data[0].unlink()
    episodes_file(answers.data[0], agent)
    pairs = load_pairs(answers, "end")
    data = tokenise(pairs, tiny.chat(), 1024, "end")
    for pair, (c, r) in zip(pairs, data.pairs, strict=True):
        chosen, rejected = data.dialogues[c], data.dialogues[r]
        begin = chosen.turns.index(0)
        assert (
            chosen.ids[:begin] == rejected.ids[:begin]
            and chosen.turns[:begin] == rejected.turns[:begin]
        )
        if pair.chosen.forced:
            given = pair.rejected.turns[0].ids
            assert len(given) > len(tiny.chat().encode(tiny.CLICK_1)) + 1
            assert any(tuple(chosen.ids[t : t + len(given)]) == given for t in range(begin))
    train_dpo(answers)
    assert trained_pairs(answers.out) == pairs


def test_what_a_pair_by_value_shares_is_shown_as_it_was_sampled(answers):
    agent = [letter_by_letter(tiny.episode((tiny.CLICK_1, WRONG), "failed"))]
    onward = [tiny.episode((tiny.CLICK_1, tiny.CLICK_2), index=1, forced=1)]
    answers.data[0].unlink()
    episodes_file(answers.data[0], spoken([*agent, *onward]))
    command = replace(answers, golden=None, dpo=replace(answers.dpo, pairs="value"))
    train_dpo(command)
    assert trained_pairs(command.out) == load_pairs(command, pair_loss_of(command.dpo).until) != []


def test_where_no_expert_solved_from_any_state_there_is_nothing_to_learn(answers):
    lost = [replace(e, outcome="limit") for e in read(answers.golden)]
    answers.golden.unlink()
    episodes_file(answers.golden, lost)
    with pytest.raises(NothingToLearn, match="no solved episode .* --policy dagger makes them"):
        load_pairs(answers, "end")


def test_dagger_pairs_that_are_written_for_trl_count_what_we_count(answers):
    train_dpo(replace(answers, export="trl"))
    ours = tokenise(load_pairs(answers, "end"), tiny.chat(), 1024, "end")
    rows = read_preferences([answers.out / "pairs-trl.jsonl"], "end")
    theirs = tokenise(rows, tiny.chat(), 1024, "end")
    assert {len(row.chosen.messages) - row.chosen.given for row in rows} == {1}
    sides = [[[data.dialogues[d] for d in pair] for pair in data.pairs] for data in (ours, theirs)]
    assert sides[0] == sides[1] and ours.solved == theirs.solved


def test_experts_answers_are_preferred_beside_an_nll_term_and_the_pairs_can_be_shown(answers):
    train_dpo(answers)
    told = [json.loads(line) for line in (answers.out / "pairs.jsonl").read_text().splitlines()]
    assert {
        (pair["source"], pair["chosen"]["policy"], pair["chosen"]["forced"]) for pair in told
    } == {("dagger", "dagger", 0), ("dagger", "dagger", 1)}
    first = finished(answers.out)[1][0]
    assert first["loss"] > math.log(2) and first["margin"] == pytest.approx(0, abs=1e-5)
    shown = trained_pairs(answers.out)
    adapter = answers.out / "adapter"
    for side in movements(answers.model, HERE, answers.adapter, adapter, shown):
        assert all({token.turn for token in tokens} == {-1, 0} for tokens in side.values())


def test_unpaired_outcomes_can_be_without_noise_or_noise_alone(folder):  # noqa: F811
    """Failures of an instance: Wrong, and Field-Wrong, which acts twice alike on an unchanged page."""
    command = DPOCommand(
        str(folder / "base"), folder / "adapter", data=(folder / "rollouts.jsonl",)
    )
    lengths = {
        name: {
            len(pair.rejected.turns)
            for pair in load_pairs(
                replace(command, dpo=DPO(loss="kto", pairs="unpaired", **{name: True})), "end"
            )
        }
        for name in ("clean", "noisy")
    }
    assert lengths == {"clean": {1}, "noisy": {2}}


def test_pairs_can_be_clean_or_noisy_and_few_of_each_task(folder):  # noqa: F811
    command = DPOCommand(
        str(folder / "base"), folder / "adapter", data=(folder / "rollouts.jsonl",)
    )

    def found(**options):
        return load_pairs(replace(command, dpo=DPO(**options)), "end")

    assert [
        {len(pair.rejected.turns) for pair in found(**{name: True})} for name in ("clean", "noisy")
    ] == [{1}, {2}]
    assert [len(found(pairs_per_task=most)) for most in (1, 3)] == [1, 3]


def test_unpaired_outcomes_may_be_the_same_words(tmp_path):
    """What once solved and once failed, by the page's own chance, is judged each time."""
    twice = [
        tiny.episode(outcome=outcome, index=n) for n, outcome in enumerate(("solved", "failed"))
    ]
    data = tokenise(unpaired(twice, seed=1), tiny.chat(), 999, "end")
    assert data.pairs == [(0, 0)] and len(data.dialogues) == 1


@pytest.mark.parametrize(
    "options, golden, says",
    [
        ({"pairs": "expert"}, False, "--dpo.pairs expert needs --golden FILE"),
        ({"pairs": "outcome"}, True, "--dpo.pairs outcome takes no --golden"),
        (
            {"pairs": "unpaired", "loss": "kto", "until": "turn"},
            False,
            "--dpo.until turn cuts where two",
        ),
    ],
)
def test_sources_that_lack_something_say_so_before_the_model_is_loaded(
    folder, tmp_path, monkeypatch, options, golden, says
):
    monkeypatch.setattr(
        "minidpo.memory.loading.open_model", lambda *_: pytest.fail("the model was loaded")
    )
    with pytest.raises(ValueError, match=says):
        train_dpo(
            DPOCommand(
                str(folder / "base"),
                folder / "adapter",
                data=(folder / "rollouts.jsonl",),
                golden=folder / "demos.jsonl" if golden else None,
                out=tmp_path / "run",
                dpo=DPO(**options),
                machine=HERE,
            )
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options, says",
    [
        ({"pairs": "unpaired"}, "as only the loss kto does"),
        ({"pairs": "unpaired", "loss": "kto", "dense": True}, "as only the loss kto does"),
        (
            {"pairs": "unpaired", "loss": "kto", "pairs_per_task": 3},
            "no pairs for .* pairs_per_task to count",
        ),
        (
            {"pairs": "unpaired", "loss": "kto", "pairs_per_instance": 9},
            "no pairs for pairs_per_instance",
        ),
        ({"loss": "orpo", "dense": True}, "orpo imitates the chosen"),
        (
            {"pairs": "unpaired", "loss": "kto", "nll": 1.0, "rehearse": 4},
            "no solved episode to rehearse",
        ),
        ({"rehearse": 4}, "rehearse imitates with the weight of nll, which is 0"),
    ],
)
def test_options_of_pairs_that_contradict_each_other_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        DPO(**options)


def test_distinct_episodes_and_weights_within_an_instance_exclude_each_other():
    with pytest.raises(ValueError, match="distinct leaves episodes out"):
        SFT(weighting="advantage", distinct=True)
