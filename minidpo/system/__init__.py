"""Disk, processes and the command line: nothing of the paper is here, and nothing here imports the rest.

Read `files` first: a file is written whole or not at all, but for logs and episodes, which grow. `tensors`
does the same for safetensors, `result_file` knows both formats of result.json. `run_folder` is what a
training leaves behind, and how it goes on after a kill; `tracking` copies its numbers to a tracker.
`processes` makes several processes under torchrun one run, `threads` says how threads wait. `command_line` turns flags and a TOML file into
a dataclass, whose types say what values are allowed (`ranges`); `needed` says which packages are missing,
`errors` what an error says.
"""
