"""Confidence intervals of a success rate."""

import math


def wilson(successes: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson's score interval for a success rate: (low, high), by default with 95 % confidence.

    It holds the rates p for which the count is within z standard deviations: |successes/n - p| <= z √(p(1-p)/n).
    Wilson 1927, JASA 22(158). Unlike p ± z·√(p(1-p)/n) it stays in [0, 1] and has a width at 0 and at n, too.

    >>> [round(end, 4) for end in wilson(45, 50)], wilson(0, 10)[0], wilson(10, 10)[1]
    ([0.7864, 0.9565], 0.0, 1.0)
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"successes must lie in 0..n with n >= 1, got {successes} of {n}")
    if not 0 < z < math.inf:
        raise ValueError(f"z must be finite and > 0, got {z}")
    rate = successes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # exact at both ends, where rounding would leave an ulp between centre and half
    return 0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half
