"""Experts for long texts, a table, guesses, a day's calendar, a hidden place and a game.

Each docstring is an instruction that the function follows.
"""

import math
import re
from functools import cache
from itertools import pairwise, takewhile

from envs.actions import Action
from envs.miniwob.experts.decisions import Decision, Expert, click, complete, fill, quoting
from envs.miniwob.experts.elements import Element, asked, find, look
from envs.protocol import Observation

# ---- texts ----


def scroll_text(seen: Observation, done: list[Action]) -> Decision:
    """Find the last word in the text area, enter it into the text field and hit Submit."""
    (area,) = look(seen, "textarea")
    end = area.value.split()[-3:]
    wanted = look(seen, "input")[0], end[-1].strip(".,"), f"last: {' '.join(end)}"
    return complete([wanted], find(seen, "Submit"))


def scroll_text_2(seen: Observation, done: list[Action]) -> Decision:
    """Scroll the textarea to the bottom of the text hit submit."""
    (end,) = asked(seen, r"to the (bottom|top)")
    (area,) = look(seen, "textarea")
    way, dy = ("down", 5000) if end == "bottom" else ("up", -5000)
    if end not in area.flags:
        return quoting(
            f"{end}, {way}", Decision(area.line, Action("SCROLL", ref=area.ref, dx=0, dy=dy))
        )
    return click(find(seen, "Submit"))


def sign_agreement(seen: Observation, done: list[Action]) -> Decision:
    """Scroll to the bottom of the textarea, enter the name "Alan" then press "Agree" """
    if "Click the cancel button" in seen.instruction:
        return click(find(seen, "Cancel"))
    name, button = asked(seen, r'the name "(.*)" then press "(.*)"')
    (area,), (field,) = look(seen, "textarea"), look(seen, "input")
    if "disabled" in field.flags:
        return Decision(area.line, Action("SCROLL", ref=area.ref, dx=0, dy=5000))
    return complete([(field, name)], find(seen, button))


def read_table_2(seen: Observation, done: list[Action]) -> Decision:
    """Enter the value that corresponds with each label into the form and submit when done."""
    page = look(seen)
    wanted = []
    for label, field in pairwise(page):
        if field.role == "input":
            key = label.text.removesuffix(":") + " "
            row = next(row.text for row in page if row.text.startswith(key))
            text = row.removeprefix(key)
            wanted.append((field, text, f"{label.text} {text}"))
    return complete(wanted, find(seen, "Submit"))


# ---- numbers ----


def guess_number(seen: Observation, done: list[Action]) -> Decision:
    """Guess the number between 0-9 and press Submit. Use the feedback below to find the right number."""
    # a search tree with each guess once, so the last answer tells the place in it
    after = {"": 4, "lower 4": 1, "higher 4": 7, "lower 1": 0, "higher 1": 2, "higher 2": 3,
             "lower 7": 5, "higher 7": 8, "higher 5": 6, "higher 8": 9}  # fmt: skip
    answer = re.search(r"(lower|higher) than (\d+)", seen.text)
    way, last = answer.groups() if answer else ("", "")
    guess = after.get(f"{way} {last}".strip())
    if guess is None:  # a number outside the tree was tried
        guess = min(max(int(last) + (1 if way == "higher" else -1), 0), 9)
    words = answer[0] if answer else "between 0-9"
    (field,) = look(seen, "input")
    if field.value != str(guess):
        return quoting(words, fill(field, str(guess)))
    return quoting(f"{words}, now {guess}", click(find(seen, "Submit")))


def generate_number(seen: Observation, done: list[Action]) -> Decision:
    """Generate a number greater than 2, then press submit. | Generate an even number, then press submit."""
    (wish,) = asked(seen, r"Generate an? (?:number )?(.*?)(?: number)?, then")
    shown, bound = look(seen, "text")[0].text, int("0" + re.sub(r"\D", "", wish))
    if shown.isdigit() and {
        "less": int(shown) < bound, "greater": int(shown) > bound,
        "odd": int(shown) % 2 == 1, "even": int(shown) % 2 == 0,
    }[wish.split()[0]]:  # fmt: skip
        return quoting(f"{shown} is {wish}", click(find(seen, "Submit")))
    return quoting(f"{shown} is not {wish}", click(find(seen, "Generate")))


# ---- a day ----


def daily_calendar(seen: Observation, done: list[Action]) -> Decision:
    """Create a 90 mins event named "Food", between 4PM and 8PM."""
    length, unit, name, start = asked(seen, r'a ([\d.]+) (min|hour).* named "(.*)", between (\d+)')
    count = round(float(length) * (2 if unit == "hour" else 1 / 30))  # half hours
    for field in look(seen, "input"):  # the event's own form shows its beginning and end as text
        made = re.findall(r'text "(\S+) to (\S+)"', seen.text)
        if not made or _half_hour(made[0][1]) - _half_hour(made[0][0]) != count:
            return click(find(seen, "Cancel"))
        return complete([(field, name)], find(seen, "Create"))
    first = {"8": 16, "12": 24, "4": 32}[start]
    free = {int(cell.text.split("-")[-1]): cell for cell in look(seen, "icon")}
    middle = free.get(first + 4) or free.get(first + 3) or free[first]
    if not any(
        action.command == "HOVER" for action in done
    ):  # what others cover shows in view only
        return Decision(middle.line, Action("HOVER", ref=middle.ref))
    for row in range(first, first + 9 - count):
        if all(row + step in free for step in range(count)):
            start, end = free[row], free[row + count - 1]
            way = {"dx": 5, "dy": 0} if start is end else {"to": end.ref}
            return Decision(start.line, Action("DRAG", ref=start.ref, **way))
    return Decision(middle.line, Action("HOVER", ref=middle.ref))


def _half_hour(clock: str) -> int:
    hour, half, noon = re.fullmatch(r"(\d+)(:30)?(am|pm)", clock).groups()
    return int(hour) % 12 * 2 + bool(half) + 24 * (noon == "pm")


# ---- a hidden place ----

DISPLAY = (82, 191)  # the middle of the line under the area, where a drag begins
HEAT = ("ICE COLD", "COLD", "WARM", "HOT")
COARSE = [(x, y) for y in (84, 141) for x in (30, 80, 130)]
FINE = [(16 * column + 8 * (row % 2), 14 * row) for row in range(-3, 4) for column in range(-3, 4)]
FINE = [
    step for step in sorted(FINE, key=lambda step: math.hypot(*step)) if 0 < math.hypot(*step) <= 44
]
NEAR = [(7, 0), (5, 5), (0, 7), (-5, 5), (-7, 0), (-5, -5), (0, -7), (5, -5)]


def hot_cold(seen: Observation, done: list[Action]) -> Decision:
    """Find and click on the HOT area.

    A drag from the line below moves the mouse to a place without clicking there. Three grids of places are tried, each
    finer than the last and around its best place: within 40 pixels it is COLD, within 10 WARM, within 5 HOT.
    """
    area, display = look(seen)[:2]
    probes = [
        (DISPLAY[0] + action["dx"], DISPLAY[1] + action["dy"])
        if "dx" in action
        else (action["x"], action["y"])
        for action in done
        if "dx" in action or (action.command == "DRAG" and "x" in action)
    ]
    heat = HEAT.index(display.text) if probes else 0
    if COARSE[0] in probes:
        probes = probes[len(probes) - 1 - probes[::-1].index(COARSE[0]) :]
    base, spots = (0, 0), COARSE
    for enough, steps in ((1, FINE), (2, NEAR), (3, ())):
        count = len([*takewhile(lambda pair: pair[0] == pair[1], zip(spots, probes, strict=False))])
        base, probes = probes[count - 1] if count else base, probes[count:]
        if not probes and heat < enough:
            return probe(display, [*spots, COARSE[0]][count])
        spots = [
            (min(max(base[0] + dx, 4), 154), min(max(base[1] + dy, 54), 176)) for dx, dy in steps
        ]
    if probes:  # some are not of this plan: begin again
        return probe(display, COARSE[0])
    return Decision(area.line, Action("CLICK_AT", x=base[0], y=base[1]))


def probe(display: Element, spot: tuple[int, int]) -> Decision:
    """Drag from the line to the spot. The button is released there, and that clicks on neither."""
    dx, dy = spot[0] - DISPLAY[0], spot[1] - DISPLAY[1]
    return Decision(display.line, Action("DRAG", ref=display.ref, dx=dx, dy=dy))


# ---- a game ----

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


@cache
def chance(board: str, player: str) -> float:
    """The probability that X wins from here, if X plays as well as possible and O at random.

    >>> chance("xx oo    ", "x")
    1.0
    """
    other = "o" if player == "x" else "x"
    if any(all(board[cell] == other for cell in line) for line in LINES):
        return float(other == "x")
    chances = [chance(board[:cell] + player + board[cell + 1 :], other)
               for cell in range(9) if board[cell] == " "]  # fmt: skip
    if not chances:
        return 0.0
    return max(chances) if player == "x" else sum(chances) / len(chances)


def tic_tac_toe(seen: Observation, done: list[Action]) -> Decision:
    """Playing as 'X', win a game of tic-tac-toe."""
    cells = look(seen, "icon")  # "mark-x ttt-0", or "ttt-0" while it is free
    board = "".join(cell.text[5] if cell.text.startswith("mark-") else " " for cell in cells)
    free = [cell for cell in range(9) if board[cell] == " "]
    best = max(free, key=lambda cell: chance(board[:cell] + "x" + board[cell + 1 :], "o"))
    return click(cells[best])


EXPERTS: dict[str, Expert] = {
    "scroll-text": scroll_text, "scroll-text-2": scroll_text_2, "sign-agreement": sign_agreement,
    "read-table-2": read_table_2, "guess-number": guess_number, "generate-number": generate_number,
    "daily-calendar": daily_calendar, "hot-cold": hot_cold, "tic-tac-toe": tic_tac_toe,
}  # fmt: skip
