"""The report in a real browser: it shows the data's numbers, fits any screen, is inert under hostile text."""

import base64
import json
import os
import struct
import zlib

import pytest
from playwright.sync_api import sync_playwright

from envs.miniwob.browser import find_chromium
from minidpo.report import render, write_report

HOSTILE = "</script><img src=x onerror=\"hurt=1\"><!-- <script>hurt=1</script> & 'quoted' \u2028 \ud800"


def grey_png(width, height):
    """A PNG by hand (signature, IHDR, IDAT, IEND), so that the test needs no image library."""
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    pixels = b"".join(b"\x00" + bytes([200]) * width for _ in range(height))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b""))


def example(text="button \"Submit\" [3]"):
    shot = base64.b64encode(grey_png(160, 210)).decode()

    def row(*values):
        names = ("success", "low", "high", "n", "mean_steps", "valid_action_rate")
        return dict(zip(names, values, strict=True))

    def episode(outcome, reward, count):
        turn = {"observation": text, "answer": text, "thought": text, "action": 'CLICK(ref="3")',
                "error": None, "screenshot": shot}
        turns = [turn] * (count - 1) + [{**turn, "action": None, "error": text, "screenshot": None}]
        return {"task": "click-link", "seed": 4000017, "instruction": text, "outcome": outcome,
                "reward": reward, "turns": turns, "final_screenshot": shot}

    return {
        "title": f"demo {text}",
        "results": {
            "sft": {"all": row(0.6103, 0.5824, 0.6375, 1200, 3.217, 0.913),
                    "tasks": {"click-link": row(0.57, 0.4721, 0.6627, 100, 2.5, 0.875),
                              "form-sequence-2": row(0.0, 0.0, 0.037, 100, 5.75, 1.0)}},
            "dpo": {"all": row(0.8425, 0.8208, 0.8620, 1200, 2.891, 0.984),
                    "tasks": {"click-link": row(0.93, 0.8625, 0.9657, 100, 1.25, 0.965),
                              "form-sequence-2": row(1.0, 0.963, 1.0, 100, 3.5, 0.99)}}},
        "gain_points": 23.22, "p_value": 3.14e-41,
        "settings": {"model": "minidpo/nano", "beta": 0.1, text: text},
        "seconds": {"sft": 61.25, "evaluate": 143.0},
        "curves": {
            "sft": [{"step": k, "loss": 2 / k, "lr": 1e-4} for k in range(1, 101)],
            "dpo": [{"step": k, "loss": 0.6931 / k, "accuracy": 1.0,
                     "logp_chosen": -3.0 - k / 50, "logp_rejected": -3.0 - k / 5,
                     "kl": float("nan") if k == 3 else 0.01 * k,
                     "validation_success": 0.6 + k / 200 if k % 10 == 0 else None} for k in range(1, 51)]},
        "episodes": {"sft": episode("failed", -1.0, 5), "dpo": episode("solved", 1.0, 3)}}


@pytest.fixture(scope="module")
def open_report(tmp_path_factory):
    """open_report(data, width) -> (page, problems): the report drawn at that width, all it complained of."""
    folder = tmp_path_factory.mktemp("report")
    sandbox = [] if os.getuid() else ["--no-sandbox"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=sandbox)

        def open_at(data, width, **options):
            page, problems = browser.new_page(viewport={"width": width, "height": 900}, **options), []
            page.on("console", lambda message: problems.append(message.text))
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("request", lambda request: problems.append(f"asked for {request.url[:80]}")
                    if not request.url.startswith(("file:", "data:image/png")) else None)
            write_report(folder / "report.html", data)
            page.goto((folder / "report.html").as_uri())
            return page, problems

        yield open_at
        browser.close()


@pytest.mark.parametrize("width", [380, 760, 1400])
@pytest.mark.parametrize("text", ['button "Submit" [3]', "x" * 600], ids=["ordinary", "unbroken"])
def test_it_draws_without_complaint_or_overflow(open_report, width, text):
    page, problems = open_report(example(text), width)
    assert problems == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("figcaption").all_inner_texts() == [
        "loss", "lr", "loss", "accuracy", "logp", "kl", "validation success"]
    assert page.locator("li img").count() == 4 + 1 + 2 + 1


def test_the_numbers_shown_are_the_data(open_report):
    data = example()
    page, _ = open_report(data, 1400)
    assert page.title() == data["title"]
    assert page.locator("#gain").inner_text() == "+23.2"
    assert page.locator("#p-value").inner_text() == "= 3.1·10⁻⁴¹"
    sft, dpo = data["results"].values()
    pairs = [(sft["all"], dpo["all"]), *zip(sft["tasks"].values(), dpo["tasks"].values(), strict=True)]
    cells = page.eval_on_selector_all(
        "#tasks tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))")
    assert [[cell.replace("\u2009", "") for cell in line[-7:]] for line in cells] == [
        [policy, "", f"{100 * row['success']:.1f}%", f"{100 * row['low']:.1f}–{100 * row['high']:.1f}",
         str(row["n"]), f"{row['mean_steps']:.2f}", f"{100 * row['valid_action_rate']:.1f}%"]
        for pair in pairs for policy, row in zip(("SFT", "EF-DPO"), pair)]
    assert page.locator("#tasks tbody th").all_inner_texts() == [
        "all tasks\n+23.2", "click-link\n+36.0", "form-sequence-2\n+100.0"]


def test_bars_and_whiskers_have_the_data_s_lengths(open_report):
    page, _ = open_report(example(), 1400)
    bar, fill, low, high = page.evaluate("""() => {
        const bar = document.querySelectorAll("#tasks .bar")[2], [i, b] = bar.children;
        const box = bar.getBoundingClientRect(), end = b.getBoundingClientRect();
        return [bar.clientWidth, i.getBoundingClientRect().width, end.left - box.left, end.right - box.left];
    }""")
    assert [fill / bar, low / bar, high / bar] == pytest.approx([0.57, 0.4721, 0.6627], abs=0.003)


def test_pointing_at_a_curve_reads_its_value(open_report):
    page, _ = open_report(example(), 1400)
    figure = page.locator("figure", has_text="chosen")
    legend = figure.locator(".legend")
    assert legend.inner_text().split() == ["step", "50", "chosen", "−4", "rejected", "−13"]
    figure.scroll_into_view_if_needed()
    box = figure.locator("svg").bounding_box()
    page.mouse.move(box["x"] + 40 / 320 * box["width"], box["y"] + 50)  # the left end of the axis: step 1
    assert legend.inner_text().split() == ["step", "1", "chosen", "−3.02", "rejected", "−3.2"]


def test_text_from_a_page_stays_text(open_report):
    page, problems = open_report(example(HOSTILE), 1400)
    assert problems == []
    assert page.evaluate("typeof hurt") == "undefined"
    assert page.locator("img:not([src^='data:image/png;base64,'])").count() == 0
    assert page.locator("blockquote").inner_text().startswith('</script><img src=x onerror="hurt=1"><!--')


def test_one_policy_without_training_or_episodes_is_a_report_too(open_report):
    data = example() | {"gain_points": None, "p_value": None, "episodes": None, "curves": {}}
    del data["results"]["sft"]
    page, problems = open_report(data, 380)
    assert problems == []
    assert page.locator("#gain").count() == 0
    assert "EF-DPO solves 84.2" in page.locator(".headline").inner_text().replace("\u2009", "")


def test_the_data_come_back_from_the_file_exactly():
    html = render(example(HOSTILE))
    block = html.split('id="data">')[1].split("</script>")[0]
    expected = example(HOSTILE)
    expected["curves"]["dpo"][2]["kl"] = None       # JSON has no nan; the curve shows a gap
    assert json.loads(block) == expected
    assert "://" not in html.replace("http://www.w3.org/2000/svg", "")


def test_a_report_that_cannot_be_made_leaves_the_old_one(tmp_path):
    path = tmp_path / "report.html"
    write_report(path, example())
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_report(path, {"title": object()})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
