"""A decoder by hand and the text around it. Read it in this order:

decoder      Qwen2, Qwen3 and Llama: embedding, attention, SwiGLU, under the checkpoint's own names
head         log-probs of tokens without ever holding all logits
scalar_head  a reward or a value off a hidden state
attention    softmax(q·kᵀ/√D + mask)·v by PyTorch's kernel, or in blocks
kvcache      the keys and values of what was read already
template     a model's own chat template, asked what it writes around messages
chat         messages to token ids, and which of them the agent wrote
guesses      what an answer may say next
sampling     answers to many prompts at once; step_graphs makes each of its steps one launch on a GPU
checkpoint   models from the hub or a folder, and back to disk; those of llama.cpp by gguf_file and ggml
"""
