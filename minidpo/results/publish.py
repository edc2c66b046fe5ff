"""42. Exchange: what was trained goes to where other programs find it: a plain model, or the hub.

Adapters need no export, they are PEFT's own files (chapter 9). A merged model is base and adapter in one, as
transformers reads it, with the tokenizer and the template of the chat: the weights that act here, so the
logits are the same. A folder appears whole or not at all, and so does a commit on the hub. The last
chapter; the scripts use it.
"""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HTTPError  # of the HTTP library it uses, whichever that is

from minidpo.config import PushCommand
from minidpo.memory import lora
from minidpo.memory.loading import open_base
from minidpo.memory.machine import Machine
from minidpo.memory.plan import require_weights, setup_of
from minidpo.memory.quantised import expand, is_quantised
from minidpo.model.chat import SYSTEM_DEFAULT, Chat
from minidpo.model.checkpoint import HUB_FILES, NANO, locate, save
from minidpo.results.success import read_result, table
from minidpo.system import processes
from minidpo.system.files import read_json, write_json
from minidpo.system.tensors import fingerprint

# Chapter 7 as Qwen2's tokenizer_config.json writes it, for a base that has none beside its tokenizer.
TEMPLATE = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
            "{{ '<|im_start|>system\n" + SYSTEM_DEFAULT + "<|im_end|>\n' }}{% endif %}"
            "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
             "pad_token": "<|endoftext|>"}
BESIDE = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")  # copied where they are
RECORD, VERSION = "export.json", 1  # whose weights a merged folder holds
UPLOADED = {"adapter": (*lora.FILES,),
            "model": (*HUB_FILES, *BESIDE, "generation_config.json", RECORD)}


def export_merged(source: str, adapter: Path, machine: Machine, folder: Path) -> str:
    """Write base and adapter to `folder` as one plain model; returns the fingerprint of its weights.

    A folder that holds just these weights is left as it is, any other is refused with ValueError.
    """
    processes.refuse_torchrun("a merged model is not written")
    in_full = setup_of(source, replace(machine, quantize=None, cache=None))
    require_weights(in_full, "a merged model is held in full,",
                    "try --machine.device cpu with --machine.dtype bfloat16")
    base = locate(source, [*HUB_FILES, *BESIDE, "generation_config.json"])
    model, chat = open_base(source, machine)
    lora.load(model, adapter)
    if is_quantised(model):
        print("the base is held in NF4: what is written are the values that its codes stand for, in full")
        expand(model)
    lora.merge(model)
    record = {"version": VERSION, "model": source, "adapter": str(adapter),
              "weights": fingerprint(model.state_dict())}
    if folder.exists():
        held = read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
        if (held.get("version"), held.get("weights")) != (VERSION, record["weights"]):
            raise ValueError(f"{folder} is there and holds something else: delete it, or give another --out")
        print(f"{folder}: holds this model already")
        return record["weights"]
    written = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        save(model, written, base / "tokenizer.json")
        write_tokenizer(base, chat, written)
        write_json(written / RECORD, record)
        os.rename(written, folder)
    finally:
        shutil.rmtree(written, ignore_errors=True)
    gigabytes = sum(path.stat().st_size for path in folder.iterdir()) / 1e9
    print(f"{folder}: {adapter} added to {source}, {str(model.head_weight.dtype).removeprefix('torch.')}, "
          f"{gigabytes:.2f} GB")
    return record["weights"]


def write_tokenizer(base: Path, chat: Chat, folder: Path) -> None:
    """What transformers wants beside tokenizer.json: settings, the chat's template, and where to stop."""
    for name in BESIDE:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
    given, stops = base / "tokenizer_config.json", base / "generation_config.json"
    if given.is_file():
        settings = read_json(given)
    else:  # not from the hub: transformers 5 would split text as Qwen2 does, whatever tokenizer.json says
        settings = dict(TOKENIZER)
        print("the tokenizer is the base's own: in transformers, PreTrainedTokenizerFast.from_pretrained "
              "reads it as it is, AutoTokenizer takes any for Qwen2's")
    if not (base / "chat_template.jinja").is_file():
        settings.setdefault("chat_template", TEMPLATE)
    write_json(folder / given.name, settings)
    generation = read_json(stops) if stops.is_file() else {}
    ends = generation.get("eos_token_id") or []
    ends = ends if isinstance(ends, list) else [ends]
    # the agent ends an answer with <|im_end|>; a base that is no chat model knows another end only
    write_json(folder / stops.name, {**generation, "eos_token_id": list(dict.fromkeys([chat.end, *ends]))})


def push(config: PushCommand) -> dict:
    """Upload an adapter or a merged model, with a model card, in one commit. Returns where it is."""
    processes.refuse_torchrun("an upload is not made")
    kind, files = to_upload(config.folder)
    operations = [CommitOperationAdd(path.name, path) for path in files]
    operations.append(CommitOperationAdd("README.md", card(config, kind).encode()))
    if get_token() is None:
        raise ValueError("the hub takes uploads from known users only: set HF_TOKEN, or run `hf auth login`")
    hub = HfApi()
    try:
        hub.create_repo(config.to, private=config.private or None, exist_ok=True)
        commit = hub.create_commit(config.to, operations, commit_message=f"{kind}, by minidpo")
    except (OSError, ValueError, HTTPError) as error:  # offline, no permission, a bad id
        raise ValueError(f"{config.to}: nothing was uploaded ({' '.join(str(error).split())})") from None
    print(f"{config.to}: {kind}, {len(operations)} files, {commit.commit_url}")
    return {"to": config.to, "kind": kind, "commit": commit.oid}


def to_upload(folder: Path) -> tuple[str, list[Path]]:
    """Whether a folder holds an adapter or a model, and its files. Raises ValueError if neither."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    if (folder / lora.CONFIG).is_file():
        lora.read_config(folder)
        kind = "adapter"
    elif (folder / RECORD).is_file():
        kind = "model"
    else:
        raise ValueError(f"{folder}: holds neither an adapter ({lora.CONFIG}) nor a model that evaluate.py "
                         f"--export merged wrote ({RECORD})")
    return kind, sorted({path for pattern in UPLOADED[kind] for path in folder.glob(pattern)})


def card(config: PushCommand, kind: str) -> str:
    """README.md for the hub: what it was made from, how to load it, and the result if there is one."""
    if kind == "adapter":
        base = read_json(config.folder / lora.CONFIG).get("base_model_name_or_path") or ""
        library, use = "peft", f"python evaluate.py --model {base} --adapters mine={config.to}"
    else:
        base = read_json(config.folder / RECORD)["model"]
        library, use = "transformers", f"python evaluate.py --model {config.to}"
    # the hub refuses a base that is no hub id: a folder of somebody's machine, or what ships with minidpo
    on_hub = base != NANO and re.fullmatch(r"\w[\w.-]*/[\w.-]+", base)
    known = f"base_model: {base}\n" if on_hub else ""
    text = (f"---\nlibrary_name: {library}\npipeline_tag: text-generation\n{known}"
            f"tags:\n- minidpo\n- web-agent\n---\n# {config.to.rpartition('/')[2]}\n\n"
            f"An agent for web pages, trained with minidpo: "
            f"{'a LoRA adapter' if kind == 'adapter' else 'base and LoRA adapter in one'}.\n"
            f"It reads pages as minidpo writes them, and answers with a thought and an action.\n\n"
            f"```\n{use}\n```\n")
    if config.result is None:
        return text
    result = read_result(config.result)
    names = [name for name, value in result.items()
             if isinstance(value, dict) and {"all", "tasks"} <= value.keys()]
    if not names:
        raise ValueError(f"{config.result}: holds no result of evaluate.py or of a loop")
    whose = "Success" if result.get("best_of", 1) == 1 else "An oracle's success, not the agent's own,"
    return (f"{text}\n{whose} on MiniWoB++ pages never seen in training, with 95 % intervals:\n"
            f"```\n{table(result, names)}\n```\n")
