"""The report in a real browser: it shows the data's numbers, fits any screen, is inert under hostile text."""

import base64
import json
import os
import struct
import zlib

import pytest
from playwright.sync_api import expect, sync_playwright

from envs.miniwob.browser.chromium import find_chromium
from minidpo.results.report import LIMIT, render
from minidpo.system.files import write_text

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


def example(text='button "Submit" [3]'):
    """Two agents on two tasks: SFT fails where EF-DPO does not, and the other way round."""
    shots = [base64.b64encode(grey_png(160, 210, shade)).decode() for shade in (40, 120, 200)]

    def row(*values):
        names = ("success", "low", "high", "n", "mean_steps", "valid_action_rate")
        rates = dict(zip(names, values, strict=True))
        return rates if rates["n"] == 1_200 else {**rates, "mean_reward": 2 * rates["success"] - 1}

    def episode(outcome, count):
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
        return {
            "outcome": outcome,
            "reward": float(outcome == "solved"),
            "turns": turns,
            "final": 2,
        }

    def instance(task, seed, first, last):
        return {
            "task": task,
            "seed": seed,
            "instruction": f"{task} {seed} {text}",
            "pictures": shots,
            "episodes": {"sft": episode(first, 5), "dpo": episode(last, 3)},
        }

    def side(outcome, *rows):
        page = [[f"task: {text}\n", -1, None, None]]
        return {
            "outcome": outcome,
            "index": 0,
            "tokens": [
                *page,
                ["click", 0, -0.5, -0.5],
                *rows,
                ["\n", 0, -0.1, -0.1],
                *page,
                [text, 1, -2.0, -1.75],
            ],
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

    return {
        "title": f"demo {text}",
        "about": f"a model {text}, by code 1a2b3c4",
        "results": {
            "sft": {
                "all": row(0.6103, 0.5824, 0.6375, 1200, 3.217, 0.913),
                "tasks": {
                    "click-link": row(0.57, 0.4721, 0.6627, 100, 2.5, 0.875),
                    "form-sequence-2": row(0.0, 0.0, 0.037, 100, 5.75, 1.0),
                },
                "causes": {"wrong element": 431, "ended too early": 37},
            },
            "dpo": {
                "all": row(0.8425, 0.8208, 0.8620, 1200, 2.891, 0.984),
                "tasks": {
                    "click-link": row(0.93, 0.8625, 0.9657, 100, 1.25, 0.965),
                    "form-sequence-2": row(1.0, 0.963, 1.0, 100, 3.5, 0.99),
                },
                "causes": {"wrong element": 188},
            },
        },
        "gain_points": 23.22,
        "p_value": 3.14e-41,
        "settings": {"model": "minidpo/nano", "beta": 0.1, text: text},
        "seconds": {"sft": 61.25, "evaluate": 143.0},
        "curves": {
            "rounds": [{"step": k, "validation_success": 0.5 + k / 10} for k in range(3)],
            "sft": [{"step": k, "loss": 2 / k, "lr": 1e-4} for k in range(1, 101)],
            "round-1/dpo": curve(),
            "round-2/dpo": curve(),
        },
        "played": 1200,
        "instances": [
            instance("form-sequence-2", 4000017, "failed", "solved"),
            instance("click-link", 4000003, "solved", "failed"),
            instance("click-link", 4000005, "failed", "failed"),
        ],
        "pairs": [
            {
                "task": "click-link",
                "seed": 2000001,
                "source": "outcome",
                "until": "token",
                "chosen": side("solved", [" link", 0, -1.2, -0.2]),
                "rejected": side("failed", [" button", 0, -0.4, -2.4], [" x", 0, -0.3, -0.3]),
            },
            {
                "task": "choose-list",
                "seed": 2000002,
                "source": "expert",
                "until": "end",
                "chosen": side("solved"),
                "rejected": side("limit", [text, 0, -9.0, -9.5]),
            },
        ],
    }


@pytest.fixture(scope="module")
def open_report(tmp_path_factory):
    """open_report(data, width) -> (page, problems): the report drawn at that width, all it complained of."""
    folder = tmp_path_factory.mktemp("report")
    sandbox = [] if os.getuid() else ["--no-sandbox"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=sandbox)

        def open_at(data, width, **options):
            for old in browser.contexts:
                old.close()
            page, problems = (
                browser.new_page(viewport={"width": width, "height": 900}, **options),
                [],
            )
            page.on("console", lambda message: problems.append(message.text))
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on(
                "request",
                lambda request: (
                    problems.append(f"asked for {request.url[:80]}")
                    if not request.url.startswith(("file:", "data:image/png"))
                    else None
                ),
            )
            write_text(folder / "report.html", render(data))
            page.goto((folder / "report.html").as_uri())
            return page, problems

        yield open_at
        browser.close()


@pytest.mark.parametrize("width", [360, 760, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("text", ['button "Submit" [3]', "x" * 600], ids=["ordinary", "unbroken"])
def test_whatever_is_opened_in_it_nothing_overflows_or_complains(open_report, width, scheme, text):
    page, problems = open_report(example(text), width, color_scheme=scheme)

    def fits():
        return page.evaluate("document.documentElement.scrollWidth") <= width

    assert fits() and page.locator("figure").count() == 1 + 2 + 5
    page.eval_on_selector_all("details", "all => all.forEach(one => one.open = true)")
    for _ in range(6):
        page.keyboard.press("ArrowRight")
        assert fits()
    for pair in range(2):
        page.locator("#pairs select").select_option(index=pair)
        page.eval_on_selector_all("#pairs details", "all => all.forEach(one => one.open = true)")
        told = page.locator(".token").evaluate_all("""all => all.map(one => {
            one.focus();
            const hint = document.querySelector("#hint").getBoundingClientRect();
            return [document.documentElement.scrollWidth, hint.width * hint.height > 0];
        })""")  # in one call: a call a token took most of this file's time
        assert told and all(wide <= width and visible for wide, visible in told)
    box = page.locator("#hint").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width
    assert problems == []


def test_the_numbers_shown_are_the_data(open_report):
    data = example()
    page, _ = open_report(data, 1280)
    assert page.title() == data["title"]
    assert page.locator("#gain").inner_text() == "+23.2"
    assert page.locator("#about").inner_text() == data["about"]
    counts = [row.locator("td").all_inner_texts() for row in page.locator("#causes tbody tr").all()]
    assert counts == [["431", "188"], ["37", "0"]]
    assert page.locator("#p-value").inner_text() == "= 3.1·10⁻⁴¹"
    sft, dpo = data["results"].values()
    pairs = [
        (sft["all"], dpo["all"]),
        *zip(sft["tasks"].values(), dpo["tasks"].values(), strict=True),
    ]
    cells = page.eval_on_selector_all(
        "#tasks tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
    )
    assert [[cell.replace("\u2009", "") for cell in line[-8:]] for line in cells] == [
        [
            policy,
            "",
            f"{100 * row['success']:.1f}%",
            f"{100 * row['low']:.1f}–{100 * row['high']:.1f}",
            str(row["n"]),
            f"{row['mean_reward']:.2f}" if "mean_reward" in row else "–",
            f"{row['mean_steps']:.2f}",
            f"{100 * row['valid_action_rate']:.1f}%",
        ]
        for pair in pairs
        for policy, row in zip(("SFT", "EF-DPO"), pair)
    ]
    assert page.locator("#tasks tbody th").all_inner_texts() == [
        "all tasks\n+23.2",
        "click-link\n+36.0",
        "form-sequence-2\n+100.0",
    ]


def test_new_pages_and_play_at_temperature_1_have_rows_where_every_agent_has_them(open_report):
    data = example()
    for agent in data["results"].values():
        agent |= {"new": agent["all"], "sampled": agent["all"]}
    first = lambda page: page.locator("#tasks tbody th").all_inner_texts()[:3]  # noqa: E731
    assert first(open_report(data, 1280)[0]) == [
        "all tasks\n+23.2",
        "all new pages\n+23.2",
        "all, at temperature 1\n+23.2",
    ]
    next(iter(data["results"].values()))["new"] = None  # training had them all
    assert first(open_report(data, 1280)[0])[1] == "all, at temperature 1\n+23.2"


def test_bars_and_whiskers_have_the_data_s_lengths(open_report):
    page, _ = open_report(example(), 1280)
    bar, fill, low, high = page.evaluate("""() => {
        const bar = document.querySelectorAll("#tasks .bar")[2], [i, b] = bar.children;
        const box = bar.getBoundingClientRect(), end = b.getBoundingClientRect();
        return [bar.clientWidth, i.getBoundingClientRect().width, end.left - box.left, end.right - box.left];
    }""")
    assert [fill / bar, low / bar, high / bar] == pytest.approx([0.57, 0.4721, 0.6627], abs=0.003)


def test_pointing_at_a_curve_reads_its_value_and_so_do_the_arrow_keys(open_report):
    page, _ = open_report(example(), 1280)
    figure = page.locator("figure", has_text="chosen")
    legend = figure.locator(".legend")
    assert legend.inner_text().split() == [
        "round",
        "2,",
        "step",
        "50",
        "chosen",
        "−4",
        "rejected",
        "−13",
    ]
    figure.scroll_into_view_if_needed()
    box = figure.locator("svg").bounding_box()
    page.mouse.move(
        box["x"] + 40 / 320 * box["width"], box["y"] + 50
    )  # the left end of the axis: step 1
    assert legend.inner_text().split() == [
        "round",
        "1,",
        "step",
        "1",
        "chosen",
        "−3.02",
        "rejected",
        "−3.2",
    ]
    page.mouse.move(5, 5)
    figure.locator("svg").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert legend.inner_text().split() == [
        "round",
        "1,",
        "step",
        "2",
        "chosen",
        "−3.04",
        "rejected",
        "−3.4",
    ]


def test_the_rounds_of_a_stage_follow_each_other_in_one_chart(open_report):
    page, _ = open_report(example(), 1280)
    assert page.locator("h3", has_text="EF-DPO, rounds 1–2").count() == 1
    titles = [
        "validation success",
        "loss",
        "lr",
        "loss",
        "accuracy",
        "log-prob",
        "mean drop",
        "grad norm",
    ]
    assert page.locator("figcaption").all_text_contents() == titles
    loss = page.locator("figure", has_text="loss").nth(1)
    ends = loss.locator("polyline").evaluate_all(
        "all => all.map(line => [line.points[0].x, line.points[line.points.length - 1].x])"
    )
    left, right = (40 + (step - 1) / 99 * (320 - 40 - 12) for step in (50, 51))
    assert [*ends[0], *ends[1]] == pytest.approx([40, left, right, 308], abs=0.1)
    assert loss.locator("text", has_text="round").all_text_contents() == ["round 1", "round 2"]


# ---- episodes ----


def test_task_instance_and_agent_can_be_chosen(open_report):
    page, _ = open_report(example(), 1280)
    task, instance, agent = (page.get_by_label(name) for name in ("Task", "Instance", "Agent"))
    assert "3 of the 1,200 instances played" in page.locator(".note", has_text="rule").inner_text()
    assert page.locator("blockquote").inner_text().startswith("form-sequence-2 4000017")
    assert instance.locator("option").all_inner_texts() == ["seed 4000017, only EF-DPO solved it"]
    task.select_option("click-link")
    assert instance.locator("option").all_inner_texts() == [
        "seed 4000003, only SFT solved it",
        "seed 4000005, neither solved it",
    ]
    instance.select_option(index=1)
    assert page.locator("blockquote").inner_text().startswith("click-link 4000005")
    heads = page.locator("#viewer h3")
    assert heads.all_inner_texts() == ["SFTfailed, 5 steps", "EF-DPOfailed, 3 steps"]
    agent.select_option("EF-DPO")
    assert heads.all_inner_texts() == ["EF-DPOfailed, 3 steps"]


def test_buttons_slider_and_arrow_keys_step_all_agents_to_their_end(open_report):
    page, _ = open_report(example(), 1280)
    where, sides = page.locator("output"), page.locator(".said")
    assert where.inner_text() == "step 1 of 5"
    page.get_by_label("next step").click()
    page.keyboard.press("ArrowRight")
    assert where.inner_text() == "step 3 of 5"
    assert "2 button" in sides.nth(0).inner_text()  # SFT's thought
    assert (
        page.locator(".pane").nth(1).locator("img").count() == 0
    )  # EF-DPO's third turn has no picture
    page.get_by_label("step", exact=True).press("End")
    assert where.inner_text() == "the end"
    assert sides.all_inner_texts() == [
        "the end\n\nfailed after 5 steps, reward 0",
        "the end\n\nsolved after 3 steps, reward 1",
    ]
    page.get_by_label("next step").press("Enter")  # there is nothing behind the end
    page.get_by_label("previous step").click()
    assert where.inner_text() == "step 5 of 5"
    assert sides.nth(0).locator(".bad").inner_text() == 'button "Submit" [3]'  # the error
    page.get_by_label("Task").press("ArrowLeft")  # a list's arrows are its own
    assert page.locator("blockquote").inner_text().startswith("click-link")


def test_the_frame_lies_where_the_element_is(open_report):
    """16, 21, 32, 42 of 160 x 210 pixels, two more on each side."""
    page, _ = open_report(example(), 1280)
    shot, mark = (page.locator(path).first.bounding_box() for path in (".shot img", ".mark"))
    part = [
        (mark["x"] - shot["x"]) / shot["width"],
        (mark["y"] - shot["y"]) / shot["height"],
        mark["width"] / shot["width"],
        mark["height"] / shot["height"],
    ]
    assert part == pytest.approx([14 / 160, 19 / 210, 36 / 160, 46 / 210], abs=0.002)


def test_what_lies_outside_of_the_picture_is_said_and_a_place_without_size_is_a_ring(open_report):
    data = example()
    turns = data["instances"][0]["episodes"]["sft"]["turns"]
    turns[0]["marks"], turns[1]["marks"] = [[10, 300, 20, 20]], [[80, 105, 0, 0]]
    page, _ = open_report(data, 1280)
    left = page.locator(".pane").first
    assert left.locator(".mark").count() == 0 and "outside the picture" in left.inner_text()
    page.keyboard.press("ArrowRight")
    assert left.locator(".mark.ring").count() == 1 and "outside" not in left.inner_text()


def test_what_the_agent_read_stays_open_from_step_to_step(open_report):
    page, _ = open_report(example(), 1280)
    page.locator(".said summary").first.click()
    page.keyboard.press("ArrowRight")
    assert page.locator(".said pre").first.inner_text() == 'button "Submit" [3]'


def test_the_address_names_instance_and_step(open_report):
    page, problems = open_report(example(), 1280)
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
    assert page.locator("output").inner_text() == "step 4 of 5"
    assert abs(page.evaluate("document.querySelector('#viewer').getBoundingClientRect().top")) < 5
    assert problems == []


# ---- tokens ----


def test_a_token_tells_its_numbers_to_mouse_keyboard_and_finger(open_report):
    page, _ = open_report(example(), 1280, has_touch=True)
    hint = page.locator("#hint")
    link = page.locator("#pairs section").nth(0).locator(".token", has_text="link")
    expected = '" link"\nSFT\t30.1\u2009%\t−1.20\nEF-DPO\t81.9\u2009%\t−0.20\nmoved\t\t+1.00 nats'
    link.hover()
    assert hint.inner_text() == expected
    page.mouse.move(5, 5)
    assert hint.is_hidden()
    link.tap()
    assert hint.inner_text() == expected
    page.keyboard.press("Escape")
    assert hint.is_hidden()
    page.keyboard.press("ArrowLeft")
    assert hint.inner_text().startswith('"click"')
    page.keyboard.press("ArrowRight")
    assert hint.inner_text() == expected
    assert page.locator("output").inner_text() == "step 1 of 5"  # the arrows were the tokens'


def test_tokens_are_blue_where_they_became_likelier_and_orange_where_less(open_report):
    """-0.4 to -2.4 is the largest change; as strong as it gets, the text on it can still be read."""
    for scheme in ("light", "dark"):
        page, _ = open_report(example(), 1280, color_scheme=scheme)
        chosen, rejected = page.locator("#pairs section").all()
        style = "one => getComputedStyle(one).%s.match(/[\\d.]+/g).map(Number)"

        def ground(side, text):
            return side.locator(".token", has_text=text).first.evaluate(style % "backgroundColor")

        red, _, blue, alpha = ground(chosen, "link")
        assert blue > red and alpha == pytest.approx(0.5, abs=0.02)
        red, _, blue = ground(rejected, "button")[:3]
        assert red > blue
        assert ground(chosen, "click")[3] == 0
        ink = [part / 255 for part in page.locator(".token").first.evaluate(style % "color")]
        for strong in (
            ground(rejected, "button")[:3],
            page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--more')"),
        ):
            if isinstance(strong, str):
                strong = [int(strong.strip()[k : k + 2], 16) / 255 for k in (1, 3, 5)]
            assert contrast(ink, strong) > 4.5


def contrast(one, other):
    """WCAG 2's ratio of two sRGB colours, each part from 0 to 1."""

    def luminance(parts):
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))

    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_both_sides_are_summed_and_the_token_where_they_part_is_marked(open_report):
    page, _ = open_report(example(), 1280)
    chosen, rejected = page.locator("#pairs section").all()
    assert (
        chosen.locator("p").inner_text()
        == "log-prob under SFT −3.80, under EF-DPO −2.55: moved +1.25"
    )
    assert [side.locator(".token.parts").inner_text() for side in (chosen, rejected)] == [
        " link",
        " button",
    ]
    assert (
        rejected.locator("p").inner_text()
        == "log-prob under SFT −0.90, under EF-DPO −2.90: moved −2.00"
    )  # cut behind " button"
    assert (
        rejected.locator(".unread").all_inner_texts()[0] == " x"
        and not chosen.locator(".unread").count()
    )
    assert chosen.locator("summary").all_inner_texts() == ["prompt", "page"]
    page.get_by_label("Pair").select_option("choose-list, seed 2000002, expert")
    assert page.locator("#pairs h3").all_inner_texts() == ["chosensolved", "rejectedlimit"]
    assert page.locator(".unread").count() == 0  # this pair was not cut


def test_all_that_can_be_used_is_reached_with_the_tab_key_and_has_a_name(open_report):
    page, _ = open_report(example(), 1280)
    names = []
    for _ in range(40):
        page.keyboard.press("Tab")
        names.append(
            page.evaluate("""() => {
            const one = document.activeElement;
            return one.ariaLabel || one.labels?.[0].firstChild.textContent || one.textContent.slice(0, 20);
        }""")
        )
    assert names[:8] == [
        "Task",
        "Instance",
        "Agent",
        "previous step",
        "step",
        "next step",
        "what it read",
        "what it read",
    ]
    assert names[8:15] == ["Pair", "prompt", "click", "page", "prompt", "click", "page"]
    assert names[15].startswith("validation success: 3 rounds") and names[16].startswith(
        "loss: 100 steps"
    )


# ---- what may be in it ----


def test_text_from_a_page_stays_text(open_report):
    page, problems = open_report(example(HOSTILE), 1280)
    page.eval_on_selector_all("details", "all => all.forEach(one => one.open = true)")
    for token in page.locator(".token").all():
        token.focus()
    for _ in range(5):
        page.get_by_label("next step").press("Enter")
    assert problems == []
    assert page.evaluate("typeof hurt") == "undefined"
    assert page.locator("img:not([src^='data:image/png;base64,'])").count() == 0
    assert '</script><img src=x onerror="hurt=1"><!--' in page.locator("blockquote").inner_text()


def test_one_policy_without_training_episodes_or_pairs_is_a_report_too(open_report):
    data = example() | {
        "gain_points": None,
        "p_value": None,
        "instances": [],
        "pairs": [],
        "curves": {},
        "seconds": {},
    }
    del data["results"]["sft"]
    page, problems = open_report(data, 360)
    assert problems == []
    assert page.locator("#gain").count() == 0 and page.locator("h3").count() == 0
    assert "EF-DPO solves 84.2" in page.locator(".headline").inner_text().replace("\u2009", "")
    for instance in (data | {"instances": example()["instances"]})["instances"]:
        del instance["episodes"]["sft"]
        data["instances"].append(instance)
    page, problems = open_report(data, 360)
    assert problems == [] and page.get_by_label("Agent").count() == 0
    assert page.get_by_label("Instance").locator("option").all_inner_texts() == [
        "seed 4000017, solved"
    ]


def test_a_task_that_a_browser_gave_up_for_one_agent_has_one_bar(open_report):
    data = example()
    del data["results"]["sft"]["tasks"]["click-link"]
    page, problems = open_report(data, 1280)
    heads = page.locator("#tasks tbody th").all_inner_texts()
    assert sorted(heads[1:]) == ["click-link", "form-sequence-2\n+100.0"] and problems == []
    assert page.locator("#tasks tbody tr").count() == 2 + 2 + 1


def test_the_headline_says_which_instances_each_agent_played(open_report):
    data = example()
    data["settings"]["split"] = "validation"
    data["results"]["sft"]["all"] |= {"n": 60}
    page, _ = open_report(data, 1280)
    said = page.locator(".headline").inner_text()
    assert "of 1,200 validation instances" in said and "of 60 validation instances" in said


def test_of_three_agents_the_headline_compares_the_last_two_and_the_viewer_tells_of_all(
    open_report,
):
    data = example()
    data["results"] = {"base": data["results"]["sft"], **data["results"]}
    data["comparisons"] = [
        {
            "before": "base",
            "after": "sft",
            "gain_points": 0.0,
            "p_value": 1.0,
            "n": 1200,
            "only_before": 0,
            "only_after": 0,
        }
    ]
    for instance in data["instances"]:
        instance["episodes"] = {"base": instance["episodes"]["sft"], **instance["episodes"]}
    data["instances"][1]["episodes"]["base"] = data["instances"][1]["episodes"]["dpo"]
    page, problems = open_report(data, 1280)
    said = page.locator(".headline").inner_text().replace("\u2009", "")
    assert "EF-DPO solves 84.2%" in said and "and SFT 61.0%" in said and "base" not in said
    assert "of 1,200 held-out instances" in said and "of the same" in said
    assert (
        page.locator(".compared").inner_text()
        == "SFT against base: +0.0 points on the same 1,200 instances (0 won, 0 lost), exact McNemar p = 1.0"
    )
    assert page.locator("#tasks tbody th").first.inner_text() == "all tasks\n+23.2"
    task, instance = page.get_by_label("Task"), page.get_by_label("Instance")
    assert instance.locator("option").all_inner_texts() == ["seed 4000017, only EF-DPO solved it"]
    task.select_option("click-link")
    assert instance.locator("option").all_inner_texts() == [
        "seed 4000003, only SFT solved it",
        "seed 4000005, none solved it",
    ]
    assert (
        "the first that EF-DPO solved and SFT did not, SFT solved and"
        in page.locator("main").inner_text()
    )
    assert problems == []


def test_agents_with_numbers_for_names_stay_in_their_order(open_report):
    data = example()
    data["results"] = {"base": data["results"]["sft"], "50": data["results"]["dpo"]}
    for instance in data["instances"]:
        instance["episodes"] = {
            "base": instance["episodes"]["sft"],
            "50": instance["episodes"]["dpo"],
        }
    page, problems = open_report(data, 1280)
    assert "50 solves 84.2" in page.locator(".headline").inner_text() and problems == []
    assert page.locator("#tasks .policy").all_inner_texts()[:2] == ["base", "50"]
    assert page.locator("#viewer h3").first.inner_text().startswith("base")


def test_settings_are_shown_as_they_were_and_a_gap_in_a_curve_as_one(open_report):
    data = example()
    data["settings"] = {"seed": 12345, "lr": 1.25e-4}
    losses = [float("nan") if 4 < k < 8 else 2 / k for k in range(1, 15)]
    data["curves"] = {"sft": [{"step": k, "loss": loss} for k, loss in enumerate(losses, 1)]}
    page, problems = open_report(data, 1280)
    assert page.locator("dd").all_inner_texts()[:2] == ["12345", "0.000125"] and problems == []
    pieces = page.locator("figure polyline").evaluate_all(
        "all => all.map(one => one.getAttribute('points').split(' ').length)"
    )
    assert pieces == [4, 7]


def test_an_oracles_success_is_called_so_and_an_agent_by_its_loss(open_report):
    data = example()
    data["settings"] |= {"loss": "kto", "best_of": 8, "temperature": 1.0}
    data["pairs"] = [pair | {"agents": ["runs/sft/adapter", "dpo"]} for pair in data["pairs"]]
    page, problems = open_report(data, 1280)
    said = page.locator(".headline").inner_text()
    assert said.split("points")[1].strip().startswith("KTO solves") and "EF-DPO" not in said
    assert said.endswith(
        "This is an oracle's success, not the agent's own: the page's verdict chose the "
        "best of 8 tries at temperature 1."
    )
    assert "(orange) KTO makes it than runs/sft/adapter:" in page.locator("main").inner_text()
    data["settings"]["judge"] = "runs/rm/adapter"
    page, _ = open_report(data, 1280)
    assert (
        page.locator(".headline")
        .inner_text()
        .endswith("A reward model (runs/rm/adapter) chose the best of 8 tries at temperature 1.")
    )
    assert problems == []


def embedded(html):
    return json.loads(html.split('id="data">')[1].split("</script>")[0])


def test_the_data_come_back_from_the_file_exactly():
    html = render(example(HOSTILE))
    expected = example(HOSTILE)
    for rows in (expected["curves"][f"round-{k}/dpo"] for k in (1, 2)):
        rows[2]["mean_drop"] = None  # JSON has no nan; the curve shows a gap
    assert embedded(html) == expected | {"policies": ["sft", "dpo"]}
    assert "://" not in html.replace("http://www.w3.org/2000/svg", "")


def test_a_large_run_stays_within_the_limit_and_says_how_many_episodes_it_shows(open_report):
    """Pairs come first, then instances in their order, as many as fit: less than one is missing room."""
    data = example()
    data["instances"] = [
        data["instances"][n % 3] | {"pictures": ["A" * 1_000_000] * 3} for n in range(30)
    ]
    html = render(data)
    assert LIMIT - 3_010_000 < len(html.encode()) <= LIMIT
    shown = embedded(html)
    assert shown["pairs"] == data["pairs"] and shown["instances"] == data["instances"][:6]
    page, problems = open_report(data, 1280)
    assert "6 of the 1,200 instances played" in page.locator("main").inner_text() and problems == []


def test_a_pair_that_does_not_fit_takes_no_instances_room():
    data = example()
    data["pairs"] = [data["pairs"][0] | {"task": "A" * LIMIT}]
    shown = embedded(render(data))
    assert shown["pairs"] == [] and shown["instances"] == data["instances"]


def test_long_curves_are_thinned_evenly_and_keep_their_ends():
    data = example()
    data["curves"] = {
        name: [{"step": k, "loss": 1.0} for k in range(1, 90_001)] for name in ("sft", "dpo")
    }
    steps = [row["step"] for row in embedded(render(data))["curves"]["sft"]]
    assert (steps[0], steps[-1]) == (1, 90_000) and len(steps) <= 10_001
    assert {after - before for before, after in zip(steps[:-2], steps[1:-1])} == {9}


def test_a_report_that_cannot_be_made_leaves_the_old_one(tmp_path):
    path = tmp_path / "report.html"
    write_text(path, render(example()))
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_text(path, render({"title": object()}))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
