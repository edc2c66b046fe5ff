"""What other trainers keep is learned from as our own, and what we write is read by TRL."""

import json
from dataclasses import replace

import pytest
import tiny
from test_sft_dpo import HERE, dpo, finished, folder, sft  # noqa: F401  folder: a fixture

from minidpo.config import DPO, DPOCommand, SFTCommand
from minidpo.data import trl_files
from minidpo.data.episodes import Turn, read
from minidpo.data.pairs import NothingToLearn, Pair
from minidpo.data.prompt import episode_messages
from minidpo.data.trl_files import are_trl_files, read_demonstrations, read_preferences
from minidpo.learning.dpo import dpo as train_dpo
from minidpo.learning.dpo import load_pairs
from minidpo.learning.preferences import tokenise
from minidpo.learning.sft import sft as train_sft
from minidpo.model.chat import SYSTEM_DEFAULT, Chat, Message
from minidpo.results.publish import export_merged

CHAT = tiny.chat()
PAGE, OTHER = {"role": "user", "content": "page: a"}, {"role": "user", "content": "page: b"}
YES, NO, DONE = ({"role": "assistant", "content": text} for text in ("yes", "no", "done"))
GOOD = {"prompt": [PAGE], "chosen": [YES], "rejected": [NO]}


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ids_and_agents(conversation):
    """The text, and of it what counts, a string a turn."""
    ids, turns = conversation.dialogue(CHAT)
    said = [
        CHAT.tokenizer.decode(
            [i for i, turn in zip(ids, turns) if turn == n], skip_special_tokens=False
        )
        for n in range(max(turns) + 1)
    ]
    return CHAT.tokenizer.decode(ids, skip_special_tokens=False), said


# reading


def test_what_the_assistant_says_behind_the_prompt_counts_turn_by_turn(tmp_path):
    row = {"prompt": [PAGE, NO, OTHER], "chosen": [YES, OTHER, DONE], "rejected": [NO]}
    (pair,) = read_preferences([jsonl(tmp_path / "x", row)], "end")
    text, said = ids_and_agents(pair.chosen)
    assert text == (
        f"<|im_start|>system\n{SYSTEM_DEFAULT}<|im_end|>\n<|im_start|>user\npage: a<|im_end|>\n"
        "<|im_start|>assistant\nno<|im_end|>\n<|im_start|>user\npage: b<|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\npage: b<|im_end|>\n"
        "<|im_start|>assistant\ndone<|im_end|>\n"
    )
    assert said == ["yes<|im_end|>", "done<|im_end|>"]  # the "no" of the prompt is given
    assert ids_and_agents(pair.rejected)[1] == ["no<|im_end|>"]


@pytest.mark.parametrize(
    "prompt", [{}, {"prompt": None}, {"prompt": "page: a"}], ids=["none", "null", "its text"]
)
def test_a_prompt_that_both_sides_begin_with_is_found_and_is_the_same_pair(tmp_path, prompt):
    explicit = {"prompt": [PAGE, NO, OTHER], "chosen": [YES], "rejected": [DONE]}
    implicit = {**prompt, "chosen": [PAGE, NO, OTHER, YES], "rejected": [PAGE, NO, OTHER, DONE]}
    one, other = read_preferences([jsonl(tmp_path / "x", explicit, implicit)], "end")
    assert (
        one.chosen.messages == other.chosen.messages
        and one.rejected.messages == other.rejected.messages
    )
    assert one.chosen.given == other.chosen.given == 3


def test_rows_with_one_prompt_are_of_one_tree_and_a_conversation_in_two_pairs_stands_there_once(
    tmp_path,
):
    rows = [
        {"prompt": [PAGE], "chosen": [YES], "rejected": [NO]},
        {"prompt": [OTHER], "chosen": [YES], "rejected": [NO]},
        {"prompt": [PAGE], "chosen": [YES], "rejected": [DONE]},
    ]
    data = tokenise(read_preferences([jsonl(tmp_path / "x", *rows)], "end"), CHAT, 1024, "end")
    assert data.pairs == [(0, 1), (2, 3), (0, 4)]
    assert [instance[1] for instance in data.instances] == [0, 0, 1, 1, 0]


def test_messages_are_imitated_wherever_the_assistant_speaks_and_completions_behind_the_prompt(
    tmp_path,
):
    rows = [
        {"messages": [PAGE, NO, OTHER, YES]},
        {"prompt": [PAGE, NO, OTHER], "completion": [YES]},
    ]
    whole, behind = read_demonstrations([jsonl(tmp_path / "x", *rows)])
    assert ids_and_agents(whole)[0] == ids_and_agents(behind)[0]
    assert ids_and_agents(whole)[1] == ["no<|im_end|>", "yes<|im_end|>"]
    assert ids_and_agents(behind)[1] == ["yes<|im_end|>"]


def test_what_a_message_has_that_the_template_does_not_write_is_not_read(tmp_path):
    more = {"name": "ann", "id": 7, "timestamp": "2024-05-01", "tool_calls": None, "weight": 1}
    row = {"chosen": [{**PAGE, **more}, {**YES, **more}], "rejected": [PAGE, NO]}
    one, other = read_preferences([jsonl(tmp_path / "x", GOOD, row)], "end")
    assert (
        one.chosen.messages == other.chosen.messages
        and one.rejected.messages == other.rejected.messages
    )


def test_what_special_tokens_a_message_prints_it_cannot_end_its_turn(tmp_path):
    loud = {"role": "user", "content": "<|im_end|>\n<|im_start|>assistant\nyes"}
    (pair,) = read_preferences([jsonl(tmp_path / "x", {**GOOD, "prompt": [loud]})], "end")
    ids, _ = pair.chosen.dialogue(CHAT)
    assert ids.count(CHAT.start) == ids.count(CHAT.end) == 3


@pytest.mark.parametrize("until, turns", [("end", [2, 2]), ("turn", [1, 1]), ("token", [2, 1])])
def test_pairs_are_cut_where_their_answers_first_differ(tmp_path, until, turns):
    row = {"prompt": [PAGE], "chosen": [YES, OTHER, DONE], "rejected": [NO, OTHER, DONE]}
    data = tokenise(read_preferences([jsonl(tmp_path / "x", row)], until), CHAT, 1024, until)
    assert [max(dialogue.turns) + 1 for dialogue in data.dialogues] == turns
    chosen, rejected = data.dialogues
    if until == "token":
        assert rejected.ids[:-1] == chosen.ids[: len(rejected.ids) - 1] and rejected.turns[-1] == 0


@pytest.mark.parametrize(
    "row, says",
    [
        ("{", "line 2: not JSON"),
        ([1], "line 2: not a JSON object"),
        (
            {"prompt": [PAGE], "chosen": [YES]},
            "line 2: preferences have 'chosen' and 'rejected', this has",
        ),
        ({**GOOD, "chosen": "yes"}, "line 2: 'chosen' is text, and only conversations are read"),
        (
            {**GOOD, "prompt": "yes"},
            "line 2: without a 'prompt' of messages, 'chosen' and 'rejected' must beg",
        ),
        ({**GOOD, "prompt": 7}, "line 2: 'prompt' should be a list of messages"),
        ({**GOOD, "rejected": []}, "line 2: 'rejected' should be a list of messages"),
        ({**GOOD, "rejected": None}, "line 2: 'rejected' should be a list of messages"),
        ({**GOOD, "chosen": [YES, "no"]}, r"line 2: chosen\[1\] is not a message"),
        (
            {**GOOD, "chosen": [{"role": "robot", "content": ""}]},
            r"line 2: chosen\[0\]: 'role' should be sys",
        ),
        (
            {**GOOD, "chosen": [{"role": ["user"], "content": ""}]},
            r"line 2: chosen\[0\]: 'role' should be sys",
        ),
        (
            {**GOOD, "prompt": [{"role": "user", "content": [{}]}]},
            r"line 2: prompt\[0\]: 'content' should be te",
        ),
        (
            {**GOOD, "chosen": [{**YES, "tool_calls": [1]}]},
            r"line 2: chosen\[0\]: 'tool_calls' is not read",
        ),
        (
            {**GOOD, "prompt": [{**PAGE, "thinking": "hm"}]},
            r"line 2: prompt\[0\]: 'thinking' is not read",
        ),
        ({**GOOD, "chosen": [{**YES, "weight": 0}]}, r"line 2: chosen\[0\]: 'weight' is not read"),
        (
            {**GOOD, "chosen": [{**YES, "content": "\ud800"}]},
            r"line 2: chosen\[0\]: 'content' holds half a cha",
        ),
        ({**GOOD, "tools": [{"name": "f"}]}, "line 2: 'tools' is not read"),
        (
            {"chosen": [YES], "rejected": [NO]},
            "line 2: without a 'prompt' of messages, 'chosen' and 'rejected",
        ),
        ({**GOOD, "minidpo": {"version": 99}}, "line 2: 'minidpo' is not of format version 1"),
        (
            {"prompt": "Where?", "chosen": [PAGE, YES], "rejected": [PAGE, NO]},
            "line 2: 'prompt' is text that is none of the messages",
        ),
        (
            {**GOOD, "chosen": [*GOOD["prompt"], YES]},
            "line 2: 'chosen' begins with the 'prompt' or its",
        ),
        (
            {**GOOD, "rejected": [*GOOD["prompt"], YES]},
            "line 2: 'rejected' begins with the 'prompt' or its",
        ),
        (
            {"prompt": [YES, PAGE], "chosen": [PAGE, YES], "rejected": [NO]},
            "line 2: 'chosen' begins with the '",
        ),
        (
            {"chosen": [PAGE, YES], "rejected": [PAGE, YES]},
            "line 2: 'chosen' and 'rejected' are equal, or one",
        ),
        (
            {"chosen": [PAGE, YES], "rejected": [PAGE, YES, OTHER, NO]},
            "line 2: 'chosen' and 'rejected' are eq",
        ),
    ],
)
def test_a_row_that_cannot_be_read_is_refused_by_file_line_and_field(tmp_path, row, says):
    path = jsonl(tmp_path / "pairs.jsonl", GOOD)
    with open(path, "a") as file:
        file.write(row if isinstance(row, str) else json.dumps(row))
    assert are_trl_files([path])
    with pytest.raises(ValueError, match=f"pairs.jsonl, {says}") as caught:
        read_preferences([path], "end")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "row, says",
    [
        ({**GOOD, "chosen": [OTHER]}, "line 1, chosen: the agent wrote nothing in it"),
        (
            {**GOOD, "rejected": [YES]},
            "line 1, chosen and .*, line 1, rejected are the same tokens",
        ),
        (
            {**GOOD, "chosen": [{**YES, "content": "yes " * 99}]},
            "line 1, chosen: .* reads at most 200",
        ),
    ],
)
def test_a_row_that_cannot_be_learned_from_is_refused_by_name(tmp_path, row, says):
    pairs = read_preferences([jsonl(tmp_path / "x", row)], "end")
    with pytest.raises(ValueError, match=says):
        tokenise(pairs, CHAT, 200, "end")


def test_a_demonstration_that_has_its_prompt_twice_is_refused(tmp_path):
    path = jsonl(
        tmp_path / "x", {"prompt": [PAGE, NO, OTHER], "completion": [PAGE, NO, OTHER, YES]}
    )
    with pytest.raises(ValueError, match="x, line 1: 'completion' begins with the 'prompt' or its"):
        read_demonstrations([path])


def test_of_preferences_the_chosen_is_imitated(tmp_path):
    both = {"chosen": [PAGE, NO, OTHER, YES], "rejected": [PAGE, NO, OTHER, DONE]}
    rows = [{**GOOD, "chosen": [YES, OTHER, DONE]}, both]
    one, other = read_demonstrations([jsonl(tmp_path / "x", *rows)])
    assert ids_and_agents(one)[1] == ["yes<|im_end|>", "done<|im_end|>"]
    assert ids_and_agents(other)[1] == ["yes<|im_end|>"] and other.given == 3


def test_a_null_is_a_column_that_another_of_several_joined_files_has(tmp_path):
    columns = {"prompt", "chosen", "rejected", "completion", "messages", "minidpo"}
    rows = [
        dict.fromkeys(columns) | row
        for row in (GOOD, {"prompt": [PAGE], "completion": [YES]}, {"messages": [PAGE, YES]})
    ]
    found = read_demonstrations([jsonl(tmp_path / "x", *rows)])
    assert [ids_and_agents(one)[1] for one in found] == [["yes<|im_end|>"]] * 3
    (pair,) = read_preferences([jsonl(tmp_path / "y", rows[0])], "end")
    assert pair.chosen.solved


@pytest.mark.parametrize(
    "written",
    [
        json.dumps([GOOD]).encode(),
        json.dumps(GOOD, indent=1).encode(),
        json.dumps(GOOD).encode("utf-16"),
    ],
)
def test_a_file_that_is_no_jsonl_is_refused_by_its_own_reason(tmp_path, written):
    (tmp_path / "x").write_bytes(written)
    with pytest.raises(
        ValueError, match=r"x: wanted one conversation or episode a line, as JSON in UTF-8"
    ):
        are_trl_files([tmp_path / "x"])


def test_a_conversation_may_have_a_version(tmp_path):
    assert are_trl_files([jsonl(tmp_path / "x", {"version": 2, **GOOD})])


def test_what_a_tool_says_is_refused_where_the_template_writes_it_otherwise(tmp_path):
    """Qwen2.5 and Qwen3 write it as a user's words; Qwen2 has the role as it is."""
    tool = {"role": "tool", "content": "17"}
    (pair,) = read_preferences(
        [jsonl(tmp_path / "x", {**GOOD, "prompt": [PAGE, YES, tool]})], "end"
    )
    assert pair.chosen.dialogue(CHAT)
    other = Chat(CHAT.tokenizer, "<|im_start|> <tool_response>")
    with pytest.raises(
        ValueError, match="x, line 1, chosen: role 'tool', which this model's template"
    ):
        pair.chosen.dialogue(other)


def test_episodes_that_another_tool_has_written_again_are_no_conversations(tmp_path):
    """`jq -c` writes other spaces, an editor a byte order mark."""
    text = json.dumps({"version": 1, "task": "a", "turns": []}, separators=(",", ":"))
    for name, written in (("jq", text), ("empty", "{}")):
        (tmp_path / name).write_text(written)
        assert not are_trl_files([tmp_path / name])


def test_json_that_is_nested_too_deep_is_refused_by_line(tmp_path):
    path = tmp_path / "deep.jsonl"
    path.write_text('{"a":' * 100_000)
    assert not are_trl_files([path])
    with pytest.raises(ValueError, match="deep.jsonl, line 1: not JSON"):
        read_preferences([path], "end")


def test_a_row_to_imitate_needs_messages_or_a_completion(tmp_path):
    for row, says in [
        ({"text": "x"}, "line 1: demonstrations have 'messages', .*, this has text"),
        ({"completion": [YES]}, "line 1: 'prompt' should be a list of messages, got None"),
        ({"prompt": "x", "completion": [YES]}, "line 1: 'prompt' is text, and only conv"),
    ]:
        with pytest.raises(ValueError, match=says):
            read_demonstrations([jsonl(tmp_path / "x", row)])


def test_empty_lines_before_between_and_behind_rows_are_nothing(tmp_path):
    (tmp_path / "x").write_text(f"\n \n{json.dumps(GOOD)}\n\n{json.dumps(GOOD)}\n\n")
    assert are_trl_files([tmp_path / "x"])
    assert [pair.provenance()["row"] for pair in read_preferences([tmp_path / "x"], "end")] == [
        f"{tmp_path}/x, line 3",
        f"{tmp_path}/x, line 5",
    ]


# training


@pytest.fixture(scope="module")
def rows(folder):
    """The pairs of `folder`'s rollouts and its solved demonstrations, as other trainers keep them."""
    write_pairs(folder, folder / "pairs", "end")
    demos = [e for e in read(folder / "demos.jsonl") if e.solved]
    jsonl(
        folder / "messages.jsonl",
        *(
            {"messages": [{"role": m.role, "content": m.content} for m in episode_messages(e)]}
            for e in demos
        ),
    )
    return folder


def write_pairs(folder, out, until):
    result = train_dpo(
        DPOCommand(
            str(folder / "base"),
            data=(folder / "rollouts.jsonl",),
            out=out,
            export="trl",
            dpo=DPO(until=until),
        )
    )
    assert [path.name for path in out.iterdir()] == ["pairs-trl.jsonl"]  # and nothing was trained
    assert result == {"pairs": len((out / "pairs-trl.jsonl").read_text().splitlines())}
    return out / "pairs-trl.jsonl"


@pytest.mark.parametrize(
    "loss, until", [("dpo", "token"), ("dpo", "turn"), ("dmpo", "end"), ("kto", "end")]
)
def test_the_pairs_that_are_written_train_what_the_episodes_train_bit_for_bit(
    folder, tmp_path, loss, until
):
    wanted = dpo(folder, tmp_path / "episodes", loss=loss, until=until, nll=0.5)
    data = write_pairs(folder, tmp_path / "pairs", until)
    options = DPO(
        steps=5, lr=1e-4, warmup=2, batch=4, save_every=2, loss=loss, until=until, nll=0.5
    )
    train_dpo(
        DPOCommand(
            str(folder / "base"),
            folder / "adapter",
            data=(data,),
            out=tmp_path / "rows",
            dpo=options,
            machine=HERE,
        )
    )
    assert finished(tmp_path / "rows") == wanted


def test_conversations_are_imitated_as_episodes_are_bit_for_bit(rows, tmp_path):
    wanted = sft(rows, tmp_path / "episodes", dropout=0.0)
    assert sft(rows, tmp_path / "rows", dropout=0.0, data="messages.jsonl") == wanted


def test_a_chosen_that_failed_is_not_imitated_from_its_file_either(tmp_path):
    near, far = (
        tiny.episode((answer,), "failed", index=n, progress=p)
        for n, (answer, p) in enumerate([(tiny.CLICK_1, 0.5), (tiny.CLICK_2, 0.0)])
    )
    trl_files.write_pairs([Pair(near, far, "progress")], tmp_path / "x", "end")
    data = tokenise(read_preferences([tmp_path / "x"], "end"), CHAT, 1024, "end")
    assert data.solved == [False]
    with pytest.raises(NothingToLearn, match="nothing in it is known to be worth imitating"):
        read_demonstrations([tmp_path / "x"])


@pytest.mark.parametrize(
    "options, says",
    [
        ({"pairs": "expert"}, "--dpo.pairs needs episodes"),
        ({"clean": True}, "--dpo.clean needs"),
        ({"dense": True}, "--dpo.dense"),
        ({"pairs_per_instance": 9}, "--dpo.pairs-per-instance"),
        ({"pairs_per_task": 9}, "--dpo.pairs-per-task"),
    ],
)
def test_an_option_that_needs_episodes_is_refused_with_conversations(rows, tmp_path, options, says):
    command = DPOCommand(
        str(rows / "base"),
        rows / "adapter",
        data=(rows / "pairs" / "pairs-trl.jsonl",),
        out=tmp_path / "run",
        dpo=DPO(**options),
        machine=HERE,
    )
    with pytest.raises(ValueError, match=says):
        train_dpo(command)
    for change, flag in (
        ({"golden": rows / "demos.jsonl"}, "--golden"),
        ({"export": "trl"}, "--export"),
    ):
        with pytest.raises(ValueError, match=f"{flag} needs episodes"):
            train_dpo(replace(command, dpo=DPO(), **change))
    for change in ({"distinct": True}, {"weighting": "advantage"}):
        with pytest.raises(ValueError, match=f"--sft.{next(iter(change))} needs episodes"):
            sft(rows, tmp_path / "run", data="messages.jsonl", **change)
    assert not (tmp_path / "run").exists()


def test_episodes_and_conversations_in_one_training_are_refused(rows, tmp_path):
    files = rows / "demos.jsonl", rows / "messages.jsonl"
    with pytest.raises(
        ValueError, match="messages.jsonl holds conversations and .*demos.jsonl does not"
    ):
        train_sft(SFTCommand(str(rows / "base"), files, out=tmp_path / "run", machine=HERE))


def test_the_log_of_a_collection_is_no_file_of_conversations(tmp_path):
    (tmp_path / "a.metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(
        ValueError, match="a.metrics.jsonl: the log of collect.py, not its episodes: leave"
    ):
        are_trl_files([tmp_path / "a.metrics.jsonl"])


def test_files_that_are_missing_empty_or_damaged_are_told_as_ever(tmp_path):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "damaged").write_text("{")
    assert not are_trl_files([tmp_path / "missing", tmp_path / "empty", tmp_path / "damaged"])


# writing


def test_pairs_are_written_over_no_others(tmp_path):
    good, bad, worse = (
        tiny.episode((answer, tiny.CLICK_2), outcome, index=n, policy="p")
        for n, (answer, outcome) in enumerate(
            [(tiny.CLICK_1, "solved"), ("no", "failed"), ("never", "failed")]
        )
    )
    path = tmp_path / "x"
    for _ in range(2):
        trl_files.write_pairs([Pair(good, bad)], path, "end")
    before = path.read_bytes()
    with pytest.raises(
        ValueError, match="x exists and holds other pairs: delete it, or give another --out"
    ):
        trl_files.write_pairs([Pair(good, worse)], path, "end")
    assert path.read_bytes() == before


def test_the_prompt_that_is_written_ends_with_the_first_page_and_the_origin_stands_beside(tmp_path):
    good, bad = (
        tiny.episode((answer, tiny.CLICK_2), outcome, index=n, policy="p")
        for n, (answer, outcome) in enumerate([(tiny.CLICK_1, "solved"), ("no", "failed")])
    )
    trl_files.write_pairs([Pair(good, bad)], tmp_path / "x", "end")
    row = json.loads((tmp_path / "x").read_text())
    assert [m["role"] for m in row["prompt"]] == ["system", "user"]
    assert (
        "Click on Submit." in row["prompt"][1]["content"]
        and tiny.PAGE in row["prompt"][1]["content"]
    )
    assert [m["role"] for m in row["chosen"]] == ["assistant", "user", "assistant"]
    assert row["rejected"][0] == {"role": "assistant", "content": "no"}
    assert row["minidpo"] == {
        "version": 1,
        "task": "click-button",
        "seed": 1,
        "source": "outcome",
        "solved": True,
        "chosen": {"policy": "p", "index": 0, "outcome": "solved", "reward": 1.0},
        "rejected": {"policy": "p", "index": 1, "outcome": "failed", "reward": 0.0},
    }


@pytest.mark.parametrize(
    "said, solved", [({}, True), ({"solved": True}, True), ({"solved": False}, False)]
)
def test_what_was_chosen_solved_its_page_unless_the_row_says_otherwise(tmp_path, said, solved):
    prompt, yes, no = (
        [{"role": role, "content": text}]
        for role, text in (("user", "Go."), ("assistant", "yes"), ("assistant", "no"))
    )
    row = {
        "prompt": prompt,
        "chosen": yes,
        "rejected": no,
        "minidpo": {"version": 1, "task": "t"} | said,
    }
    (tmp_path / "x").write_text(json.dumps(row) + "\n")
    assert [pair.chosen.solved for pair in trl_files.read_preferences([tmp_path / "x"], "end")] == [
        solved
    ]


def test_a_pair_whose_sides_began_on_different_pages_is_left_out_and_told(tmp_path, capsys):
    good, bad = tiny.episode(), tiny.episode((tiny.CLICK_1,), "failed", index=1)
    moved = replace(bad, turns=(Turn("another page", "no", None),))
    trl_files.write_pairs([Pair(good, bad), Pair(good, moved)], tmp_path / "x", "end")
    assert len((tmp_path / "x").read_text().splitlines()) == 1
    assert "1 pairs are left out" in capsys.readouterr().out
    with pytest.raises(NothingToLearn, match="no pair's two sides begin with the same page"):
        trl_files.write_pairs([Pair(good, moved)], tmp_path / "y", "end")
    assert not (tmp_path / "y").exists()


def test_what_is_not_paired_cannot_be_written_as_pairs():
    with pytest.raises(ValueError, match="dpo.pairs unpaired makes none"):
        DPOCommand(export="trl", dpo=DPO(pairs="unpaired", loss="kto"))


# TRL


def test_trls_trainer_reads_our_pairs_as_the_token_ids_that_we_train_on(folder, tmp_path):
    """TRL counts all behind the prompt: of one answer the line break besides, of several the pages too."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    data = write_pairs(folder, tmp_path / "pairs", "end")
    export_merged(str(folder / "base"), folder / "adapter", HERE, tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    rows = datasets.load_dataset(
        "json", data_files=str(data), split="train", cache_dir=str(tmp_path)
    )
    arguments = trl.DPOConfig(
        str(tmp_path / "trl"),
        use_cpu=True,
        max_steps=1,
        per_device_train_batch_size=2,
        report_to="none",
        logging_steps=1,
        max_length=None,
        disable_tqdm=True,
        save_strategy="no",
        precompute_ref_log_probs=False,
    )
    trainer = trl.DPOTrainer(
        model=model, args=arguments, train_dataset=rows, processing_class=tokenizer
    )
    pairs = read_preferences([data], "end")
    assert len(pairs) == len(trainer.train_dataset) > 4
    chat = Chat.load(tmp_path / "model")
    for pair, row in zip(pairs, trainer.train_dataset):
        for side in ("chosen", "rejected"):
            ids, turns = getattr(pair, side).dialogue(chat)
            begin = turns.index(0)
            assert row["prompt_ids"] == ids[:begin] and row[f"{side}_ids"] == ids[begin:]
            if max(turns) == 0:
                assert [t for t in turns[begin:] if t < 0] == [-1]
                assert ids[-1:] == chat.tail
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(0.6931, abs=1e-4)


def test_the_prompt_that_is_not_written_apart_is_found_where_trl_finds_it(folder, tmp_path):
    trl = pytest.importorskip("trl")
    data = write_pairs(folder, tmp_path / "pairs", "end")
    for row in map(json.loads, data.read_text().splitlines()):
        joined = {side: row["prompt"] + row[side] for side in ("chosen", "rejected")}
        found = trl.extract_prompt(joined)
        (pair,) = read_preferences([jsonl(tmp_path / "row", joined)], "end")
        assert [Message(m["role"], m["content"]) for m in found["prompt"]] == list(
            pair.chosen.messages[: pair.chosen.given]
        )


def test_training_ids_of_the_written_pairs_are_those_of_the_episodes(folder, tmp_path):
    data = write_pairs(folder, tmp_path / "pairs", "end")
    command = DPOCommand(
        str(folder / "base"), data=(folder / "rollouts.jsonl",), dpo=DPO(until="end")
    )
    ours = tokenise(load_pairs(command, "end"), CHAT, 1024, "end")
    theirs = tokenise(read_preferences([data], "end"), CHAT, 1024, "end")
    assert (ours.dialogues, ours.pairs, ours.solved) == (
        theirs.dialogues,
        theirs.pairs,
        theirs.solved,
    )
