"""Each law of your function, as a test; `laws/plugin` has the options and prints what came of it."""


def test_your(law, yours):
    law(yours)
