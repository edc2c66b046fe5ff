"""envs/miniwob/browser."""
