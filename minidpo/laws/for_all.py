"""`for_all` makes a law of a claim: hypothesis looks for a case in which it is false, and shrinks that."""

import functools
import math
import traceback

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Flaky
from torch import Tensor

SEARCH, SHRINK = (Phase.generate,), (Phase.generate, Phase.shrink)


def for_all(**cases):
    """Make a claim about a function and a case a law: the claim for 50 cases of those strategies.

    law(function) raises AssertionError with the claim's message and the case, the simplest that hypothesis
    finds; the same one each time. A function that raises breaks the law; NotImplementedError passes through.
    """

    def make_law(claim):
        @functools.wraps(claim)
        def law(function, phases=SHRINK):
            tries = settings.default.max_examples // 2
            if phases is SEARCH:  # one counterexample is wanted, and it ends the search
                tries *= 100

            @settings(
                max_examples=tries,
                phases=phases,
                database=None,
                report_multiple_bugs=False,
                derandomize=True,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(**cases)
            def attempt(**case):
                if reason := why_not(claim, function, case):
                    found = ", ".join(f"{name} = {shown(value)}" for name, value in case.items())
                    raise AssertionError(f"{reason} ({found})")

            try:
                attempt()
            except Flaky:
                raise AssertionError("the same input gives one result and then another") from None

        law.is_of_beta = (
            "beta" in cases
        )  # such a law can be asked only of a function with that parameter
        return law

    return make_law


def why_not(claim, function, case: dict) -> str:
    """Why the claim is false in this case, in a line; "" if it is true."""
    try:
        claim(function, **case)
    except NotImplementedError:
        raise
    except (Exception, SystemExit) as wrong:  # somebody's function may raise anything
        reason = str(wrong).partition("\n")[0]
        if isinstance(wrong, AssertionError) and reason:
            return reason
        at = traceback.extract_tb(wrong.__traceback__)[-1]
        return f"raises {type(wrong).__name__}: {reason}, in line {at.lineno} of {at.filename}"
    return ""


def shown(case) -> str:
    """-30.0 as -30, [-1.25, nan] as [-1.25, nan]: six digits of every number.

    >>> shown((-30.0, [1 / 3, 2]))
    '(-30, [0.333333, 2])'
    """
    if isinstance(case, (tuple, list)):
        return f"{'(['[isinstance(case, list)]}{', '.join(map(shown, case))}{')]'[isinstance(case, list)]}"
    return f"{case:.6g}" if isinstance(case, float) else str(case)


def unlike(a: float, b: float) -> tuple[str, str]:
    """Two numbers that are not equal, with six digits, or with all where six do not show it.

    >>> unlike(0.7, 1), unlike(1 / 3, 1 / 3 + 1e-8)
    (('0.7', '1'), ('0.3333333333333333', '0.3333333433333333'))
    """
    short = f"{a:.6g}", f"{b:.6g}"
    return short if short[0] != short[1] else (repr(a), repr(b))


def tensor_of(result, shape: tuple, what: str = "the result") -> Tensor:
    """The result, which must be a tensor of this shape."""
    assert isinstance(result, Tensor), f"{what} is a {type(result).__name__}, not a tensor"
    assert tuple(result.shape) == shape, (
        f"{what} has the shape {tuple(result.shape)}, wanted {shape}"
    )
    return result


def unchanged(names, now, before) -> None:
    """Fail with the name of the first tensor that a function has written to."""
    for name, after, first in zip(names, now, before, strict=True):
        assert torch.equal(after, first), f"{name} was {first.tolist()} and is now {after.tolist()}"


def same(a: float, b: float, what: str) -> None:
    """Fail with both numbers unless a and b are equal up to rounding in float64."""
    assert math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9), f"{what}: {', then '.join(unlike(a, b))}"


def close(found: Tensor, wanted: Tensor, what: str, tolerance: float = 1e-9) -> None:
    """Fail with the first number that is off unless both tensors are equal up to `tolerance`, without nan."""
    apart = ~((found.double() - wanted.double()).abs() <= tolerance * (1 + wanted.double().abs()))
    if apart.any():
        at = tuple(apart.nonzero()[0].tolist())
        place = f" at {', '.join(map(str, at))}" if at else ""
        found_and_wanted = ", wanted ".join(unlike(found[at].item(), wanted[at].item()))
        raise AssertionError(f"{what}{place} is {found_and_wanted}")


def f64(rows) -> Tensor:
    """Nested numbers as float64."""
    return torch.tensor(rows, dtype=torch.float64)
