"""Data: from episodes on pages to the batches of a training step.

Read in this order: `episodes` (one record for demonstrations, rollouts and evaluations), `prompt` (an episode
as the conversation that the model reads), `pairs` (which episode is preferred to which, and where a pair is
cut), `tree` (episodes with a common prefix as one row), `batch` (trees as tensors, and the weights W of every
score). `selection` chooses what is imitated, `values` estimates how good a step was, `curriculum` chooses which
tasks to explore more, `information` measures whether answers depend on the task, `interval` gives confidence
intervals. `trl_files` reads and writes TRL's files; `row_keys` decides which of their keys may be ignored.
"""
