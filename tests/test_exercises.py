"""The exercises: minidpo's own functions keep their laws, the holes and plausible mistakes do not."""

import re

import pytest
from hypothesis import Phase

from minidpo.exercises import EXERCISES, main, parts

HOLE = "    raise NotImplementedError\n"

# Exercise: an answer; then mistakes: a text of the answer, what somebody could write, a law that it breaks.
ANSWERS = {
    1: (
        """
    h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)
    return -F.logsigmoid(beta * h)
""",
        [
            ("-F.log", "F.log", "is log 2 where the policy is the reference"),
            ("beta * h", "-beta * h", "pulls with half of beta at first"),
            ("beta * h", "0.1 * h", "is the loss at beta 1 of beta times the log probs"),
            ("beta * h)", "beta * h).mean()", "gives each pair a loss of its own"),
            ("- ref_rejected", "+ ref_rejected", "ignores what a prompt adds to the reference"),
            ("ref_chosen", "ref_chosen.detach() * 0", "reads the reference"),
            (
                "-F.logsigmoid(beta * h)",
                "-torch.log(torch.sigmoid(beta * h))",
                "is finite in float32 at margins of thousands",
            ),
            (
                "-F.logsigmoid(beta * h)",
                "-torch.log(torch.sigmoid(beta * h).clamp(min=1e-12))",
                "still pulls a pair that is hopelessly lost",
            ),
        ],
    ),
    2: (
        """
    h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)
    return (h - 1 / (2 * beta)) ** 2
""",
        [
            ("1 / (2 * beta)", "1 / beta", "is 0 where h is 1 over 2 beta"),
            ("(h - 1 / (2 * beta)) ** 2", "(h - 1 / (2 * beta)).abs()", "bends like h squared"),
            (
                "(h - 1 / (2 * beta)) ** 2",
                "((h - 1 / (2 * beta)) ** 2).mean()",
                "gives each pair a loss of its own",
            ),
        ],
    ),
    3: (
        """
    terms = torch.where(weight != 0, weight * logps, 0.0)
    return torch.zeros(n, dtype=logps.dtype).index_add(0, segment, terms)
""",
        [
            (
                "torch.where(weight != 0, weight * logps, 0.0)",
                "weight * logps",
                "ignores a token of weight 0 whatever its log prob",
            ),
            (
                "torch.where(weight != 0, weight * logps, 0.0)",
                "torch.where(weight > 0, weight * logps, 0.0)",
                "gives a token alone its weight times its log prob",
            ),
            (
                "index_add(0, segment, terms)",
                "index_copy(0, segment, terms)",
                "adds up over any partition of the tokens",
            ),
            (
                "torch.where(weight != 0,",
                "torch.where((weight != 0) & logps.isfinite(),",
                "is minus infinity where a token that counts is impossible",
            ),
            (
                "weight * logps, 0.0",
                "weight * logps.detach(), 0.0",
                "has each tokens weight as its gradient",
            ),
        ],
    ),
    4: (
        """
    logits = hidden @ weight.t()
    real = torch.promote_types(logits.dtype, torch.float32)
    return logits.log_softmax(1, dtype=real).gather(1, targets[:, None])[:, 0]
""",
        [
            (
                "logits.log_softmax(1, dtype=real)",
                "logits.to(real)",
                "gives all targets together the probability 1",
            ),
            ("log_softmax(1,", "log_softmax(0,", "gives each token what it has alone"),
            (
                "logits.log_softmax",
                "(-logits).log_softmax",
                "gives log probs as far apart as the logits",
            ),
            (
                "logits.log_softmax(1, dtype=real)",
                "logits.to(real).softmax(1).log()",
                "is finite in float32 at logits of thousands",
            ),
            (", dtype=real", "", "gives float32 for bfloat16"),
            ("weight.t()", "weight.detach().t()", "has the gradient of log softmax"),
        ],
    ),
    5: (
        """
    position = lengths[:, None] + torch.arange(new)
    return torch.arange(columns) <= position[:, :, None]
""",
        [
            ("<=", "<", "shows a query its position plus 1 keys"),
            (
                "torch.arange(columns)",
                "torch.arange(columns - 1, -1, -1)",
                "shows the first keys without a gap",
            ),
        ],
    ),
    6: (
        """
    count = torch.bincount(group)
    total = torch.zeros(len(count), dtype=reward.dtype).index_add(0, group, reward)
    return reward - (total / count)[group]
""",
        [
            ("reward - (total", "(total", "rises with the reward"),
            ("(total / count)[group]", "reward.mean()", "reads no other group"),
            (
                "return reward - (total / count)[group]",
                "return reward.sub_((total / count)[group])",
                "leaves its inputs as they were",
            ),
            ("(total / count)[group]", "total[group]", "sums to 0 in each group"),
            (
                "(total / count)[group]",
                "(total / count)[group] + 0 / (count[group] - 1)",
                "is 0 where all rewards of a group are equal",
            ),
            (
                "return reward - (total / count)[group]",
                "a = reward - (total / count)[group]\\n    return a / 2",
                "keeps the differences of rewards",
            ),
            (
                "return reward - (total / count)[group]",
                "return reward",
                "is unmoved when all rewards of a group shift",
            ),
            ("(total / count)[group]", "(total / count)", "goes with its episode into any order"),
        ],
    ),
    7: (
        """
    return weight + alpha / len(a) * (b @ a)
""",
        [
            ("alpha / len(a)", "alpha", "acts as the two thin products beside the wide one"),
            ("weight + ", "", "is the weight bit for bit where b is 0"),
            ("weight + ", "weight.add_(1) - 1 + ", "leaves the matrices as they were"),
        ],
    ),
    8: (
        """
    if gamma in (0, 1):
        return torch.tensor([gamma**t * (n_turns - t) / n_turns**gamma if gamma else float(t == 0)
                             for t in range(n_turns)], dtype=torch.float64)
    log = math.log(gamma)
    return torch.tensor([gamma**t * math.expm1((n_turns - t) * log) / math.expm1(n_turns * log)
                         for t in range(n_turns)], dtype=torch.float64)
""",
        [
            ("gamma**t * math", "math", "loses gamma times as much with each turn"),
            ("gamma**t * math", "gamma**(t + 1) * math", "gives the first turn the weight 1"),
            (
                "math.expm1((n_turns - t) * log) / math.expm1(n_turns * log)",
                "(1 - gamma**(n_turns - t)) / (1 - gamma**n_turns)",
                "keeps its digits near gamma 1",
            ),
        ],
    ),
    9: (
        """
    token = torch.arange(ends.shape[1])
    key, query = token[None, None, :], token[None, :, None]
    return (key <= query) & (query < ends[:, None, :])
""",
        [
            ("key <= query", "key < query", "lets a token read itself"),
            (
                "(key <= query) & (query < ends[:, None, :])",
                "(key <= query).expand(len(ends), -1, -1)",
                "lets a token read as many as its depth and itself",
            ),
            (
                "ends[:, None, :]",
                "ends[:1, None, :].expand(len(ends), 1, -1)",
                "reads no other tree of the batch",
            ),
        ],
    ),
    10: (
        """
    largest = blocks.abs().amax(1, keepdim=True)
    unit = blocks / torch.where(largest > 0, largest, 1.0)
    codes = (unit[..., None] - LEVELS).abs().argmin(-1)
    return codes.to(torch.uint8), LEVELS[codes] * largest
""",
        [
            (
                "blocks.abs().amax(1, keepdim=True)",
                "blocks.amax(1, keepdim=True)",
                "keeps the largest of a block",
            ),
            (
                "blocks.abs().amax(1, keepdim=True)",
                "blocks.abs().max()",
                "blocks know nothing of each other",
            ),
            (
                "(unit[..., None] - LEVELS).abs().argmin(-1)",
                "(torch.searchsorted(LEVELS, unit, right=True) - 1).clamp(min=0)",
                "gives each weight the nearest of the levels",
            ),
            (
                "codes.to(torch.uint8)",
                "(codes ^ 8).to(torch.uint8)",
                "decodes code i to level i of nf4",
            ),
            (
                "    largest",
                "    LEVELS = torch.linspace(-1, 1, 16)\\n    largest",
                "keeps a weight of 0",
            ),
            (
                "    largest",
                "    LEVELS = torch.cat([torch.linspace(-1, 0, 8), torch.linspace(0, 1, 9)[1:]])\\n    largest",
                "loses less of normal weights than even levels",
            ),
        ],
    ),
    11: (
        """
    roots = F.pad(v.sqrt(), (0, -len(v) % 256)).view(-1, 256)
    scale = roots.amax(1)
    share = roots / torch.where(scale > 0, scale, 1.0)[:, None]
    codes = torch.bucketize(share, (LEVELS[1:] + LEVELS[:-1]) / 2)
    codes = torch.where(share > 0, codes.clamp(min=1), codes)
    decoded = (LEVELS[codes] * scale[:, None]).square()
    return codes.flatten()[:len(v)].to(torch.uint8), scale, decoded.flatten()[:len(v)]
""",
        [
            (
                "codes = torch.where(share > 0, codes.clamp(min=1), codes)",
                "pass",
                "keeps a live moment above 0",
            ),
            (
                "codes = torch.where(share > 0, codes.clamp(min=1), codes)",
                "codes = codes.clamp(min=1)",
                "keeps a moment of 0",
            ),
            ("v.sqrt()", "v", "keeps the largest"),
            (
                "torch.bucketize(share, (LEVELS[1:] + LEVELS[:-1]) / 2)",
                "torch.searchsorted(LEVELS, share)",
                "gives each root the nearest of the levels",
            ),
            (
                "scale = roots.amax(1)",
                "scale = roots.amax().expand(len(roots))",
                "gives each 256 numbers a scale of their own",
            ),
            (
                "scale = roots.amax(1)",
                "scale = roots.amax(1).clamp(min=0.01)",
                "a power of four moves no code",
            ),
            ("return codes", "return 0 * codes", "decodes to what codes and scales stand for"),
        ],
    ),
    12: (
        """
    ids, depths, ends = [], [], []
    paths = [[] for _ in trajectories]

    def add(members, depth):
        for token in sorted({trajectories[i][depth] for i in members if len(trajectories[i]) > depth}):
            below = [i for i in members if trajectories[i][depth:depth + 1] == [token]]
            k = len(ids)
            ids.append(token)
            depths.append(depth)
            ends.append(0)
            for i in below:
                paths[i].append(k)
            add(below, depth + 1)
            ends[k] = len(ids)
    add(range(len(trajectories)), 0)
    return ids, depths, ends, paths
""",
        [
            (
                "ends[k] = len(ids)",
                "ends[k] = len(ids) - 1",
                "puts the descendants of a token right behind it up to its end",
            ),
            (
                "depths.append(depth)",
                "depths.append(depth + 1)",
                "spells each trajectory along its path",
            ),
        ],
    ),
}
MISTAKES = [(number, *mistake) for number, (_, mistakes) in ANSWERS.items() for mistake in mistakes]


def function_of(number, body):
    """The exercise's function with `body` in place of the hole."""
    _, template = parts(number)
    assert template.endswith(HOLE) and template.count("NotImplementedError") == 1
    names = {}
    exec(template.replace(HOLE, body), names)
    return names[EXERCISES[number].function]


@pytest.mark.parametrize(
    "number, old, new, law", MISTAKES, ids=[f"{n}-{new}" for n, _, new, _ in MISTAKES]
)
def test_a_plausible_mistake_breaks_the_law_that_is_there_to_catch_it(number, old, new, law):
    answer, _ = ANSWERS[number]
    old, new = old.replace("\\n", "\n"), new.replace("\\n", "\n")
    assert old in answer
    (broken,) = (
        claim for claim in EXERCISES[number].laws if claim.__name__.replace("_", " ") == law
    )
    with pytest.raises(AssertionError):
        broken(
            function_of(number, answer.replace(old, new)), [Phase.generate]
        )  # any case: not the simplest


@pytest.mark.parametrize("number", EXERCISES)
def test_a_hole_is_told_in_one_line(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = f"exercise_{number:02}.py"
    assert main([str(number)]) == 0 and (tmp_path / name).read_text() == parts(number)[1]
    assert capsys.readouterr().out == (
        f"wrote {name}: {parts(number)[0]}. Fill its hole, then: "
        f"python -m minidpo.exercises {number}\n"
    )
    assert main([str(number)]) == 1
    assert capsys.readouterr().out.startswith(
        f"{name}: {EXERCISES[number].function} is not written yet: "
    )


def test_a_file_is_checked_and_never_written_over(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    answer = tmp_path / "mine.py"
    answer.write_text(parts(7)[1].replace(HOLE, ANSWERS[7][0]))
    assert main(["7", "mine.py"]) == 0
    said = capsys.readouterr().out
    assert "all 3 laws hold: merged is right" in said and "minidpo.exercises 8" in said
    answer.write_text(answer.read_text().replace("weight +", "weight -"))
    assert main(["7", str(answer)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert (
        said[0].startswith("holds          is the weight bit for bit")
        and said[-1] == "1 of 3 laws broken"
    )
    assert re.fullmatch(
        r"does not hold  acts as .*: merged @ x at \d, \d is .*, wanted .* "
        r"\(rank = 1, values = \[.*\], alpha = 1\)",
        said[-2],
    )


@pytest.mark.parametrize(
    "arguments, text, complaint",
    [
        (["13"], "", "wanted a number from 1 to 12"),
        (["x"], "", "wanted a number"),
        (["1", "a", "b"], "", "wanted"),
        (["1", "none.py"], "", "none.py: no such file"),
        (["1", "mine.py"], "x = 1", "mine.py has no function dpo_loss"),
        (["1", "mine.py"], "def (", "mine.py does not run: SyntaxError: "),
        (["1", "mine.py"], "raise SystemExit", "mine.py does not run: SystemExit: "),
    ],
)
def test_what_cannot_be_checked_is_refused_in_a_line(
    arguments, text, complaint, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=complaint) as refused:
        main(arguments)
    assert "\n" not in str(refused.value)
