"""Agents in worlds: who answers, how an episode is played, and where it is written.

Read in this order: `policies` (what an agent is asked and what it answers), `rollout` (one policy plays many
episodes at once), `collect` (episodes to a file, also after a kill and in several processes), `browse` (an
agent on any page), `make_nano` (the shipped model, from the experts' episodes). Only this package, with
`results/replay` and `loop`, names a world.
"""
