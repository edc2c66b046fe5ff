"""Progress: how near a failed episode came to the goal, from 0 to 1, so that failures can be ranked.

For a form it is the share of the fields that hold what the instruction asks for, on the last page that the
agent saw and after its last action. For a page that pays by closeness it is the reward, if there was a
verdict. The click-checkboxes pages are both. They are read as forms, so that episodes without a verdict are
on the same scale; only click-checkboxes-soft takes the reward, because it asks for words similar to those
named. For all other pages nothing is known: most of them pay 1 or -1.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from envs.actions import ActionError, parse
from envs.miniwob.experts.elements import Element, element

Page = list[Element]
Fields = list[tuple[str, str]]
"(value, wanted value) of each field of a form; wanted is empty where the field is to be left alone."

# ---- pages that pay by closeness ----

# The raw reward that means no progress; 1 means all of it. Read from the pages' own scripts. Pages that pay
# for no part of the way are left out: find-greatest pays for any wrong card, buy-ticket for all wrong tickets
# but the worst.
FLOORS = {
    # sums of what is right and what is wrong
    "click-checkboxes-soft": -1.0, "drag-shapes-2": -1.0, "odd-or-even": -1.0,
    "phone-book": -1.0,  # ±0.7 for the person, ±0.3 for what is asked of them
    "tic-tac-toe": -0.75,  # lost; a draw pays -0.5
    # -1 means far off. A drawing's marks are multiplied, so below 0 a smaller drawing would get more.
    "ascending-numbers": 0.0, "bisect-angle": 0.0, "circle-center": 0.0, "draw-circle": 0.0, "draw-line": 0.0,
    "find-midpoint": 0.0, "hot-cold": 0.0, "right-angle": 0.0, "use-colorwheel": 0.0, "use-colorwheel-2": 0.0,
}  # fmt: skip

# ---- forms ----


def _values(page: Page, role: str) -> list[str]:
    """The values of the fields of that role, in reading order."""
    return [
        "checked" if "checked" in thing.flags else thing.value
        for thing in page
        if thing.role == role
    ]


def _only(page: Page, role: str, text: str, number: str) -> Fields:
    """Field number `number` of that role is to hold the text, the other fields nothing."""
    return [
        (value, text if str(n) == number else "") for n, value in enumerate(_values(page, role), 1)
    ]


def _inputs(page: Page, *texts: str) -> Fields:
    """One text for each field; a single text is for all of them."""
    values = _values(page, "input")
    return list(zip(values, texts * len(values) if len(texts) == 1 else texts, strict=False))


def _checkboxes(page: Page, listed: str) -> Fields:
    names = listed.split(", ")
    wanted = [
        "checked" if thing.text in names else "" for thing in page if thing.role == "checkbox"
    ]
    return list(zip(_values(page, "checkbox"), wanted, strict=True))


def _option(page: Page, name: str) -> Fields:
    """All radio buttons are one field, because choosing one releases the others."""
    radios = [thing for thing in page if thing.role == "radio"]
    return (
        [("".join(thing.text for thing in radios if "checked" in thing.flags), name)]
        if radios
        else []
    )


def _list(page: Page, name: str) -> Fields:
    return [(value, name) for value in _values(page, "select")]


def _radio_and_number(page: Page, radio: str, text: str, number: str) -> Fields:
    values = _values(page, "radio")
    chosen = str(values.index("checked") + 1) if "checked" in values else ""
    return [(chosen, radio), *_only(page, "input", text, number)] if values else []


def _slider_and_box(page: Page, position: str, number: str) -> Fields:
    shown = [thing.text for thing in page if thing.role == "text"]  # the slider's position
    return [*zip(shown, [position], strict=False), *_only(page, "checkbox", "checked", number)]


def _film(page: Page, genre: str, director: str, year: str) -> Fields:
    """Labels stand before their fields, or all behind them. The page ignores case."""
    wanted = {"Genre": genre.lower(), "Director": director.lower(), "Year": year, "Date": year}
    after = page[0].role == "input"
    labelled = [(one, other) if after else (other, one) for one, other in pairwise(page)]
    return [(field.value.lower(), text) for field, label in labelled if field.role == "input"
            for word, text in wanted.items() if word in label.text]  # fmt: skip


_BOXES = (r"Select (.*) and click Submit", _checkboxes)
_TEXT = (r'Enter (?:the password )?"(.*)" into', _inputs)
_LOGIN = (r'username "(.*)" and the password "(.*)" into', _inputs)
_SEARCH = (r"Search for (.*) movies directed by (.*) from year (\d+)", _film)

FORMS: dict[str, tuple[str, Callable[..., Fields]]] = {
    "click-checkboxes": _BOXES, "click-checkboxes-large": _BOXES, "click-checkboxes-transfer": _BOXES,
    "click-option": (r"Select (.*) and click Submit", _option),
    "choose-list": (r"Select (.*) from the list", _list),
    "enter-text": _TEXT, "enter-text-dynamic": _TEXT, "enter-password": _TEXT,
    "login-user": _LOGIN, "login-user-popup": _LOGIN,
    "form-sequence": (r"Select (-?\d+) with the slider, click the (\d)", _slider_and_box),
    "form-sequence-2": (r'the (\d)\w\w radio button .* number "(.*)" into the (\d)', _radio_and_number),
    "multi-layouts": _SEARCH, "multi-orderings": _SEARCH,
}  # fmt: skip
"Of each task the instruction's pattern, and a function that maps page and blanks to the fields."


def _after(page: Page, text: str | None) -> Page:
    """The page after the action, as far as its text fields, lists and boxes can be foreseen."""
    try:
        action = parse(text or "")
    except ActionError:
        return page
    used = next((thing for thing in page if "ref" in action and thing.ref == action["ref"]), None)
    match action.command, used and used.role:
        case "TYPE", "input":
            new = replace(used, value=" ".join(action["text"].split()))  # as the page will show it
        case "SELECT", "select" if action["option"] in used.options:
            new = replace(used, value=action["option"])
        case "CLICK", "checkbox":
            new = replace(used, flags=used.flags ^ {"checked"})
        case "CLICK", "radio":
            page = [replace(thing, flags=thing.flags - {"checked"}) if thing.role == "radio" and thing != used
                    else thing for thing in page]  # fmt: skip
            new = replace(used, flags=used.flags | {"checked"})
        case _:
            return page
    return [new if thing is used else thing for thing in page]


def _share(fields: Fields) -> float:
    """1 - (wrong fields) / (fields asked for), at least 0. A field to be left alone can be wrong, too.

    >>> _share([("Lina", "Lina"), ("", "h1qg"), ("", "")])
    0.5
    """
    wrong = sum(holds != wanted for holds, wanted in fields)
    return max(0.0, 1 - wrong / max(1, sum(wanted != "" for _, wanted in fields)))


def progress(instruction: str, task: str, turns: Sequence[tuple[str, str | None]], reward: float,
             ended: bool) -> float | None:  # fmt: skip
    """How near the episode came, from 0 to 1; None if that is not known.

    `turns`: the text that the agent saw and its action, if any; `reward`: the page's raw reward; `ended`:
    whether the page gave a verdict. Only episodes of one instance may be compared.

    >>> page = 'input text #username value="olin" [1]\\ninput password #password [2]'
    >>> asked = 'Enter the username "olin" and the password "h1" into the text fields and press login.'
    >>> actions = 'TYPE(ref="1", text="oli")', None, 'TYPE(ref="2", text="h1")'
    >>> [progress(asked, "login-user", [(page, action)], 0.0, False) for action in actions]
    [0.0, 0.5, 1.0]
    """
    if task in FLOORS:
        share = (reward - FLOORS[task]) / (1 - FLOORS[task])
        return min(1.0, max(0.0, share)) if ended else None
    pattern, form = FORMS.get(task, (None, None))
    blanks = re.search(pattern, instruction) if pattern else None
    if blanks is None:
        return None
    # A message that pops up hides the form and swallows what was being typed. So if the last page shows no
    # form, the page before counts as it was, without the action that was taken there.
    for back, (text, action) in enumerate(reversed(turns)):
        page = [element(line) for line in text.split("\n")]
        fields = form(page if back else _after(page, action), *blanks.groups())
        if fields:
            return _share(fields)
    return None
