"""Play episodes on real pages: `python collect.py --help`."""

from minidpo.commands import collect as run
from minidpo.system.command_line import main

if __name__ == "__main__":
    main(run)
