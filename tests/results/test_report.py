"""The report in a real browser: it shows the data's numbers, fits any screen, is inert under hostile text."""

import base64
import json
import struct
import zlib
from itertools import pairwise

import pytest
from playwright.sync_api import expect

from minidpo.results.report import LIMIT, render

HOSTILE = (
    "</script><img src=x onerror=\"hurt=1\"><!-- <script>hurt=1</script> & 'quoted' \u2028 \ud800"
)


def grey_png(width, height, shade):
    """A PNG by hand (signature, IHDR, IDAT, IEND), so that the test needs no image library."""

    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    pixels = b"".join(b"\x00" + bytes([shade]) * width for _ in range(height))
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(pixels))
        + chunk(b"IEND", b"")
    )


def row(*values):
    names = ("success", "low", "high", "n", "mean_steps", "valid_action_rate", "mean_reward")
    return dict(zip(names, values))


def episode(text, outcome, count):
    turns = [
        {
            "observation": text,
            "answer": text,
            "thought": f"{n} {text}",
            "action": 'CLICK(ref="3")',
            "error": None,
            "picture": n % 3,
            "marks": [[16, 21, 32, 42]],
        }
        for n in range(count - 1)
    ]
    turns.append({**turns[0], "action": None, "error": text, "picture": None, "marks": []})
    return {"outcome": outcome, "reward": float(outcome == "solved"), "turns": turns, "final": 2}


def instance(text, task, seed, first, last):
    return {
        "task": task,
        "seed": seed,
        "instruction": f"{task} {seed} {text}",
        "pictures": [
            base64.b64encode(grey_png(160, 210, shade)).decode() for shade in (40, 120, 200)
        ],
        "size": [160, 210],
        "episodes": {"sft": episode(text, first, 5), "dpo": episode(text, last, 3)},
    }


def pair(text, task, until, chosen, rejected):
    page = [[f"task: {text}\n", -1, None, None]]

    def side(outcome, rows):
        own = [["click", 0, -0.5, -0.5], *rows, ["\n", 0, -0.1, -0.1]]
        return {"outcome": outcome, "tokens": [*page, *own, *page, [text, 1, -2.0, -1.75]]}

    return {
        "task": task,
        "seed": 2000001,
        "source": "outcome",
        "until": until,
        "agents": ["sft", "dpo"],
        "chosen": side("solved", chosen),
        "rejected": side("failed", rejected),
    }


def curve():
    return [
        {
            "step": k,
            "loss": 0.6931 / k,
            "accuracy": 1.0,
            "grad_norm": 2.0,
            "logp_chosen": -3.0 - k / 50,
            "logp_rejected": -3.0 - k / 5,
            "mean_drop": float("nan") if k == 3 else 0.01 * k,
        }
        for k in range(1, 51)
    ]


def example(text='button "Submit" [3]'):
    """Two agents on two tasks: sft fails where dpo does not, and the other way round."""
    return {
        "title": f"demo {text}",
        "headline": f"dpo is kept {text}",
        "about": f"a model {text}, by code 1a2b3c4",
        "results": {
            "sft": {
                "all": row(0.6103, 0.5824, 0.6375, 1200, 3.217, 0.913),
                "tasks": {
                    "click-link": row(0.57, 0.4721, 0.6627, 100, 2.5, 0.875, 0.14),
                    "form-sequence-2": row(0.0, 0.0, 0.037, 100, 5.75, 1.0, -1.0),
                },
                "causes": {"wrong element": 431, "ended too early": 37},
            },
            "dpo": {
                "all": row(0.8425, 0.8208, 0.8620, 1200, 2.891, 0.984),
                "tasks": {
                    "click-link": row(0.93, 0.8625, 0.9657, 100, 1.25, 0.965, 0.86),
                    "form-sequence-2": row(1.0, 0.963, 1.0, 100, 3.5, 0.99, 1.0),
                },
                "causes": {"wrong element": 188},
            },
        },
        "gain_points": 23.22,
        "p_value": 3.14e-41,
        "settings": {"model": "minidpo/nano", "beta": 1.25e-4, "seed": 12345, text: text},
        "seconds": {"sft": 61.25, "evaluate": 143.0},
        "curves": {
            "stages": [{"step": k, "validation_success": 0.5 + k / 10} for k in range(3)],
            "sft": [{"step": k, "loss": 2 / k, "lr": 1e-4} for k in range(1, 101)],
            "dpo": curve(),
            "dpo-2": curve(),
        },
        "played": 1200,
        "instances": [
            instance(text, "form-sequence-2", 4000017, "failed", "solved"),
            instance(text, "click-link", 4000003, "solved", "failed"),
            instance(text, "click-link", 4000005, "failed", "failed"),
        ],
        "pairs": [
            pair(
                text,
                "click-link",
                "token",
                [[" link", 0, -1.2, -0.2]],
                [[" button", 0, -0.4, -2.4], [" x", 0, -0.3, -0.3]],
            ),
            pair(text, "choose-list", "end", [], [[text, 0, -9.0, -9.5]]),
        ],
    }


def embedded(html):
    return json.loads(html.split('id="data">')[1].split("</script>")[0])


@pytest.mark.parametrize(
    "width, scheme, text",
    [(360, "light", "x" * 600), (760, "dark", 'button "Submit" [3]'), (1280, "light", "x" * 600)],
)
def test_whatever_is_opened_in_it_nothing_overflows_or_complains(open_report, width, scheme, text):
    page, problems = open_report(example(text), width, color_scheme=scheme)

    def fits():
        return page.evaluate("document.documentElement.scrollWidth") <= width

    assert fits() and page.locator("figure").count() == 1 + 2 + 5
    page.eval_on_selector_all("details", "all => all.forEach(one => one.open = true)")
    for _ in range(6):
        page.keyboard.press("ArrowRight")
        assert fits()
    for index in range(2):
        page.locator("#pairs select").select_option(index=index)
        page.eval_on_selector_all("#pairs details", "all => all.forEach(one => one.open = true)")
        told = page.locator(".token").evaluate_all("""all => all.map(one => {
            one.focus();
            const hint = document.querySelector("#hint").getBoundingClientRect();
            return [document.documentElement.scrollWidth, hint.width * hint.height > 0];
        })""")  # in one call: a call a token took most of this file's time
        assert told and all(wide <= width and visible for wide, visible in told)
    assert problems == []


def test_the_numbers_shown_are_the_data(open_report):
    data = example()
    page, _ = open_report(data)
    assert page.locator("#said").inner_text() == data["headline"]
    assert page.locator("#about").inner_text() == data["about"]
    assert page.locator("#gain").inner_text() == "+23.2"
    assert page.locator("#p-value").inner_text() == "= 3.1·10⁻⁴¹"
    counts = [row.locator("td").all_inner_texts() for row in page.locator("#causes tbody tr").all()]
    assert counts == [["431", "188"], ["37", "0"]]
    sft, dpo = data["results"].values()
    groups = [(sft["all"], dpo["all"]), *zip(sft["tasks"].values(), dpo["tasks"].values())]
    cells = page.eval_on_selector_all(
        "#tasks tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
    )
    assert [[cell.replace("\u2009", "") for cell in line[-8:]] for line in cells] == [
        [
            name,
            "",
            f"{100 * rates['success']:.1f}%",
            f"{100 * rates['low']:.1f}–{100 * rates['high']:.1f}",
            str(rates["n"]),
            f"{rates['mean_reward']:.2f}" if "mean_reward" in rates else "–",
            f"{rates['mean_steps']:.2f}",
            f"{100 * rates['valid_action_rate']:.1f}%",
        ]
        for group in groups
        for name, rates in zip(("sft", "dpo"), group)
    ]
    bar, fill, low, high = page.evaluate("""() => {
        const bar = document.querySelectorAll("#tasks .bar")[2], [i, b] = bar.children;
        const box = bar.getBoundingClientRect(), end = b.getBoundingClientRect();
        return [bar.clientWidth, i.getBoundingClientRect().width, end.left - box.left, end.right - box.left];
    }""")
    assert [fill / bar, low / bar, high / bar] == pytest.approx([0.57, 0.4721, 0.6627], abs=0.003)


def test_pointing_at_a_curve_reads_its_value_and_so_do_the_arrow_keys(open_report):
    page, _ = open_report(example())
    figure = page.locator("figure", has_text="chosen")
    legend = figure.locator(".legend")

    def told():
        return legend.inner_text().split()

    assert told() == ["round", "2,", "step", "50", "chosen", "−4", "rejected", "−13"]
    figure.scroll_into_view_if_needed()
    box = figure.locator("svg").bounding_box()
    page.mouse.move(
        box["x"] + 40 / 320 * box["width"], box["y"] + 50
    )  # the axis's left end: step 1
    assert told() == ["round", "1,", "step", "1", "chosen", "−3.02", "rejected", "−3.2"]
    page.mouse.move(5, 5)
    figure.locator("svg").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert told() == ["round", "1,", "step", "2", "chosen", "−3.04", "rejected", "−3.4"]


# ---- episodes ----


def test_buttons_slider_and_arrow_keys_step_all_agents_to_their_end(open_report):
    page, _ = open_report(example())
    where, sides = page.locator("output"), page.locator(".said")
    assert where.inner_text() == "step 1 of 5"
    page.get_by_label("next step").click()
    page.locator(".said summary").first.click()
    page.keyboard.press("ArrowRight")
    assert where.inner_text() == "step 3 of 5"
    assert page.locator(".said pre").first.inner_text() == 'button "Submit" [3]'  # it stays open
    assert "2 button" in sides.nth(0).inner_text()  # the thought
    assert page.locator(".pane").nth(1).locator("img").count() == 0  # dpo's third turn has none
    page.get_by_label("step", exact=True).press("End")
    assert where.inner_text() == "the end"
    assert "failed after 5 steps, reward 0" in sides.nth(0).inner_text()
    assert "solved after 3 steps, reward 1" in sides.nth(1).inner_text()
    page.get_by_label("previous step").click()
    assert where.inner_text() == "step 5 of 5"
    assert sides.nth(0).locator(".bad").inner_text() == 'button "Submit" [3]'  # the error


def test_the_frame_is_where_the_element_is(open_report):
    """16, 21, 32, 42 of 160 x 210 pixels, two more on each side."""
    data = example()
    turns = data["instances"][0]["episodes"]["sft"]["turns"]
    turns[1]["marks"], turns[2]["marks"] = [[10, 300, 20, 20]], [[80, 105, 0, 0]]
    page, _ = open_report(data)
    shot, mark = (page.locator(path).first.bounding_box() for path in (".shot img", ".mark"))
    part = [
        (mark["x"] - shot["x"]) / shot["width"],
        (mark["y"] - shot["y"]) / shot["height"],
        mark["width"] / shot["width"],
        mark["height"] / shot["height"],
    ]
    assert part == pytest.approx([14 / 160, 19 / 210, 36 / 160, 46 / 210], abs=0.002)
    assert shot["height"] / shot["width"] == pytest.approx(210 / 160, abs=0.01)
    left = page.locator(".pane").first
    page.keyboard.press("ArrowRight")
    assert left.locator(".mark").count() == 0 and "outside the picture" in left.inner_text()
    page.keyboard.press("ArrowRight")
    assert left.locator(".mark.ring").count() == 1  # a place without a size


def test_the_address_names_instance_and_step(open_report):
    page, problems = open_report(example())
    page.get_by_label("Task").select_option("click-link")
    page.keyboard.press("Escape")
    page.get_by_label("next step").click()
    assert page.evaluate("location.hash") == "#click-link/4000003/2"
    page.evaluate("location.hash = '#click-link/4000005/4'")
    expect(page.locator("output")).to_have_text("step 4 of 5")
    sent = page.url
    page.goto("about:blank")
    page.goto(sent)
    assert page.locator("blockquote").inner_text().startswith("click-link 4000005")
    assert page.locator("output").inner_text() == "step 4 of 5" and problems == []


# ---- tokens ----


def test_a_token_tells_its_numbers_to_mouse_keyboard_and_finger(open_report):
    page, _ = open_report(example(), has_touch=True)
    hint = page.locator("#hint")
    link = page.locator("#pairs section").nth(0).locator(".token", has_text="link")
    expected = '" link"\nsft\t30.1\u2009%\t−1.20\ndpo\t81.9\u2009%\t−0.20\nchange\t\t+1.00 nats'
    link.hover()
    assert hint.inner_text() == expected
    page.mouse.move(5, 5)
    assert hint.is_hidden()
    link.tap()
    assert hint.inner_text() == expected
    page.keyboard.press("ArrowLeft")
    assert hint.inner_text().startswith('"click"')
    page.keyboard.press("ArrowRight")
    assert hint.inner_text() == expected
    assert page.locator("output").inner_text() == "step 1 of 5"  # the arrows were the tokens'


def test_both_sides_are_summed_and_the_token_where_they_part_is_marked(open_report):
    page, _ = open_report(example())
    chosen, rejected = page.locator("#pairs section").all()
    sums = [side.locator("p").inner_text() for side in (chosen, rejected)]
    assert all(number in sums[0] for number in ("−3.80", "−2.55", "+1.25"))
    assert all(number in sums[1] for number in ("−0.90", "−2.90", "−2.00"))  # cut after " button"
    parts = [side.locator(".token.parts").inner_text() for side in (chosen, rejected)]
    assert parts == [" link", " button"]
    assert rejected.locator(".unread").first.inner_text() == " x"
    assert chosen.locator(".unread").count() == 0
    page.get_by_label("Pair").select_option(index=1)
    assert page.locator(".unread").count() == 0  # this pair was not cut


# ---- what may be in it ----


def test_text_from_a_page_stays_text(open_report):
    page, problems = open_report(example(HOSTILE))
    page.eval_on_selector_all("details", "all => all.forEach(one => one.open = true)")
    for token in page.locator(".token").all():
        token.focus()
    for _ in range(5):
        page.get_by_label("next step").press("Enter")
    assert problems == []
    assert page.evaluate("typeof hurt") == "undefined"
    assert page.locator("img:not([src^='data:image/png;base64,'])").count() == 0
    assert '</script><img src=x onerror="hurt=1"><!--' in page.locator("blockquote").inner_text()


def test_one_agent_without_training_and_pairs_is_a_report_too(open_report):
    data = example() | {"headline": "", "gain_points": None, "p_value": None}
    data |= {"pairs": [], "curves": {}, "seconds": {}}
    del data["results"]["sft"]
    for instance in data["instances"]:
        del instance["episodes"]["sft"]
    page, problems = open_report(data, 360)
    assert problems == [] and page.get_by_label("Agent").count() == 0
    assert page.locator("#gain").count() == page.locator("#said").count() == 0
    assert "dpo solves 84.2" in page.locator(".headline").inner_text()
    options = page.get_by_label("Instance").locator("option").all_inner_texts()
    assert options == ["seed 4000017, solved"]
    data["instances"] = []
    assert open_report(data, 360)[1] == []


def test_of_three_agents_the_headline_compares_the_last_two_and_the_viewer_tells_of_all(
    open_report,
):
    """A name that is a number keeps its place, too; a browser gave up one task for one agent."""
    data = example()
    sft = data["results"]["sft"]
    given_up = {**sft, "tasks": {"click-link": sft["tasks"]["click-link"]}}
    data["results"] = {"50": given_up, **data["results"]}
    for instance in data["instances"]:
        episodes = instance["episodes"]
        instance["episodes"] = {"50": episodes["sft"], **episodes}
    page, problems = open_report(data)
    said = page.locator(".headline").inner_text()
    assert "dpo solves 84.2" in said and "and sft 61.0" in said and "50 solves" not in said
    assert page.locator("#tasks .policy").all_inner_texts()[:3] == ["50", "sft", "dpo"]
    assert page.locator("#viewer h3").first.inner_text().startswith("50")
    page.get_by_label("Task").select_option("click-link")
    options = page.get_by_label("Instance").locator("option").all_inner_texts()
    assert options[0] == "seed 4000003, only 50 and sft solved it" and problems == []


def test_the_data_come_back_from_the_file_exactly():
    html = render(example(HOSTILE))
    expected = example(HOSTILE)
    for name in ("dpo", "dpo-2"):
        expected["curves"][name][2]["mean_drop"] = None  # JSON has no nan
    assert embedded(html) == expected | {"policies": ["sft", "dpo"]}
    assert "://" not in html.replace("http://www.w3.org/2000/svg", "")


def test_a_large_run_stays_within_the_limit_and_says_how_many_episodes_it_shows(open_report):
    """Pairs come first, then instances in their order, as many as fit: less than one is missing room."""
    data = example()
    large = {"pictures": ["A" * 1_000_000] * 3}
    data["instances"] = [data["instances"][n % 3] | large for n in range(30)]
    html = render(data)
    assert LIMIT - 3_010_000 < len(html.encode()) <= LIMIT
    shown = embedded(html)
    assert shown["pairs"] == data["pairs"] and shown["instances"] == data["instances"][:6]
    page, problems = open_report(data)
    assert "6 of the 1,200 instances played" in page.locator("main").inner_text() and problems == []


def test_long_curves_are_thinned_evenly_and_keep_their_ends():
    data = example()
    rows = [{"step": k, "loss": 1.0} for k in range(1, 90_001)]
    data["curves"] = {"sft": rows, "dpo": rows}
    steps = [row["step"] for row in embedded(render(data))["curves"]["sft"]]
    assert (steps[0], steps[-1]) == (1, 90_000) and len(steps) <= 10_001
    assert {after - before for before, after in pairwise(steps[:-1])} == {9}
