"""envs/web."""
