"""Each law of your function, as a test that fails with its reason alone; `laws/plugin` has the options."""

import pytest


def test_your(law, yours):
    reason = ""
    try:
        law(yours)
    except AssertionError as broken:
        reason = str(broken)
    if reason:
        pytest.fail(reason, pytrace=False)
