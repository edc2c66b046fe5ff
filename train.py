"""Train an agent.

    python train.py sft  --data runs/demos.jsonl --out runs/sft       imitate demonstrations
    python train.py dpo  --adapter runs/sft/adapter --data runs/rollouts.jsonl --out runs/dpo
    python train.py loop --config configs/demo.toml                   the whole circle, as `make demo` runs it
    python train.py plan --config configs/qwen2-7b-8gb.toml           the memory it will need
    python train.py check                                             whether this machine can run the demo
    python train.py base --config configs/nano-base.toml              make the small base model from nothing
    python train.py push --to OWNER/NAME --folder runs/dpo/adapter    upload it to the Hugging Face hub

dpo --explain shows one pair as the loss sees it, dpo --export trl writes all for TRL; --track mlflow, or
tensorboard, tells a tracker. Each takes --help, and --config FILE for a TOML file of defaults. A run that was
killed goes on when started again; torchrun --nproc-per-node N train.py ... shares the work of sft, dpo, loop.
"""

from minidpo.acting.check import check
from minidpo.acting.make_nano import make_nano
from minidpo.config import BaseCommand, CheckCommand, DPOCommand, LoopCommand, PushCommand, SFTCommand
from minidpo.learning.dpo import dpo
from minidpo.learning.explain import explain
from minidpo.learning.plan_loop import plan_loop
from minidpo.learning.sft import sft
from minidpo.loop import loop
from minidpo.results.publish import push
from minidpo.system.command_line import main, parse

COMMANDS = {"sft": (SFTCommand, sft), "loop": (LoopCommand, loop), "plan": (LoopCommand, plan_loop),
            "dpo": (DPOCommand, lambda config: explain(config) if config.explain else dpo(config)),
            "base": (BaseCommand, make_nano), "push": (PushCommand, push), "check": (CheckCommand, check)}


def run(arguments: list[str]) -> None:
    """Parse the command's options and call it."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return
    if arguments[0] not in COMMANDS:
        raise ValueError(f"no command {arguments[0]!r}; there are {', '.join(COMMANDS)}")
    kind, command = COMMANDS[arguments[0]]
    command(parse(kind, arguments[1:], f"train.py {arguments[0]}", kind.__doc__))


if __name__ == "__main__":
    main(run)
