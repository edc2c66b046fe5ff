"""The grid of the study: its rows, the flags of each, and the tasks that no agent was trained on.

A row is `configs/study.toml` with the flags that GRID gives it. The other files of this folder import this
one: run.py plays the rows, rates.py counts, rows.py, preface.py and document.py write docs/results.md.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNS = Path("runs/study")
# No agent was trained on these tasks, and the base read none. The SFT policy solves some instances of each
# (seen on validation seeds).
UNSEEN = (
    "click-dialog,click-tab,click-tab-2-easy,click-widget,click-collapsible,unicode-test,navigate-tree,"
    "identify-shape"
)
BEST_OF = 4  # tries of the row `sft-best`

BASE = "dpo"
# Rows run in this order, so the list is cut at its end where time ends. `sft` and `sft-best` are no rows of
# the grid: they evaluate the policy that BASE begins with.
GRID = {
    BASE: "",
    "rounds": "--rounds 5",
    "rft": "--learn rft",
    "bc": "--learn bc",
    "rwr": "--learn rwr",
    "expert": "--dpo.pairs expert",
    "dmpo-0.9": "--loss dmpo --dpo.beta 0.3 --dpo.gamma 0.9",
    "kto-unpaired": "--loss kto --dpo.pairs unpaired --dpo.batch 16",
    "stepwise": "--dpo.pairs stepwise",
    "dmpo-0.9-clean": "--loss dmpo --dpo.beta 0.3 --dpo.gamma 0.9 --dpo.clean",
    "mixture": "--dpo.pairs mixture",
    "ipo": "--loss ipo_sum --dpo.beta 0.25",
    "simpo": "--loss simpo --dpo.beta 2",
    "orpo": "--loss orpo --dpo.beta None --dpo.odds-weight 1 --dpo.nll 0",
    "dense": "--dpo.dense",
    "beta-0.1": "--dpo.beta 0.1",
    "beta-3": "--dpo.beta 3",
    "dmpo-0.5": "--loss dmpo --dpo.beta 0.3 --dpo.gamma 0.5",
    "group-4": "--group 4",
    "demos-1": "--demonstrations 1",
    "selfplay": "--demonstrations 0 --sft.lr 2e-4",
    "demos-20": "--demonstrations 20",
    "rounds-fixed": "--rounds 3 --reference sft",
    "group-16": "--group 16",
    "curriculum": "--rounds 3 --curriculum 0.7",
    "focus": "--rounds 3 --focus",
    "group-2": "--group 2",
    "clean": "--dpo.clean",
    "plain": "--dpo.beta 0.1 --dpo.nll 0 --dpo.until end",
    "no-nll": "--dpo.nll 0",
    "kto": "--loss kto",
    "rounds-rft": "--rounds 3 --learn rft",
    "beta-0.3": "--dpo.beta 0.3",
}
ALONE = (
    "demos-1",
    "demos-20",
    "selfplay",
)  # these begin with a first policy of their own, not with BASE's
