"""minidpo teaches a language model to operate web pages by DPO from the pages' own verdict: solved or not.

Packages are layers: each imports only those above it in this list.

    system     disk, processes, command line: nothing of the paper
    objective  the maths: scores, DPO and its variants; it imports torch alone
    model      a Qwen2 decoder, its text and its sampling
    memory     making a model fit: LoRA, four bits, recomputation, a plan
    data       from verdicts to pairs to prefix trees
    config     every option, in one file
    learning   SFT, DPO and the trainer
    acting     agents in worlds: policies and rollouts
    results    is the agent better, and what did it do
    loop       the algorithm: explore, train, validate, keep the best
    commands   what the scripts in the root do
    laws       what must hold of a loss, a head, an advantage, a 4-bit code; pytest runs them
    exercises  runs the laws on an answer to docs/exercises.md

To read the algorithm in one evening: objective/scores, objective/losses, data/tree, data/batch, learning/dpo,
learning/trainer, loop.

Dimensions have the same letter in every file:
    B sequences   P pairs   T tokens   S keys (cached and new)   N turns of an episode (DMPO's paper says T)
    V vocabulary   C width   L layers   H query heads   K key/value heads   D head size   R LoRA rank
Masks are True where something counts. `logp` is in nats and summed, `mean_logp` in nats a token.
"""

import sys

if sys.version_info < (3, 11):
    sys.exit(f"minidpo needs Python 3.11 or newer, and this is {sys.version.split()[0]}: run make setup")


def __getattr__(name: str):
    """`from minidpo import Agent`, which loads PyTorch only when it is asked for."""
    if name == "Agent":
        from minidpo.acting.agent import Agent
        return Agent
    raise AttributeError(f"module 'minidpo' has no attribute {name!r}")
