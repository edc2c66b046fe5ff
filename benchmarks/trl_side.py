"""The peer side of a training: the same examples, base and first adapter, by TRL's DPOTrainer or SFTTrainer.

    /path/to/peer/python benchmarks/trl_side.py --learner dpo --work FOLDER --batch 8 --steps 20 --out trl.json

Needs trl, peft, transformers and datasets (written against TRL 1.16.0) and nothing of minidpo, so that it
runs in an environment of its own. FOLDER holds base/, adapter/ and dpo.json or sft.json, which works.py writes.

TRL gets the fastest settings it documents that leave the arithmetic alone: the reference's log-probs
computed beforehand, no gradient checkpointing (its default is on), the fused AdamW, PyTorch's own attention
kernel, and its fused head, which never builds the logits (both trainers of 1.16 have no other). --padding-free
lays the rows of an SFT's pass end to end; DPOTrainer 1.16 refuses that. Left out because a CPU has none:
Liger's and the hub's kernels (Triton), activation offloading (CUDA). On CUDA also pinned memory and workers
for the loader.

With --four-bit (needs bitsandbytes) it is TRL's QLoRA: blocks in NF4 with double quantisation, products in
bf16, gradient checkpointing, 8-bit AdamW; vocabulary and adapter in bf16, as TRL has them. As in TRL 1.16
itself, nothing calls PEFT's prepare_model_for_kbit_training, whose fp32 embedding and head would take 2 GiB
more of a 7B. A run that --cap-gib ends writes {"out_of_memory": true}.
"""

import json
import os
import tempfile
import time
import warnings

from sides import forget_peak, held_mib, hold_to, options, peak_mib

FIELDS = ("prompt_ids", "chosen_ids", "rejected_ids")


def arguments():
    parser = options(__doc__.split("\n")[0])
    parser.add_argument(
        "--micro", type=int, help="examples a forward pass; all of the batch unless given"
    )
    parser.add_argument("--padding-free", action="store_true", help="of SFT")
    args = parser.parse_args()
    args.micro = args.micro or args.batch
    if args.batch % args.micro:
        parser.error(f"--batch {args.batch} is no multiple of --micro {args.micro}")
    return args


def make_trainer_class():
    """TRL's trainer for pairs that are token ids already, with a clock on the reference pass."""
    from trl import DPOTrainer

    class TokenisedDPOTrainer(DPOTrainer):
        precompute_s = 0.0

        def _prepare_dataset(self, dataset, *_):
            # TRL 1.16 knows text only: it would append EOS where there is none, and tokenise anew.
            return dataset

        def _precompute_ref_logps(self, *arguments):
            start = time.perf_counter()
            dataset = super()._precompute_ref_logps(*arguments)
            self.precompute_s += time.perf_counter() - start
            return dataset

    return TokenisedDPOTrainer


def make_clock(device):
    """A callback that keeps the wall seconds and the loss of every step."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self):
            self.ticks, self.losses, self.earlier_peak = [], [], 0.0

        def on_train_begin(self, *_, **__):
            self.earlier_peak = peak_mib(device)
            forget_peak(device)

        def on_step_begin(self, *_, **__):
            if not self.ticks:
                self.ticks.append(time.perf_counter())

        def on_step_end(self, *_, **__):
            if device == "cuda":
                # The optimizer's kernels may still run. Logging follows at once and waits for them too.
                torch.cuda.synchronize()
            self.ticks.append(time.perf_counter())

        def on_log(self, args, state, control, logs=None, **_):
            if "loss" in logs:  # the summary after the last step has none
                self.losses.append(logs["loss"])

    return Clock()


def load_model(args):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype = getattr(torch, args.dtype)
    quantised = {}
    if args.four_bit:  # on the way in, so that the GPU never holds the model in full
        nf4 = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )  # fmt: skip
        quantised = {
            "quantization_config": nf4,
            "device_map": {"": 0 if args.device == "cuda" else "cpu"},
        }
    # dtype= keeps transformers from taking the one in config.json; sdpa is its default, named to pin it.
    model = AutoModelForCausalLM.from_pretrained(
        args.work / "base", dtype=dtype, attn_implementation="sdpa", **quantised
    )
    return model if args.four_bit else model.to(args.device)


def make_config(args, folder):
    from trl import DPOConfig, SFTConfig

    cuda = args.device == "cuda"
    if args.learner == "dpo":
        kind = DPOConfig
        own = {"loss_type": ["sigmoid"], "beta": args.beta, "precompute_ref_log_probs": True}
    else:
        kind = SFTConfig
        own = {
            "padding_free": args.padding_free,
            "dataset_kwargs": {"skip_prepare_dataset": True},
        }
    return kind(
        folder, **own, use_cpu=not cuda, per_device_train_batch_size=args.micro,
        gradient_accumulation_steps=args.batch // args.micro, max_steps=args.steps,
        learning_rate=args.lr, lr_scheduler_type="cosine",
        warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0,
        optim="adamw_8bit" if args.four_bit else "adamw_torch_fused",
        # A bf16 base runs under autocast, TRL's default: the adapter's weights stay fp32, their products are
        # bf16. Without it PEFT would multiply in fp32.
        bf16=args.dtype == "bfloat16", fp16=False, gradient_checkpointing=args.four_bit, max_length=None,
        train_sampling_strategy="sequential", dataloader_pin_memory=cuda,
        # On the CPU workers would take the cores that train.
        dataloader_num_workers=2 if cuda else 0, dataloader_persistent_workers=cuda,
        logging_steps=1, logging_nan_inf_filter=False,  # the filter looks at the loss twice a forward pass
        save_strategy="no", report_to="none", disable_tqdm=True, seed=0,
    )  # fmt: skip


def make_tokenizer():
    """TRL insists on a tokenizer; this one only names the id to pad with, which the attention mask hides."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")


def examples(args):
    """The file's examples under the names that TRL reads."""
    found = json.loads((args.work / f"{args.learner}.json").read_text())
    if args.learner == "dpo":
        return [{field: pair[field] for field in FIELDS} for pair in found]
    return [
        {
            "input_ids": row["ids"],
            "labels": [i if turn >= 0 else -100 for i, turn in zip(row["ids"], row["turns"])],
        }
        for row in found
    ]


def make_trainer(args, folder, model, data, clock):
    """A trainer that starts from adapter/, with the base as its reference and rows in the order of training.

    TRL given a PeftModel would carry a second copy of the adapter as the reference. Given a LoRA config it
    takes the model with its adapter switched off, which is the same reference as long as B = 0; the weights
    are copied in afterwards. The rows are repeated by hand, since an epoch could end on a short batch.
    """
    import transformers
    from datasets import Dataset
    from peft import PeftConfig, load_peft_weights, set_peft_model_state_dict
    from trl import SFTTrainer

    lora = PeftConfig.from_pretrained(args.work / "adapter")
    lora.inference_mode = False  # a saved adapter says True, which would freeze it
    weights = load_peft_weights(str(args.work / "adapter"), device=args.device)
    assert lora.lora_dropout == 0.0, "the adapter has dropout: losses could not be compared"
    assert not any(w.any() for k, w in weights.items() if "lora_B" in k), (
        "B != 0: base is not the reference"
    )
    kind = SFTTrainer if args.learner == "sft" else make_trainer_class()
    trainer = kind(
        model=model, args=make_config(args, folder), train_dataset=Dataset.from_list(data),
        processing_class=make_tokenizer(), peft_config=lora, callbacks=[clock],
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    loaded = set_peft_model_state_dict(trainer.model, weights)
    assert not loaded.unexpected_keys, (
        f"adapter/ holds what the model lacks: {loaded.unexpected_keys}"
    )
    assert not [k for k in loaded.missing_keys if "lora_" in k], (
        "adapter/ lacks weights of the model's"
    )
    rows = [i % len(data) for i in range(args.batch * args.steps)]
    trainer.train_dataset = trainer.train_dataset.select(rows)
    return trainer


def check_batches(trainer, args, data):
    """What the model will be given is, row for row, what the file says: ids, and which of them count."""
    for step in range(0, min(len(trainer.train_dataset), len(data)), args.micro):
        rows = range(step, min(step + args.micro, len(trainer.train_dataset)))
        batch = trainer.data_collator([trainer.train_dataset[i] for i in rows])
        if args.learner == "sft":
            labels = [label for i in rows for label in data[i % len(data)]["labels"] if label >= 0]
            assert batch["labels"][batch["labels"] >= 0].tolist() == labels
            continue
        # TRL's batch is all chosen, then all rejected.
        wanted = [(data[i % len(data)], side) for side in FIELDS[1:] for i in rows]
        masks = batch["attention_mask"].bool(), batch["completion_mask"].bool()
        for (pair, side), ids, real, counts in zip(wanted, batch["input_ids"], *masks, strict=True):
            assert ids[real].tolist() == pair["prompt_ids"] + pair[side], (
                f"TRL sees other ids in rows {rows}"
            )
            assert ids[counts].tolist() == pair[side], f"TRL counts other tokens in rows {rows}"


def bench(args, folder):
    """Train, and return seconds and loss of each step, memory in MiB and versions, as one dict."""
    import datasets
    import peft
    import transformers
    import trl

    warnings.simplefilter("ignore", FutureWarning)  # TRL's own use of transformers' older names
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    used = [trl, peft, transformers, datasets, torch]
    if args.four_bit:
        import bitsandbytes

        used.append(bitsandbytes)
    data = examples(args)
    began = time.perf_counter()
    model = load_model(args)
    load_s = time.perf_counter() - began
    clock = make_clock(args.device)
    make_trainer_class()  # TRL imports what it needs when it is asked for: not to be counted as training
    before = held_mib(args.device)
    trainer = make_trainer(args, folder, model, data, clock)
    check_batches(trainer, args, data)
    trainer.train()
    return {
        "step_s": [end - start for start, end in zip(clock.ticks, clock.ticks[1:])],
        "losses": clock.losses,
        "load_s": load_s,
        "precompute_s": getattr(trainer, "precompute_s", 0.0),
        "before_mib": before,
        "earlier_peak_mib": clock.earlier_peak,
        "peak_mib": peak_mib(args.device),
        "trainable": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "versions": {m.__name__: m.__version__ for m in used},
    }


if __name__ == "__main__":
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="trl_") as folder:
        # Before the imports, which read these. A home of its own: TRL keeps reference log-probs in a cache
        # there, and a run that found an earlier one's would report a pass that took no time.
        os.environ.update(HF_HOME=folder, HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
        if args.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        import torch

        torch.set_num_threads(args.threads)
        if args.cap_gib:
            hold_to(args.cap_gib)
        try:
            result = bench(args, folder)
        except torch.OutOfMemoryError:
            if not args.cap_gib:
                raise
            result = {"out_of_memory": True}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
