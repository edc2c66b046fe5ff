"""Is the agent better, and what did it do?

Read `success` first: from episodes to rates with intervals and comparisons; `table` prints them, and
`circumstances` says when, where and by which code. `evaluate` plays held-out instances and calls the rest.
`report` writes one HTML file; its scripts (`report*.js`) draw it. `replay` collects what the report shows
besides numbers: pictures of episodes, and pairs token by token. `publish` writes an adapter and its base as one
model (`gguf_out`: for llama.cpp), or uploads to the hub.
"""
