"""The other side of generate.py: transformers' `generate` on the same checkpoint and prompts.

Run by generate.py in a Python that has transformers; prints one JSON line.
"""

import json
import sys
import time

import torch
import transformers

work = json.loads(sys.argv[1])
torch.set_num_threads(work["threads"])
transformers.utils.logging.set_verbosity_error()
model = transformers.AutoModelForCausalLM.from_pretrained(
    work["base"], dtype=getattr(torch, work["dtype"])
)
model = model.to(work["device"]).eval()
ids = torch.tensor(work["prompts"], device=work["device"])
way = (
    {"do_sample": False}
    if work["temperature"] == 0
    else {"do_sample": True, "temperature": work["temperature"], "top_k": 0, "top_p": 1.0}
)
seconds = []
for _ in range(1 + work["repeats"]):  # the first warms up
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            use_cache=True,
            **way,
            pad_token_id=0,
            eos_token_id=None,
            max_new_tokens=work["new"],
            min_new_tokens=work["new"],
        )
    answers = out[:, ids.shape[1] :].tolist()
    seconds.append(time.perf_counter() - began)
print(
    json.dumps(
        {
            "seconds": seconds[1:],
            "answers": answers,
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        }
    )
)
