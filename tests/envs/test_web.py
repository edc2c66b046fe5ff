"""A page of the web: it is read and used like any other, and never left."""

import asyncio
import contextlib
import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from listening import Site, nobody_should_call
from playwright.async_api import Error

from envs.actions import Action
from envs.protocol import EnvError
from envs.web.gate import Bounds
from envs.web.visit import Web

ROOT = Path(__file__).parents[2]
ATTACK = Path(__file__).parents[1].joinpath("attack.js").read_text()
HOME = """<h1>Home</h1><a href=/two>two</a> <a href=OTHER/taken>away</a> <a href=/hop>hop</a>
<a href=/two target=_blank>aside</a> <button onclick="alert('so\\nmuch')">say</button>
<button onclick="window.open('/two'); window.open('OTHER/taken')">window</button>
<a href=/two download>save</a> <input type=file> <button onclick="location = 'OTHER/taken'">go</button>
<button onclick="location = 'about:blank'">blank</button> <button onclick="document.open()">wipe</button>
<iframe src=OTHER/taken></iframe><img src=OTHER/taken><a href=mailto:a@b.c>mail</a>"""
NUMBERS = "\n".join(f"line-{n}" for n in range(200))
SWITCH = """<label><input type=checkbox style="opacity: 0; position: absolute"><b>Remember me</b></label>
<label><input type=radio> Plain</label>"""
BASED = """<base target=_blank><a href=/two>based</a> <map name=m><area href=/two coords=0,0,99,99></map>
<img usemap=#m width=99 height=99 src=/none>
<form action=/sent method=post><input name=target><button formtarget=_blank>Send</button></form>"""
LEAVE = (
    "<script>onbeforeunload = (event) => event.preventDefault()</script>"
    "<label>Note <input></label><a href=/two>out</a>"
)
INNER = f"<body style='margin: 0'><main style='height: 100vh; overflow: auto'><pre>{NUMBERS}</pre></main>"
GROUP = "<fieldset disabled><label>Name <input></label></fieldset>"
FOCUS = """<textarea style="position: absolute; left: -9999px"></textarea>
<button onclick="document.querySelector('b').textContent = 'deleted'">Delete all</button> <b>kept</b>
<form action=/sent><label>name <input></label></form>
<select aria-label=letters><option disabled>Aa<option selected>Bb</select>
<div contenteditable=plaintext-only>my editor</div>
<script>document.querySelector("textarea").focus()</script>"""
FORM = "<form action=/sent method=post><label>Name <input name=name></label> <button>Submit</button></form>"


@pytest.fixture(scope="module")
def other():
    with Site({"/taken": "<p>You are elsewhere</p>"}) as site:
        yield site


@pytest.fixture(scope="module")
def site(other):
    pages = {
        "/": HOME.replace("OTHER", other.origin),
        "/two": "<p>Two</p><a href=/>home</a>",
        "/form": FORM,
        "/sent": "<p>Thank you</p>",
        "/prose": f"<p>{'word ' * 90}last.</p><pre>{NUMBERS}</pre>",
        "/switch": SWITCH,
        "/copies": 2 * "<iframe srcdoc='<input value=secret><input>'></iframe>",
        "/long": "".join(f"<p><a href=#{n}>link {n}</a>" for n in range(1000)),
        "/focus": FOCUS,
        "/based": BASED,
        "/leave": LEAVE,
        "/inner": INNER,
        "/group": GROUP,
        "/many": "<button onclick='for (let n = 0; n < 9; n++) alert(n)'>many</button>",
        "/lies": """<button>true</button><script>mini = { look: () => ({ text: 'button "false" [1]' }) };
                Array.prototype.map = Array.prototype.join = () => 'button "false" [1]';</script>""",
    }
    with Site(pages, {"/hop": "/hop2", "/hop2": f"{other.origin}/taken"}) as site:
        yield site


@pytest.fixture(scope="module")
def home(run, site):
    """An environment at the site's first page."""
    env = Web(Bounds(f"{site.origin}/"), "Look around.")
    run(env.__aenter__())
    yield env
    run(env.__aexit__(None, None, None))


@pytest.fixture
def at(run, home, site, other):
    """Goes to a page of the site and gives what is seen there; the other site must not hear of anything."""

    def go(path):
        home.bounds.url = f"{site.origin}{path}"
        return run(home.reset()).text.split("\n")

    site.seen.clear()
    yield go
    assert other.seen == []
    for _ in range(100):  # windows that were opened are closed one after the other
        if len(home.page.context.pages) > 1:
            run(asyncio.sleep(0.05))
    assert len(home.page.context.pages) == 1


@pytest.fixture
def act(run, home):
    return lambda command, **args: run(home.step(Action(command, **args)))


@pytest.fixture
def use(run, home, act):
    """Acts on the element of that name; what is seen then."""

    def step(name, command="CLICK", **args):
        text = run(home.page.look()).text
        ref = re.search(rf'^.*"{name}".* \[(\d+)\]$', text, re.MULTILINE)[1]
        return act(command, ref=ref, **args)

    return step


# ---- within the origin ----


def test_a_form_is_filled_in_and_sent_within_the_origin(use, site, at):
    assert [line.split(" [")[0] for line in at("/form")] == ['input text "Name"', 'button "Submit"']
    assert use("Name", "TYPE", text="Lina & co").error is None
    seen = use("Submit")
    assert (seen.text, seen.error, seen.outcome) == ('text "Thank you"', None, None)
    assert "POST /sent name=Lina+%26+co" in site.seen


def test_a_link_that_would_open_another_tab_opens_in_this_one(use, at):
    at("/")
    assert use("aside").text.startswith('text "Two"')


def test_so_does_one_whose_page_or_button_would_have_it_so_for_all(use, act, run, home, site, at):
    at("/based")
    assert use("based").text.startswith('text "Two"')
    at("/based")
    box = run(home.page._tab.locator("img").bounding_box())
    seen = act("CLICK_AT", x=int(box["x"]) + 40, y=int(box["y"]) + 40)
    assert seen.text.startswith('text "Two"')
    at("/based")
    assert use("Send").text == 'text "Thank you"'
    assert [asked for asked in site.seen if "sent" in asked] == ["POST /sent target="]


def test_whoever_wants_to_leave_a_page_that_asks_back_leaves_it(use, at):
    at("/leave")
    use("Note", "TYPE", text="unsaved")
    seen = use("out")
    assert seen.text.startswith('text "Two"') and seen.error is None


def test_a_page_that_leads_away_at_once_is_an_error(at):
    with pytest.raises(EnvError, match=r'taken" lies outside http://127.0.0.1:\d+/, where'):
        at("/hop")


@pytest.mark.parametrize("path", ["close", "later", "opened", "crash"])
def test_a_tab_that_is_gone_is_told_in_a_sentence_and_is_no_verdict(run, path):
    pages = {
        "/close": "<button onclick='window.close()'>go</button>",
        "/later": "<button onclick='setTimeout(() => window.close(), 50)'>go</button>",
        "/opened": "<button onclick='window.open(`/closes`)'>go</button>",
        "/closes": "<script>opener.close()</script>",
        "/crash": "<button>go</button>",
    }

    async def visit(site):
        async with Web(Bounds(f"{site.origin}/{path}"), "") as env:
            seen = await env.reset()
            if path == "crash":
                with contextlib.suppress(Error):
                    await env.page._devtools.send("Page.crash")
            await env.step(Action("CLICK", ref=seen.text[-2]))

    with Site(pages) as site, pytest.raises(EnvError, match="the tab is gone") as gone:
        run(visit(site))
    assert not re.search("CDP|Target|context", str(gone.value))


def test_where_the_scripts_of_a_look_are_missing_they_are_loaded_again(run, home, at):
    """A context's number may become another's, in another process, or the page's own, which may lie."""
    at("/lies")
    tab = home.page
    other = run(
        tab._devtools.send(
            "Page.createIsolatedWorld", {"frameId": tab._frame, "worldName": "other"}
        )
    )
    for number in (other["executionContextId"], None):
        tab._world = {"contextId": number} if number else {"returnByValue": True}
        sight, _ = run(tab.look_when_quiet())
        assert 'button "true"' in sight.text


def test_a_page_of_plain_http_is_asked_for_as_such(run, site, monkeypatch):
    connect, port = asyncio.open_connection, int(site.origin.rpartition(":")[2])
    monkeypatch.setattr(
        "envs.web.gate.asyncio.open_connection", lambda *_: connect("127.0.0.1", port)
    )

    async def play():
        async with Web(Bounds("http://www.example.org/two"), "") as env:
            return await env.reset()

    seen = run(play())
    assert seen.text.startswith('text "Two"') and seen.error is None


@pytest.mark.parametrize("long", ["", "x"])
def test_of_a_visit_nothing_is_left(run, site, monkeypatch, long):
    """History and cookies are in the profile; killed at once, a browser sometimes left them.

    Chromium's socket is in the folder for temporary files, and its path may have a hundred characters.
    """
    tmp_path = Path(tempfile.mkdtemp(dir="/tmp", prefix=40 * long))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)

    async def visit():
        async with Web(Bounds(f"{site.origin}/two"), "") as env:
            await env.reset()
            return [
                *tmp_path.glob("playwright_chromiumdev_profile-*"),
                *tmp_path.glob("minidpo_*/org.chromium.*"),
            ]

    assert len(run(visit())) == (1 if long else 2)
    left = [path for path in tmp_path.iterdir() if not long or "chromium." not in path.name]
    shutil.rmtree(tmp_path)
    assert left == []


def test_a_text_goes_into_the_field_that_is_named_and_presses_no_enter(use, at):
    """A field that nobody sees has the focus; typing on a button would have pressed it."""
    at("/focus")
    seen = use("Delete all", "TYPE", text="x")
    assert "is not a field one can type in" in seen.error and "deleted" not in seen.text
    seen = use("name", "TYPE", text="Li\nna")
    assert seen.error is None and "Lina" in seen.text and "sent" not in seen.text
    assert re.search(r"my editor\" \[\d+\]", seen.text)


def test_a_disabled_option_is_told_as_such(act, run, home, at):
    at("/focus")
    ref = re.search(r'options? .*"Aa".* \[(\d+)\]', run(home.page.look()).text)[1]
    seen = act("SELECT", ref=ref, option="Aa")
    assert seen.error == f'option "Aa" of [{ref}] is disabled'


def test_a_reference_is_never_given_twice_whatever_is_loaded(act, at):
    pages = ["\n".join(at(path)) for path in ("/", "/two", "/", "/form")]
    given = [re.findall(r"\[(\d+)\]$", page, re.MULTILINE) for page in pages]
    numbers = [int(ref) for page in given for ref in page]
    assert numbers == sorted(set(numbers)) and all(given)
    assert act("CLICK", ref=given[0][0]).error == f"there is no [{given[0][0]}]"


def test_of_a_long_page_the_window_is_told_and_that_there_is_more(use, act, at):
    first = at("/long")
    assert len(first) < 100 and '"link 0"' in first[0]
    assert first[-1] == "... more below (PageDown): PRESS the key, or SCROLL"
    seen = act("PRESS", key="PageDown").text.split("\n")
    assert '"link 0"' not in seen[0] and seen[-1].startswith(
        "... more above (PageUp) and below (PageDown)"
    )
    use(seen[3].split('"')[1], "SCROLL", dx=0, dy=10_000)
    for _ in range(2):
        last = act("PRESS", key="End").text.split("\n")
    assert '"link 999"' in last[-2] and last[-1].startswith("... more above (PageUp): ")


def test_prose_is_read_to_its_end_and_a_long_text_a_window_at_a_time(act, at):
    first, pre, more = at("/prose")
    assert first.endswith('word last."') and len(first) > 450 and more.startswith("... more below")
    assert "line-0 line-1 " in pre and "line-150" not in pre
    last = act("PRESS", key="End").text
    assert "line-199" in last and "line-0 " not in last and "word" not in last


def test_of_a_part_that_scrolls_by_itself_it_is_told_that_there_is_more(act, at):
    way = ": SCROLL what lies there, or CLICK_AT it and PRESS PageDown"
    first = at("/inner")
    assert first[-1] == f"... more below{way}" and "line-0 " in first[0]
    act("CLICK_AT", x=400, y=300)
    seen = act("PRESS", key="PageDown").text
    assert seen.endswith(f"... more above and below{way}") and "line-0 " not in seen


def test_a_field_of_a_disabled_group_is_disabled(use, at):
    assert at("/group")[0].startswith('input text "Name" disabled [')
    assert "is not a field one can type in" in use("Name", "TYPE", text="x").error


def test_a_switch_that_is_drawn_in_place_of_its_input_is_told_and_used_as_one(use, at):
    told = [re.sub(r" \[\d+\]", "", line) for line in at("/switch")]
    assert told == ['checkbox "Remember me"', 'radio "Plain"']
    assert 'checkbox "Remember me" checked [' in use("Remember me").text


def test_what_is_copied_in_a_frame_stays_in_it(act, run, home, at):
    """Nor is what lies on the system's clipboard pasted there."""
    at("/copies")
    _, one, other = home.page._tab.frames
    for frame, field, keys in ((one, "", "ac"), (one, "input + ", "v"), (other, "input + ", "v")):
        run(frame.focus(f"{field}input"))
        for key in keys:
            act("PRESS", key=f"Control+{key}")
    pasted = [
        run(frame.evaluate("document.querySelector('input + input').value"))
        for frame in (one, other)
    ]
    assert pasted == ["secret", ""]


def test_a_pages_scripts_cannot_change_what_is_told_of_it(at):
    assert [re.sub(r"\d+", "N", line) for line in at("/lies")] == ['button "true" [N]']


# ---- and not beyond ----


@pytest.mark.parametrize(
    "name, told",
    [
        ("away", "lies outside"),
        ("hop", "lies outside"),
        ("go", "lies outside"),
        ("window", "another window, which was closed"),
        ("say", 'said "so much" in a dialog, which was'),
        ("save", "a download, which was stopped"),
        ("blank", "where it may not go, and was led back"),
    ],
)
def test_what_would_leave_the_page_is_stopped_and_told(use, act, at, name, told):
    before = [line.split(" [")[0] for line in at("/")]
    seen = use(name)
    for _ in range(20):  # a window is heard of a little later
        if seen.error:
            break
        seen = act("WAIT")
    assert told in seen.error and "\n" not in seen.error
    assert [line.split(" [")[0] for line in seen.text.split("\n")] == before


def test_however_much_a_page_says_the_agent_reads_three_sentences(use, act, run, home, at):
    at("/many")
    error = use("many").error
    assert error.count("dialog") == 3 and error.endswith("; and 6 more")
    run(home.page._tab.evaluate("setTimeout(() => document.querySelector('button').click())"))
    run(asyncio.sleep(0.5))
    error = act("CLICK", ref="99999").error
    assert error.startswith("there is no [99999]; the page said")


def test_a_file_is_asked_for_and_none_is_given(use, act, at):
    ref = re.search(r"input file \[(\d+)\]", "\n".join(at("/")))[1]
    assert "was given none" in act("CLICK", ref=ref).error
    seen = use("mail")  # and no mail program starts
    assert seen.error is None and 'link "two"' in seen.text


def test_a_page_that_has_wiped_itself_out_shows_nothing(use, at):
    at("/")
    assert use("wipe").text == ""


def test_a_page_reaches_no_other_server_and_no_file(run, home, at, tmp_path):
    """The same attack as in test_untrusted, from an origin of the web."""
    (tmp_path / "secret.js").write_text("window.stolen = 'TOPSECRET'; //")
    at("/two")
    with nobody_should_call() as (tcp, udp, calls):
        given = {
            "http": f"http://127.0.0.1:{tcp}/",
            "udp": udp,
            "files": [(tmp_path / "secret.js").as_uri()],
        }
        assert (
            run(home.page._tab.evaluate(f"({ATTACK})({json.dumps(given)})")) == [] and calls == []
        )
    for way in (
        "fetch('/hop', {mode: 'no-cors'})",  # redirected to the other site, which hears of nothing
        "new Promise((y, n) => Object.assign(new Image(), {src: '/hop', onload: y, onerror: n}))",
    ):
        assert (
            run(home.page._tab.evaluate(f"{way}.then(() => 'reached', () => 'stopped')"))
            == "stopped"
        )


def test_a_page_that_is_a_file_stays_in_its_folder(run, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "out.html").write_text("TOPSECRET")
    (tmp_path / "in" / "two.html").write_text("<p>Two</p>")
    (tmp_path / "in" / "a page.html").write_text(
        "<a href=../out.html>out</a> <a href=three.html>none</a> <a href=two.html>in</a>"
        "<iframe src=../out.html></iframe>"
    )

    async def play():
        async with Web(Bounds((tmp_path / "in" / "a page.html").as_uri()), "") as env:
            texts = [
                await env.reset(),
                *[await env.step(Action("CLICK", ref=ref)) for ref in "126"],
            ]
            with nobody_should_call() as (tcp, udp, calls):
                outside = [f"{tmp_path.as_uri()}/out.html"]
                given = {"http": f"http://127.0.0.1:{tcp}/", "udp": udp, "files": outside}
                got = await env.page._tab.evaluate(f"({ATTACK})({json.dumps(given)})")
            env.bounds.url = (tmp_path / "in").as_uri() + "/"  # a folder may be visited
            return texts, got + calls, (await env.reset()).text

    (first, stayed, back, went), got, listed = run(play())
    assert "two.html" in listed
    assert first.text == stayed.text == 'link "out" [1]\nlink "none" [2]\nlink "in" [3]'
    assert (
        "lies outside" in stayed.error
        and "could not be loaded" in back.error
        and '"in" [6]' in back.text
    )
    assert went.text == 'text "Two"' and got == []


@pytest.mark.parametrize(
    "url, origin",
    [
        ("http://Example.org", "http://example.org/"),
        ("http://example.org:80/a", "http://example.org/"),
        ("https://example.org:8443/x?y#z", "https://example.org:8443/"),
        ("http://[::1]:8/", "http://[::1]:8/"),
        ("http://[0:0:0:0:0:0:0:1]:8/", "http://[::1]:8/"),
        ("http://127.1:8/", "http://127.0.0.1:8/"),
        ("http://example.org:0/a", "http://example.org:0/"),
        ("https://bücher.example/", "https://xn--bcher-kva.example/"),
        (Path(__file__).as_uri(), f"{ROOT.as_uri()}/tests/envs/"),
    ],
)
def test_the_bounds_are_the_origin_or_the_folder(url, origin):
    bounds = Bounds(url)
    assert bounds.origin == origin
    assert bounds.page.match(f"{origin}a") and not bounds.outside.match(f"{origin}a")
    for outside in (
        "http://example.org.evil.example/",
        "http://example.org@evil.example/",
        "http://example.org:81/",
        "ftp://example.org/",
        "file:///etc/passwd",
        "view-source:http://example.org/",
    ):
        assert bounds.outside.match(outside) and not bounds.page.match(outside)


@pytest.mark.parametrize("host", ["STRASSE.faß.example", "σοφός.example"])
def test_a_host_that_two_standards_read_differently_is_refused(host):
    with pytest.raises(ValueError, match=r"xn--..., as '\\x?u?\w+' in it can be read in two"):
        Bounds(f"https://{host}/")
