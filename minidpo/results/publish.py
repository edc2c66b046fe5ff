"""Publishing: write base and adapter as one model or GGUF file, or upload either to the Hugging Face hub.

Adapters need no export: they are PEFT's own files (`memory/lora`). A merged model is base and adapter in one
folder that transformers reads, with the weights that act here, so the logits are the same. A folder appears
whole or not at all, and so does a commit on the hub.
"""

import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import huggingface_hub as hub
import torch

from minidpo.memory import lora
from minidpo.memory.advice import require_weights
from minidpo.memory.loading import merge, open_base, to_compute
from minidpo.memory.machine import Machine
from minidpo.memory.plan import acting_setup, setup_of
from minidpo.model import gguf_file, scalar_head
from minidpo.model.chat import Chat
from minidpo.model.checkpoint import (
    HUB_FILES,
    NANO,
    SMOLLM2,
    SMOLLM2_HUB,
    locate,
    raw_config,
    save,
    token_ids,
)
from minidpo.model.decoder import Transformer
from minidpo.results.table import table
from minidpo.system import processes
from minidpo.system.files import read_json, temporary_beside, write_json
from minidpo.system.result_file import read_result
from minidpo.system.tensors import fingerprint

# copied if there
BESIDE = (
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
RECORD, VERSION = "export.json", 1  # says which base and adapter a merged folder holds
UPLOADED = {
    "adapter": (*lora.FILES, scalar_head.FILE),
    "model": (*HUB_FILES, *BESIDE, "generation_config.json", RECORD),
}
# what is left of an earlier upload there, which a loader would take for this one's
STALE = {
    "adapter": re.escape(scalar_head.FILE),
    "model": r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?",
}


class Merged(NamedTuple):
    """Base and adapter in one plain model, with the weights that act here."""

    base: Path  # its folder or GGUF file
    model: Transformer
    chat: Chat
    adapter: dict[str, lora.LoRALinear]  # by the name of the map that each was added to


def open_merged(source: str, adapter: Path, machine: Machine) -> Merged:
    """The merged model. Raises ValueError if it does not fit in full, before weights are read."""
    processes.refuse_torchrun("a merged model is not written")
    machine = to_compute(machine, adapter)
    setup = setup_of(source, replace(machine, quantize=None, cache=None))
    dtype = acting_setup(setup).dtype
    require_weights(
        setup._replace(dtype=torch.promote_types(dtype, setup.dtype)),
        "a merged model is held in full,",
        "try --machine.device cpu with --machine.dtype bfloat16",
    )
    base = locate(source, [*HUB_FILES, *BESIDE, "generation_config.json"])
    model, chat = open_base(source, machine)
    lora.load(model, adapter)
    if machine.quantize:
        print("the base is held in few bits: the values that its codes stand for are written")
    layers = lora.layers(model)
    merge(model, dtype, adapter)
    return Merged(base, model, chat, layers)


def export_gguf(source: str, adapter: Path, machine: Machine, folder: Path, name: str) -> str:
    """Write base and adapter to FOLDER/NAME-merged.gguf, the adapter alone to NAME-lora.gguf beside it, if
    they are missing. Returns the merged weights' fingerprint, which both hold."""
    from minidpo.results import gguf_out  # here: the package `gguf` adds 0.2 s to every start

    merged = open_merged(source, adapter, machine)
    model, chat = merged.model, merged.chat
    weights = fingerprint(model.state_dict())
    whole, alone = folder / f"{name}-merged.gguf", folder / f"{name}-lora.gguf"
    for path in (whole, alone):
        if path.exists() and gguf_out.weights_in(path) != weights:
            raise ValueError(
                f"{path} exists and holds something else: delete it, or give another --out"
            )
    if not whole.exists():
        gguf_out.write_model(whole, model, merged.base, chat=chat, weights=weights)
    if not alone.exists():
        gguf_out.write_adapter(alone, model.config, merged.adapter, weights)
    print(f"{whole}: {adapter} added to {source}, F16")
    print(f"{alone}: the adapter alone, for llama.cpp's --lora beside {source}")
    return weights


def export_merged(source: str, adapter: Path, machine: Machine, folder: Path, name: str) -> str:
    """Write base and adapter to FOLDER/NAME-merged as one plain model, unless it is there. Returns its
    fingerprint."""
    base, model, chat, _ = open_merged(source, adapter, machine)
    folder = folder / f"{name}-merged"
    record = {
        "version": VERSION,
        "model": source,
        "adapter": str(adapter),
        "weights": fingerprint(model.state_dict()),
    }
    if folder.exists():
        if _read_if_there(folder / RECORD).get("weights") != record["weights"]:
            raise ValueError(
                f"{folder} exists and holds something else: delete it, or give another --out"
            )
        print(f"{folder}: already holds this model")
        return record["weights"]
    temporary = temporary_beside(folder)
    try:
        if gguf_file.is_gguf(base):
            save(model, temporary, None, found=raw_config(base))
            gguf_file.tokenizer_of(base).save(str(temporary / "tokenizer.json"))
        else:
            save(model, temporary, base / "tokenizer.json", found=raw_config(base))
        write_tokenizer(base, chat, temporary)
        write_json(temporary / RECORD, record)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{folder}: {adapter} added to {source}, {model.head_weight.dtype}")
    return record["weights"]


def write_tokenizer(base: Path, chat: Chat, folder: Path) -> None:
    """Write what transformers needs beside tokenizer.json: settings, chat template, stop tokens."""
    for path in (path for pattern in BESIDE for path in base.glob(pattern)):
        copy = folder / path.relative_to(base)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
    settings = _read_if_there(base / "tokenizer_config.json")
    if not settings:
        name_of = chat.tokenizer.id_to_token
        end, pad = name_of(chat.end), "<|endoftext|>"  # Llama 3 has no pad token
        if (given := token_ids(base).get("pad_token_id")) is not None:
            pad = name_of(given)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end,
            "pad_token": end if pad is None or chat.tokenizer.token_to_id(pad) is None else pad,
        }
        print(
            "the base has no tokenizer_config.json: load its tokenizer with PreTrainedTokenizerFast, as "
            "transformers' AutoTokenizer would split text as Qwen2's does, whatever tokenizer.json says"
        )
        if chat.begin:  # the template writes it
            settings["bos_token"] = name_of(*chat.begin)
    if settings.get("chat_template") is None and not (base / "chat_template.jinja").is_file():
        settings["chat_template"] = chat.template.source
    write_json(folder / "tokenizer_config.json", settings)
    # the agent ends an answer with <|im_end|>; a base that is no chat model lists another token, or null
    generation = _read_if_there(base / "generation_config.json") or token_ids(base)
    others = generation.get("eos_token_id")
    others = others if isinstance(others, list) else [others]
    ends = [chat.end, *(end for end in others if end not in (chat.end, None))]
    write_json(folder / "generation_config.json", {**generation, "eos_token_id": ends})


def _read_if_there(path: Path) -> dict:
    return read_json(path) if path.is_file() else {}


@dataclass(frozen=True)
class PushCommand:
    """Upload an adapter, or a model that evaluate --export merged wrote, to the Hugging Face hub."""

    to: str
    "hub id, OWNER/NAME; the repository is made if it is missing"
    folder: Path = Path("runs/dpo/adapter")
    "folder with an adapter or with a merged model"
    result: Path | None = None
    "result.json of an evaluation, for the model card"
    private: bool = False
    "make a new repository private"


def push(command: PushCommand) -> dict:
    """Upload an adapter or a merged model with a model card, in one commit. Returns where it is."""
    processes.refuse_torchrun("an upload is not made")
    kind, files = to_upload(command.folder)
    uploads = {path.relative_to(command.folder).as_posix(): path for path in files}
    uploads["README.md"] = card(command, kind).encode()
    if hub.get_token() is None:
        raise ValueError("an upload to the hub needs a token: set HF_TOKEN, or run `hf auth login`")
    api = hub.HfApi()
    try:
        api.create_repo(command.to, private=command.private or None, exist_ok=True)
        there = api.list_repo_files(command.to)
        stale = [name for name in there if re.fullmatch(STALE[kind], name) and name not in uploads]
        operations = [hub.CommitOperationAdd(name, content) for name, content in uploads.items()]
        operations += [hub.CommitOperationDelete(name) for name in stale]
        commit = api.create_commit(command.to, operations, commit_message=f"{kind}, by minidpo")
    except (OSError, ValueError, hub.errors.HTTPError) as error:  # offline, no permission, a bad id
        reason = " ".join(str(error).split())
        raise ValueError(f"{command.to}: nothing was uploaded ({reason})") from None
    print(f"{command.to}: {kind}, {len(uploads)} files, {commit.commit_url}")
    return {"to": command.to, "kind": kind, "commit": commit.oid}


def to_upload(folder: Path) -> tuple[str, list[Path]]:
    """The kind of a folder, "adapter" or "model", and the files to upload."""
    if (folder / lora.CONFIG).is_file():
        lora.read_config(folder)
        kind = "adapter"
    elif (folder / RECORD).is_file():
        kind = "model"
    else:
        raise ValueError(f"{folder}: neither an adapter nor what evaluate.py --export merged wrote")
    return kind, sorted({path for pattern in UPLOADED[kind] for path in folder.glob(pattern)})


def card(command: PushCommand, kind: str) -> str:
    """The model card: the base, how to load the agent, and the result if one is given."""
    if kind == "adapter":
        base = read_json(command.folder / lora.CONFIG).get("base_model_name_or_path") or ""
        library, what = "peft", "a LoRA adapter"
        use = f"python evaluate.py --model {base} --adapters mine={command.to}"
    else:
        base = read_json(command.folder / RECORD)["model"]
        library, what = "transformers", "base and LoRA adapter in one"
        use = f"python evaluate.py --model {command.to}"
    # the hub refuses a base_model that is no hub id: a local folder, or the nano that ships with minidpo
    base = {SMOLLM2: SMOLLM2_HUB}.get(base, base)
    on_hub = base != NANO and not Path(base).exists() and re.fullmatch(r"\w[\w.-]*/[\w.-]+", base)
    base_line = f"base_model: {base}\n" if on_hub else ""
    text = (
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\n{base_line}"
        f"tags:\n- minidpo\n- web-agent\n---\n# {command.to.rpartition('/')[2]}\n\n"
        f"An agent for web pages, trained with minidpo: {what}.\n"
        f"It reads pages as minidpo writes them, and answers with a thought and an action.\n\n"
        f"```\n{use}\n```\n"
    )
    if command.result is None:
        return text
    result = read_result(command.result)
    if not result["agents"]:
        raise ValueError(f"{command.result}: holds no result of evaluate.py or of a training")
    # the table says which instances these are, and who chose among several tries
    world = result.get("world", "miniwob")
    return f"{text}\nSuccess on {world}, with 95 % intervals:\n```\n{table(result)}\n```\n"
