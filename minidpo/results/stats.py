"""25. Statistics: what a count of solved tasks can and cannot say.

A success rate of n episodes is a binomial count: `wilson` gives its interval. Two agents that met the same
task instances are compared by the instances on which they differ: `mcnemar_exact` asks whether a fair coin
could have shared those out so unevenly. Next: 26 results.
"""

import math


def wilson(successes: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson's score interval for a success rate: (low, high), by default with 95 % confidence.

    The rates p at which the count lies within z standard deviations: |successes/n - p| <= z √(p(1-p)/n).
    Wilson 1927, JASA 22(158). Unlike p ± z·√(p(1-p)/n) it never leaves [0, 1] and has a width at 0 and at n
    successes. Raises ValueError unless 0 <= successes <= n, n >= 1 and z > 0.

    >>> low, high = wilson(45, 50)
    >>> f"{low:.4f} {high:.4f}"
    '0.7864 0.9565'
    >>> wilson(0, 10)[0], wilson(10, 10)[1]
    (0.0, 1.0)
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"successes must lie in 0..n with n >= 1, got {successes} of {n}")
    if not 0 < z < math.inf:
        raise ValueError(f"z must be finite and > 0, got {z}")
    rate = successes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # exact at both ends, where centre and half are equal in theory and an ulp apart in floats
    return 0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Two-sided exact p-value that agents A and B are equally good, from the instances on which they differ.

    only_a instances were solved by A alone, only_b by B alone. If neither is better each of them is a fair
    coin, so p = 2 · P(Binomial(only_a + only_b, 1/2) <= min(only_a, only_b)), at most 1, from exact integers.
    Instances that both or neither solved say nothing, so mcnemar_exact(0, 0) is 1. McNemar 1947,
    Psychometrika 12(2), in its exact form. Raises ValueError for a negative count.

    >>> mcnemar_exact(1, 8)  # 2 · (1 + 9) / 2**9
    0.0390625
    """
    if only_a < 0 or only_b < 0:
        raise ValueError(f"counts must be >= 0, got {only_a} and {only_b}")
    n = only_a + only_b
    tail = sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / 2**n)
