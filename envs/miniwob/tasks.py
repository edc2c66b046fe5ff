"""Tables of the tasks: names, seeds of each split, step limits, and the reward at which a task counts as solved.

A task is the name of a page of the `miniwob` package; an instance is (task, seed).
"""

from importlib.metadata import distribution
from pathlib import Path

from envs.miniwob.experts.by_task import EXPERTS

HTML = Path(distribution("miniwob").locate_file("miniwob")) / "html"

# Pages that the package does not register as tasks, because they are unfinished or depend on the wall clock.
_UNREGISTERED = {"button-delay", "chase-circle", "hover-shape", "moving-items", "simon-says"}
_REGISTERED = tuple(
    sorted({page.stem for page in (HTML / "miniwob").glob("*.html")} - _UNREGISTERED)
)

SUITES: dict[str, tuple[str, ...]] = {
    "report": ("click-button", "login-user"),
    "demo": (
        "click-button", "click-link", "click-option", "click-checkboxes", "choose-list", "enter-text",
        "enter-password", "login-user", "focus-text-2", "form-sequence-2", "click-tab-2", "click-dialog-2",
    ),
    # The tasks that WebN-T5, WebGUM, AutoWebGLM and HTML-T5 report on (BrowserGym's and CompWoB's lists agree).
    "webgum-56": (
        "book-flight", "choose-date", "choose-date-easy", "choose-date-medium", "choose-list",
        "click-button", "click-button-sequence", "click-checkboxes", "click-checkboxes-large",
        "click-checkboxes-soft", "click-checkboxes-transfer", "click-collapsible", "click-collapsible-2",
        "click-color", "click-dialog", "click-dialog-2", "click-link", "click-menu", "click-option",
        "click-pie", "click-scroll-list", "click-shades", "click-shape", "click-tab", "click-tab-2",
        "click-tab-2-hard", "click-test", "click-test-2", "click-widget", "count-shape", "email-inbox",
        "email-inbox-forward-nl", "email-inbox-forward-nl-turk", "email-inbox-nl-turk", "enter-date",
        "enter-password", "enter-text", "enter-text-dynamic", "enter-time", "focus-text", "focus-text-2",
        "grid-coordinate", "guess-number", "identify-shape", "login-user", "login-user-popup",
        "multi-layouts", "multi-orderings", "navigate-tree", "search-engine", "social-media",
        "social-media-all", "social-media-some", "tic-tac-toe", "use-autocomplete", "use-spinner",
    ),
    "expert": tuple(task for task in _REGISTERED if task in EXPERTS),  # those with a scripted expert
    "all": _REGISTERED,
}  # fmt: skip

# Each split has its own million seeds.
SEEDS: dict[str, range] = {
    name: range(index * 1_000_000, (index + 1) * 1_000_000)
    for index, name in enumerate(("base", "demos", "rollouts", "validation", "test"))
}

# What moves by the wall clock, so the same actions may give another episode. Every other clock of a page is off.
BY_THE_CLOCK = {
    "stock-market": "the price changes every 100 ms",
    "drag-cube": "the cube turns every 20 ms while a mouse button is down, and after",
}

# Pages that are loaded anew for each episode (90 ms instead of 3), because a reset in place would leave traces of the
# last one. The pages in the first two lines did so when tried (old text in a field, old results, old classes); the
# others keep pagination, scroll position, datepicker state, animations or timers.
RELOAD = frozenset({
    "scroll-text", "scroll-text-2", "focus-text-2", "use-colorwheel", "use-colorwheel-2",
    "use-autocomplete-nodelay", "search-engine", "book-flight", "book-flight-nodelay",
    "use-autocomplete", "social-media", "social-media-all", "social-media-some", "order-food", "phone-book",
    "choose-date", "choose-date-easy", "choose-date-medium", "choose-date-nodelay",
    "terminal", "stock-market", "drag-cube", "click-pie", "click-pie-nodelay",
})  # fmt: skip

# The raw reward at which an instance counts as solved, for pages that reward closeness and never quite give 1.0.
_THRESHOLDS = {
    "circle-center": 0.9, "find-midpoint": 0.9,  # within 3 pixels
    "bisect-angle": 0.9, "right-angle": 0.9,  # within 5 % of the angle, within 9 degrees
    "draw-circle": 0.8, "draw-line": 0.8,  # nothing drawn by hand is quite round or straight
    "use-colorwheel": 0.95, "use-colorwheel-2": 0.95,  # 5 % of the colour range
    "drag-shapes-2": 0.999,  # a sum of fractions that rounding keeps below 1
}  # fmt: skip

# About twice what the scripted expert needs.
_STEP_LIMITS = {
    "click-button": 3, "click-link": 3, "focus-text-2": 3, "click-dialog-2": 3,
    "click-option": 5, "choose-list": 5, "enter-text": 5,
    "enter-password": 6, "login-user": 6, "form-sequence-2": 6, "click-tab-2": 6,
    "click-checkboxes": 10,
    "form-sequence": 20, "book-flight": 22, "book-flight-nodelay": 22,
    "choose-date": 28, "choose-date-nodelay": 28,
    "click-checkboxes-large": 26, "click-shades": 26, "order-food": 26, "social-media-all": 26,
    "social-media-some": 26, "text-editor": 26,
    "number-checkboxes": 44, "use-spinner": 44, "hot-cold": 60, "use-slider": 60, "use-slider-2": 60,
}  # fmt: skip


def STEP_LIMIT(task: str) -> int:
    """The most actions in an episode of the task."""
    return _STEP_LIMITS.get(task, 15)


def THRESHOLD(task: str) -> float:
    """The raw reward at which the task is solved: the page's maximum, or less if the page rewards closeness."""
    return _THRESHOLDS.get(task, 1.0)


def url(task: str) -> str:
    """The file URL of the task's page."""
    return (HTML / "miniwob" / f"{task}.html").as_uri()
