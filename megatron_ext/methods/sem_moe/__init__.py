"""Sem-MoE: experts, samples and tokens that belong together on one rank.

    sem_moe.py    strategy `sem_moe`: no replicas
    learn.py      experts and samples clustered, from recorded routes
    semantics.py  what was learned, as a value and as a file
    samples.py    samples to the ranks that have the experts they choose
    tokens.py     tokens to the ranks that probably have their experts
    attach.py     hooks that do so around Megatron's MoE layers; imports Megatron
    savings.py    what dealing tokens would save on recorded choices

A checkpoint's experts are moved by `checkpoints_tools`.
"""
