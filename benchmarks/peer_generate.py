"""The other sides of generate.py, in a Python that has transformers or xllamacpp: one JSON line.

transformers: `generate` on the same checkpoint. llamacpp: its server answers all prompts at once, a slot for each.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version


def transformers_answers(work):
    """A function that answers so many prompts with so many tokens each."""
    import torch
    import transformers

    torch.set_num_threads(work["threads"])
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        work["base"], dtype=getattr(torch, work["dtype"])
    )
    model = model.to(work["device"]).eval()
    way = {"do_sample": False}
    if work["temperature"]:
        way = {"do_sample": True, "temperature": work["temperature"], "top_k": 0, "top_p": 1.0}

    def answer(prompts, new):
        ids = torch.tensor(prompts, device=work["device"])
        length = {"max_new_tokens": new, "min_new_tokens": new}
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True,
                pad_token_id=0, eos_token_id=None, **way, **length,
            )  # fmt: skip
        return out[:, ids.shape[1] :].tolist()

    return answer


def llamacpp_answers(work):
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = work["gguf"]
    params.n_parallel = len(work["prompts"])
    params.n_ctx = params.n_parallel * 256  # a prompt of 192 tokens and 48 new ones
    params.n_batch = params.n_ubatch = 2048
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = work["threads"]
    params.n_gpu_layers, params.verbosity = 0, -1
    params.warmup, params.cont_batching, params.cache_prompt = False, True, False
    server = xllamacpp.Server(params)
    pool = ThreadPoolExecutor(params.n_parallel)

    def answer(prompts, new):
        def one(ids):
            said = server.handle_completions(
                {
                    "prompt": ids,
                    "max_tokens": new,
                    "temperature": work["temperature"],
                    "ignore_eos": True,
                    "cache_prompt": False,
                }
            )
            assert said["usage"]["completion_tokens"] == new, said["usage"]

        return list(pool.map(one, prompts))

    return answer


side, work = sys.argv[1], json.loads(sys.argv[2])
sides = {
    "transformers": (transformers_answers, ("transformers", "torch")),
    "llamacpp": (llamacpp_answers, ("xllamacpp",)),
}
make, packages = sides[side]
answer, seconds = make(work), []
answer([work["prompts"][0][:9]], 2)  # warms up
for _ in range(work["repeats"]):
    began = time.perf_counter()
    answers = answer(work["prompts"], work["new"])
    seconds.append(time.perf_counter() - began)
versions = {name: version(name) for name in packages}
print("\n" + json.dumps({"seconds": seconds, "answers": answers, "versions": versions}))
