"""Measure success on held-out instances: the base and any number of adapters, all on the same ones.

    python evaluate.py --adapters sft=runs/nano/sft/adapter dpo=runs/nano/adapter
    python evaluate.py --model Qwen/Qwen2-0.5B-Instruct --tasks report --out runs/qwen2
    python evaluate.py --adapters dpo=runs/dpo/adapter --export merged   # a model, no episodes
    python evaluate.py --url URL --goal "..."    # an agent on any page; with --help: its options

Greedy by default. The seeds are disjoint from those of demonstrations and rollouts by construction.
"""

from minidpo.acting import browse
from minidpo.config import BrowseCommand, EvaluateCommand
from minidpo.results.evaluate import evaluate
from minidpo.system.command_line import main, parse, split_config_file


def run(arguments: list[str]) -> dict:
    """An agent on any page where there is a --url, else success on held-out instances."""
    _, settings, flags = split_config_file(arguments)
    if any(argument.split("=")[0] == "--url" for argument in (*settings, *flags)):
        return browse.browse(parse(BrowseCommand, arguments, "evaluate.py --url URL", browse.__doc__))
    return evaluate(parse(EvaluateCommand, arguments, "evaluate.py", __doc__))


if __name__ == "__main__":
    main(run)
