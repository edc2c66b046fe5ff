"""minidpo teaches a language model to operate web pages by DPO from the pages' own verdict: solved or not.

README.md has a map of the packages, docs/tour.md an order to read them in. To read the algorithm in two
hours: objective/losses, objective/scores, data/tree, data/batch, data/pairs, learning/dpo, learning/trainer,
algorithms/ef_dpo.

Letters of dimensions, if the head of a file says nothing else:
    B sequences   P pairs   T tokens   N tokens that the agent wrote (in DMPO's φ: turns)   M entries of W
    S keys, cached and new (in policy gradients: turns)   R LoRA rank
    V vocabulary   C width   L layers   H query heads   K key/value heads   D head size
Masks are True where something counts. `logp` is in nats and summed, `mean_logp` in nats a token.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (said before anything is imported)
    sys.exit(
        f"minidpo needs Python 3.11 or newer, and this is {sys.version.split()[0]}: run make setup"
    )

from minidpo.system.threads import wait_briefly

wait_briefly()  # before anything here loads PyTorch


def __getattr__(name: str):
    """`from minidpo import Agent`, which loads PyTorch only when it is asked for."""
    if name == "Agent":
        from minidpo.acting.agent import Agent

        return Agent
    raise AttributeError(f"module 'minidpo' has no attribute {name!r}")
