"""Making a model fit: less memory for weights, optimizer and activations, and a plan that says how much.

In this order: `lora` trains thin maps beside a frozen base; `nf4` holds the base in four bits a weight, and
`quantised` makes such a model from a checkpoint larger than memory; `recompute` keeps only the blocks' inputs
for backward; `adamw8bit` holds the optimizer's moments in a byte each. `packing` costs memory and saves time:
it lays out weights for a CPU's kernels. `machine` holds the options that choose among them, with device and
dtype; `plan` counts what a step takes before a weight is read; `loading` opens the model.
"""
