"""One page in a real Chromium: what is seen, how it is acted on, when it is won."""

import re

import pytest

from envs.actions import Action
from envs.protocol import Outcome


@pytest.fixture
def show(run, env):
    """Makes HTML and a script the problem of a page and returns what is then seen of it, line by line."""

    async def lines(html, code="", task="click-option"):  # a page with jQuery and d3
        await env.reset(task, 0)
        await env._page._tab.evaluate(
            "([html, code]) => { genProblem = () => { area.innerHTML = html; eval(code); }; }",
            [html, code],
        )
        return (await env.reset(task, 0)).text.splitlines()

    yield lambda *given: run(lines(*given))
    env._page.task = None  # the next reset loads the page's own problem again


@pytest.fixture
def js(run, env):
    """The value of a script that runs in the page."""
    return lambda code: run(env._page._tab.evaluate(code))


@pytest.fixture
def act(run, env):
    return lambda command, **args: run(env.step(Action(command, **args)))


# ---- what is seen ----


@pytest.mark.parametrize(
    "html, lines",
    [
        ("<label><input type=checkbox> tea</label> or water", ['checkbox "tea" [1]', 'text "or water"']),
        ("<label for=a>Name</label><input id=a value=' x '>", ['input text "Name" value="x" [1]']),
        ("<label for=a>Name</label><input id=a><label for=a>is required</label>",
         ['input text "Name" [1]', 'text "is required"']),
        ("<label for=a> </label><input id=a><label for=b>Do</label> <button id=b>it</button>",
         ["input text #a [1]", 'text "Do"', 'button "it" [2]']),
        ("<input id=a placeholder='a b' disabled>", ['input text #a placeholder="a b" disabled [1]']),
        ("<p>one <b>run</b> of\n text</p><p>another</p>", ['text "one run of text"', 'text "another"']),
        ("say <b>\"hi\"</b> \\", ['text "say \\"hi\\" \\\\"']),
        ("<table><tr><td>a</td><td>b</td></tr></table>", ['text "a b"']),
        ("<div style='cursor: pointer'>go <i>now</i></div>", ['item "go now" [1]']),
        ("<div onclick='0'>row <span onclick='0'>x</span></div>", ['item "row" [1]', 'item "x" [2]']),
        ("<select><option>a</option><option>b</option></select>", ['select options "a", "b" value="a" [1]']),
        ("<a href='#'>there</a><button>go</button><span class=alink>old</span>",
         ['link "there" [1]', 'button "go" [2]', 'text "old"']),
        ("<img alt=dog onclick='0' width=9 height=9>", ['icon "dog" [1]']),
        ("<svg><circle cx=9 cy=9 r=5 fill=red onclick='0' /><rect y=40 width=20 height=20 /></svg>",
         ['shape "small red circle" at 11,61 [1]', 'shape "large black rectangle" at 12,102']),
        ("<div style='background: lime; width: 9px; height: 9px'></div>", ['box "lime"']),
    ],
)  # fmt: skip
def test_what_a_person_reads(show, html, lines):
    assert show(html) == lines


@pytest.mark.parametrize(
    "style",
    [
        "display: none", "visibility: hidden", "opacity: 0", "font-size: 0",
        "position: absolute; left: -999px", "text-indent: -999px; overflow: hidden; width: 50px",
        "width: 0; height: 0; overflow: hidden",
    ],
)  # fmt: skip
def test_what_nobody_sees_is_not_told(show, style):
    seen = show(
        f"<p style='{style}'>secret <a style='font-size: inherit'>secret</a></p><p>plain</p>"
    )
    assert "secret" not in " ".join(seen) and seen[-1] == 'text "plain"'


def test_what_lies_under_a_dialog_is_not_told(show):
    over = "position: absolute; left: 0; top: 50px; width: 150px; height: 100px; background: white"
    assert show(f"<p>below</p><button>below</button><div style='{over}'>above</div>") == [
        'text "above"'
    ]


def test_a_long_page_is_cut_and_says_so(show):
    *lines, last = show("".join(f"<p>{'long ' * 20} {i}</p>" for i in range(200)))
    assert re.fullmatch(r"\.\.\. \d+ more lines", last)
    assert sum(map(len, lines)) < 6000 and len(lines) + int(last.split()[1]) == 200


def test_a_listener_of_any_library_makes_a_control(show):
    html = "<i id=a>a</i> <i id=b>b</i> <p id=list>c <i>d</i></p> <i id=e>e</i>"
    assert show(
        html,
        """
        d3.select('#a').on('click', () => 0);
        $('#b').on('mousedown', () => 0);
        $('#list').on('click', 'i', () => 0);
        d3.select('#e').on('click', () => 0).on('click', null);
    """,
    ) == ['item "a" [1]', 'item "b" [2]', 'text "c"', 'item "d" [3]', 'text "e"']


def test_references_stay_with_their_node_and_are_not_given_twice(js, run, env, show):
    show("<button id=a>a</button><button id=b>b</button>")
    js("() => { a.remove(); area.insertAdjacentHTML('afterbegin', '<button>c</button>'); }")
    assert run(env._page.look()).text.splitlines() == ['button "c" [3]', 'button "b" [2]']
    again = run(env.reset("click-option", 0)).text.splitlines()
    assert again == ['button "a" [1]', 'button "b" [2]']


# ---- how it is acted on ----


def test_input_is_trusted_and_a_typed_text_replaces_the_old_one(js, act, show):
    show("<input id=a value=old><input id=b value=old><p>end</p>")
    js("""() => {
        window.log = [];
        for (const type of ['click', 'input', 'change'])
            addEventListener(type, (event) => log.push(event.type + event.target.id + event.isTrusted), true);
    }""")
    assert 'value="new, Åsa" focused [1]' in act("TYPE", ref="1", text="new, Åsa").text
    assert act("TYPE", ref="2", text="").text.splitlines()[1] == "input text #b focused [2]"
    assert js("log") == [
        "clickatrue",
        "inputatrue",
        "changeatrue",
        "clickbtrue",
        "inputbtrue",
    ]


def test_a_page_that_listens_to_keys_gets_every_key(js, act, show):
    show("<input id=a>")
    js("""() => {
        window.keys = '';
        area.addEventListener('keydown', (event) => { keys += event.key; });
    }""")
    act("TYPE", ref="1", text="aB c")
    assert js("keys").endswith("aB c") and js("a.value") == "aB c"


def test_select_by_keys_is_trusted_and_in_a_long_list_adds(js, act, show):
    show(
        "<select id=a><option>x<option disabled>y<option>z</select>"
        "<select id=b multiple size=2><option>p<option>q<option>r</select>"
    )
    js("() => { a.onchange = (event) => { window.trusted = event.isTrusted; }; }")
    assert 'value="z" [1]' in act("SELECT", ref="1", option=" z ").text
    assert js("trusted") is True
    act("SELECT", ref="2", option="r")
    assert 'value="p", "r" [2]' in act("SELECT", ref="2", option="p").text


@pytest.mark.parametrize(
    "action, name",
    [
        (Action("CLICK", ref="9"), "[9]"),
        (Action("CLICK", ref="1"), "[1]"),
        (Action("TYPE", ref="2", text="a"), "[2]"),
        (Action("SELECT", ref="2", option="a"), "[2]"),
        (Action("SELECT", ref="3", option="b"), '"b"'),
        (Action("CLICK", ref="3"), "SELECT"),
        (Action("DRAG", ref="2", to="1"), "[1]"),
        (Action("CLICK", ref="5"), "[5]"),
        (Action("PRESS", key="Control+Nope"), "Control+Nope"),
    ],
)
def test_what_cannot_be_done_is_named_and_leaves_the_page_alone(js, run, env, show, action, name):
    show(
        "<p><button id=a>a</button><button>b</button><select><option>a</select>"
        "<input readonly><button id=e>e</button></p>"
    )
    js("""() => {
        a.remove(); e.style.visibility = 'hidden'; window.events = 0;
        for (const type of ['mousedown', 'click', 'input']) addEventListener(type, () => { events++; });
    }""")
    before = run(env._page.look()).text
    seen = run(env.step(action))
    assert name in seen.error and (seen.text, seen.outcome) == (before, None)
    assert js("events") == 0


def test_an_icon_that_changes_under_the_mouse_is_clicked_when_its_other_picture_is_there(
    js, act, run, env
):
    """Where the mouse is pressed meanwhile the icon has no size: three in twenty clicks of a busy machine."""
    seen = run(env.reset("social-media", 0)).text
    reply = re.search(r'"reply" \[(\d+)\]', seen)[1]
    js("() => { hits = []; onmousedown = (event) => hits.push(event.target.className); }")
    act("CLICK", ref=reply)
    assert run(env._page._call("locate", reply))["icons"] and js("() => hits") == ["reply"]


@pytest.mark.parametrize(
    "options, option, told",
    [
        (
            "<option>One<optgroup disabled><option>Two<option>Three</optgroup><option>Four<option>Five",
            "Four",
            '"One", "Two", "Three", "Four", "Five" value="One"',
        ),
        (
            "<option>One<option disabled selected>Two<option>Three<option>Four",
            "Four",
            '"One", "Two", "Three", "Four" value="Two"',
        ),
        (
            "<option>One<option hidden>Two<optgroup style='display: none'><option>Three</optgroup><option>Four"
            "<option>Five",
            "Four",
            '"One", "Four", "Five" value="One"',
        ),
    ],
)
def test_select_finds_its_way_past_options_nobody_can_choose(js, act, show, options, option, told):
    assert show(f"<select id=list>{options}</select>") == [f"select options {told} [1]"]
    for hidden in set(re.findall(r">(\w+)", options)) - set(re.findall(r'"(\w+)"', told)):
        seen = act("SELECT", ref="1", option=hidden)
        assert seen.error == f'[1] has no option "{hidden}"'
    assert act("SELECT", ref="1", option=option).error is None
    assert js("() => list.selectedOptions[0].text") == option


def test_a_list_tells_its_page_of_the_option_that_was_chosen_and_of_none_on_the_way(js, act, show):
    show(
        "<select id=list><option>One<option>Two<option label=Third>Three<option label=''>Four</select>",
        "told = []; for (const type of ['input', 'change']) "
        "list.addEventListener(type, (event) => told.push(type, list.value, event.isTrusted));",
    )
    for option, value in (("Four", "Four"), ("Third", "Three"), ("One", "One")):
        seen = act("SELECT", ref="1", option=option)
        assert seen.error is None and f'value="{option}"' in seen.text
        assert js("() => told.splice(0)") == [
            "input",
            value,
            True,
            "change",
            value,
            True,
        ]


@pytest.mark.parametrize("gap, far", [(300, False), (3000, True)])
def test_a_drag_begins_where_its_element_is_after_its_target_was_scrolled_into_view(
    js, act, show, gap, far
):
    show(
        f"<div style='height: 900px'></div><div id=a tabindex=0>A</div><div style='height: {gap}px'></div>"
        "<div id=b tabindex=0>B</div>",
        "down = null; onmousedown = (event) => { down = event.target.id; };",
    )
    act("CLICK", ref="1")
    seen = act("DRAG", ref="1", to="2")
    assert seen.error == ("[1] and [2] are too far apart to be seen at once" if far else None)
    assert js("() => down") == "a"


@pytest.mark.parametrize("way", [{"dx": 60, "dy": -5}, {"x": 90, "y": 25}, {"to": "2"}])
def test_a_drag_ends_so_far_away_or_at_a_place_or_on_an_element(js, act, show, way):
    show(
        "<div id=a tabindex=0 style='position: absolute; left: 20px; top: 20px; width: 20px; height: 20px'>"
        "</div><div id=b tabindex=0 style='position: absolute; left: 80px; top: 15px; width: 20px; "
        "height: 20px'></div>",
        "onmouseup = (event) => { up = [event.clientX, event.clientY]; };",
    )
    assert act("DRAG", ref="1", **way).error is None
    assert js("() => up") == [90, 25]


def test_a_date_is_typed_in_the_order_in_which_its_value_is_told_too(js, act, show):
    show("<input type=date id=day style='width: 140px'>")  # this page's own are 20 wide
    for text in ("2024-05-06", "05/06/2024"):
        assert act("TYPE", ref="1", text=text).error is None
        assert js("() => day.value") == "2024-05-06"


@pytest.mark.parametrize(
    "kind, held",
    [
        ("date", "2016-09-18"),
        ("time", "13:05"),
        ("datetime-local step=0.001", "2016-09-18T13:05:07.123"),
    ],
)
def test_a_date_or_time_is_cleared_by_an_empty_text_and_takes_no_words(js, act, show, kind, held):
    show(f"<input type={kind} value={held} style='width: 140px'>")
    refused = act("TYPE", ref="1", text="tomorrow")
    assert "takes digits" in refused.error and f'value="{held}"' in refused.text
    seen = act("TYPE", ref="1", text="")
    assert seen.error is None and "value" not in seen.text
    assert js("() => document.querySelector('input').validity.badInput") is False


@pytest.mark.parametrize(
    "css, said",
    [
        ("oklch(0.628 0.2577 29.23)", "red"),
        ("color(srgb 0 1 0)", "lime"),
        ("rgb(37, 208, 37)", "green #25d025"),
        ("#f06529", "orange #f06529"),
        ("#7cd2dc", "aqua #7cd2dc"),
        ("#d0d0d0", "#d0d0d0"),
    ],
)
def test_a_colour_is_told_however_it_is_written(show, css, said):
    assert show(f"<div style='background: {css}; width: 9px; height: 9px'></div>") == [
        f'box "{said}"'
    ]


# task, actions, lines that the page then shows: what a picture shows and the text once lacked
STATES = [
    ("click-shades", [], ['icon "green #427b42" [1]']),
    ("click-menu", [], ['item "Laurette" submenu [4]']),
    (
        "search-engine",
        [Action("TYPE", ref="1", text="Renda"), Action("CLICK", ref="2")],
        ['link "1" selected [6]', 'link "2" [7]'],
    ),
    (
        "use-slider-2",
        [Action("CLICK", ref="2")],
        ['icon "slider-handle" [1]', 'icon "slider-handle" focused [2]'],
    ),
    ("scroll-text-2", [Action("SCROLL", ref="1", dx=0, dy=5000)], ["at bottom [1]"]),
    (
        "text-editor",
        [Action("CLICK", ref="5"), Action("PRESS", key="Control+A")],
        ['focused marked="'],
    ),
]


@pytest.mark.parametrize("task, actions, lines", STATES, ids=[task for task, *_ in STATES])
def test_what_a_picture_shows_of_a_pages_state_is_told(run, env, task, actions, lines):
    seen = run(env.reset(task, 0))
    for action in actions:
        assert not all(line in seen.text for line in lines)
        seen = run(env.step(action))
        assert seen.error is None
    for line in lines:
        assert line in seen.text


def test_a_field_that_refuses_typing_says_so(act, run, env):
    run(env.reset("use-spinner", 0))
    seen = act("TYPE", ref="1", text="7")
    assert seen.error == "[1] took nothing of what was typed" and 'value="0"' in seen.text
    run(env.reset("enter-text", 0))
    for text in ("a", "b", "b"):  # another field takes it, and the same text again
        assert act("TYPE", ref="1", text=text).error is None
    run(env.reset("focus-text-2", 0))
    ended = act("TYPE", ref="1", text="a")  # by the click that comes before the keys
    assert ended.outcome is not None and ended.error is None


@pytest.mark.parametrize("x, y, at", [(159, 209, (159, 209)), (-5, 9, (0, 9)), (9, 999, (9, 209))])
@pytest.mark.parametrize("command, of", [("CLICK_AT", {}), ("DRAG", {"ref": "1"})])
def test_coordinates_are_of_the_task_area_and_clamped_aloud(js, act, show, command, of, x, y, at):
    show("<button>b</button>", "addEventListener('mouseup', (event) => { window.at = event; })")
    seen = act(command, **of, x=x, y=y)
    assert tuple(js("[at.clientX, at.clientY]")) == at
    assert (seen.error is None) == ((x, y) == at)


# ---- when it is won ----


def test_a_part_of_the_reward_is_not_a_success(act, run, env):
    """Two boxes, one is wrong: the page pays (1 - 1) / 2; the wrong card of find-greatest pays 0.1."""
    run(env.reset("click-checkboxes", 0))
    seen = act("CLICK", ref="3")
    assert (seen.outcome, seen.reward) == (Outcome.FAILED, 0.0)
    run(env.reset("find-greatest", 0))
    act("CLICK", ref="1")
    seen = act("CLICK", ref="4")
    assert seen.outcome is Outcome.FAILED and 0 < seen.reward < 1


def test_the_first_verdict_stays_and_nothing_starts_again(js, act, run, env):
    run(env.reset("click-test", 0))
    won = act("CLICK", ref="1")
    assert (won.outcome, won.reward) == (Outcome.SOLVED, 1.0)
    js("() => { core.endEpisode(-1); core.cover_div.click(); core.endEpisode(-1); }")
    assert run(env._page.look()).verdict == 1.0
    assert run(env._page._tab.is_visible("#sync-task-cover")) is False
    assert act("CLICK_AT", x=80, y=100) == won


def test_the_clock_is_off(js, run, env):
    for task in ("click-button", "login-user-popup"):
        run(env.reset(task, 0))
        assert js("[core.EPISODE_MAX_TIME, core.CD_TIMER]") == [2**31 - 1, None]
