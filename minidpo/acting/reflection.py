"""Reflection: the agent reads its own failed attempt, says what went wrong, and tries again.

Shinn et al. 2023, arXiv:2303.11366. Its words are a turn of the conversation like any other. It is told nothing
but the verdict.
"""

from collections.abc import Sequence

from envs.protocol import World
from minidpo.acting.jobs import Job, make_jobs
from minidpo.acting.policies import ModelPolicy, uniform_stream
from minidpo.data.episodes import Episode
from minidpo.data.prompt import as_shots, episode_messages
from minidpo.model.chat import Message
from minidpo.model.sampling import Request

QUESTION = "The task was not solved. Say in one sentence what went wrong and what to do instead."


def words_after(policy: ModelPolicy, failed: Sequence[Episode]) -> list[str]:
    """What the agent says about each failed episode; "" if the question does not fit into the model's context.

    Each episode has its own random stream, so an answer does not depend on the other episodes.
    """
    waiting: dict[int, Request] = {}
    for number, episode in enumerate(failed):
        messages = [*episode_messages(episode, policy.system_prompt), Message("user", QUESTION)]
        ids = tuple(policy.chat.prompt(messages))
        if len(ids) + policy.max_new_tokens <= policy.max_context:
            seed = policy.seed, *episode.key, "reflection"
            uniforms = uniform_stream(policy.max_new_tokens, *seed)
            waiting[number] = Request(ids, uniforms, None)
    words = [""] * len(failed)
    asked: dict[int, int] = {}  # {page of the sampler: number of the episode that it answers}
    while waiting or asked:
        for page in range(len(policy.sampler.texts.rows)):
            if page not in asked and waiting:
                number = next(iter(waiting))
                policy.sampler.ask(page, waiting.pop(number))
                asked[page] = number
        for page, sampled in policy.sampler.step().items():
            words[asked.pop(page)] = policy.chat.decode(sampled.ids)
    return words


def retry_jobs(
    world: World, failed: Sequence[Episode], words: Sequence[str], retries: int
) -> list[Job]:
    """`retries` new attempts at each failed instance, with the failed attempt and the agent's words before them."""
    jobs = []
    for episode, said in zip(failed, words, strict=True):
        attempt = (*episode.shots, *as_shots([episode]), QUESTION, said)
        after = episode.index + 1
        if said:
            again = make_jobs(world, [episode.instance], retries, after)
            jobs += [job._replace(shots=attempt) for job in again]
    return jobs
