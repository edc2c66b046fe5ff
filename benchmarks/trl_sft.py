"""The peer side of SFT in real_model.py: the same dialogues, base and first adapter, by TRL's SFTTrainer.

    /path/to/peer/python benchmarks/trl_sft.py --work FOLDER --batch 8 --steps 4 --out trl.json

Like trl_dpo.py it needs trl, peft, transformers and datasets, and nothing of minidpo. The loss counts what
the agent wrote. `--micro` rows go through the model at once, padded to the longest; by default all of a step.
"""

import json
import os
import tempfile
import warnings

from sides import held_mib, options, peak_mib
from trl_dpo import load_model, make_clock, make_tokenizer


def make_trainer(args, folder, model, rows, clock):
    """A trainer that starts from adapter/ and takes the rows in their order."""
    import transformers
    from datasets import Dataset
    from peft import PeftConfig, load_peft_weights, set_peft_model_state_dict
    from trl import SFTConfig, SFTTrainer

    lora = PeftConfig.from_pretrained(args.work / "adapter")
    lora.inference_mode = False
    taken = [rows[i % len(rows)] for i in range(args.batch * args.steps)]
    data = [
        {
            "input_ids": row["ids"],
            "labels": [
                token if turn >= 0 else -100 for token, turn in zip(row["ids"], row["turns"])
            ],
        }
        for row in taken
    ]
    config = SFTConfig(
        folder, use_cpu=args.device == "cpu", per_device_train_batch_size=args.micro or args.batch,
        gradient_accumulation_steps=args.batch // (args.micro or args.batch), max_steps=args.steps,
        learning_rate=args.lr, lr_scheduler_type="cosine", warmup_steps=0, weight_decay=0.0,
        max_grad_norm=1.0, optim="adamw_torch_fused", bf16=args.dtype == "bfloat16", fp16=False,
        gradient_checkpointing=False,
        max_length=None, train_sampling_strategy="sequential", dataset_kwargs={"skip_prepare_dataset": True},
        dataloader_pin_memory=args.device == "cuda", logging_steps=1, logging_nan_inf_filter=False,
        save_strategy="no", report_to="none", disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(data),
        processing_class=make_tokenizer(),
        peft_config=lora,
        callbacks=[clock],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    loaded = set_peft_model_state_dict(trainer.model, load_peft_weights(str(args.work / "adapter")))
    assert lora.lora_dropout == 0.0 and not loaded.unexpected_keys
    assert not [k for k in loaded.missing_keys if "lora_" in k], (
        "adapter/ lacks weights of the model's"
    )
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(args.batch)])
    for row, labels in zip(data, batch["labels"]):
        assert labels[labels >= 0].tolist() == [label for label in row["labels"] if label >= 0]
    return trainer


def bench(args, folder):
    """Train, and return seconds and loss of each step, memory in MiB and versions, as one dict."""
    import datasets
    import peft
    import transformers
    import trl

    warnings.simplefilter("ignore", FutureWarning)
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    rows = json.loads((args.work / "sft.json").read_text())
    model, clock = load_model(args), make_clock(args.device)
    before = held_mib(args.device)
    trainer = make_trainer(args, folder, model, rows, clock)
    trainer.train()
    return {
        "step_s": [end - start for start, end in zip(clock.ticks, clock.ticks[1:])],
        "losses": clock.losses,
        "before_mib": before,
        "peak_mib": peak_mib(args.device),
        "versions": {m.__name__: m.__version__ for m in (trl, peft, transformers, datasets, torch)},
    }


if __name__ == "__main__":
    parser = options(__doc__.split("\n")[0])
    parser.set_defaults(four_bit=False)  # which trl_dpo.py's load_model reads
    parser.add_argument("--micro", type=int, help="rows a forward pass, a divisor of --batch")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trl_sft_") as folder:
        os.environ.update(
            HF_HOME=folder, HF_HUB_OFFLINE="1", TQDM_DISABLE="1", OMP_NUM_THREADS=str(args.threads)
        )
        import torch
        import trl_dpo

        trl_dpo.torch = torch
        torch.set_num_threads(args.threads)
        args.out.write_text(json.dumps(bench(args, folder), indent=1) + "\n")
