"""Disk, processes and the command line. Nothing of the papers is here, and nothing here imports the rest.

Read `files` first: a file is written whole or not at all, except logs and episodes, which grow. `tensors` does the
same for safetensors; `result_file` reads both formats of result.json. `run_folder` is what a training leaves on the
disk and how it continues after a kill; `tracking` copies its numbers to a tracker. `processes` makes several
processes under torchrun one run; `threads` decides how threads wait. `command_line` turns flags and a TOML file
into a dataclass, whose types say which values are allowed (`ranges`). `needed` says which packages are missing, and
`errors` shortens an error to one line.
"""
