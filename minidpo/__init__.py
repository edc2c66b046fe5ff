"""minidpo teaches a language model to operate web pages from the pages' own verdict: solved or not solved.

Read the chapters in order; each module imports only lower ones.

         before all            0 files
    I    the objective         1 scores  2 losses  3 variants
    II   the policy            4 kvcache  5 qwen2  6 pretrained  7 chat  8 sampling
    III  making it fit         9 lora  10 nf4  11 checkpointing  12 adamw8bit  13 packing  14 streaming
    IV   from feedback to data 15 episodes  16 pairs  17 tree  18 reference
    V    acting and learning   19 agent  20 rollout  21 tracking  22 runs  23 parallel  24 trainer
    VI   what came of it       25 stats  26 results  27 report
    VII  the whole circle      28 options  29 config  30 recipes  31 commandline  32 alive  33 budget
                               34 opening  35 preference  36 conversations  37 imitation  38 stages
                               39 explain  40 pretraining  41 rounds  42 exchange

Legend of dimensions, the same in every file:
    B sequences   P pairs   T tokens   S keys (cached and new)   N turns of an episode (DMPO's paper says T)
    V vocabulary   C width   L layers   H query heads   K key/value heads   D head size   R LoRA rank
Masks are True where something counts. `logp` is in nats and summed, `mean_logp` in nats a token.
"""
