"""llama.cpp's side of real_model.py: the server of `xllamacpp` answers all prompts at once, a slot for each.

Run by real_model.py in a Python that has xllamacpp; prints one JSON line.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import xllamacpp

work = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path = work["gguf"]
params.n_parallel = len(work["prompts"])
params.n_ctx = params.n_parallel * 256  # a prompt of 192 tokens and 48 new ones
params.n_batch = params.n_ubatch = 2048
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = work["threads"]
params.n_gpu_layers, params.warmup, params.cont_batching, params.cache_prompt = (
    0,
    False,
    True,
    False,
)
params.verbosity = -1
server = xllamacpp.Server(params)


def answer(ids: list[int]) -> int:
    """How many tokens it wrote."""
    said = server.handle_completions(
        {
            "prompt": ids,
            "max_tokens": work["new"],
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
    )
    return said["usage"]["completion_tokens"]


seconds = []
with ThreadPoolExecutor(params.n_parallel) as pool:
    for _ in range(1 + work["repeats"]):  # the first warms up
        began = time.perf_counter()
        written = list(pool.map(answer, work["prompts"]))
        seconds.append(time.perf_counter() - began)
        assert set(written) == {work["new"]}, f"llama.cpp wrote {written} tokens"
print(
    "\n"
    + json.dumps(
        {"seconds": seconds[1:], "answers": [], "versions": {"xllamacpp": version("xllamacpp")}}
    )
)
