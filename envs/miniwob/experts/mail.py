"""Experts for mail, social media, search and text.

Each docstring is an instruction that the function follows. The clipboard and the cursor are not in the
observation; they are inferred from the actions done.
"""

import re

from envs.actions import Action
from envs.miniwob.experts.decisions import (
    Decision,
    Expert,
    after,
    click,
    complete,
    fill,
    press,
    quoting,
)
from envs.miniwob.experts.elements import Element, asked, find, look
from envs.protocol import Observation

# ---- mail ----

_TRASH = re.compile(r"[Dd]elete|[Tt]rash|rid of|remove|recycling|[Tt]hrow away|out of|don't want")
_STAR = re.compile(r"imp|[Ss]tar\b|[Mm]ark\b")
# five of the pages' 4,945 names are of two words
_NAME = re.compile(r"\b(?:Dee Dee|Jo Ann|La Verne|Miof Mela|Zsa Zsa|[A-Z][\w-]+)")
_NO_NAMES = {
    "I",
    "Email",
    "Mark",
    "Tuesday",
    "NAME",
}  # NAME: one instruction does not fill in its blank


def people(words: str, most: int) -> list[str]:
    """The last names of a text, `most` at most; a sentence's first word only if there are too few others.

    >>> people("Find the email by Ana. Send it to Lou.", 2), people("Ana's email should be deleted.", 1)
    (['Ana', 'Lou'], ['Ana'])
    >>> people("Delete the email from Jo Ann.", 1)
    ['Jo Ann']
    """
    said = re.sub(r"^Answer(?=[A-Z])", "Answer ", words)  # one of the instructions lacks a space
    names = [name for name in _NAME.finditer(said) if name[0] not in _NO_NAMES]
    later = [name for name in names if re.search(r"\w,? $|\w[,:]? ?$", said[: name.start()])]
    return [name[0] for name in (later if len(later) >= most else names)][-most:]


def errand(words: str) -> tuple[str, str, str]:
    """(what to do, whose mail, and to whom to forward it or what to answer).

    >>> errand("Forward Lou the email from Ana."), errand("Star the email from Ana.")
    (('forward', 'Ana', 'Lou'), ('star', 'Ana', ''))
    """
    quoted = re.search(r'"+([^"]+)"', words)
    if quoted:
        return "reply", people(words.replace(quoted[0], ""), 1)[-1], quoted[1]
    for kind, pattern in ("trash", _TRASH), ("star", _STAR):
        if pattern.search(words):
            return kind, people(words, 1)[-1], ""
    first, second = people(words, 2)
    mine = rf"\b(from|by|of|the|Ask) {first}\b|\b{first}('s\b| (sent|wrote|wants his|last)\b)"
    return ("forward", first, second) if re.search(mine, words) else ("forward", second, first)


def handle_mail(seen: Observation, done: list[Action]) -> Decision:
    """Find the email by Jessie and forward that email to Meade. | Delete the email from Jessie. | ..."""
    kind, sender, text = errand(seen.instruction)
    senders = (sender, sender.removesuffix("s"))  # "find Mays email"
    page, icons = look(seen), {icon.text: icon for icon in look(seen, "icon")}
    texts = {thing.text.removeprefix("to: ") for thing in look(seen, "text")}
    right = not texts.isdisjoint(senders)
    if "search-cancel" in icons:
        return click(icons["search-cancel"])
    if "close-reply" in icons:
        if kind != "reply" or not right:
            return click(icons["close-reply"])
        return complete([(look(seen, "textarea")[0], text, f'"{text}"')], icons["send-reply"])
    if "close-forward" in icons:
        if kind != "forward":
            return click(icons["close-forward"])
        return complete([(look(seen, "input")[0], text, f"to {text}")], icons["send-forward"])
    if "close-email" in icons:
        if not right:
            return click(icons["close-email"])
        return quoting(
            kind, click(icons[kind] if kind in icons else find(seen, kind.capitalize(), "item"))
        )
    for index, mail in enumerate(page):
        if mail.role == "item" and (by := _NAME.match(mail.text)) and by[0] in senders:
            wanted = page[
                index + {"trash": 1, "star": 2}.get(kind, 0)
            ]  # the icons follow their mail
            words = f"{kind}, {sender if wanted is mail else mail.line}"
            return quoting(f"{words} to {text}" if kind == "forward" else words, click(wanted))
    raise ValueError(f"no mail by {sender!r} on this page: {seen.text!r}")


# ---- social media ----


def posts(seen: Observation) -> list[tuple[str, Element]]:
    """Everything usable on the page, each with the text of the post that it stands in."""
    post, found = "", []
    for thing in look(seen):
        if thing.ref is not None:
            found.append((post, thing))
        else:
            post = thing.text if "@" in thing.text else f"{post} {thing.text}"
    return found


def from_user(found: list[tuple[str, Element]], post: str, user: str, until: Element) -> str:
    """The post from its user's name on, which the task names, then what stands in it as far as `until`, each
    with its ref: all of it can be copied, line after line. found: the page's `posts`."""
    words = post.split()
    near = [
        f"{thing.text} {thing.ref}"
        for other, thing in found
        if other == post and int(thing.ref) <= int(until.ref)
    ][-4:]
    return ", ".join([" ".join(words[words.index(user) :]), *near])


def use_post(seen: Observation, done: list[Action]) -> Decision:
    """For the user @ut, click on the "Mute" button."""
    user, action = asked(seen, r'the user (@\S+), click on the "(.*)" button')
    found = posts(seen)
    for names in (action.lower(), f"{action} {user}".lower()), ("more",):
        for post, thing in found:
            if user in post.split() and thing.text.lower() in names:
                return quoting(f"{action}, {from_user(found, post, user, thing)}", click(thing))
    page = look(seen, "icon", "item")  # another post's menu covers this one
    return click(page[[thing.role for thing in page].index("item") - 1])


def mark_posts(seen: Observation, done: list[Action]) -> Decision:
    """Click the "Share" button on all posts by @orci and then click Submit. | ... on 2 posts by @orci ..."""
    action, amount, user = asked(seen, r'"(.*)" button on (all|\d+) posts? by (@\S+) and then')
    marked, free, found = [], [], posts(seen)
    for post, thing in found:
        kind, _, active = thing.text.partition(" ")
        if user in post.split() and kind == action.lower():
            (marked if active else free).append((from_user(found, post, user, thing), thing))
        elif active:
            return click(thing)  # marked by mistake
    more = len(free) if amount == "all" else int(amount) - len(marked)
    if more < 0:
        words, thing = marked[0]
        return quoting(words, click(thing))
    words, thing = free[0] if more else ("no more", find(seen, "Submit"))
    if amount != "all":
        words = f"{len(marked) + (more > 0)} of {amount}, {words}"
    return after([thing for _, thing in marked], quoting(words, click(thing)))


# ---- pages of results ----


def search_phone_book(seen: Observation, done: list[Action]) -> Decision:
    """Find Johnna in the contact book and click on their address."""
    name, kind = asked(seen, r"Find (.*) in the contact book and click on their (\w+)")
    page = look(seen)
    if page[0].text != name:
        links = {link.text: link for link in look(seen, "link")}
        return quoting(f"shown {page[0].text}, not {name}", click(links.get(">") or links["<"]))
    label = [thing.text for thing in page].index(f"{kind.capitalize()}:")
    return quoting(f"shown {name}, {kind}", click(page[label + 1]))


def search_web(seen: Observation, done: list[Action]) -> Decision:
    """Use the textbox to enter "Jerald" and press "Search", then find and click the 3rd search result."""
    name, number = asked(seen, r'enter "(.*)" and press "Search", .* the (\d)\w\w search result')
    page, place = divmod(int(number) - 1, 3)
    pages = ("page 1: 1 2 3", "page 2: 4 5 6", "page 3: 7 8 9")[: page + 1]
    words = f"{', '.join(pages)}, search result {number} is {place + 1} on page {page + 1}"
    (field,), links = look(seen, "input"), {link.text: link for link in look(seen, "link")}
    results = [link for link in look(seen, "link") if not re.fullmatch(r"[<>\d]", link.text)]
    if field.value != name or not results:
        return complete([(field, name)], find(seen, "Search"))
    if page != (0 if "<" not in links else 1 if ">" in links else 2):
        return quoting(words, click(links[str(page + 1)]))
    # with another title there, these are still the results of another search
    if results[place].text != name:
        return click(find(seen, "Search"))
    return quoting(words, click(results[place]))


# ---- text ----


def find_word(seen: Observation, done: list[Action]) -> Decision:
    """Find the 10th word in the paragraph, type that into the textbox and press "Submit"."""
    (number,) = asked(seen, r"Find the (\d+)\w\w word in the paragraph")
    words = [
        re.sub(r"[^a-zA-Z]", "", word) for word in look(seen, "text")[0].text.split()[: int(number)]
    ]
    counted = f"word {number}: {' '.join(f'{n} {word}' for n, word in enumerate(words, 1))}"
    return complete([(look(seen, "input")[0], words[-1], counted)], find(seen, "Submit"))


def first_missing(steps: list[Decision], done: list[Action]) -> Decision | None:
    """The next of these steps, which must directly follow each other; None if all are done."""
    actions = [step.action for step in steps]
    if any(done[start : start + len(actions)] == actions for start in range(len(done))):
        return None
    count = next(n for n in range(len(steps) - 1, -1, -1) if done[len(done) - n :] == actions[:n])
    return steps[count]


def copy_paste(seen: Observation, done: list[Action]) -> Decision:
    """Copy the text in the textarea below, paste it into the textbox and press Submit."""
    (number,) = asked(seen, r"Copy the text (?:in|from) the (?:(\d)\w\w )?text ?area below")
    area, (field,) = look(seen, "textarea")[int(number or 1) - 1], look(seen, "input")
    copying = [
        quoting("select", click(area)),
        quoting("select all", press(area, "Control+A")),
        quoting("copy", press(area, "Control+C")),
    ]
    if field.value == area.value:
        return click(find(seen, "Submit"))
    if field.value:
        return fill(field, "")
    pasting = press(field, "Control+V") if "focused" in field.flags else click(field)
    return first_missing(copying, done) or quoting("paste", pasting)


_COLORS = {"red": "#e60000", "orange": "#ff9900", "yellow": "yellow", "green": "#008a00", "blue": "#0066cc",
           "purple": "#9933ff"}  # fmt: skip
_STYLES = {"bold": "ql-bold", "italics": "ql-italic", "underlined": "ql-underline"}


def selecting(editor: Element, word: str) -> list[str]:
    """The keys that select a word of the editor's text. A comma or full stop is a stop of its own."""
    if word == "everything":
        return ["Control+A"]
    words = editor.text.split()
    parts = " ".join(words[: words.index(word)]), word
    before, within = (len(re.findall(r"\w+|[^\w\s]", part)) for part in parts)
    return [
        "Control+Home",
        *["Control+ArrowRight"] * before,
        *["Control+Shift+ArrowRight"] * within,
    ]


def edit_text(seen: Observation, done: list[Action]) -> Decision:
    """Using the text editor, give the text est. the style bold and press Submit. | ... everything ... red."""
    word, style = asked(seen, r"(?:give|make) (?:the text )?(\S+) the (?:style|color) (\w+)")
    buttons = {thing.text.split()[0]: thing for thing in look(seen, "icon", "button")}
    button = buttons[_STYLES.get(style, "ql-picker-label")]
    for thing in look(seen, "icon"):
        if style in _COLORS and "ql-primary" in thing.text and thing.text.endswith(_COLORS[style]):
            return quoting(style, click(thing))
    for thing in look(seen, "button"):
        if "ql-active" in thing.text and thing != button:
            return click(thing)  # another style, given by mistake
    if "ql-active" in button.text:
        return click(find(seen, "Submit"))
    if not look(seen, "editor"):  # the colors cover it
        return quoting(style, click(buttons["ql-picker-label"]))
    (editor,) = look(seen, "editor")
    steps = [click(editor), *(press(editor, key) for key in selecting(editor, word))]
    return first_missing([quoting(f"select {word}", step) for step in steps], done) or quoting(
        style, click(button)
    )


def use_terminal(seen: Observation, done: list[Action]) -> Decision:
    """Use the terminal below to delete a file ending with the extension .rb | ... has no file extension."""
    (ending,) = asked(seen, r"the extension (\.\S+)$|no file extension")
    (terminal,) = look(seen, "item")
    *past, typed = [part.strip() for part in terminal.text.split("user$")]
    listed = [part.removeprefix("ls ").split() for part in past if part.startswith("ls ")]
    files = [
        file
        for file in (listed[-1] if listed else [])
        if (file.endswith(ending) if ending else "." not in file)
    ]
    command = f"rm {files[0]}" if files else "ls"
    words = f"{ending or 'no ending'}: {command}" if files else command
    if typed and typed != command:
        return quoting("another command", press(terminal, "Backspace"))
    return quoting(words, press(terminal, "Enter") if typed else fill(terminal, command))


_MAIL = ("email-inbox", "email-inbox-delete", "email-inbox-forward", "email-inbox-forward-nl",
         "email-inbox-forward-nl-turk", "email-inbox-important", "email-inbox-nl-turk",
         "email-inbox-noscroll", "email-inbox-reply", "email-inbox-star-reply")  # fmt: skip

EXPERTS: dict[str, Expert] = {
    **dict.fromkeys(_MAIL, handle_mail),
    "social-media": use_post, "social-media-all": mark_posts, "social-media-some": mark_posts,
    "phone-book": search_phone_book, "search-engine": search_web, "find-word": find_word,
    "copy-paste": copy_paste, "copy-paste-2": copy_paste, "text-editor": edit_text, "terminal": use_terminal,
}  # fmt: skip
