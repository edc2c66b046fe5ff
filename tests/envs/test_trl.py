"""Worlds as TRL's environment classes. TRL itself is tried where it is installed."""

import inspect
import os
from pathlib import Path

import pytest

import envs
from envs.protocol import EnvError
from envs.trl import environment, rows

WALK = f"{Path(__file__).parent / 'walking.py'}:Walk"


def tools(cls):
    """As TRL finds them."""
    named = dict(inspect.getmembers(cls, inspect.isfunction))
    return {
        name: f
        for name, f in named.items()
        if name[0] != "_" and name not in ("reset", "get_reward")
    }


def test_pages_have_a_tool_for_each_command_and_other_worlds_one():
    page, other = tools(environment("toy")), tools(environment(WALK))
    assert {"click", "type", "press", "wait"} < page.keys() and other.keys() == {"act"}
    for tool in (*page.values(), *other.values()):
        _, *parameters = inspect.signature(tool).parameters.values()
        assert tool.__doc__ and all(one.annotation in (int, str) for one in parameters)
        assert all(f"    {one.name}: " in tool.__doc__ for one in parameters)


def test_an_instance_is_the_world_s_and_so_is_its_reward():
    env = environment("toy")()
    row = rows("toy", "open-two", 3)[2]
    assert row["seed"] == envs.world("toy").instances("open-two", "rollouts")[2]
    page = env.reset(**row)
    first, second = page.split('"')[1:4:2]
    number = {
        line.split('"')[1]: line[-2] for line in page.splitlines() if line.startswith("button")
    }
    assert "boxes are opened with" in env.press(key="Enter")
    assert f'text "{first}, open"' in env.click(ref=number[first]) and env.get_reward() == 0.0
    assert env.click(ref=number[second]) == "The episode has ended." and env.get_reward() == 1.0
    with pytest.raises(ValueError, match="ended"):
        env.click(ref="1")
    assert env.reset(**row) == page and env.get_reward() == 0.0


def test_an_episode_has_the_world_s_limit():
    env = environment("toy")()
    env.reset("open-one", 7)
    for _ in range(envs.world("toy").step_limit("open-one")):
        env.wait()
    with pytest.raises(ValueError, match="ended"):
        env.wait()


def test_a_world_that_breaks_has_no_reward_and_is_begun_anew(monkeypatch):
    class Broken:
        resets = 0

        async def reset(self, task, seed):
            Broken.resets += 1
            if Broken.resets % 2:
                raise EnvError("gone")
            return envs.protocol.Observation("do", "page")

        async def step(self, action):
            raise EnvError("gone again")

    env = environment("toy")()
    env.reset("open-one", 7)
    env._place.env = Broken()
    assert "page" in env.reset("open-one", 7)
    with pytest.raises(EnvError):
        env.click(ref="1")
    assert env.get_reward() is None
    env.reset("open-one", 7)
    assert env.get_reward() == 0.0


def test_an_unknown_world_is_refused():
    with pytest.raises(ValueError, match="toy"):
        environment("toi")


@pytest.mark.slow
@pytest.mark.parametrize("world, task", [("toy", "open-one"), ("miniwob", "click-button")])
def test_trl_trains_on_it(tmp_path, monkeypatch, world, task):
    """The model is tiny and says nothing usable, so a call is put into its mouth: TRL finds and carries it out."""
    monkeypatch.setitem(os.environ, "TRL_EXPERIMENTAL_SILENCE", "1")
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from trl.chat_template_utils import qwen2_5_chat_template

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    fast.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = qwen2_5_chat_template
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **heads))
    call = '<tool_call>\n{"name": "click", "arguments": {"ref": "1"}}\n</tool_call><|im_end|>'
    prompts = []

    class Told(trl.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            said, logps = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            prompts.append(tokenizer.decode(prompt_ids[0]))
            if "<tool_response>" not in prompts[-1]:
                said = [tokenizer(call)["input_ids"]] * len(said)
            return said, logps

    trainer = Told(
        model,
        args=trl.GRPOConfig(
            str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=400,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=datasets.Dataset.from_list(rows(world, task, 4)),
        processing_class=tokenizer,
        environment_factory=environment(world),
    )
    trainer.train()
    assert all("task: " in prompt and "page:\n" in prompt for prompt in prompts)
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert len(logs) == 2 and all(log["tools/call_frequency"] >= 1 for log in logs)
    assert all(log["tools/failure_frequency"] == 0 for log in logs)
    assert all(log[f"rewards/{world.title()}/mean"] in (0.0, 1.0) for log in logs)
