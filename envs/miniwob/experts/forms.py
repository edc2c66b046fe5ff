"""Experts for buttons, links, tabs, boxes, lists and fields.

Each docstring is an instruction that the function follows.
"""

from datetime import datetime

from envs.actions import Action
from envs.miniwob.experts.decisions import (
    Decision,
    Expert,
    after,
    choose,
    click,
    complete,
    fill,
    quoting,
)
from envs.miniwob.experts.elements import asked, find, look
from envs.protocol import Observation

# ---- one click ----


def click_named(seen: Observation, done: list[Action]) -> Decision:
    """Click on the "ok" button. | Click on the link "sit". | Close the dialog box by clicking the "x"."""
    (name,) = asked(seen, r'"(.*)"')
    return click(find(seen, name, "button", "link"))


def click_test(seen: Observation, done: list[Action]) -> Decision:
    """Click the button. | Click button ONE."""
    return click(look(seen, "button")[0])


def click_tab(seen: Observation, done: list[Action]) -> Decision:
    """Click on Tab #2."""
    (name,) = asked(seen, r"(Tab #\d)")
    return click(find(seen, name, "tab"))


def click_widget(seen: Observation, done: list[Action]) -> Decision:
    """Click on a "text" widget."""
    (kind,) = asked(seen, r'"(\w+)"')
    return click(look(seen, "input" if kind == "text" else kind)[0])


def focus_text(seen: Observation, done: list[Action]) -> Decision:
    """Focus into the 2nd input textbox. | Focus into the textbox."""
    (number,) = asked(seen, r"the (?:(\d)\w\w )?(?:input )?textbox")
    return click(look(seen, "input")[int(number or 1) - 1])


# ---- several clicks ----


def click_sequence(seen: Observation, done: list[Action]) -> Decision:
    """Click button ONE, then click button TWO."""
    buttons = look(seen, "button")  # in this order; TWO may lie on ONE and hide its name
    first, second = click(buttons[0]), click(buttons[-1])
    return (
        second if first.action in done else first
    )  # the one page that does not show what was done


def click_option(seen: Observation, done: list[Action]) -> Decision:
    """Select h1qgWO and click Submit."""
    (name,) = asked(seen, r"Select (.*) and click Submit")
    radio = find(seen, name, "radio")
    if "checked" not in radio.flags:
        return quoting(f"Select {name}", click(radio))
    return quoting(f"Select {name} and click Submit", click(find(seen, "Submit")))


def click_checkboxes(seen: Observation, done: list[Action]) -> Decision:
    """Select g3, D6yOi and click Submit. | Select nothing and click Submit."""
    (listed,) = asked(seen, r"Select (.*) and click Submit")
    names, boxes = listed.split(", "), look(seen, "checkbox")
    for n, name in enumerate(names, 1):
        for box in boxes:
            if box.text == name and "checked" not in box.flags:
                return quoting(f"Select {', '.join(names[:n])}", click(box))
    for box in boxes:
        if box.text not in names and "checked" in box.flags:
            return quoting(f"Select {listed}", click(box))
    return quoting(f"Select {listed} and click Submit", click(find(seen, "Submit")))


def click_many_checkboxes(seen: Observation, done: list[Action]) -> Decision:
    """Select g3, D6yOi, ldf, 9oDr and click Submit.

    Twelve names up to this step are more than an answer holds. So the thought goes on from the name before.
    """
    step = click_checkboxes(seen, done)
    if " and click" in step.words:
        return step._replace(words=step.words.split(", ")[-1])
    return step._replace(words=", ".join(step.words.removeprefix("Select ").split(", ")[-2:]))


def click_hidden_link(seen: Observation, done: list[Action]) -> Decision:
    """Switch between the tabs to find and click on the link "tellus". | Expand the sections ..."""
    (name,) = asked(seen, r'"(.*)"')
    for link in look(seen, "link"):
        if link.text == name:
            return quoting(f'link "{name}"', click(link))
    tabs = look(seen, "tab")
    opened = [index for index, tab in enumerate(tabs) if "selected" in tab.flags]
    return quoting(f'link "{name}"', click(tabs[(opened[-1] + 1) % len(tabs) if opened else 0]))


def click_collapsible(seen: Observation, done: list[Action]) -> Decision:
    """Expand the section below and click submit."""
    section = look(seen, "tab")[0]
    return click(find(seen, "Submit") if "selected" in section.flags else section)


WORDS = [
    set(group.split())
    for group in [
        "\n    big large huge enormous gigantic",
        " small tiny little mini petite",
        " red scarlet crimson vermillion",
        "\n    happy cheerful joyful gleeful delighted",
        " sad unhappy sorrowful miserable tragic",
        "\n    angry mad furious irritated",
        " evil wicked immoral sinful corrupt depraved",
        "\n    wrong incorrect mistaken erroneous",
        " real genuine actual",
        " strange odd peculiar unusual weird",
        "\n    stop cease halt end finish",
        " scared terrified panicked fearful frightened afraid",
        "\n    quiet calm peaceful serene mild",
        " old aged archaic",
        " love like adore favor",
        " kill murder assassinate",
        "\n    keep retain preserve sustain maintain",
        " hide conceal camouflage",
        " hate despise loathe detest dislike",
        "\n    funny humorous amusing comical laughable",
        " fat fleshy plump chubby",
        " stupid dumb dull unwise",
        "\n    delicious savory delectable appetizing",
        " cut slice carve chop",
        " brave courageous fearless",
        "\n    begin start initiate launch",
        " answer reply response",
        " television televisions TV TVs",
        "\n    house home houses homes",
        " fire flame fires flames",
        " pig pork swine",
        " rabbit rabbits bunny bunnies",
        "\n    car cars automobile automobiles vehicle vehicles",
        " water",
    ]
]
"Words that mean much the same."


def click_similar(seen: Observation, done: list[Action]) -> Decision:
    """Select words similar to houses, huge and click Submit."""
    (listed,) = asked(seen, r"similar to (.*) and click Submit")
    names, boxes = listed.split(", "), look(seen, "checkbox")
    alike = [next(group for group in WORDS if name in group) for name in names]
    for n, group in enumerate(alike):
        for box in boxes:
            if box.text in group and "checked" not in box.flags:
                return quoting(", ".join(names[max(n - 1, 0) : n + 1]), click(box))
    for box in boxes:
        if "checked" in box.flags and not any(box.text in group for group in alike):
            return quoting(f"similar to {listed}", click(box))
    return quoting(f"similar to {listed} and click Submit", click(find(seen, "Submit")))


DIGITS = ("6999996", "2622222", "699248F", "6916196", "8AAF222", "F88E196", "698E996", "F912244", "6996996",
          "6997196")  # fmt: skip
"Each digit as the page draws it: seven rows of four boxes, a row as the four bits of a hexadecimal number."


def number_checkboxes(seen: Observation, done: list[Action]) -> Decision:
    """Draw the number "8" in the checkboxes using the example on the right and press Submit when finished."""
    (number,) = asked(seen, r'the number "(\d)"')
    bits = "".join(f"{int(row, 16):04b}" for row in DIGITS[int(number)])
    boxes = list(zip(look(seen, "checkbox"), bits, strict=True))
    words = f'number "{number}": {" ".join(box.ref for box, bit in boxes if bit == "1")}'
    checked = [box for box, bit in boxes if bit == "1" and "checked" in box.flags]
    for box, bit in boxes:
        if ("checked" in box.flags) != (bit == "1"):
            return after(checked, quoting(words, click(box)))
    return after(checked, quoting(f"{words}, no more", click(find(seen, "Submit"))))


def navigate_tree(seen: Observation, done: list[Action]) -> Decision:
    """Navigate through the file tree. Find and click on the folder or file named "Karrie"."""
    (name,) = asked(seen, r'"(.*)"')
    closed = [icon for icon in look(seen, "icon") if "expandable" in icon.text]
    return click(
        next((item for item in look(seen, "item") if item.text == name), None) or closed[0]
    )


# ---- lists and fields ----


def choose_list(seen: Observation, done: list[Action]) -> Decision:
    """Select Turkey from the list and click Submit."""
    (name,) = asked(seen, r"Select (.*) from the list")
    (box,) = look(seen, "select")
    if box.value != name:
        return quoting(f"Select {name} from the list", choose(box, name))
    return quoting(f"Select {name} from the list and click Submit", click(find(seen, "Submit")))


def enter_text(seen: Observation, done: list[Action]) -> Decision:
    """Enter "Myron" into the text field and press Submit. | Enter the password "Kh1" into both ..."""
    (text,) = asked(seen, r'"(.*)"')
    return complete([(field, text) for field in look(seen, "input")], find(seen, "Submit"))


def enter_cased(seen: Observation, done: list[Action]) -> Decision:
    """Type "MYRON" in all lower case letters in the text input and press Submit."""
    text, case = asked(seen, r'"(.*)" in all (upper|lower) case')
    cased = text.upper() if case == "upper" else text.lower()
    words = f"{' '.join(text)} in all {case} case: {' '.join(cased)}"
    return complete([(look(seen, "input")[0], cased, words)], find(seen, "Submit"))


def enter_moment(seen: Observation, done: list[Action]) -> Decision:
    """Enter 09/16/2018 as the date and hit submit. | Enter 1:09 PM as the time and press submit."""
    text, kind = asked(seen, r"Enter (.*) as the (date|time)")
    (field,) = look(seen, "input")
    # "01:09PM" is typed: after "1" the field waits for a second digit, and a space opens its picker
    said, typed, stored = {
        "date": ("%m/%d/%Y", "%m/%d/%Y", "%Y-%m-%d"), "time": ("%I:%M %p", "%I:%M%p", "%H:%M")
    }[kind]  # fmt: skip
    moment = datetime.strptime(text, said)
    if field.value == moment.strftime(stored):
        return click(find(seen, "Submit"))
    words = text if kind == "date" else f"{text}, hour {moment:%I}"
    return quoting(words, fill(field, moment.strftime(typed)))


def login_user(seen: Observation, done: list[Action]) -> Decision:
    """Enter the username "olin" and the password "h1qg" into the text fields and press login."""
    texts = asked(seen, r'username "(.*)" and the password "(.*)" into')
    for button in look(seen, "button"):
        if button.text == "Cancel":  # a message has popped up
            return click(button)
    return complete(list(zip(look(seen, "input"), texts, strict=True)), look(seen, "button")[-1])


def form_sequence_2(seen: Observation, done: list[Action]) -> Decision:
    """Check the 3rd radio button and enter the number "32" into the 1st textbox."""
    radio, number, box = asked(seen, r'the (\d)\w\w radio button .* number "(.*)" into the (\d)')
    radio = look(seen, "radio")[int(radio) - 1]
    if "checked" not in radio.flags:
        return click(radio)
    fields = look(seen, "input")
    texts = [number if field is fields[int(box) - 1] else "" for field in fields]
    return complete(list(zip(fields, texts, strict=True)), find(seen, "Submit"))


def search_movies(seen: Observation, done: list[Action]) -> Decision:
    """Search for thriller movies directed by Osborne from year 1981."""
    genre, director, year = asked(seen, r"Search for (.*) movies directed by (.*) from year (\d+)")
    answers = {"Genre": genre, "Director": director, "Year": year, "Date": year}
    page = look(seen)
    step = 1 if page[0].role == "input" else -1  # labels stand before their fields, or all after
    labelled = [
        (field, page[index + step].text)
        for index, field in enumerate(page)
        if field.role == "input"
    ]
    texts = [next(answers[key] for key in answers if key in label) for _, label in labelled]
    return complete(
        [
            (field, text, f"[{field.ref}] {label} {text}")
            for (field, label), text in zip(labelled, texts, strict=True)
        ],
        page[-1],
    )


def copy_text(seen: Observation, done: list[Action]) -> Decision:
    """Type the text below into the text field and press Submit."""
    return complete([(look(seen, "input")[0], look(seen, "text")[0].text)], find(seen, "Submit"))


def read_table(seen: Observation, done: list[Action]) -> Decision:
    """Enter the value of Last name into the text field and press Submit."""
    (label,) = asked(seen, r"the value of (.*) into")
    (row,) = (row.text for row in look(seen, "text") if row.text.startswith(label + " "))
    wanted = look(seen, "input")[0], row.removeprefix(label + " "), row
    return complete([wanted], find(seen, "Submit"))


EXPERTS: dict[str, Expert] = {
    # the twelve of the suite "demo"
    "click-button": click_named, "click-link": click_named, "click-option": click_option,
    "click-checkboxes": click_checkboxes, "choose-list": choose_list, "enter-text": enter_text,
    "enter-password": enter_text, "login-user": login_user, "focus-text-2": focus_text,
    "form-sequence-2": form_sequence_2, "click-tab-2": click_hidden_link, "click-dialog-2": click_named,
    "click-test": click_test, "click-test-2": click_test, "click-test-transfer": click_test,
    "unicode-test": click_named, "click-dialog": click_named, "click-tab": click_tab,
    "click-widget": click_widget, "focus-text": focus_text, "click-button-sequence": click_sequence,
    "click-checkboxes-transfer": click_checkboxes, "click-checkboxes-large": click_many_checkboxes,
    "click-tab-2-easy": click_hidden_link, "click-tab-2-medium": click_hidden_link,
    "click-tab-2-hard": click_hidden_link, "click-collapsible-2": click_hidden_link,
    "click-collapsible": click_collapsible, "click-collapsible-nodelay": click_collapsible,
    "click-collapsible-2-nodelay": click_hidden_link, "click-checkboxes-soft": click_similar,
    "number-checkboxes": number_checkboxes, "navigate-tree": navigate_tree,
    "enter-text-dynamic": enter_text, "enter-text-2": enter_cased, "enter-date": enter_moment,
    "enter-time": enter_moment, "login-user-popup": login_user, "multi-layouts": search_movies,
    "multi-orderings": search_movies, "text-transform": copy_text, "read-table": read_table,
}  # fmt: skip
