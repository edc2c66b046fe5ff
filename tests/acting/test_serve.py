"""Other programs' agents ask, and what they were told is what is recorded and learned, token by token."""

import contextlib
import http.client
import json
import random
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import shelf
import tiny
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from envs.toy import COLOURS, SENTENCES
from minidpo.acting.endpoint import Serve, message_of, settled
from minidpo.acting.serve import listening
from minidpo.commands import by_hand
from minidpo.data import recorded
from minidpo.data.batch import batch_logps, batch_scores, collate
from minidpo.data.pairs import outcome_pairs
from minidpo.data.tree import grow
from minidpo.learning.dpo import DPO
from minidpo.learning.policy_gradient import PolicyGradient
from minidpo.learning.rollouts import own_rollouts
from minidpo.memory import loading, lora
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import Machine
from minidpo.model.sampling import Answer

openai = pytest.importorskip("openai")

QWEN = (Path(__file__).parents[1] / "oracles" / "chat_templates" / "qwen2.5.jinja").read_text()
TOOLS = [{"type": "function", "function": {"name": "press", "parameters": {"type": "object"}}}]
ASKED = [{"role": "user", "content": "page: a"}]
few = settings(max_examples=settings.default.max_examples // 4)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random model whose template knows tools."""
    folder = tiny.checkpoint(tmp_path_factory.mktemp("serve") / "base")
    (folder / "chat_template.jinja").write_text(QWEN)
    return folder


@contextlib.contextmanager
def serving(base, sampler=None, rows=4, **options):
    """A server on this model, or whose rows a `Script` writes, and a client that asks it once."""
    machine = Machine(device="cpu", dtype="float32", pages=rows)
    with listening(Serve(serve=0, model=str(base), machine=machine, **options)) as server:
        desk = server.endpoint.answering
        if sampler:
            desk.samplers[1.0], desk.texts[1.0] = sampler(desk.stop), dict.fromkeys(range(rows), ())
        threading.Thread(target=desk.run, daemon=True).start()
        port = server.server_address[1]
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
        ) as client:
            yield SimpleNamespace(
                client=client,
                port=port,
                model=str(options.get("adapter") or base),
                chat=server.endpoint.chat,
                limit=server.endpoint.limit,
                endpoint=server.endpoint,
            )


@pytest.fixture(scope="module")
def served(base, tmp_path_factory):
    record = tmp_path_factory.mktemp("record") / "talk.jsonl"
    with serving(base, record=record) as served:
        served.record = record
        yield served


def ask(served, messages=ASKED, **options):
    return served.client.chat.completions.create(model=served.model, messages=messages, **options)


def judge(served, conversation, solved):
    body = {"conversation": conversation, "solved": solved}
    return served.client.post("/verdicts", cast_to=object, body=body)


def post(served, body, path="/v1/chat/completions", kind="application/json"):
    """The status and the body of the answer to any bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    with contextlib.closing(connection):
        connection.request("POST", path, body, {"Content-Type": kind})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


# as OpenAI's client sees it


def test_the_client_finds_the_model_and_an_answer_says_how_it_ended_and_what_it_took(served):
    (model,) = served.client.models.list().data
    assert model.id == served.client.models.retrieve(model.id).id == served.model
    answer = ask(served, max_tokens=5, logprobs=True, seed=1)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.role) == ("length", "assistant")
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    assert all(entry.logprob < 0 for entry in choice.logprobs.content)
    usage = answer.usage
    assert (usage.completion_tokens, usage.prompt_tokens + 5) == (5, usage.total_tokens)


@few
@given(
    st.integers(0, 99),
    st.sampled_from([0, 0.7, 1.0, 1.5]),
    st.sampled_from([None, 0.9]),
    st.sampled_from([None, "e", ["in", "zq"], "\n"]),
)
def test_a_stream_put_together_is_the_answer(served, seed, temperature, top_p, stop):
    options = {"seed": seed, "temperature": temperature, "max_tokens": 30, "logprobs": True}
    options |= {"top_p": top_p, "stop": stop}
    whole = ask(served, **options).choices[0]
    chunks = list(ask(served, stream=True, stream_options={"include_usage": True}, **options))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.message.content
    assert choices[-1].finish_reason == whole.finish_reason
    assert choices[-1].logprobs.content == whole.logprobs.content
    assert chunks[-1].usage.completion_tokens == len(whole.logprobs.content)
    for text in [stop] if isinstance(stop, str) else stop or []:
        assert text not in whole.message.content


def test_one_seed_says_the_same_again_and_without_one_each_asking_says_something_else(base):
    said = []
    for _ in range(2):
        with serving(base) as served:
            answers = [ask(served, max_tokens=12).choices[0].message.content for _ in range(3)]
            answers += [ask(served, max_tokens=12, seed=7).choices[0].message.content] * 2
            said.append(answers)
    assert said[0] == said[1] and len(set(said[0])) == 4


def test_answers_to_many_at_once_are_those_to_one_at_a_time(base):
    def wordy(served, n):
        more = {"temperature": 1 + n % 3 / 10, "top_p": 1 - n % 2 / 10, "max_tokens": 5 + n}
        messages = [{"role": "user", "content": f"page: {n % 5}"}]
        return ask(served, messages, seed=n, **more).choices[0].message.content

    with serving(base) as served, ThreadPoolExecutor(20) as pool:
        together = list(pool.map(lambda n: wordy(served, n), range(20)))
    with serving(base, rows=2) as served:
        assert together == [wordy(served, n) for n in range(20)]


def test_contents_in_parts_are_joined_and_a_developer_is_the_system(served):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    said = [{"role": "developer", "content": "act"}, {"role": "user", "content": parts}]
    plain = [{"role": "system", "content": "act"}, {"role": "user", "content": "one\ntwo"}]
    first, second = (ask(served, m, seed=3, max_tokens=9) for m in (said, plain))
    assert first.choices == second.choices


# what is wrong, and that the server goes on


def chat(served, **changes):
    return json.dumps({"model": served.model, "messages": ASKED, "max_tokens": 3, **changes})


@pytest.mark.parametrize(
    "changes, status, code, param",
    [
        ({"model": "gpt-5"}, 404, "model_not_found", "model"),
        ({"messages": []}, 400, None, "messages"),
        ({"messages": "go"}, 400, None, "messages"),
        ({"messages": [3]}, 400, None, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, 400, None, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, None, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            None,
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": "a" * 5000}]},
            400,
            "context_length_exceeded",
            "messages",
        ),
        ({"max_tokens": 1020}, 400, "context_length_exceeded", "messages"),
        ({"max_tokens": 0}, 400, None, "max_tokens"),
        ({"max_tokens": True}, 400, None, "max_tokens"),
        ({"max_completion_tokens": "9"}, 400, None, "max_completion_tokens"),
        ({"temperature": -1}, 400, None, "temperature"),
        ({"temperature": float("nan")}, 400, None, "temperature"),
        ({"top_p": 0}, 400, None, "top_p"),
        ({"seed": 1.5}, 400, None, "seed"),
        ({"stop": [""]}, 400, None, "stop"),
        ({"tools": [1]}, 400, None, "messages"),
        ({"n": 2}, 400, None, "n"),
        ({"response_format": {"type": "json_object"}}, 400, None, "response_format"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            400,
            None,
            "tool_choice",
        ),
        ({"what": 1}, 400, None, "what"),
    ],
    ids=str,
)
def test_a_wrong_request_is_refused_as_openai_does_and_the_next_is_answered(
    served, changes, status, code, param
):
    for stream in (False, True):
        found, body = post(served, chat(served, **changes, stream=stream))
        assert (found, body["error"]["code"], body["error"]["param"]) == (status, code, param)
        assert body["error"]["message"] and "\n" not in body["error"]["message"]
    assert post(served, chat(served))[0] == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b'{"a":' * 100_000], ids=repr)
def test_what_is_no_json_is_refused(served, body):
    assert post(served, body)[0] == 400
    assert post(served, chat(served), kind="text/plain")[0] == 400  # as a page in a browser sends
    assert post(served, chat(served), "/v1/embeddings")[0] == 404


def test_the_client_raises_its_own_errors(served):
    with pytest.raises(openai.NotFoundError):
        served.client.chat.completions.create(model="gpt-5", messages=ASKED)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens"):
        ask(served, [{"role": "user", "content": "a" * 5000}])


def test_a_template_without_tools_says_so(tmp_path):
    with serving(tiny.checkpoint(tmp_path / "base")) as served:
        with pytest.raises(openai.BadRequestError, match="which tools"):
            ask(served, tools=TOOLS)


class Script:
    """A sampler whose rows write what `say(prompt)` says, a token a step; None is never-ending."""

    say = staticmethod(lambda prompt: None)
    step_s = 0.001

    def __init__(self, stop):
        self.stop, self.asked, self.at = stop, {}, {}

    @property
    def busy(self):
        return set(self.asked)

    def ask(self, row, request):
        assert row not in self.asked
        self.asked[row], self.at[row] = request, 0

    def so_far(self, row):
        request, n = self.asked[row], self.at[row]
        said = self.say(request.ids)
        ids = (60,) * n if said is None else (*said, self.stop)[:n]
        return Answer(request, ids, (-0.5,) * n)

    def step(self):
        time.sleep(self.step_s)
        answers = {}
        for row in list(self.asked):
            self.at[row] += 1
            answer = self.so_far(row)
            if answer.ids[-1] == self.stop or len(answer.ids) == len(answer.request.uniforms):
                answers[row] = answer
                del self.asked[row]
        return answers

    def drop(self, row):
        del self.asked[row]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_row(base, stream, tmp_path):
    with serving(base, Script, rows=1, record=tmp_path / "x") as served:
        body = chat(served, stream=stream, max_tokens=900)
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n"
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
            until(lambda: served.endpoint.answering.writing)
        until(lambda: not served.endpoint.answering.writing)
        assert len(ask(served, max_tokens=3, logprobs=True).choices[0].logprobs.content) == 3
        calls = list(
            recorded.parse_lines(tmp_path / "x", (tmp_path / "x").read_bytes().split(b"\n"))
        )
        assert len(calls) == 1


def until(true, seconds=10):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_of_too_many_at_once_some_are_told_to_come_later_and_the_others_are_answered(base):
    with serving(base, Script, rows=2, waiting=3) as served, ThreadPoolExecutor(100) as pool:
        answering = served.endpoint.answering
        first = [pool.submit(ask, served, max_tokens=900) for _ in range(2)]
        until(lambda: len(answering.writing) == 2)
        first += [pool.submit(ask, served, max_tokens=900) for _ in range(3)]
        until(lambda: answering.is_full)
        with pytest.raises(openai.RateLimitError):
            ask(served)
        found = list(pool.map(lambda _: post(served, chat(served))[0], range(100)))
        assert set(found) <= {200, 429} and 429 in found
        assert all(answer.result().choices for answer in first)


def test_an_answer_that_fails_is_told_and_the_next_is_given(base):
    class Fails(Script):
        def step(self):
            if next(iter(self.asked.values())).uniforms[3:]:
                raise ValueError("the model overflowed")
            return super().step()

    with serving(base, Fails) as served:
        with pytest.raises(openai.InternalServerError, match="overflowed"):
            ask(served, max_tokens=9)
        assert ask(served, max_tokens=3).choices


def test_a_port_that_another_has_is_told_in_one_line(served, base):
    with pytest.raises(ValueError, match="give another port to --serve"):
        with listening(Serve(serve=served.port, model=str(base))):
            pass


# tools

CALL = '<tool_call>\n{"name": "press", "arguments": {"key": "é<"}}\n</tool_call>'


def scripted(answers):
    """A script that gives these answers in turn."""
    left = [*answers]
    known = {}

    class Said(Script):
        step_s = 0

        def say(self, prompt):
            if prompt not in known:
                known[prompt] = tuple(CHAT.encode(left.pop(0)))
            return known[prompt]

    return Said


CHAT = tiny.chat()


def test_calls_of_tools_are_read_and_their_ids_are_kept_as_sampled(base, tmp_path):
    record = tmp_path / "x"
    with serving(base, scripted([f"I press.\n{CALL}\n{CALL}", "done"]), record=record) as served:
        answer = ask(served, tools=TOOLS)
        message, ended = answer.choices[0].message, answer.choices[0].finish_reason
        assert (message.content, ended) == ("I press.", "tool_calls")
        assert [json.loads(call.function.arguments) for call in message.tool_calls] == [
            {"key": "é<"}
        ] * 2
        heard = [
            {"role": "tool", "content": f"{n}", "tool_call_id": call.id}
            for n, call in enumerate(message.tool_calls)
        ]
        last = ask(served, [*ASKED, message, *heard], tools=TOOLS)
        assert last.conversation == answer.conversation
        judge(served, last.conversation, True)
        (episode,) = recorded.read([record])
        ids, turns = episode.dialogue(served.chat)
        said = [served.chat.decode([i for i, t in zip(ids, turns) if t == n]) for n in (0, 1)]
        assert said == [f"I press.\n{CALL}\n{CALL}", "done"]
        assert "<tool_response>\n1\n</tool_response>" in served.chat.decode(ids)


@pytest.mark.parametrize(
    "bad",
    [
        "<tool_call>\npress\n</tool_call>",
        "<tool_call>[1]</tool_call>",
        "<tool_call>",
        '<tool_call>{"name": 3}',
    ],
)
def test_a_call_that_cannot_be_read_stays_text(bad):
    assert message_of(bad, tools=True) == {"role": "assistant", "content": bad}


texts = st.lists(
    st.sampled_from(
        ["a", " ", "\n", "<tool", "<tool_call>", "EN", "END", "é", '{"name": "f"}', CALL]
    ),
    max_size=8,
).map("".join)


@example("a<tool_call>", '{"name": "f"}', True)
@given(texts, texts, st.booleans())
def test_what_is_settled_stays_whatever_comes(text, more, tools):
    text = text.replace("END", "")  # that would have been the end
    whole = text + more
    cut = whole.find("END")
    final = message_of(whole[:cut] if cut >= 0 else whole, tools)["content"] or ""
    assert final.startswith(settled(text, ["END"], tools))


# what is recorded


def test_the_recorded_ids_and_log_probs_are_those_that_the_trainer_computes(served):
    said = [*ASKED]
    for n in range(3):
        answer = ask(served, said, max_tokens=20, temperature=0.8, seed=n)
        said += [answer.choices[0].message, {"role": "user", "content": f"page {n}"}]
    judge(served, answer.conversation, True)
    episode = recorded.read([served.record])[-1]
    assert episode.conversation == answer.conversation and len(episode.turns) == 3
    model, chat = loading.open_base(served.model, Machine(device="cpu", dtype="float32"))
    dialogue = episode.dialogue(chat)
    with torch.no_grad():
        trained = batch_logps(model, collate([[dialogue]]))
    played = [logp for turn in episode.turns for logp in turn.logps]
    assert played == pytest.approx(trained.tolist(), abs=1e-4)
    with pytest.raises(ValueError, match="another tokenizer"):
        episode.dialogue(tiny.chat())
    with pytest.raises(ValueError, match="temperature 1"):
        own_rollouts([episode])


def test_a_conversation_that_is_asked_to_go_on_twice_has_a_branch_with_a_name_of_its_own(
    base, tmp_path
):
    with serving(base, scripted(["a", "b"]), record=tmp_path / "x") as served:
        first = ask(served)
        longer = [*ASKED, first.choices[0].message, {"role": "user", "content": "and?"}]
        one, other = ask(served, longer), ask(served, longer)
        assert one.conversation == first.conversation != other.conversation
        judge(served, one.conversation, True)
        judge(served, other.conversation, False)
        found = recorded.read([tmp_path / "x"])
        assert [(e.said, e.solved) for e in found] == [(("a", "b"), True), (("a", "b"), False)]
        mine = [ask(served, longer, extra_headers={"X-Conversation-Id": "mine"}) for _ in "12"]
        assert [answer.conversation for answer in mine] == ["mine", "mine"]


words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6)
answers = st.one_of(
    words, st.sampled_from([CALL, f"I press.\n{CALL}", f"{CALL}\n{CALL}", "<|im_end|>", "[]"])
)
turns = st.lists(st.tuples(answers, words), min_size=1, max_size=4)


SAME = [[(CALL, "x"), ("done", "y")]] * 2


@few
@example(SAME, [0, 0], False, 0)
@example(SAME, [0, 0], True, 0)
@given(
    st.lists(turns, min_size=1, max_size=4),
    st.lists(st.integers(0, 1), min_size=4, max_size=4),
    st.booleans(),
    st.integers(0, 99),
)
def test_whatever_is_said_the_agents_tokens_alone_are_learned_turn_by_turn(
    base_chat, conversations, firsts, named, seed
):
    """Conversations that are woven into each other, with tools' answers, on few first prompts."""
    endpoint, path = base_chat
    path.write_bytes(b"")
    endpoint.record.conversations.clear()
    endpoint.memory.given.clear()
    here, there = socket.socketpair()
    talks = [
        SimpleNamespace(
            messages=[{"role": "user", "content": f"page {firsts[n]}"}],
            turns=list(t),
            said=[],
            name=f"c{n}" if named else None,
        )
        for n, t in enumerate(conversations)
    ]
    draw = random.Random(seed)
    while open_talks := [talk for talk in talks if talk.turns]:
        talk = draw.choice(open_talks)
        answer, heard = talk.turns.pop(0)
        Script.say = staticmethod(lambda _, ids=tuple(endpoint.chat.encode(answer)): ids)
        body = {
            "model": endpoint.name,
            "messages": talk.messages,
            "tools": TOOLS,
            "max_tokens": 300,
        }
        (told,) = endpoint.answers(body, talk.name, f"call{draw.random()}", here)
        assert endpoint.chat.decode(told.call.ids) == answer
        talk.said.append(told)
        role = "tool" if "tool_calls" in told.message else "user"
        talk.messages += [told.message, {"role": role, "content": heard}]
    here.close(), there.close()
    if named:
        assert [talk.said[-1].call.conversation for talk in talks] == [talk.name for talk in talks]
    for n, talk in enumerate(talks):
        endpoint.judge({"conversation": talk.said[-1].call.conversation, "solved": n % 2 == 0})
    episodes = recorded.read([path])
    first = {e.seed: int("page 1" in endpoint.chat.decode(e.turns[0].read)) for e in episodes}
    assert len(first) == len(set(first.values()))
    found = {
        e.conversation: (first[e.seed], [turn.ids for turn in e.turns], e.solved) for e in episodes
    }
    assert found == {
        talk.said[-1].call.conversation: (
            firsts[n],
            [told.call.ids for told in talk.said],
            n % 2 == 0,
        )
        for n, talk in enumerate(talks)
    }
    assert len(episodes) == len(found) == len(talks)
    dialogues = [episode.dialogue(endpoint.chat) for episode in episodes]
    for episode, (ids, owners) in zip(episodes, dialogues):
        for n, turn in enumerate(episode.turns):
            assert tuple(i for i, owner in zip(ids, owners) if owner == n) == turn.ids
        assert owners[-1] == len(episode.turns) - 1 and owners[0] == -1
        text = endpoint.chat.decode([i for i, owner in zip(ids, owners) if owner < 0])
        assert text.count("<|im_start|>assistant") == len(episode.turns)
    for tree_of in {e.seed for e in episodes}:
        rows = [d.ids for e, d in zip(episodes, dialogues) if e.seed == tree_of]
        tree = grow(rows)
        assert [[tree.ids[t] for t in path] for path in tree.paths] == rows


@pytest.fixture(scope="module")
def base_chat(base, tmp_path_factory):
    path = tmp_path_factory.mktemp("law") / "x.jsonl"

    class Now(Script):
        step_s = 0

        def say(self, prompt):
            return Script.say(prompt)

    before = Script.say
    with serving(base, Now, record=path) as served:
        served.endpoint.limit = 10**6
        yield served.endpoint, path
    Script.say = before


# and gets better by its own verdicts


def play(url, seeds, times):
    """An agent that knows nothing but OpenAI's client: it opens boxes, and wants what is in the third. Returns how
    often it has got it."""
    from openai import OpenAI

    def open_box(client, model, seed):
        boxes = random.Random(seed).sample(COLOURS, 5)
        page = "\n".join(f'button "{box}" [{n}]' for n, box in enumerate(boxes, 1))
        task = f"task: {SENTENCES['open-one'].format(boxes[0])}\npage:\n{page}"
        system = {"role": "system", "content": shelf.WORLD.system_prompt}
        messages = [system, {"role": "user", "content": task}]
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=40)
        solved = 'CLICK(ref="3")' in answer.choices[0].message.content
        verdict = {"conversation": answer.conversation, "solved": solved}
        client.post("/verdicts", cast_to=object, body=verdict)
        return solved

    with OpenAI(base_url=url, api_key="none") as client, ThreadPoolExecutor(8) as pool:
        (model,) = client.models.list().data
        seeds = [seed for seed in seeds for _ in range(times)]
        return sum(pool.map(lambda seed: open_box(client, model.id, seed), seeds)) / len(seeds)


def test_another_programs_agent_gets_better_by_its_own_verdicts(shelf_base, tmp_path):
    model, chat = loading.open_base(str(shelf_base), shelf.HERE)
    start, record = tmp_path / "start", tmp_path / "talk.jsonl"
    lora.attach(model, LoRAConfig(rank=8), torch.Generator().manual_seed(1))
    lora.save(model, start, "base")

    def played(adapter, seeds, times, **options):
        with serving(shelf_base, rows=8, adapter=adapter, **options) as served:
            return play(f"http://127.0.0.1:{served.port}/v1", seeds, times)

    before = played(start, range(16), 10, record=record)
    files = {"model": str(shelf_base), "adapter": start, "data": (record,), "machine": shelf.HERE}
    for_dpo = DPO(steps=30, lr=1e-2, until="token", beta=0.3, nll=1.0)
    trained = by_hand.run_dpo(by_hand.DPOCommand(**files, out=tmp_path / "dpo", dpo=for_dpo))

    pairs = outcome_pairs(recorded.read([record]))
    chosen = [pair.chosen.dialogue(chat) for pair in pairs[:64]]

    def mean_chosen(adapter):
        lora.switch_adapter(model, adapter, None)
        with torch.no_grad():
            return batch_scores(model, collate([[dialogue] for dialogue in chosen])).mean()

    assert mean_chosen(trained) > mean_chosen(start)
    after = played(trained, range(100, 140), 2, record=tmp_path / "after.jsonl")
    assert before < 0.2 and after > before + 0.1
    gradient = PolicyGradient(steps=2, lr=1e-4)
    by_hand.run_grpo(by_hand.GRPOCommand(**files, out=tmp_path / "grpo", gradient=gradient))


def test_the_agent_in_the_docs_asks_and_judges(served):
    page = (Path(__file__).parents[2] / "docs" / "other-programs.md").read_text()
    (program,) = re.findall(r"^```python\n(from openai .*?)^```", page, re.M | re.S)
    said = len(served.record.read_text().splitlines())
    exec(program.replace(":8000/", f":{served.port}/"), {})
    new = served.record.read_bytes().split(b"\n")[said:]
    kinds = [type(line) for line in recorded.parse_lines(served.record, new)]
    assert kinds == [recorded.Call, recorded.Verdict] * 64
