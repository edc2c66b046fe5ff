"""Experts for calendars, pickers, sliders and longer forms.

A value is reached step by step, and the page shows each step: the month, the number beside a slider, the list that has
opened. Each docstring is an instruction that the function follows.
"""

import re
from calendar import month_name
from datetime import datetime
from typing import NamedTuple

from envs.actions import Action
from envs.miniwob.experts.decisions import Decision, Expert, choose, click, fill, press, quoting
from envs.miniwob.experts.elements import Element, asked, find, look
from envs.protocol import Observation

# ---- dates ----


def pick_date(seen: Observation, field: Element, date: str) -> Decision:
    """Open the field's calendar, turn its pages to the month, click on the day; the date is 11/14/2016."""
    wanted = datetime.strptime(date, "%m/%d/%Y")
    shown = [thing.text.split() for thing in look(seen, "text")]
    months = [(int(words[1]), list(month_name).index(words[0]))
              for words in shown if len(words) == 2 and words[0] in month_name]  # fmt: skip
    # it opens when the field gets the focus, but not by a click if the field has it already
    if not months:
        return quoting(date, press(field, "Tab") if "focused" in field.flags else click(field))
    words = f"{date}, {wanted:%m/%Y}, shown {months[0][1]:02}/{months[0][0]}"
    if (wanted.year, wanted.month) == months[0]:
        return quoting(
            f"{words}, same, day {wanted.day}", click(find(seen, str(wanted.day), "link"))
        )
    turn, way = (
        ("Prev", "earlier") if (wanted.year, wanted.month) < months[0] else ("Next", "later")
    )
    link = next(link for link in look(seen, "link") if link.text.startswith(turn))
    return quoting(f"{words}, {way}", click(link))


def choose_date(seen: Observation, done: list[Action]) -> Decision:
    """Select 11/14/2016 as the date and hit submit."""
    (date,) = asked(seen, r"Select (\S+) as the date")
    (field,) = look(seen, "input")
    if field.value != date:
        return pick_date(seen, field, date)
    return quoting(f"Select {date} as the date and hit submit", click(look(seen, "button")[-1]))


# ---- lists that open ----


def use_autocomplete(seen: Observation, done: list[Action]) -> Decision:
    """Enter an item that starts with "Ku" and ends with "wait". | Enter an item that starts with "Swed"."""
    start, end = asked(seen, r'starts with "(.*?)"(?: and ends with "(.*)")?\.$')
    words = f'starts with "{start}"'
    (field,) = look(seen, "input")

    def fits(name: str) -> bool:
        return f"{name} ".startswith(start) and f" {name}".endswith(end or "")

    for item in look(seen, "item"):
        if fits(item.text) and item.text != field.value:
            return quoting(words + (f' and ends with "{end}"' if end else ""), click(item))
    return (
        click(look(seen, "button")[-1]) if fits(field.value) else quoting(words, fill(field, start))
    )


def form_sequence_3(seen: Observation, done: list[Action]) -> Decision:
    """Choose 5ft 11in from the dropdown, then click the button labeled "Maybe"."""
    height, name = asked(seen, r'Choose (.*) from the dropdown, .* labeled "(.*)"')
    box, *opened = look(seen, "item", "icon")
    if opened:
        return quoting(
            f"Choose {height}", click(next(item for item in opened if item.text == height))
        )
    if height not in box.text:
        return quoting(f"Choose {height} from the dropdown", click(box))
    return quoting(f'labeled "{name}"', click(find(seen, name)))


def click_menu(seen: Observation, done: list[Action]) -> Decision:
    """Select Roseline>Karoline"""
    (path,) = asked(seen, r"Select (.*)")
    items, names = {item.text: item for item in look(seen, "item")}, path.split(">")
    deepest = max(depth for depth, name in enumerate(names) if name in items)
    item, words = items[names[deepest]], "Select " + ">".join(names[: deepest + 1])
    if deepest == len(names) - 1:
        return quoting(words, click(item))
    return quoting(
        words, Decision(item.line, Action("HOVER", ref=item.ref))
    )  # a click would choose it


def click_menu_2(seen: Observation, done: list[Action]) -> Decision:
    """Click the "Menu" button, and then find and click on the item labeled "Prev" (or: with an icon)."""
    label, icon = asked(seen, r'item (?:labeled "(.*)"|with the (\S+) icon)')
    wanted, items = label or icon, look(seen, "item")
    for item in items:  # "icon-seek-start Prev"
        if wanted in item.text.split(" ", 1):
            return quoting(wanted, click(item))
    if not items:
        return click(find(seen, "Menu"))
    parent = find(seen, "Playback", "item")
    return quoting(wanted, Decision(parent.line, Action("HOVER", ref=parent.ref)))


def click_pie(seen: Observation, done: list[Action]) -> Decision:
    """Expand the pie menu below and click on the item labeled "n"."""
    (name,) = asked(seen, r'labeled "(.*)"')
    labels = {shape.text.split()[-1]: shape for shape in look(seen, "shape")}
    return quoting(f'labeled "{name}"', click(labels[name] if name in labels else labels["+"]))


def click_scroll_list(seen: Observation, done: list[Action]) -> Decision:
    """Select Niue, Burundi from the scroll list and click Submit."""
    (listed,) = asked(seen, r"Select (.*) from the scroll list")
    (box,) = look(seen, "select")
    chosen = box.line.split(" value=")[-1] if " value=" in box.line else ""
    names = listed.split(", ")
    for n, name in enumerate(names, 1):
        if f'"{name}"' not in chosen:
            return quoting(
                f"{', '.join(names[max(n - 2, 0) : n])}, {n} of {len(names)}", choose(box, name)
            )
    words = f"{len(names)} of {len(names)} from the scroll list and click Submit"
    return quoting(words, click(find(seen, "Submit")))


# ---- numbers ----


def use_spinner(seen: Observation, done: list[Action]) -> Decision:
    """Select -7 with the spinner and hit Submit."""
    (wanted,) = asked(seen, r"Select (-?\d+) with")
    shown = look(seen, "input")[0].value
    missing = int(wanted) - int(shown)
    if missing == 0:
        return quoting(
            f"Select {wanted} with the spinner and hit Submit", click(find(seen, "Submit"))
        )
    way = "up" if missing > 0 else "down"
    arrow = next(button for button in look(seen, "button") if f"spinner-{way}" in button.text)
    return quoting(f"Select {wanted}, now {shown}, {way}", click(arrow))


def slide(seen: Observation, wanted: list[int], page: int) -> Decision | None:
    """Move the first slider whose number is not the wanted one, with keys; None if all are right.

    PageUp and PageDown go a fifth of the way, `page`, the arrows one step.
    """
    handles = [icon for icon in look(seen, "icon") if icon.text.startswith("slider-handle")]
    numbers = [
        int(thing.text) for thing in look(seen, "text") if re.fullmatch(r"-?\d+", thing.text)
    ]
    for handle, number, goal in zip(handles, numbers, wanted, strict=True):
        if number != goal:
            way, *keys = (
                ("up", "PageUp", "ArrowRight")
                if goal > number
                else ("down", "PageDown", "ArrowLeft")
            )
            step = press(handle, keys[abs(goal - number) <= page / 2])
            words = f"{goal}, now {number}, {way} {abs(goal - number)}"
            return quoting(words, step if "focused" in handle.flags else click(handle))
    return None


def use_slider(seen: Observation, done: list[Action]) -> Decision:
    """Select 112 with the slider and hit Submit."""
    (wanted,) = asked(seen, r"Select (-?\d+) with")
    moved = slide(
        seen, [int(wanted)], page=20
    )  # a shorter slider has a shorter page, and needs none
    return moved or quoting(
        f"Select {wanted} with the slider and hit Submit", click(find(seen, "Submit"))
    )


def use_slider_2(seen: Observation, done: list[Action]) -> Decision:
    """Set the sliders to the combination [17,0,5] and submit."""
    (listed,) = asked(seen, r"(\[.*\])")
    moved = slide(seen, [int(number) for number in listed[1:-1].split(",")], page=4)
    return moved or quoting(listed, click(find(seen, "Submit")))


def form_sequence(seen: Observation, done: list[Action]) -> Decision:
    """Select 7 with the slider, click the 1st checkbox, then hit Submit."""
    wanted, number = asked(seen, r"Select (-?\d+) with the slider, click the (\d)")
    if moved := slide(seen, [int(wanted)], page=4):
        return moved
    boxes = look(seen, "checkbox")
    for box in boxes:
        if ("checked" in box.flags) != (box is boxes[int(number) - 1]):
            return quoting(asked(seen, r"(Select .* checkbox)")[0], click(box))
    return quoting(asked(seen, r"(Select .* Submit)")[0], click(find(seen, "Submit")))


# ---- offers ----


class Dish(NamedTuple):
    """One dish of a menu: how many of it are ordered, and its two signs."""

    name: str
    kinds: list[str]
    count: int
    minus: Element
    plus: Element


def dishes(seen: Observation) -> list[Dish]:
    """The dishes of the menu in reading order."""
    found, texts, minus = [], [], None
    for thing in look(seen, "text", "item"):
        if thing.text == "+":
            name, kinds, *count = texts[texts.index("-") - 2 :]
            found.append(Dish(name, kinds.split(), int((count[1:] or ["0"])[0]), minus, thing))
        minus = thing if thing.text == "-" else minus
        texts = [*texts, thing.text] if thing.text != "+" else []
    return found


def order_food(seen: Observation, done: list[Action]) -> Decision:
    """Order one of each item: Caesar Salad, Cheese wheel | Order 4 items that are gluten-free"""
    menu, words = dishes(seen), seen.instruction
    if "items that are" in words:
        count, kind = asked(seen, r"Order (\d+) items that are (.*)")
        fitting = [dish.name for dish in menu if kind in dish.kinds]
        names = [fitting[n % len(fitting)] for n in range(int(count))]
    else:
        names = [name.strip() for name in asked(seen, r"each item: (.*)")[0].split(",")]
    for dish in sorted(
        menu, key=lambda dish: names.index(dish.name) if dish.name in names else len(names)
    ):
        if dish.count != names.count(dish.name):
            words = f"{dish.name} {' '.join(dish.kinds)} {dish.minus.line}"
            if dish.count > names.count(dish.name):
                return quoting(words, click(dish.minus))
            number = sum(dish.count for dish in menu) + 1
            return quoting(f"{number} of {len(names)}, {words}", click(dish.plus))
    return quoting(f"{len(names)} of {len(names)}", click(find(seen, "Order!")))


def best_offer(seen: Observation, wish: str) -> Decision | None:
    """Book the cheapest, most expensive, shortest or longest; None if nothing is on offer yet."""
    offers, time = [], (0, "")
    for thing in look(seen):
        if duration := re.search(r"(\d+)h (\d+)m$", thing.text):
            time = 60 * int(duration[1]) + int(duration[2]), duration[0]
        elif price := re.search(r"^Book .*\$(\d+)$", thing.text):
            cost = int(price[1]), f"${price[1]}"
            offers.append((*(cost if wish in ("cheapest", "most expensive") else time), thing))
    if not offers:
        return None
    sign = -1 if wish in ("cheapest", "shortest") else 1
    best, compared = offers[0], []
    for offer in offers:
        better = offer is best or sign * offer[0] > sign * best[0]
        best = offer if better else best
        compared.append(f"{offer[1]} {'yes' if better else 'no'}")
    return quoting(f"{wish}: {', '.join(compared)}, so {best[1]}", click(best[2]))


def buy_ticket(seen: Observation, done: list[Action]) -> Decision:
    """Buy the ticket with the longest duration. | Buy the ticket with the most expensive cost."""
    return best_offer(seen, *asked(seen, r"with the (.*) (?:duration|cost)"))


def book_flight(seen: Observation, done: list[Action]) -> Decision:
    """Book the cheapest one-way flight from: SCE to: Peoria, IL on 11/28/2016."""
    wish, start, to, date = asked(seen, r"the (\w+) one-way flight from: (.*) to: (.*) on (\S+)\.")
    if offer := best_offer(seen, wish):
        return offer
    fields = {field.text: field for field in look(seen, "input")}
    for label, name in (("from", start), ("to", to)):
        field = fields.get(f"#flight-{label}")
        if field is None:
            if look(seen, "link"):  # the calendar covers it: the day first
                break
            return press(next(iter(fields.values())), "Escape")  # an open list covers it
        if name not in field.value or not field.value.endswith(")"):
            items = [item for item in look(seen, "item") if name in item.text]
            step = click(items[0]) if items and field.value == name else fill(field, name)
            return quoting(f"{label}: {name}", step)
    if fields["#datepicker"].value != date:
        return pick_date(seen, fields["#datepicker"], date)
    return click(find(seen, "Search"))


EXPERTS: dict[str, Expert] = {
    "choose-date": choose_date, "choose-date-easy": choose_date, "choose-date-medium": choose_date,
    "choose-date-nodelay": choose_date, "use-autocomplete": use_autocomplete,
    "use-autocomplete-nodelay": use_autocomplete, "form-sequence-3": form_sequence_3,
    "click-menu": click_menu, "click-menu-2": click_menu_2, "click-pie": click_pie,
    "click-pie-nodelay": click_pie, "click-scroll-list": click_scroll_list, "use-spinner": use_spinner,
    "use-slider": use_slider, "use-slider-2": use_slider_2, "form-sequence": form_sequence,
    "order-food": order_food, "buy-ticket": buy_ticket, "book-flight": book_flight,
    "book-flight-nodelay": book_flight,
}  # fmt: skip
