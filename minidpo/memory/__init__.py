"""Making a model fit: less memory for weights, optimizer and activations, and a plan that says how much.

In this order: `lora` trains thin maps beside a `frozen` base, which `nf4` (on a GPU with `nf4_cuda`) holds in
four bits a weight and `ggml_matrix` in a GGUF file's blocks; `quantised` makes it from a checkpoint larger
than memory. For backward `recompute` keeps blocks' inputs only, `depth_first` a path of a tree; `adamw8bit`
holds moments in a byte each. Two save time on a CPU: `packing` lays weights out for its kernels, `int8` holds
them in a byte each for one conversation at a time. `machine` holds the options that choose among them; `plan` counts what a step takes before a weight
is read, `advice` says whether that fits and what would help, `plan_print` prints both;
`loading` opens the model. `context` is what all stages of a run share: model, machine, world and seed.
"""
