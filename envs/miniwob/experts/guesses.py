"""Experts for long texts, a table, guesses and a day's calendar.

Each docstring is an instruction that the function obeys.
"""
import re

from envs.actions import Action
from envs.miniwob.experts.decisions import Decision, Expert, click, complete, quoting
from envs.miniwob.experts.elements import Element, asked, find, look
from envs.protocol import Observation

# ---- texts ----


def scroll_text(seen: Observation, done: list[Action]) -> Decision:
    """Find the last word in the text area, enter it into the text field and hit Submit."""
    (area,) = look(seen, "textarea")
    word = area.value.split()[-1].strip(".,")
    return complete([(look(seen, "input")[0], word)], find(seen, "Submit"))


def scroll_text_2(seen: Observation, done: list[Action]) -> Decision:
    """Scroll the textarea to the bottom of the text hit submit."""
    (end,) = asked(seen, r"to the (bottom|top)")
    (area,) = look(seen, "textarea")
    scroll = Action("SCROLL", ref=area.ref, dx=0, dy=5000 if end == "bottom" else -5000)
    if scroll not in done[-1:]:  # the page does not show how far it is scrolled
        return quoting(end, Decision(area.line, scroll))
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
    for label, field in zip(page, page[1:], strict=False):
        if field.role == "input":
            key = label.text.removesuffix(":") + " "
            row = next(row.text for row in page if row.text.startswith(key))
            wanted.append((field, row.removeprefix(key)))
    return complete(wanted, find(seen, "Submit"))


# ---- numbers ----


def guess_number(seen: Observation, done: list[Action]) -> Decision:
    """Guess the number between 0-9 and press Submit. Use the feedback below to find the right number."""
    # a search tree with each guess once, so the last answer says where in it we are
    after = {"": 4, "lower 4": 1, "higher 4": 7, "lower 1": 0, "higher 1": 2, "higher 2": 3,
             "lower 7": 5, "higher 7": 8, "higher 5": 6, "higher 8": 9}  # fmt: skip
    answer = re.search(r"(lower|higher) than (\d+)", seen.text)
    way, last = answer.groups() if answer else ("", "")
    guess = after.get(f"{way} {last}".strip())
    if guess is None:  # a number outside the tree was tried
        guess = min(max(int(last) + (1 if way == "higher" else -1), 0), 9)
    return complete([(look(seen, "input")[0], str(guess))], find(seen, "Submit"))


def generate_number(seen: Observation, done: list[Action]) -> Decision:
    """Generate a number greater than 2, then press submit. | Generate an even number, then press submit."""
    (wish,) = asked(seen, r"Generate an? (?:number )?(.*?)(?: number)?, then")
    shown, bound = look(seen, "text")[0].text, int("0" + re.sub(r"\D", "", wish))
    if shown.isdigit() and {
        "less": int(shown) < bound, "greater": int(shown) > bound,
        "odd": int(shown) % 2 == 1, "even": int(shown) % 2 == 0,
    }[wish.split()[0]]:  # fmt: skip
        return quoting(wish, click(find(seen, "Submit")))
    return quoting(wish, click(find(seen, "Generate")))


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
    if not any(action.command == "HOVER" for action in done):  # what others cover shows in view only
        return Decision(middle.line, Action("HOVER", ref=middle.ref))
    for row in range(first, first + 9 - count):
        if all(row + step in free for step in range(count)):
            return _draw(free[row], free[row + count - 1])
    return Decision(middle.line, Action("HOVER", ref=middle.ref))


def _half_hour(clock: str) -> int:
    hour, half, noon = re.fullmatch(r"(\d+)(:30)?(am|pm)", clock).groups()
    return int(hour) % 12 * 2 + bool(half) + 24 * (noon == "pm")


def _draw(start: Element, end: Element) -> Decision:
    if start is end:
        return Decision(start.line, Action("DRAG", ref=start.ref, dx=5, dy=0))
    return Decision(start.line, Action("DRAG", ref=start.ref, to=end.ref))


EXPERTS: dict[str, Expert] = {
    "scroll-text": scroll_text, "scroll-text-2": scroll_text_2, "sign-agreement": sign_agreement,
    "read-table-2": read_table_2, "guess-number": guess_number, "generate-number": generate_number,
    "daily-calendar": daily_calendar,
}  # fmt: skip
