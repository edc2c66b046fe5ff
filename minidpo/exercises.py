"""Twelve exercises that check themselves: docs/exercises.md has their equations, this runs their laws.

    python -m minidpo.exercises           the list
    python -m minidpo.exercises 3         writes exercise_03.py here if there is none, then runs its laws
    python -m minidpo.exercises 3 FILE    runs the laws on the function in FILE

The exit code is 0 if all laws hold, 1 if one does not, and 2 if there is nothing to run them on.
"""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from minidpo.laws import missing, page

if lacking := missing():
    print(lacking, file=sys.stderr)
    sys.exit(2)

from minidpo.laws import advantage, code, head, loss, masks, moment, scores

PAGE = page("exercises.md")
SEES_H_ALONE = (
    loss.gives_each_pair_a_loss_of_its_own,
    loss.reads_the_reference,
    loss.ignores_what_a_prompt_adds_to_the_policy,
    loss.ignores_what_a_prompt_adds_to_the_reference,
    loss.sees_the_policy_only_as_a_ratio_to_the_reference,
    loss.has_the_gradient_of_its_value,
)


class Exercise(NamedTuple):
    """What is to be written, and the laws that together allow one answer."""

    function: str
    laws: tuple[Callable, ...]


DPO = (
    *SEES_H_ALONE,
    loss.is_log_2_where_the_policy_is_the_reference,
    loss.pulls_with_half_of_beta_at_first,
    loss.pulls_in_proportion_to_the_chance_of_being_wrong,
    loss.is_the_loss_at_beta_1_of_beta_times_the_log_probs,
    loss.is_finite_in_float32_at_margins_of_thousands,
    loss.still_pulls_a_pair_that_is_hopelessly_lost,
)
IPO = (
    *SEES_H_ALONE,
    loss.is_0_where_h_is_1_over_2_beta,
    loss.is_never_negative,
    loss.bends_like_h_squared,
)
EXERCISES = {
    1: Exercise("dpo_loss", DPO),
    2: Exercise("ipo_loss", IPO),
    3: Exercise("scores", scores.SCORES),
    4: Exercise("token_logps", head.LAWS),
    5: Exercise("visible", masks.CACHE),
    6: Exercise("advantage", (*advantage.LAWS, advantage.keeps_the_differences_of_rewards)),
    7: Exercise("merged", scores.LORA),
    8: Exercise("turn_weights", scores.TURNS),
    9: Exercise("ancestors", masks.ANCESTORS),
    10: Exercise("code", (*code.LAWS, code.decodes_code_i_to_level_i_of_nf4)),
    11: Exercise("moment", moment.LAWS),
    12: Exercise("grow", masks.GROW),
}


def parts(number: int) -> tuple[str, str]:
    """The exercise's title, and its file with a hole, as the page has them."""
    found = re.search(
        rf"^## {number}\. (.*?)\n.*?^```python\n(.*?)^```",
        PAGE.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    return found[1], found[2]


def broken_laws(number: int, function: Callable) -> dict[str, str]:
    """Each law's name, and why it does not hold; "" where it does."""
    found = {}
    for law in EXERCISES[number].laws:
        name = law.__name__.replace("_", " ")
        try:
            law(function)
            found[name] = ""
        except AssertionError as broken:
            found[name] = str(broken)
    return found


def answer_in(path: Path, name: str) -> Callable:
    """The function in a file. Raises ValueError, a line, if there is none."""
    try:
        function = runpy.run_path(str(path)).get(name)
    except (Exception, SystemExit) as error:  # a student's file may raise anything
        raise ValueError(f"{path} does not run: {type(error).__name__}: {error}") from None
    if not callable(function):
        raise ValueError(f"{path} has no function {name}")
    return function


def check(number: int, path: Path) -> int:
    """Run the laws on the answer in a file and print a line each; the exit code."""
    name = EXERCISES[number].function
    try:
        broken = broken_laws(number, answer_in(path, name))
    except NotImplementedError:
        print(
            f"{path}: {name} is not written yet: put your lines in place of `raise NotImplementedError`"
        )
        return 1
    for law, why in sorted(broken.items(), key=lambda item: item[1] != ""):
        print(f"does not hold  {law}: {why}" if why else f"holds          {law}")
    wrong = sum(map(bool, broken.values()))
    if wrong:
        print(f"{wrong} of {len(broken)} laws broken")
        return 1
    print(f"all {len(broken)} laws hold: {name} is right")
    if number < len(EXERCISES):
        print(f"next: python -m minidpo.exercises {number + 1}")
    return 0


def main(arguments: list[str]) -> int:
    """List, write or check; the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__, *(f"{number:>4}  {parts(number)[0]}" for number in EXERCISES), sep="\n")
        return 0
    numbers = [n for n in EXERCISES if arguments[0] == str(n)]
    if not numbers or len(arguments) > 2:
        raise ValueError(
            f"wanted a number from 1 to {len(EXERCISES)}, then perhaps a file; "
            f"got {' '.join(arguments)}"
        )
    number, path = numbers[0], Path(*arguments[1:] or [f"exercise_{int(numbers[0]):02}.py"])
    if path.exists():
        return check(number, path)
    if len(arguments) == 2:
        raise ValueError(
            f"{path}: no such file; without it, python -m minidpo.exercises {number} writes one"
        )
    title, template = parts(number)
    path.write_text(template, encoding="utf-8")
    print(f"wrote {path}: {title}. Fill its hole, then: python -m minidpo.exercises {number}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
