"""What the laws are tried on in this house: our losses as functions of four log-probs, our 4-bit code."""

from minidpo.laws import page
from minidpo.learning import loss_table
from minidpo.memory.nf4 import code_book, nearest

LOSSES = {
    name: entry.of_scores(entry.defaults, baseline=0.0) for name, entry in loss_table.LOSSES.items()
}


def broken_by() -> dict[str, list[str]]:
    """Which of our losses break each law, read from docs/your-own-loss.md; a test tries them all."""
    table = page("your-own-loss.md").read_text(encoding="utf-8").partition("\n| law |")[2]
    rows = [line.split("|")[1:-1] for line in table.partition("\n\n")[0].splitlines()[2:]]
    return {law.strip(): names.replace(",", " ").split() for law, names in rows}


def nf4(blocks):
    """NF4 without double quantisation: codes (n,64) uint8 and weights (n,64) for blocks (n,64) float32."""
    codes, absmax = nearest(blocks)
    return codes, code_book()[codes.int()] * absmax[:, None]
