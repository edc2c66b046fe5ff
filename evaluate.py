"""Measure success on held-out instances, or let an agent act on any page: `python evaluate.py --help`."""

from minidpo.commands import evaluate as run
from minidpo.system.command_line import main

if __name__ == "__main__":
    main(run)
