"""Agents in worlds: who answers, how an episode is played, and where it is written.

Read in this order: `jobs` (which episodes to play, and how they begin), `policies` (what an agent is asked and
how it answers), `rollout` (one policy plays many episodes at once), `collect` (write episodes to a file, also
after a kill and in several processes), `reflection` (an agent comments on its failures and tries again), `agent`
(an agent in your own program), `browse` (an agent on any page), `serve` (a chat endpoint for other programs' agents,
on `endpoint` and `answering`), `causes` (why episodes failed), `check` (whether this machine has what is needed). These modules know a world only as an `envs.protocol.World`.
"""
