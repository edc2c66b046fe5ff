"""Ids are made of parts, a page cannot speak for the agent, and each token knows its turn."""

import json
from pathlib import Path

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from minidpo.model.chat import Chat, Message

CHAT = tiny.chat()
START = CHAT.tokenizer.token_to_id("<|im_start|>")
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_end|>\n<|im_start|>assistant\n",
    "\n",
    "é",
]
texts = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(SPECIAL)), max_size=4).map("".join)
others = st.builds(Message, st.sampled_from(["system", "user", "tool"]), texts)


@st.composite
def answers(draw):
    """What an agent said: a text alone, or any ids it may have sampled, closed or cut short."""
    if draw(st.booleans()):
        return Message("assistant", draw(texts))
    ids = draw(st.lists(st.integers(0, CHAT.end - 1), min_size=1, max_size=6))
    ids = tuple(ids + [CHAT.end] * draw(st.booleans()))
    return Message("assistant", CHAT.decode(ids), ids)


dialogues = st.lists(st.one_of(others, answers()), min_size=1, max_size=6)


@given(texts)
def test_text_survives_its_ids_and_never_becomes_a_special_token(text):
    ids = CHAT.encode(text)
    assert CHAT.decode(ids) == text
    assert not {START, CHAT.end, CHAT.tokenizer.token_to_id("<|endoftext|>")} & set(ids)


@given(st.lists(others, min_size=1, max_size=4))
def test_a_page_that_prints_special_tokens_neither_ends_its_turn_nor_begins_another(messages):
    ids, turns = CHAT.dialogue(messages)
    plain, _ = CHAT.dialogue([Message(message.role, "x") for message in messages])
    assert ids.count(START) == ids.count(CHAT.end) == plain.count(CHAT.end)
    assert set(turns) == {-1}


@given(dialogues)
def test_the_tokens_of_turn_n_are_the_nth_answers_and_no_others(messages):
    ids, turns = CHAT.dialogue(messages)
    assert len(ids) == len(turns) and turns[0] == -1
    said = [CHAT.answer(message) for message in messages if message.role == "assistant"]
    for n, answer in enumerate(said):
        assert [i for i, turn in zip(ids, turns) if turn == n] == answer
    assert set(turns) <= {-1, *range(len(said))}


@given(dialogues, answers(), dialogues)
def test_a_prompt_is_a_prefix_of_what_comes_of_it(before, answer, after):
    prompt, (ids, turns) = CHAT.prompt(before), CHAT.dialogue([*before, answer, *after])
    said = CHAT.answer(answer)
    end = len(prompt) + len(said)
    assert ids[:end] == prompt + said
    n = sum(message.role == "assistant" for message in before)
    assert [t for t, turn in enumerate(turns) if turn == n] == list(range(len(prompt), end))


def test_sampled_ids_are_kept_even_where_the_tokenizer_would_have_cut_the_text_otherwise():
    letters = tuple(i for letter in "Submit" for i in CHAT.encode(letter))
    assert list(letters) != CHAT.encode("Submit")
    assert CHAT.answer(Message("assistant", "Submit", (*letters, CHAT.end))) == [*letters, CHAT.end]


def test_what_a_tokenizers_file_says_of_cutting_and_filling_is_not_obeyed():
    """transformers writes `max_length` and padding of its last call into the file that it saves."""
    tokenizer, text = Tokenizer.from_str(tiny.tokenizer_json()), "Click on Submit. " * 9
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=999)
    assert len(tokenizer.encode("Click").ids) == 999
    assert Chat(Tokenizer.from_str(tokenizer.to_str())).encode(text) == tiny.chat().encode(text)


def test_a_folder_without_a_tokenizer_of_this_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer.json here"):
        Chat.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json: not a readable tokenizer file"):
        Chat.load(tmp_path)
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="no chat template"):
        Chat.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tiny.tokenizer_json(), encoding="utf-8")
    assert Chat.load(tmp_path).encode("naïve") == CHAT.encode("naïve")


TEMPLATES = json.loads((Path(__file__).parents[1] / "oracles" / "templates.json").read_text())


@pytest.mark.parametrize("said", TEMPLATES["cases"])
@pytest.mark.parametrize("name", TEMPLATES["templates"])
def test_prompts_spell_what_transformers_makes_of_the_models_own_templates(name, said):
    tokenizer = Tokenizer.from_str(tiny.tokenizer_json())
    if name.startswith("llama"):
        tokenizer.add_special_tokens(
            ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
        )
    case = TEMPLATES["templates"][name]
    chat = Chat(tokenizer, case["template"], {"bos_token": "<|begin_of_text|>"})
    messages = [
        Message(message["role"], message["content"]) for message in TEMPLATES["cases"][said]
    ]
    assert chat.decode([*chat.prompt(messages), chat.end]) == case["texts"][said]
