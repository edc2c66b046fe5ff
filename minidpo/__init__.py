"""minidpo teaches a language model to operate web pages from the pages' own verdict: solved or not solved.

Read the chapters in order; each module imports only lower ones.

    I    the objective        1 scores  2 losses  3 variants
    II   the policy           4 kvcache  5 qwen2  6 pretrained  7 chat  8 sampling
    III  making it fit        9 lora  11 checkpointing
    IV   from feedback to data   14 episodes  15 pairs  16 rows  17 reference
    V    acting and learning  18 agent  19 rollout  20 trainer  21 stats  22 report  23 runs  24 config  ...

Legend of dimensions, the same in every file:
    B sequences   P pairs   T tokens   S keys (cached and new)   N turns of an episode (DMPO's paper says T)
    V vocabulary   C width   L layers   H query heads   K key/value heads   D head size   R LoRA rank
Masks are True where something counts. `logp` is in nats and summed, `mean_logp` in nats a token.
"""
