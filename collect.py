"""Play episodes on real pages and keep them, one JSON line each.

    python collect.py --policy expert --split demos --instances 5 --group 1 --out runs/demos.jsonl
    python collect.py --policy expert --noise 0.3 --split base --instances 400 --group 1 --out runs/bad.jsonl
    python collect.py --adapter runs/sft/adapter --out runs/rollouts.jsonl
    python collect.py --adapter runs/sft/adapter --golden runs/golden.jsonl --out runs/stepwise.jsonl

Started again after a kill, it goes on where it stopped: no episode twice, none lost, the same numbers. With
torchrun --nproc-per-node N in place of python, N processes share the instances.
"""

from minidpo.acting.collect import collect
from minidpo.config import CollectCommand
from minidpo.system.command_line import main, parse

if __name__ == "__main__":
    main(lambda arguments: collect(parse(CollectCommand, arguments, "collect.py", __doc__)))
