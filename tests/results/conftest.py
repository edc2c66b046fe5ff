"""A tiny base with an adapter, and a browser that opens reports."""

import os
from pathlib import Path

import pytest
import tiny
from playwright.sync_api import sync_playwright
from test_lora import trained

from envs.miniwob.browser.chromium import find_chromium
from minidpo.memory import loading, lora
from minidpo.memory.lora import LoRAConfig
from minidpo.memory.machine import Machine
from minidpo.results.report import render
from minidpo.system.files import write_text
from minidpo.system.tensors import fingerprint


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """A base model's folder. It must not be changed."""
    return tiny.checkpoint(tmp_path_factory.mktemp("tiny") / "base")


@pytest.fixture(scope="session")
def make_adapter(base):
    """make_adapter(folder, machine, shape): an adapter that does something, for the base on this machine."""

    def make(out: Path, machine=Machine(device="cpu", dtype="float32"), shape=LoRAConfig(rank=3)):
        model, _ = loading.open_base(str(base), machine)
        trained(model, shape)
        lora.save(model, out, str(base), fingerprint(lora.base_tensors(model)))
        return out

    return make


@pytest.fixture(scope="session")
def adapter(make_adapter, tmp_path_factory) -> Path:
    """An adapter of the base. It must not be changed."""
    return make_adapter(tmp_path_factory.mktemp("tiny") / "adapter")


@pytest.fixture(scope="module")
def open_report(tmp_path_factory):
    """open_report(data, width) -> (page, problems): the report drawn at that width, all it complained of."""
    folder = tmp_path_factory.mktemp("report")
    sandbox = [] if os.getuid() else ["--no-sandbox"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=sandbox)

        def open_at(data, width=1280, **options):
            for old in browser.contexts:
                old.close()
            page = browser.new_page(viewport={"width": width, "height": 900}, **options)
            problems = []

            def on_request(request):
                if not request.url.startswith(("file:", "data:image/png")):
                    problems.append(f"asked for {request.url[:80]}")

            page.on("console", lambda message: problems.append(message.text))
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("request", on_request)
            write_text(folder / "report.html", render(data))
            page.goto((folder / "report.html").as_uri())
            return page, problems

        yield open_at
        browser.close()
