"""Answers to prompts that are all known in advance: what pages ask of a sampler, in a loop of its own."""

from collections import deque
from collections.abc import Sequence

from minidpo.model.decoder import Transformer
from minidpo.model.sampling import Answer, Request, Sampler


def generate(
    model: Transformer,
    requests: Sequence[Request],
    stop: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_rows: int = 64,
) -> list[Answer]:
    """Answers in the order of the requests, at most `max_rows` of them at a time."""
    assert max_rows > 0
    rows = min(max_rows, len(requests))
    return answers_of(Sampler(model, rows, stop, temperature, top_p), requests)


def answers_of(sampler: Sampler, requests: Sequence[Request]) -> list[Answer]:
    """The same of a sampler. Each row writes until its stop or until its uniforms run out, and then takes the
    next request."""
    waiting = deque(enumerate(requests))
    asked: dict[int, int] = {}  # the request that each row answers
    answers: dict[int, Answer] = {}
    while len(answers) < len(requests):
        for row in range(len(sampler.texts.rows)):
            if waiting and row not in sampler.busy:
                asked[row], request = waiting.popleft()
                sampler.ask(row, request)
        for row, answer in sampler.step().items():
            answers[asked[row]] = answer
    return [answers[i] for i in range(len(requests))]
