"""A page of the web: it is read and used like any other, and never left."""

import asyncio
import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from listening import Site, nobody_should_call

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
CLOBBER = """<form onclick=0>Find <input name=contains> <input name=matches value=x><input name=title>
<input name=id type=hidden> <button>Go</button></form>
<form onclick=0><input type=hidden name=matches value=1>Click me</form>"""
TRAP = """<form><input type=hidden name=parentElement><input type=hidden name=parentNode><input type=hidden
name=childNodes>
<p style="height: 500px">Deep</p><input aria-label=Name></form>"""
ARIA = """<button role=tab aria-selected=true>First</button> <button role=tab>Second</button>
<div role=checkbox aria-checked=true>Agree</div> <div role=switch aria-checked=false>Dark</div>"""
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
        "/clobber": CLOBBER,
        "/trap": TRAP,
        "/aria": ARIA,
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

    async def go(path):
        home.bounds.url = f"{site.origin}{path}"
        return (await home.reset()).text.split("\n")

    site.seen.clear()
    yield lambda path: run(go(path))
    assert other.seen == []
    for _ in range(100):  # windows that were opened are closed one after the other
        if len(home.page.context.pages) > 1:
            run(asyncio.sleep(0.05))
    assert len(home.page.context.pages) == 1


def use(run, home, name, command="CLICK", **args):
    """Act on the element of that name; what is seen then."""
    text = run(home.page.look()).text
    ref = re.search(rf'^.*"{name}".* \[(\d+)\]$', text, re.MULTILINE)[1]
    return run(home.step(Action(command, ref=ref, **args)))


# ---- within the origin ----


def test_a_form_is_filled_in_and_sent_within_the_origin(run, home, site, at):
    assert [line.split(" [")[0] for line in at("/form")] == ['input text "Name"', 'button "Submit"']
    assert use(run, home, "Name", "TYPE", text="Lina & co").error is None
    seen = use(run, home, "Submit")
    assert (seen.text, seen.error, seen.outcome) == ('text "Thank you"', None, None)
    assert "POST /sent name=Lina+%26+co" in site.seen


def test_a_link_that_would_open_another_tab_opens_in_this_one(run, home, at):
    at("/")
    assert use(run, home, "aside").text.startswith('text "Two"')


def test_so_does_one_whose_page_or_button_would_have_it_so_for_all(run, home, site, at):
    at("/based")
    assert use(run, home, "based").text.startswith('text "Two"')
    at("/based")
    box = run(home.page._tab.locator("img").bounding_box())
    seen = run(home.step(Action("CLICK_AT", x=int(box["x"]) + 40, y=int(box["y"]) + 40)))
    assert seen.text.startswith('text "Two"')
    at("/based")
    assert use(run, home, "Send").text == 'text "Thank you"'
    assert [asked for asked in site.seen if "sent" in asked] == ["POST /sent target="]


def test_whoever_wants_to_leave_a_page_that_asks_back_leaves_it(run, home, at):
    at("/leave")
    use(run, home, "Note", "TYPE", text="unsaved")
    seen = use(run, home, "out")
    assert seen.text.startswith('text "Two"') and seen.error is None


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


def test_of_a_visit_nothing_is_left(run, site, monkeypatch):
    """History and cookies lie in the profile; killed at once, a browser sometimes left them."""
    tmp_path = Path(tempfile.mkdtemp(dir="/tmp"))  # short: Chromium binds a socket there
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)

    async def visit():
        async with Web(Bounds(f"{site.origin}/two"), "") as env:
            await env.reset()
            return [
                *tmp_path.glob("playwright_chromiumdev_profile-*"),
                *tmp_path.glob("minidpo_*/org.chromium.*"),
            ]

    assert len(run(visit())) == 2 and list(tmp_path.iterdir()) == []
    tmp_path.rmdir()


def test_a_long_name_of_the_folder_for_temporary_files_stops_no_visit(run, site, monkeypatch):
    """Chromium's socket lies there, and its path may have a hundred characters."""
    long = Path(tempfile.mkdtemp(dir="/tmp", prefix=40 * "x"))
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)

    async def visit():
        async with Web(Bounds(f"{site.origin}/two"), "") as env:
            return await env.reset()

    assert run(visit()).text.startswith('text "Two"') and list(long.glob("minidpo_*")) == []
    shutil.rmtree(long)


def test_a_text_goes_into_the_field_that_is_named_and_presses_no_enter(run, home, at):
    """A field that nobody sees has the focus; typing on a button would have pressed it."""
    at("/focus")
    seen = use(run, home, "Delete all", "TYPE", text="x")
    assert "is not a field one can type in" in seen.error and "deleted" not in seen.text
    seen = use(run, home, "name", "TYPE", text="Li\nna")
    assert seen.error is None and "Lina" in seen.text and "sent" not in seen.text
    assert re.search(r"my editor\" \[\d+\]", seen.text)


def test_a_disabled_option_is_told_as_such(run, home, at):
    at("/focus")
    ref = re.search(r'options? .*"Aa".* \[(\d+)\]', run(home.page.look()).text)[1]
    seen = run(home.step(Action("SELECT", ref=ref, option="Aa")))
    assert seen.error == f'option "Aa" of [{ref}] is disabled'


def test_a_reference_is_never_given_twice_whatever_is_loaded(run, home, at):
    pages = ["\n".join(at(path)) for path in ("/", "/two", "/", "/form")]
    given = [re.findall(r"\[(\d+)\]$", page, re.MULTILINE) for page in pages]
    numbers = [int(ref) for page in given for ref in page]
    assert numbers == sorted(set(numbers)) and all(given)
    assert run(home.step(Action("CLICK", ref=given[0][0]))).error == f"there is no [{given[0][0]}]"


def test_of_a_long_page_the_window_is_told_and_that_there_is_more(run, home, at):
    first = at("/long")
    assert len(first) < 100 and '"link 0"' in first[0]
    assert first[-1] == "... more below (PageDown): PRESS the key, or SCROLL"
    seen = run(home.step(Action("PRESS", key="PageDown"))).text.split("\n")
    assert '"link 0"' not in seen[0] and seen[-1].startswith(
        "... more above (PageUp) and below (PageDown)"
    )
    use(run, home, seen[3].split('"')[1], "SCROLL", dx=0, dy=10_000)
    for _ in range(2):
        last = run(home.step(Action("PRESS", key="End"))).text.split("\n")
    assert '"link 999"' in last[-2] and last[-1].startswith("... more above (PageUp): ")


def test_prose_is_read_to_its_end_and_a_long_text_a_window_at_a_time(run, home, at):
    first, pre, more = at("/prose")
    assert first.endswith('word last."') and len(first) > 450 and more.startswith("... more below")
    assert "line-0 line-1 " in pre and "line-150" not in pre
    last = run(home.step(Action("PRESS", key="End"))).text
    assert "line-199" in last and "line-0 " not in last and "word" not in last


def test_of_a_part_that_scrolls_by_itself_it_is_told_that_there_is_more(run, home, at):
    way = ": SCROLL what lies there, or CLICK_AT it and PRESS PageDown"
    first = at("/inner")
    assert first[-1] == f"... more below{way}" and "line-0 " in first[0]
    run(home.step(Action("CLICK_AT", x=400, y=300)))
    seen = run(home.step(Action("PRESS", key="PageDown"))).text
    assert seen.endswith(f"... more above and below{way}") and "line-0 " not in seen


def test_a_field_of_a_disabled_group_is_disabled(run, home, at):
    assert at("/group")[0].startswith('input text "Name" disabled [')
    assert "is not a field one can type in" in use(run, home, "Name", "TYPE", text="x").error


def test_a_switch_that_is_drawn_in_place_of_its_input_is_told_and_used_as_one(run, home, at):
    told = [re.sub(r" \[\d+\]", "", line) for line in at("/switch")]
    assert told == ['checkbox "Remember me"', 'radio "Plain"']
    assert 'checkbox "Remember me" checked [' in use(run, home, "Remember me").text


def test_fields_named_like_what_a_form_can_do_hide_nothing(at):
    told = [re.sub(r" \[\d+\]", "", line) for line in at("/clobber")]
    assert told == [
        'text "Find"',
        "input text",
        'input text value="x"',
        "input text",
        'button "Go"',
        'item "Click me"',
    ]


def test_nor_do_they_lead_a_walk_to_the_top_in_circles(run, home, at):
    assert at("/trap")[0] == 'text "Deep"'
    assert 'value="x"' in use(run, home, "Name", "TYPE", text="x").text


def test_what_a_page_says_of_its_own_tabs_and_boxes_is_told(at):
    told = [re.sub(r" \[\d+\]", "", line) for line in at("/aria")]
    assert told == [
        'tab "First" selected',
        'tab "Second"',
        'checkbox "Agree" checked',
        'switch "Dark"',
    ]


def test_what_is_copied_in_a_frame_stays_in_it(run, home, at):
    """Nor is what lies on the system's clipboard pasted there."""
    at("/copies")
    _, one, other = home.page._tab.frames
    for frame, field, keys in ((one, "", "ac"), (one, "input + ", "v"), (other, "input + ", "v")):
        run(frame.focus(f"{field}input"))
        for key in keys:
            run(home.step(Action("PRESS", key=f"Control+{key}")))
    pasted = [
        run(frame.evaluate("document.querySelector('input + input').value"))
        for frame in (one, other)
    ]
    assert pasted == ["secret", ""]


def test_a_pages_scripts_cannot_change_what_is_told_of_it(home, at):
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
def test_what_would_leave_the_page_is_stopped_and_told(run, home, at, name, told):
    before = [line.split(" [")[0] for line in at("/")]
    seen = use(run, home, name)
    for _ in range(20):  # a window is heard of a little later
        if seen.error:
            break
        seen = run(home.step(Action("WAIT")))
    assert told in seen.error and "\n" not in seen.error
    assert [line.split(" [")[0] for line in seen.text.split("\n")] == before


def test_however_much_a_page_says_the_agent_reads_three_sentences(run, home, at):
    at("/many")
    error = use(run, home, "many").error
    assert error.count("dialog") == 3 and error.endswith("; and 6 more")
    run(home.page._tab.evaluate("setTimeout(() => document.querySelector('button').click())"))
    run(asyncio.sleep(0.5))
    error = run(home.step(Action("CLICK", ref="99999"))).error
    assert error.startswith("there is no [99999]; the page said")


def test_a_file_is_asked_for_and_none_is_given(run, home, at):
    ref = re.search(r"input file \[(\d+)\]", "\n".join(at("/")))[1]
    assert "was given none" in run(home.step(Action("CLICK", ref=ref))).error
    seen = use(run, home, "mail")  # and no mail program starts
    assert seen.error is None and 'link "two"' in seen.text


def test_a_page_that_has_wiped_itself_out_shows_nothing(run, home, at):
    at("/")
    assert use(run, home, "wipe").text == ""


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
            return texts, got + calls

    (first, stayed, back, went), got = run(play())
    assert first.text == stayed.text == 'link "out" [1]\nlink "none" [2]\nlink "in" [3]'
    assert (
        "lies outside" in stayed.error
        and "could not be loaded" in back.error
        and '"in" [6]' in back.text
    )
    assert went.text == 'text "Two"' and got == []


def test_a_folder_may_be_visited(run, tmp_path):
    (tmp_path / "two.html").write_text("<p>Two</p>")

    async def play():
        async with Web(Bounds(tmp_path.as_uri()), "") as env:
            return await env.reset()

    assert "two.html" in run(play()).text


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


@pytest.mark.parametrize("host", ["faß.example", "STRASSE.faß.example", "σοφός.example"])
def test_a_host_that_two_standards_read_differently_is_refused(host):
    with pytest.raises(ValueError, match=r"xn--..., as '\\x?u?\w+' in it can be read in two"):
        Bounds(f"https://{host}/")


def test_a_page_that_leads_away_at_once_is_an_error(run, site):
    async def load():
        async with Web(Bounds(f"{site.origin}/hop"), "") as env:
            await env.reset()

    with pytest.raises(EnvError, match=r'taken" lies outside http://127.0.0.1:\d+/, where'):
        run(load())
