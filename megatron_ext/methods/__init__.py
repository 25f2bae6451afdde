"""The field: methods of papers, one folder each. The plug-in balances a model without them.

    ultraep_paper/   UltraEP's Algorithm 1 as published
    eplb/            EPLB: replicas from load history; all experts rearranged
    lplb/            LPLB: a linear program splits each load over such replicas
    llep/            LLEP: overload spills to the least loaded ranks
    moonep/          MoonEP: overloaded ranks fill others completely
    craft/           CRAFT: replicas placed before the run, by what each layer gains
    libra/           Libra: replicas from a prediction
    sem_moe/         Sem-MoE: experts, samples and tokens that belong together on one rank

The methods depend on the plug-in's rooms and on `files/` and `data/`. Nothing of the plug-in
depends on them: `balance/strategies` looks a strategy up in the table below, if this folder is
there, and imports its module when it is used. `mcore/dispatcher.py` does so with dispatchers.
"""

STRATEGIES = {
    "quota_paper": "megatron_ext.methods.ultraep_paper.quota_paper:QUOTA_PAPER",
    "eplb": "megatron_ext.methods.eplb.eplb:EPLB",
    "eplb_exact": "megatron_ext.methods.eplb.eplb_exact:EPLB_EXACT",
    "lplb": "megatron_ext.methods.lplb.lplb:LPLB",
    "llep": "megatron_ext.methods.llep.llep:LLEP",
    "moonep": "megatron_ext.methods.moonep.moonep:MOONEP",
    "craft": "megatron_ext.methods.craft.craft:CRAFT",
    "libra": "megatron_ext.methods.libra.libra:LIBRA",
    "libra_paper": "megatron_ext.methods.libra.libra_paper:LIBRA_PAPER",
    "sem_moe": "megatron_ext.methods.sem_moe.sem_moe:SEM_MOE",
}
"""Module and constant of each `Strategy`, by its name."""

DISPATCHERS = {"local_first": "megatron_ext.methods.libra.local_first:LOCAL_FIRST"}
"""Module and constant of each `DispatcherKind`, by its name."""
