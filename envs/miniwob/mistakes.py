"""How an action differs from the one that the expert would have taken on the same page."""

from envs.actions import Action
from envs.miniwob.experts.elements import element


def mistake(page: str, done: Action, wanted: Action, ended: bool) -> str:
    """A key of `envs.protocol.MISTAKES`. ended: the episode failed with this action.

    >>> page = 'checkbox "tea" [1]\\nbutton "Submit" [2]'
    >>> mistake(page, Action("CLICK", ref="2"), Action("CLICK", ref="1"), ended=True)
    'ended too early'
    """
    if "ref" in done and "ref" in wanted and done["ref"] == wanted["ref"]:
        both_fill = done.command == wanted.command in ("TYPE", "SELECT")
        return "wrong text" if both_fill else "wrong action"
    was_to_fill = wanted.command != "CLICK" or role_of(wanted, page) in ("checkbox", "radio")
    if ended and role_of(done, page) == "button" and was_to_fill:
        return "ended too early"
    return "wrong element"


def role_of(action: Action, page: str) -> str:
    """The role of the element that the action uses; "" without one."""
    lines = [element(line) for line in page.split("\n")] if "ref" in action else []
    return next((thing.role for thing in lines if thing.ref == action["ref"]), "")
