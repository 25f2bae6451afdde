"""Sem-MoE: experts, samples and tokens that belong together on one rank."""
