"""Agents in worlds: who answers, how an episode is played, and where it is written.

Read in this order: `jobs` (which episodes, and what is given at their beginning), `policies` (what an agent is
asked and what it answers), `rollout` (one policy plays many episodes at once), `collect` (episodes to a file,
also after a kill and in several processes), `agent` (one in your own program), `browse` (one on any page),
`causes` (why episodes failed), `check` (does this machine have what is needed). All of it knows worlds through
`envs.protocol.World` alone.
"""
