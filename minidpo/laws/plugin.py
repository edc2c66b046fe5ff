"""What `python -m minidpo.laws --loss mine:loss` needs: the options, and a line a law at the end.

The options exist only if minidpo.laws is asked for, so that no other project's options collide with them.
"""

import gc
import importlib
import inspect
import sys

import pytest

from minidpo import laws

OPTIONS = {
    "loss": ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected"),
    "head": ("hidden", "weight", "targets"),
    "advantage": ("reward", "group"),
    "code": ("blocks",),
}
WANTED = " or ".join(f"--{kind}" for kind in OPTIONS) + " package.module:function"
YOURS = pytest.StashKey()  # which function is tested as what


def pytest_addoption(parser, pluginmanager):
    if "minidpo.laws" in pluginmanager.get_plugin("pytestconfig").invocation_params.args:
        for kind, parameters in OPTIONS.items():
            parser.getgroup("minidpo.laws").addoption(
                f"--{kind}",
                metavar="package.module:function",
                help=(
                    f"which laws hold for this function of {', '.join(parameters)} (minidpo/laws/{kind}.py)"
                ),
            )


def pytest_configure(config):
    if "minidpo.laws" not in config.invocation_params.args or config.option.help:
        return
    if lacking := laws.missing():
        raise pytest.UsageError(lacking)
    given = {kind: config.getoption(f"--{kind}") for kind in OPTIONS}
    if not any(given.values()):
        raise pytest.UsageError(f"the laws want a function: {WANTED}")
    # the summary below says all, a line a law
    config.option.tbstyle, config.option.reportchars = "no", ""
    sys.path.insert(0, str(config.invocation_params.dir))
    config.stash[YOURS] = {kind: named(spec, kind) for kind, spec in given.items() if spec}


def named(spec: str, kind: str):
    """The function that `package.module:function` names, or one of our losses. Raises UsageError, a line."""
    start = f"--{kind} {spec}:"
    if kind == "loss":
        from minidpo.laws.ours import LOSSES  # here, because it imports torch

        if spec in LOSSES:
            return LOSSES[spec]
    module_name, colon, name = spec.partition(":")
    if not (module_name and colon and name):
        known = f", or one of {', '.join(LOSSES)}" if kind == "loss" else ""
        raise pytest.UsageError(f"{start} wanted package.module:function, e.g. mine:{kind}{known}")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may do anything while it is imported
        raise pytest.UsageError(
            f"{start} cannot import {module_name}: {error} (it is looked for in "
            "this folder and in those of PYTHONPATH)"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise pytest.UsageError(f"{start} {module!r} has no function {name}")
    if wrong := why_not_callable(function, name, OPTIONS[kind]):
        raise pytest.UsageError(f"{start} {wrong}")
    return function


def why_not_callable(function, name: str, wanted: tuple[str, ...]) -> str:
    """Why a function cannot be called with the arguments wanted and no others; "" if it can."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return f"{name} is built in and does not say what it takes: wrap it in a def"
    try:
        signature.bind(*wanted)
    except TypeError as error:
        return f"cannot be called with {', '.join(wanted)}: {error}"
    return ""


def pytest_generate_tests(metafunc):
    """A test for each law of what was given."""
    if {"law", "yours"} <= set(metafunc.fixturenames):
        cases = [
            pytest.param(
                law,
                function,
                id=f"{kind}-{law.__name__}",
                marks=[pytest.mark.skip]
                * (law.is_of_beta and "beta" not in inspect.signature(function).parameters),
            )
            for kind, function in metafunc.config.stash.get(YOURS, {}).items()
            for law in importlib.import_module(f"minidpo.laws.{kind}").LAWS
        ]
        metafunc.parametrize("law, yours", cases)
        gc.freeze()  # else each search for garbage walks all that was imported: a tenth of the time


def pytest_terminal_summary(terminalreporter, config):
    """A line a law, first those that hold; of a broken one the reason, and which of our losses break it."""
    lines = {
        "passed": "holds          {}",
        "skipped": "not asked      {}: it has no parameter beta",
        "failed": "does not hold  {}: {}",
    }
    for kind in config.stash.get(YOURS, {}):
        from minidpo.laws.ours import broken_by

        terminalreporter.section(f"laws of {config.getoption(f'--{kind}')}")
        for outcome, line in lines.items():
            for report in terminalreporter.getreports(outcome):
                law_kind, _, name = report.nodeid.partition("[")[2].rstrip("]").partition("-")
                if law_kind != kind:
                    continue
                law, reason = name.replace("_", " "), ""
                if crash := getattr(report.longrepr, "reprcrash", None):
                    reason = crash.message.partition("\n")[0].removeprefix("AssertionError: ")
                terminalreporter.write_line(line.format(law, reason))
                if outcome == "failed" and kind == "loss":
                    breakers = ", ".join(broken_by()[law]) or "none"
                    terminalreporter.write_line(
                        f"{'':15}of minidpo's losses it is broken by: {breakers}"
                    )
