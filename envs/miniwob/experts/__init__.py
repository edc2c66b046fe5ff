"""envs/miniwob/experts."""
