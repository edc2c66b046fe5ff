"""minidpo teaches a language model to operate web pages from the pages' own verdict: solved or not solved.

Read the chapters in order; each module imports only lower ones.

         before all            0 files
    I    the objective         1 scores  2 losses  3 variants
    II   the policy            4 kvcache  5 qwen2  6 pretrained  7 chat  8 sampling
    III  making it fit         9 lora  11 checkpointing
    IV   from feedback to data 14 episodes  15 pairs  16 tree  17 reference
    V    acting and learning   18 agent  19 rollout  20 runs  21 trainer
    VI   what came of it       22 stats  23 results  24 report
    VII  the whole circle      25 options  26 config  27 commandline  28 preference  29 stages  30 pretraining

Legend of dimensions, the same in every file:
    B sequences   P pairs   T tokens   S keys (cached and new)   N turns of an episode (DMPO's paper says T)
    V vocabulary   C width   L layers   H query heads   K key/value heads   D head size   R LoRA rank
Masks are True where something counts. `logp` is in nats and summed, `mean_logp` in nats a token.
"""
