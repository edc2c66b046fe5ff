"""What the vocabulary head costs in memory: our scores against plain logits, at Qwen2's V = 152,064.

    python benchmarks/head_memory.py

One step of LoRA (forward, backward) on one trajectory of a prompt and a 64-token answer, by a small model
with Qwen2's vocabulary; each case in a process of its own. Ours scores the answer's tokens alone, a chunk at
a time; "full" is the textbook's way, `head(hidden).log_softmax(-1)` of every position. Counted is the peak of
the process above what it held before the step. Writes benchmarks/results/head_memory.json.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from records import RESULTS, record
from sides import forget_peak, memory_mib

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

PROMPTS, ANSWER, VOCABULARY = (256, 1024, 4096), 64, 152_064


def step(way: str, prompt: int) -> float:
    """MiB that the step needs at most."""
    import torch

    from minidpo.data.batch import batch_scores, collate
    from minidpo.memory import lora
    from minidpo.memory.lora import LoRAConfig
    from minidpo.model.chat import Dialogue
    from minidpo.model.decoder import ModelConfig, Transformer

    torch.manual_seed(0)
    model = Transformer(ModelConfig(VOCABULARY, 64, 128, 1, 2, 1, tie_word_embeddings=True))
    lora.attach(model, LoRAConfig(), torch.Generator().manual_seed(0))
    ids = torch.randint(VOCABULARY, (prompt + ANSWER,)).tolist()
    batch = collate([[Dialogue(ids, [-1] * prompt + [0] * ANSWER)]])
    forget_peak()  # of making the model
    before = memory_mib("VmRSS")
    if way == "ours":
        score = batch_scores(model, batch)[0]
    else:
        logps = model.head(model(batch.ids))[0].log_softmax(-1)
        score = logps[batch.predict, batch.targets].sum()
    score.backward()
    return memory_mib("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--case", nargs=2, metavar=("WAY", "PROMPT"), help="used by the script itself"
    )
    args = parser.parse_args()
    if args.case:
        print(step(args.case[0], int(args.case[1])))
        return
    figures = {}
    for prompt in PROMPTS:
        for way in ("ours", "full"):
            done = subprocess.run(
                [sys.executable, __file__, "--case", way, str(prompt)],
                check=True,
                capture_output=True,
                text=True,
            )
            figures[f"{way}_{prompt}_mib"] = round(float(done.stdout), 1)
            print(f"prompt {prompt:>5}, {way}: {figures[f'{way}_{prompt}_mib']:>8} MiB", flush=True)
    short, long = PROMPTS[0], PROMPTS[-1]
    for way in ("ours", "full"):
        grown = figures[f"{way}_{long}_mib"] - figures[f"{way}_{short}_mib"]
        figures[f"{way}_kib_per_prompt_token"] = round(1024 * grown / (long - short), 1)
    figures["memory_ratio_4096"] = round(figures["ours_4096_mib"] / figures["full_4096_mib"], 4)
    import torch

    record(RESULTS / "head_memory.json", figures, {"torch": torch.__version__})


if __name__ == "__main__":
    main()
