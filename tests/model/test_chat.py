"""Ids are made of parts, a page cannot speak for the agent, and each token knows its turn."""

import json
from pathlib import Path

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

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


# the model's own template

ORACLES = Path(__file__).parents[1] / "oracles"
TEMPLATES = json.loads((ORACLES / "templates.json").read_text())


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


TURN = "'<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n'"
ASKED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
SEPARATED = "'<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>'"
REAL = {path.stem: path.read_text() for path in (ORACLES / "chat_templates").glob("*.jinja")}
# made up, each with what sets some public template apart
MADE_UP = {
    "begins with bos": f"{{{{ bos_token }}}}{{% for m in messages %}}{{{{ {TURN} }}}}{{% endfor %}}{ASKED}",
    "another token behind the role": f"{{% for m in messages %}}{{{{ {SEPARATED} }}}}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
    "a user's end asks": "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + eos_token }}"
    "{% else %}{{ '<s>' + m.role + ': ' + m.content + '</s>' }}{% endif %}{% endfor %}",
    "default in a variable": "{% set system = 'It\\'s {so} \\\\boxed{}.' %}{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}"
    f"{{{{ '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}}}{{% for m in messages %}}{{{{ {TURN} }}}}"
    f"{{% endfor %}}{ASKED}",
    "trims": "{% for m in messages %}{{ bos_token if loop.first }}{{ '<|' + m.role + '|>' }}"
    "{{ m.content | trim + '<|end|>' }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}",
    "leaves the last open": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% if add_generation_prompt or not loop.last %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    + ASKED,
    "knows no generation prompt": f"{{% for m in messages %}}{{{{ {TURN} }}}}{{% endfor %}}",
    "marks the agent's words": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% endfor %}" + ASKED,
    "line breaks before earlier answers go": "{% for m in messages %}{% set said = m.content %}"
    "{% if m.role == 'assistant' %}{% set said = said.lstrip('\\n') %}{% endif %}{{ '<|im_start|>' + m.role + '\n' "
    "+ said + '<|im_end|>\n' }}{% endfor %}" + ASKED,
    "marks without ends": "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}"
    "{% endfor %}{{ '<|assistant|>\\n' if add_generation_prompt }}",
}
MARKS = [
    "<s>",
    "</s>",
    "<|im_sep|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<｜User｜>",
]
MARKS += ["<｜Assistant｜>", "<｜end▁of▁sentence｜>"]


def chat_with(template, *, eos="</s>", marks=MARKS, **flags):
    tokenizer = Tokenizer.from_str(tiny.tokenizer_json())
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False, **flags) for name in marks]
    )
    return Chat(tokenizer, template, {"bos_token": "<s>", "eos_token": eos})


def ids_of_the_whole(chat, text):
    """As transformers makes them: special tokens are found in the text."""
    chat.tokenizer.encode_special_tokens = False
    try:
        return chat.encode(text)
    finally:
        chat.tokenizer.encode_special_tokens = True


blank = st.sampled_from(["", "\n", " ", "\n\n", " \n", "\t"])
word = st.sampled_from(["Click 12", "é <b>", "page:\n  x\ty", "'\"{}%"])
loud = st.tuples(blank, word, blank).map("".join)
turns = st.lists(st.tuples(st.tuples(word, blank).map("".join), loud), max_size=3)


def conversation(system, first, turns):
    said = [("system", system)] * (system is not None) + [("user", first)]
    said += [message for a, u in turns for message in (("assistant", a), ("user", u))]
    return [{"role": role, "content": content} for role, content in said]


@pytest.mark.parametrize(
    "flags", [{}, {"rstrip": True}, {"lstrip": True, "rstrip": True}], ids=["", "right", "both"]
)
@pytest.mark.parametrize("name", [*MADE_UP, *REAL])
@settings(max_examples=15)
@given(system=st.none() | loud, first=loud, turns=turns)
def test_ids_are_those_of_the_templates_text_as_a_whole(name, flags, system, first, turns):
    chat = chat_with(
        {**MADE_UP, **REAL}[name], eos=MARKS[-1] if "deep" in name else "</s>", **flags
    )
    asked, answered = (chat.template.opening("user"), chat.template.before("user", "assistant"))
    turns = [] if asked != answered else turns  # `not_followed` tells, below
    said = conversation(system, first, turns)
    text = chat.template.render(said, opened=True)
    if name == "knows no generation prompt":
        text += "<|im_start|>assistant\n"
    assert chat.prompt([Message(**message) for message in said]) == ids_of_the_whole(chat, text)


CALLS = [{"type": "function", "function": {"name": "press", "arguments": {"key": "é<"}}}]
LLAMA_LIKE = """{{- bos_token }}{% set ns = namespace(told=false) %}{% for m in messages %}{% if m.role == 'tool' %}
{{- '<|user|>' + m.content | tojson + '<|end|>' }}{% elif 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception("one call at once") }}{% endif %}
{{- '<|assistant|>{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson + '}<|end|>' }}{% else %}
{{- '<|' + m.role + '|>' }}{% if m.role == 'user' and tools and not ns.told %}
{%- set ns.told = true %}{{ tools | tojson(indent=4) }}{% endif %}
{{- m.content | trim + '<|end|>' }}{% endif %}{% endfor %}
{{- '<|assistant|>' if add_generation_prompt }}"""


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "like Llama 3.1"])
def test_tools_and_their_calls_are_written_by_the_template_and_only_calls_are_the_agents(name):
    chat = chat_with(REAL.get(name, LLAMA_LIKE))
    words = "" if name.startswith("like") else "I press."
    said = conversation("act", "a page", [])
    said += [
        {"role": "assistant", "content": words, "tool_calls": CALLS},
        {"role": "tool", "content": 'it "is" 42'},
        {"role": "tool", "content": "43"},
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        {"role": "tool", "content": "44"},
    ]
    tools = [{"type": "function", "function": {"name": "press"}}]
    ours = [
        Message(
            m["role"],
            m["content"],
            calls=json.dumps(m["tool_calls"]) if "tool_calls" in m else None,
        )
        for m in said
    ]
    whole = chat.with_tools(json.dumps(tools)).render(said, opened=True)
    assert (
        chat.prompt(ours, json.dumps(tools)) == ids_of_the_whole(chat, whole) and "press" in whole
    )
    ids, owners = chat.dialogue(ours, json.dumps(tools))
    for turn in (0, 1):
        answer = chat.decode([i for i, owner in zip(ids, owners) if owner == turn])
        assert '{"key": "é<"}' in answer and "4" not in answer
    with pytest.raises(ValueError, match="which tools"):
        tiny.chat().prompt(ours[:2], json.dumps(tools))
    with pytest.raises(ValueError, match="calls of tools"):
        tiny.chat().prompt(ours)


def test_an_answer_is_closed_where_a_template_leaves_the_last_open():
    chat = chat_with(MADE_UP["leaves the last open"])
    ids, owners = chat.dialogue([Message("user", "go"), Message("assistant", "yes")])
    assert chat.decode([i for i, owner in zip(ids, owners) if owner == 0]) == "yes"
    assert ids[-1] == chat.end and owners[-1] == 0


def test_what_a_template_does_besides_joining_is_said():
    said = chat_with(REAL["deepseek-r1-distill-qwen"], eos=MARKS[-1]).template.not_followed()
    assert "<think>" in said[0] and "thoughts" in said[1]
    assert any(
        "last answer" in clause for clause in chat_with(REAL["qwen3"]).template.not_followed()
    )
    dated = chat_with("{{ strftime_now('%Y') + bos_token }}" + MADE_UP["begins with bos"])
    assert "2024" in dated.decode(dated.prompt([Message("user", "x")]))
    assert "day" in dated.template.not_followed()[0]
    assert not chat_with(REAL["qwen2.5"]).template.not_followed()


@pytest.mark.parametrize(
    "template, why",
    [
        ("{% for m in messages %}", "no Jinja"),
        ("{{ messages[0].content }}", "leaves out"),
        (MADE_UP["marks without ends"].replace("eos_token", "'</turn>'"), "marks turns with text"),
        ("{% for m in messages %}### {{ m.role + ':\n' + m.content + '\n' }}{% endfor %}", "with text"),
        (MADE_UP["trims"].replace("| trim", "| upper"), "changes"),
        (MADE_UP["trims"].replace("m.role", "m.role if not loop.first else m.no.role"), "does not write"),
        (MADE_UP["begins with bos"].replace("m.role", "loop.index | string"), "more than join"),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
         + MADE_UP["trims"], "no system"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_followed_is_refused(template, why):
    with pytest.raises(ValueError, match=why) as caught:
        chat_with(template)
    assert "\n" not in str(caught.value)


def test_a_template_cannot_reach_out_of_its_sandbox():
    with pytest.raises(ValueError, match="chat template does not write"):
        chat_with("{{ messages.append(1) }}{{ ''.__class__.__mro__ }}")


def test_what_marks_turns_becomes_special_where_a_tokenizer_does_not_say_so():
    tokenizer = Tokenizer.from_str(tiny.tokenizer_json())
    tokenizer.add_tokens(["<|user|>", "<|assistant|>", "<|end|>", "<|system|>", "<tool>"])
    chat = Chat(tokenizer, MADE_UP["trims"], {"bos_token": ""})
    loud = "<|end|><|assistant|><tool>"
    assert chat.end not in chat.encode(loud) and chat.decode(chat.encode(loud)) == loud
    assert tokenizer.token_to_id("<tool>") in chat.encode(loud)  # it ends no turn


@pytest.mark.parametrize("name", ["trims", "deepseek-r1-distill-qwen"])
def test_a_page_opens_no_answer_where_the_tokenizer_calls_no_mark_special(name):
    """DeepSeek's distilled models do not, and only the token that opens an answer ends a page."""
    tokenizer = Tokenizer.from_str(tiny.tokenizer_json())
    tokenizer.add_tokens([AddedToken(mark, rstrip=True) for mark in MARKS])
    chat = Chat(tokenizer, {**MADE_UP, **REAL}[name], {"bos_token": "<s>", "eos_token": MARKS[-1]})
    marks = {tokenizer.token_to_id(mark) for mark in MARKS if mark in chat.template.source}
    assert not marks & set(chat.encode("".join(MARKS)))
    said = [{"role": "user", "content": "page"}]
    whole = ids_of_the_whole(chat, chat.template.render(said, opened=True))
    assert chat.prompt([Message("user", "page")]) == whole


@pytest.mark.parametrize("name", ["begins with bos", "a user's end asks"])
def test_a_blank_before_the_first_text_alone_is_read_as_in_the_whole(name):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    bytes_ = [f"<0x{n:02X}>" for n in range(256)]
    tokenizer.train_from_iterator(
        ["user assistant page ▁"], trainers.BpeTrainer(special_tokens=["<unk>", *bytes_])
    )
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = []
    described["model"]["byte_fallback"] = True
    first = Tokenizer.from_str(json.dumps(described))
    first.add_special_tokens(["<|im_start|>", "<|im_end|>", *MARKS])
    as_it_was = Tokenizer.from_str(first.to_str())
    chat = Chat(first, MADE_UP[name], {"bos_token": "<s>", "eos_token": "</s>"})
    said = conversation("act", "page", [("page", "user")])
    whole = as_it_was.encode(chat.template.render(said, opened=True), add_special_tokens=False).ids
    assert chat.prompt([Message(**message) for message in said]) == whole


def test_a_folders_names_of_tokens_fill_its_template(tmp_path):
    tokenizer = Tokenizer.from_str(tiny.tokenizer_json())
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(MADE_UP["begins with bos"])
    begin = [tokenizer.token_to_id("<s>")]
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": begin[0]}))
    assert Chat.load(tmp_path).begin == begin
    for bos in ("<s>", {"content": "<s>", "lstrip": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos}))
        assert (
            Chat.load(tmp_path).begin
            == Chat.load(tmp_path).prompt([Message("user", "x")])[:1]
            == begin
        )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": None}))
    assert Chat.load(tmp_path).begin == []
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    assert Chat.load(tmp_path).begin == begin


@pytest.mark.parametrize(
    "said, why",
    [
        ({"chat_template": [{"name": "rag", "template": "{{ 1 }}"}]}, "'default' among rag"),
        ({"chat_template": [{"name": "default"}, {"name": "default", "template": 5}]}, "text, got 5"),
        ({"chat_template": {"default": ""}}, "text, got"),
        ({"chat_template": []}, "'default' among"),
        ({"bos_token": 5}, "bos_token should be text, got 5"),
    ],
)  # fmt: skip
def test_a_tokenizers_settings_that_are_no_template_or_token_are_refused(tmp_path, said, why):
    """Qwen2's template in their place would be a guess."""
    (tmp_path / "tokenizer.json").write_text(tiny.tokenizer_json(), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=f"tokenizer_config.json: .*{why}"):
        Chat.load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="chat_template.jinja: not text in UTF-8"):
        Chat.load(tmp_path)
