"""What pages of the web are made of: rows, cards, editors, dates, sliders, names and states, slow servers."""

import re

import pytest
from listening import Site

from envs.actions import Action
from envs.miniwob.browser import page
from envs.web.gate import Bounds
from envs.web.visit import Web

LONG = "".join(f"<p>para {n}</p>" for n in range(60))
HEARD = "position: absolute; width: 1px; height: 1px; overflow: hidden; clip: rect(0, 0, 0, 0)"  # not seen
KINDS = ("month", "week", "datetime-local", "time", "date")
DEFINE = """<style>body { margin: 8px }</style><script>
    const define = (name, html) => customElements.define(name, class extends HTMLElement {
      constructor() { super(); this.attachShadow({ mode: "open" }).innerHTML = html; } });</script>"""
BASE = "<style>select, ::picker(select) { appearance: base-select }</style>"
HALF = "<style>select { appearance: base-select }</style>"  # its popup is the browser's own
SHUT = "<script>addEventListener('mousedown', (event) => event.preventDefault(), true)</script>"
CHOICES = {
    name: f"""{style}<select aria-label=Size {kind}><option>S<option>M<option>L<option>XL</select><p id=said></p>
        <script>document.querySelector("select").onchange = ({{ target }}) => {{ said.textContent +=
        "now " + [...target.selectedOptions].map(({{ text }}) => text) + "; " }}</script>"""
    for name, style, kind in [
        ("list", "", "size=3"),
        ("several", "", "multiple"),
        ("narrow", "", "multiple size=1"),
        ("base", BASE, ""),
        ("half", HALF, ""),
        ("base-list", BASE, "size=3"),
        ("base-several", BASE, "multiple"),
        ("base-narrow", BASE, "multiple size=1"),
        ("shut", BASE + SHUT, ""),
    ]
}
OWN = """<script>const field = document.querySelector(".e"), context = new EditContext({ text: "old" });
    const draw = () => { (window.v ?? field).textContent = context.text };
    context.addEventListener("textupdate", draw); field.editContext = context; draw();</script>"""
EDITORS = {
    "drawn": f"<div class=e>{OWN}",
    "selects": f"""<div class=e tabindex=0></div>{OWN}<script>field.onkeydown = (event) => {{
        if (event.ctrlKey && event.key === "a") context.updateSelection(0, context.text.length) }}</script>""",
    "canvas": f"<canvas class=e tabindex=0 aria-label=old></canvas>{OWN}",
    "behind": f"""<div id=m style='position: relative'><div class=e tabindex=0 style='position: absolute;
        z-index: -1'></div><p id=v>line</p></div>{OWN}<script>m.onmousedown = (event) => {{
        event.preventDefault(); field.focus() }}</script>""",
    "plain": "<div contenteditable=plaintext-only>old</div>",
    "upper": "<div contenteditable=TRUE>old</div>",
    "body": "<body contenteditable>old</body>",
    "keys": """<div role=textbox tabindex=0 onkeydown="if (event.key === 'a' && event.ctrlKey)
        this.textContent = ''; else if (event.key.length === 1) this.textContent += event.key">old</div>""",
}
PAGES = {
    **{f"/choose-{name}": html for name, html in CHOICES.items()},
    **{f"/edit-{name}": html for name, html in EDITORS.items()},
    "/locked": "<div role=textbox tabindex=0 aria-readonly=true>old</div>",
    "/need": "<form action=/sent><label>Name <input required></label><button>Send</button></form>",
    "/late": "<a href=/silent>late</a><label>Name <input></label>",
    "/letters": """<style>@font-face { font-family: F; src: url(/silent) }</style>
        <p style='font-family: F'>words""",
    "/aborted": """<p>x<script>const end = new AbortController();
        fetch("/silent", { signal: end.signal }).catch(() => 0);
        setTimeout(() => end.abort(), 100)</script>""",
    "/two": "<p>Two</p><a href=/need>on</a>",
    "/sent": "ok",
    "/row": """<table><tr style='cursor: pointer' onclick='document.title = 1'>
        <td><input type=checkbox><td>Ann<td><button>Star</button></table>
        <div style='cursor: pointer; text-align: center' onclick='document.title = 2'>
        row <a href=/two>the link in the middle of it</a></div>""",
    "/log": "<pre>"
    + "\n".join(f"line {n} of a log with some words" for n in range(20_000))
    + "</pre>",
    "/over": """<div style='position: relative'>Choose<select aria-label=Size style='opacity: 0;
        position: absolute; inset: 0'><option>S<option>L</select></div>
        <div style='opacity: 0'><input aria-label=faded></div>""",
    "/card": """<div style='position: relative'><h5>Shoe</h5><p>$20</p>
        <a href=/two>Buy<i style='position: absolute; inset: 0'></i></a></div>
        <section style='position: relative'><p>under paint</p><i style='position: absolute; inset: 0;
        background: black'></i></section><section style='background: white'><p style='position: relative;
        z-index: -1'>behind</p></section><section style='position: relative'><p>under a picture</p><img
        style='position: absolute; width: 100%; height: 100%; inset: 0'></section>
        <style>.c::after { content: ""; position: absolute; inset: 0 } .c { position: relative }
        .d::after { background: #fff }</style>
        <img name=elementsFromPoint><div class=c><p>under nothing</p></div>
        <div class='c d'><p>under a colour</p></div>""",
    "/heard": f"""<button><svg class=h-6 width=9 height=9></svg><b style='{HEARD}'>Close menu</b></button>
        <label for=q style='{HEARD}'>Search</label><input id=q><label style='{HEARD}'>In<input id=in></label>
        <button><i class=fa></i></button><button><i class=fb>&#8203;</i></button>
        <label><input type=checkbox><svg width=9 height=9><style>.a {{ fill: red }}</style></svg></label>
        <label for=m style='{HEARD}'>Mail<i hidden>is wrong</i></label><input id=m>""",
    "/code": "<pre tabindex=0>" + "code code\n" * 20 + "word word word\n" * 10,
    "/cells": "<table><tr style='cursor: pointer'><td>Ann</td><td>Bonn</td><td>42</td></table>",
    "/off": """<label aria-disabled=true><input type=checkbox disabled style='position: absolute;
        opacity: 0; width: 0'>
        <b>Box</b></label><style>[disabled] { pointer-events: none }</style><button disabled>Save</button>
        <input disabled value=Lina><a style='pointer-events: none' href=/two>passed through</a>
        <div style='height: 30px; position: relative'><button disabled>under a dialog</button>
        <div style='position: absolute; inset: 0; background: white'></div></div>""",
    "/alts": """<label><input type=radio><img alt=Visa width=40 height=20></label>
        <a href=/two><img alt=PDF width=9 height=9> Report <img alt=gone style='opacity: 0'></a>
        <button aria-label='Delete Ann'><img alt=trash width=9 height=9></button>
        <img alt=Cart style='cursor: pointer' width=9 height=9>""",
    "/han": f"<p>{'漢' * 9_999}",
    "/private": "<button aria-label=Find>\ue8b6</button><p>\ue8b6",
    "/many": f"<select aria-label=N>{''.join(f'<option>{n:0100}' for n in range(60))}</select>after",
    "/captions": """<input type=submit><input type=reset><input type=submit value='' title=Find>
        <input type=submit value=Go>""",
    "/more": """<details open><summary>More</summary>x</details><input type=checkbox id=c>
        <script>c.indeterminate = true</script><svg role=button aria-label=Delete style='cursor: pointer'
        width=20 height=20></svg>""",
    "/paste": "<textarea aria-label=T>words</textarea>",
    "/choice": f"<select aria-label=Size><option>S<option>M<option>L</select>{LONG}",
    "/kept": """<select aria-label=Size onchange="value = 'S'"><option>S<option>M</select>""",
    "/wide": "<div style='width: 3000px'>a <a href=/two>b</a></div>",
    "/held": f"<style>body {{ overflow: hidden }}</style>{LONG}",
    "/tall": "<div contenteditable=true style='height: 9000px'>tall</div>",
    "/todo": "<div contenteditable=true>todo <input type=checkbox></div>",
    "/smooth": f"<style>html {{ scroll-behavior: smooth }}</style><a href=#end>down</a>{LONG}<b id=end>end",
    "/names": """<button><i class='fa fa-trash'></i></button>
        <button><svg width=9 height=9><title>Cut</title></svg></button>
        <b id=l>Lbl</b><input aria-labelledby=l><input title=Tit>""",
    "/states": """<div role=checkbox aria-checked=true>Agree</div><div role=option aria-selected=true>O</div><button aria-pressed=true>B</button>
        <button aria-expanded=true>M</button><div role=treeitem tabindex=-1>T</div>""",
    "/drag": "<div draggable=true>move me</div>",
    "/float": "<a href=/two><img alt=Photo style='float: left' width=90 height=90></a>",
    "/typed": "<a type=hidden href=/two>there</a><input type=hidden>",
    "/slide": "<input type=range aria-label=R max=10><button disabled>no</button>",
    "/odd": "<input type=range aria-label=zero step=0><input type=range aria-label=word step=abc>",
    "/send": "<form action=/sent method=post><button>Send</button></form>",
    "/moves": """<select aria-label=Size onchange="n.focus()"><option>S<option>M</select>
        <input id=n aria-label=N>""",
    "/child": """<input id=i title=Tit><script>
        i.innerHTML = '<form aria-label=x><input type=hidden name=ariaLabel></form>'</script>""",
    "/editable": "<form onclick=0><input type=hidden name=isContentEditable>Click</form>",
    "/labels": "<input aria-labelledby='a b' title=Tit><input id=named aria-labelledby=l><b id=l> </b>",
    "/twice": """<button disabled aria-disabled=true>A</button>
        <input type=number aria-label=N value=7 aria-valuenow=8>
        <button id=delete><i class=css-1x2></i></button>""",
    "/inner": f"""<body style='margin: 0'><div style='width: 900px'><main style='width: 800px; height: 500px;
        overflow: auto'>{LONG}</main></div>""",
    "/cut": "<body style='overflow-x: hidden'><div style='width: 3000px'>a</div>",
    "/soft": "<select aria-label=N><option>Oak<option>Wal&shy;nut</select>",
    "/every": """<form id=f onclick=0>Click me</form>
        <form id=g style='overflow: auto'>x <input aria-label=N></form><script>
        for (const form of [f, g]) for (const name in form) if (name !== "isContentEditable") {
        const field = document.createElement("input"); field.type = "hidden"; field.name = name;
        form.prepend(field); }</script>""",
    "/shadow": f"""{DEFINE}<p>Before</p>
        <my-card><b slot=head>Title</b>light words<i slot=none>unslotted</i></my-card>
        <my-bar>Save</my-bar><my-box></my-box><my-plain>not shown</my-plain>
        <p style='display: contents'>after</p>
        <script>
        define("my-card", `loose <h2><slot name=head>none</slot></h2><p><slot></slot></p>
          <slot name=foot>foot</slot>`);
        define("my-bar", "<button onclick='document.title = 1'><slot></slot></button>");
        define("my-field", `<b id=l>Town</b><input aria-labelledby=l><div style='cursor: pointer'
          onclick='document.title = 2'>Row</div><div style='display: none'>hidden</div>`);
        define("my-box", `<my-field></my-field><select aria-label=Size onchange='document.title += value'>
          <option>S<option>M<option>L</select>`);
        define("my-plain", "<a href=/two>the shadow's</a>");
        </script>""",
    "/slots": f"""{DEFINE}<my-link>inline words</my-link>
        <my-tabs><my-tab>One</my-tab><my-tab>Two</my-tab></my-tabs><my-link><img alt=Photo></my-link>
        <button><my-icon></my-icon></button><my-clear>clear</my-clear><my-hidden>hidden</my-hidden>
        <p style='display: contents; visibility: hidden'>without a box</p>
        <my-over><input type=checkbox aria-label=over style='opacity: 0; position: absolute'></my-over>
        <my-red></my-red><my-blue></my-blue>
        <div style='visibility: hidden'>no<p style='display: contents; visibility: visible'>yes</p></div>
        <script>
        define("my-link", "<a href='#x'><slot></slot></a>");
        define("my-tabs", "<nav role=tablist><slot></slot></nav>");
        define("my-tab", "<div role=tab tabindex=0 style='display: inline-block'><slot></slot></div>");
        define("my-icon", "<svg width=9 height=9><title>Search</title></svg>");
        define("my-clear", "<div style='opacity: 0'><slot></slot></div>");
        define("my-hidden", "<slot style='visibility: hidden'></slot>");
        define("my-over", "<div style='width: 20px; height: 20px'><slot></slot></div>");
        define("my-red", `<style>:host {{ display: block; width: 50px; height: 50px; background: red }}`);
        define("my-blue", `<slot></slot><style>:host {{ display: block; width: 50px; height: 50px;
          background: blue }}`);
        </script>""",
    "/panel": f"""{DEFINE}<my-panel></my-panel><script>define("my-panel", `<style>
        #p {{ position: fixed; top: 99px; left: -600px; width: 300px; transition: left .3s }}
        #p.on {{ left: 50px }}</style>
        <button onclick="this.nextElementSibling.classList.add('on')">open</button><div id=p>panel</div>
        <form action=/sent target=_blank><button>send</button></form>
        <form action=/sent target=_blank><input></form>`)</script>""",
    "/far": f"""{DEFINE}<my-far></my-far><script>define("my-far", `<style>
        main {{ height: 300px; overflow: auto; scroll-behavior: smooth }}</style>
        <a href="#" onclick="this.nextElementSibling.scrollTop = 9999; return false">down</a>
        <main>{LONG}</main>`)</script>""",
    "/when": "<style>input { width: 240px; padding: 6px 12px }</style>"
    + "".join(
        f"<input type={kind} aria-label={kind.split()[0]}>"
        for kind in (*KINDS, "datetime-local max=2030-01-01T00:00 aria-label=soon")
    ),
}


@pytest.fixture(scope="module")
def site():
    with Site(PAGES, silent=("/silent",)) as site:
        yield site


@pytest.fixture(scope="module")
def home(run, site):
    env = Web(Bounds(f"{site.origin}/two"), "Look around.")
    run(env.__aenter__())
    yield env
    run(env.__aexit__(None, None, None))


@pytest.fixture
def at(run, home, site):
    """Opens a page; its lines without their refs."""

    def lines(path):
        home.bounds.url = f"{site.origin}{path}"
        return re.sub(r" \[\d+\]", "", run(home.reset()).text).split("\n")

    return lines


@pytest.fixture
def use(run, home):
    """Acts on the element whose line has this name."""

    def step(name, command="CLICK", **args):
        text = run(home.page.look()).text
        ref = re.search(rf'^.*"{name}".* \[(\d+)\]$', text, re.MULTILINE)[1]
        return run(home.step(Action(command, ref=ref, **args)))

    return step


@pytest.fixture
def press(run, home):
    return lambda key: run(home.step(Action("PRESS", key=key)))


def test_what_keeps_a_form_from_being_sent_is_told(at, use):
    at("/need")
    assert 'says="Please fill out this field."' in use("Send").text


def test_the_keys_of_the_browser_itself_go_back_forward_and_load_anew(at, use, press):
    at("/two")
    assert "Name" in use("on").text
    assert 'text "Two"' in press("Alt+ArrowLeft").text
    assert "Name" in press("Alt+ArrowRight").text
    use("Name", "TYPE", text="x")
    assert 'value="x"' not in press("F5").text


def test_a_row_and_a_card_are_used_beside_what_lies_in_them(run, home, at, use):
    assert at("/row")[:3] == ['item "Ann"', "checkbox", 'button "Star"']
    use("Ann")
    assert run(home.page._tab.title()) == "1"
    use("row")
    assert run(home.page._tab.title()) == "2"


def test_a_server_that_gives_no_answer_does_not_end_the_visit(monkeypatch, at, use):
    at("/late")
    monkeypatch.setattr(page, "DEADLINE_S", 1.0)
    seen = use("late")
    assert (
        "the page gave no answer: what was loading was stopped" in seen.error
        and "Name" in seen.text
    )
    assert 'value="here"' in use("Name", "TYPE", text="here").text


def test_a_picture_waits_for_no_letters(run, home, at, monkeypatch):
    monkeypatch.setattr(page, "DEADLINE_S", 4.0)
    at("/letters")
    assert run(home.page.screenshot()).startswith(b"\x89PNG")


def test_a_field_that_is_laid_over_its_drawing_is_listed_and_a_faded_one_is_not(at):
    assert at("/over") == ['text "Choose"', 'select "Size" options "S", "L" value="S"']


def test_words_under_what_has_no_paint_are_told_and_those_under_paint_are_not(at):
    assert at("/card") == [
        'text "Shoe"',
        'text "$20"',
        'link "Buy"',
        'box "black"',
        'text "under nothing"',
    ]


def test_words_that_are_cut_away_name_what_shows_none(at):
    assert at("/heard") == [
        'button "Close menu #efefef"',
        'input text "Search"',
        'button "fa #efefef"',
        'button "fb #efefef"',
        "checkbox",
        'input text "Mail"',
    ]


def test_a_long_text_that_can_be_used_is_told_as_far_as_any_other(at):
    line = at("/code")[0]
    assert (
        line.startswith('item "code code') and line.count("code") == 40 and line.count("word") == 30
    )


def test_cells_and_pictures_are_words_of_their_own(at):
    assert at("/cells") == ['item "Ann Bonn 42"']
    assert at("/alts") == [
        'radio "Visa"',
        'link "PDF Report"',
        'button "Delete Ann #efefef"',
        'icon "Cart"',
    ]


def test_what_is_disabled_is_told_though_the_mouse_passes_through_it_or_it_is_drawn_by_its_label(
    at, use
):
    seen = at("/off")
    assert seen[:4] == [
        'checkbox "Box" disabled',
        'button "Save" disabled',
        'input text value="Lina" disabled',
        'text "passed through"',
    ]
    assert 'button "under a dialog" disabled' not in seen
    assert use("Box").error.endswith("is disabled") and use("Save").error.endswith("is disabled")


def test_a_paragraph_without_spaces_is_told_as_far_as_it_lies_in_the_window(at):
    told, more = at("/han")
    assert (
        told.startswith('text "漢')
        and 1_000 < told.count("漢") <= 2_000
        and more.startswith("... more")
    )


def test_a_long_list_hides_nothing_that_follows(at):
    options, after = at("/many")
    assert (
        '... 41 more value="' in options and after == 'text "after"'
    )  # 19 of 60: 19 * 102 < 2,000


def test_a_button_without_a_caption_has_the_browsers(at):
    assert at("/captions") == [
        f'button "{caption}"' for caption in ("Submit", "Reset", "Find", "Go")
    ]


def test_the_last_line_says_how_to_see_more_and_does_no_harm(at, use, press):
    assert at("/choice")[-1].endswith("below (PageDown): PRESS the key, or SCROLL")
    assert use("Size", "SELECT", option="M").text.endswith(
        "more below: SCROLL"
    )  # PageDown would choose
    press("Enter")  # opens the list
    assert 'value="L"' in use("Size", "SELECT", option="L").text
    assert at("/wide")[-1] == "... more beside (dx): SCROLL"
    assert "more" not in at("/held")[-1] and "more" not in at("/cut")[-1]
    assert [line[:22] for line in at("/inner")[-2:]] == [
        "... more beside (dx): ",
        "... more below: SCROLL",
    ]


def test_a_choice_that_the_page_takes_back_is_told(at, use):
    at("/kept")
    assert "did not stay" in use("Size", "SELECT", option="M").error


@pytest.mark.parametrize("name", sorted(CHOICES.keys() - {"shut"}))
def test_an_option_is_chosen_however_the_list_is_drawn(at, use, name):
    """One change of its own for each, and none where it is chosen already; of several, that releases it."""
    at(f"/choose-{name}")
    several = "several" in name or "narrow" in name
    told = []
    for option in ("L", "L", "M"):
        seen = use("Size", "SELECT", option=option)
        assert seen.error is None
        told.append(seen.text)
    assert 'value="L"' in told[0] and ('value="L"' in told[1]) == (not several)
    assert 'value="M"' in told[2]
    changes = '"now L; now ; now M;"' if several else '"now L; now M;"'
    assert told[2].endswith(f"text {changes}")


def test_a_list_that_a_page_keeps_shut_is_told_of(at, use):
    at("/choose-shut")
    assert "did not open" in use("Size", "SELECT", option="M").error


@pytest.mark.parametrize("name", EDITORS)
def test_what_takes_keys_is_an_editor_and_is_typed_in(at, use, run, home, name):
    assert at(f"/edit-{name}")[0].startswith('editor "old"')
    assert use("old", "TYPE", text="new word").error is None
    held = "document.querySelector('.e')?.editContext.text ?? document.body.innerText"
    assert run(home.page._tab.evaluate(held)) == "new word"


def test_a_text_box_that_may_only_be_read_takes_no_text(at, use):
    at("/locked")
    assert "is not a field one can type in" in use("old", "TYPE", text="x").error


def test_an_editor_is_listed_however_tall_and_whatever_lies_in_it(at):
    assert at("/tall")[0] == 'editor "tall"'
    assert at("/todo")[:2] == ['editor "todo"', "checkbox"]


def test_a_page_is_read_when_it_has_come_to_rest(at, use):
    at("/smooth")
    assert 'text "end"' in use("down").text


def test_names_that_a_page_gives_in_other_ways_are_told(at):
    seen = at("/names")
    assert seen[0].startswith('button "fa fa-trash') and seen[1].startswith('button "Cut')
    assert seen[-2:] == ['input text "Lbl"', 'input text "Tit"']
    assert at("/child") == ['input text "Tit"']
    assert at("/labels")[:2] == ['input text "Tit"', "input text #named"]
    assert at("/twice")[1:] == ['input number "N" value="7"', 'button "delete css-1x2 #efefef"']


def test_aria_states_are_told(at):
    assert at("/states") == [
        'checkbox "Agree" checked',
        'option "O" selected',
        'button "B" pressed',
        'button "M" expanded',
        'treeitem "T"',
    ]
    assert at("/twice")[0] == 'button "A" disabled'


def test_a_slider_is_set_to_a_number_and_a_disabled_button_is_told(at, use):
    at("/slide")
    assert 'value="7"' in use("R", "TYPE", text="7").text
    assert "cannot be set to 77" in use("R", "TYPE", text="77").error
    assert "is disabled" in use("no").error


def test_nothing_is_sent_twice_by_going_back_or_loading_anew(at, use, press, site):
    at("/send")
    use("Send")
    assert "would be sent again" in press("F5").error
    at("/send")
    use("Send")
    press("Alt+ArrowLeft")
    assert "would be sent again" in press("Alt+ArrowRight").error
    assert sum(seen.startswith("POST") for seen in site.seen) == 2


def test_behind_the_first_page_there_is_nothing_to_go_back_to(at, use, press):
    at("/need")
    use("Name", "TYPE", text="kept")
    seen = press("Alt+ArrowLeft")
    assert seen.error is None and 'value="kept"' in seen.text


def test_the_focus_stays_where_the_page_put_it_after_a_choice(at, use):
    at("/moves")
    assert 'input text "N" focused' in use("Size", "SELECT", option="M").text


def test_a_form_whose_fields_are_named_like_all_its_properties_is_read_and_used(run, home, at, use):
    assert at("/every") == ['item "Click me"', 'text "x"', 'input text "N"']
    run(home.page.mark(Action("CLICK", ref="1")))
    assert use("Click me").error is None
    assert at("/editable") == ['item "Click"']
    assert "is not a field one can type in" in use("Click", "TYPE", text="yes").error


@pytest.mark.parametrize(
    "kind, texts",
    [
        ("month", ["2024-05"]),
        ("week", ["2024-W07", "2023-W50"]),
        ("date", ["2024-05-06"]),
        ("datetime-local", ["2024-05-06T13:05", "2023-12-01T00:07", "2024-05-06T13:05:00"]),
        ("soon", ["2024-05-06T09:05"]),
        ("time", ["09:05", "13:05", "12:00", "00:05"]),
    ],
)
def test_a_date_or_time_is_typed_as_its_value_is_written(at, use, kind, texts):
    at("/when")
    for text in texts:
        seen = use(kind, "TYPE", text=text)
        assert seen.error is None and f'value="{text[:16]}"' in seen.text  # no seconds that are 0


def test_a_date_in_another_form_is_refused_with_the_right_one(at, use):
    at("/when")
    error = use("month", "TYPE", text="05/2024").error
    assert re.fullmatch(
        r"\[\d+\] holds '.*' now, and not '05/2024': write it as 2024-05-31, .*", error
    )


def test_open_shadow_trees_are_read_as_they_are_drawn_and_used_like_any_element(run, home, at, use):
    assert at("/shadow") == [
        'text "Before"',
        'text "loose"',
        'text "Title"',
        'text "light words"',
        'text "foot"',
        'button "Save"',
        'text "Town"',
        'input text "Town"',
        'item "Row"',
        'select "Size" options "S", "M", "L" value="S"',
        'link "the shadow\'s"',
        'text "after"',
    ]
    for name, title in (("Save", "1"), ("Row", "2")):
        use(name)
        assert run(home.page._tab.title()) == title
    assert 'input text "Town" value="Ulm" focused' in use("Town", "TYPE", text="Ulm").text
    assert 'value="L"' in use("Size", "SELECT", option="L").text
    assert run(home.page._tab.title()) == "2L"  # the option on the way is told nobody
    assert 'text "Two"' in use("the shadow's").text


def test_what_lies_in_a_slot_belongs_to_what_the_shadow_draws_around_it(at):
    assert [line.replace(" #efefef", "") for line in at("/slots")] == [
        'link "inline words"',
        'tab "One"',
        'tab "Two"',
        'link "Photo"',
        'button "Search"',
        'checkbox "over"',
        'box "red"',
        'box "blue"',
        'text "yes"',
    ]


def test_what_moves_or_scrolls_smoothly_in_a_shadow_comes_to_rest(at, use):
    at("/panel")
    assert 'text "panel"' in use("open").text
    at("/far")
    assert 'text "para 59"' in use("down").text


def test_a_form_in_a_shadow_stays_in_the_tab_sent_by_the_mouse_or_by_keys_alone(at, use, press):
    at("/panel")
    assert 'text "ok"' in use("send").text
    at("/panel")
    for _ in ("open", "send", "input"):
        press("Tab")
    assert 'text "ok"' in press("Enter").text
