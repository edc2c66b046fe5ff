"""Data: from what happened on pages to what a training step reads.

Read in this order: `episodes` (one record for demonstrations, rollouts and evaluations), `prompt` (an episode
as the conversation that the model reads), `pairs` (which episode is preferred to which, and where a pair is
cut), `tree` (episodes with a common beginning as one row), `batch` (trees as tensors, and the weights W of
every score). `selection` chooses what is imitated, `values` says how good a step was, `curriculum` which tasks
to explore more, `information` whether answers depend on the task, `interval` how sure a share is; `trl_files`
reads and writes preferences as TRL keeps them, `row_keys` says which of their other keys may be ignored.
"""
