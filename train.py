"""Train an agent: `python train.py --help`."""

from minidpo.commands import train as run
from minidpo.system.command_line import main

if __name__ == "__main__":
    main(run)
