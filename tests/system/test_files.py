"""A file is there whole, old or new, and what cannot be read says so."""

import socket
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from minidpo.system.files import read_json, replacing, write_json, write_text
from minidpo.system.tensors import fingerprint, write_weights

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.uint8,
    torch.int64,
    torch.bool,
)


def test_what_was_written_is_read_back(tmp_path):
    path = tmp_path / "new" / "folder" / "settings.json"
    write_json(path, {"name": "naïve 你好", "out": Path("runs/sft"), "n": [1, 2.5, None]})
    assert read_json(path) == {"name": "naïve 你好", "out": "runs/sft", "n": [1, 2.5, None]}
    assert "naïve 你好" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("before", [None, "old"])
def test_a_block_that_fails_leaves_what_was_there_and_no_litter(tmp_path, before):
    path = tmp_path / "file"
    if before:
        path.write_text(before)
    with pytest.raises(KeyboardInterrupt), replacing(path) as written:
        written.write_text("half of the n")
        raise KeyboardInterrupt
    assert [p.read_text() for p in tmp_path.iterdir()] == ([before] if before else [])


@pytest.mark.parametrize(
    "content, says",
    [
        (None, "no such file"),
        (b"", "not readable as JSON"),
        (b'{"a": 1', "not readable as JSON"),
        (b"\xff\xfe\x00", "not readable as JSON"),
        (b"[1, 2]", "expected a JSON object, got [1, 2]"),
    ],
)
def test_what_is_no_json_object_is_refused_by_name(tmp_path, content, says):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_json(path)
    assert str(error.value).startswith(f"{path}: ") and says in str(error.value)


def test_what_a_kill_left_half_written_goes_with_the_next_write_and_what_others_write_stays(
    tmp_path,
):
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = f".file.{socket.gethostname()}"
    dead, alive, elsewhere, others = (
        tmp_path / name
        for name in (
            f"{here}.{ended.pid}",
            f"{here}.1",
            f".file.elsewhere.{ended.pid}",
            f".other{here}.{ended.pid}",
        )
    )
    for path in (dead, alive, elsewhere, others):
        path.write_text("half")
    write_text(tmp_path / "file", "whole")
    assert set(tmp_path.iterdir()) == {tmp_path / "file", alive, elsewhere, others}


SHAPES = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3))


@given(
    st.dictionaries(st.text(max_size=9), SHAPES, max_size=5),
    st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3),
)
def test_the_library_reads_what_was_written(tmp_path_factory, shapes, metadata):
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    tensors = {
        name: (100 * torch.randn(shape)).to(dtype) for name, (dtype, shape) in shapes.items()
    }
    write_weights(path, tensors, metadata)
    with safe_open(path, framework="pt") as file:
        assert (file.metadata() or {}) == metadata
    read = load_file(path)
    assert read.keys() == tensors.keys() and fingerprint(read) == fingerprint(tensors)
    assert all(
        read[name].data_ptr() % tensor.element_size() == 0 for name, tensor in tensors.items()
    )
