"""The field: methods of papers, one folder each. The plug-in balances a model without them.

The methods depend on the plug-in's rooms and on `files/` and `data/`. Nothing of the plug-in
depends on them: `balance/strategies` reads the table of strategies below if this folder is there,
and imports a strategy's module when the strategy is used. `mcore/spec.py` does the same with
layers, `mcore/limits.py` with their rules, and the training program with the hooks of a run.
"""

STRATEGIES = {
    "quota_paper": "megatron_ext.methods.ultraep_paper.quota_paper:QUOTA_PAPER",
    "quota_shipped": "megatron_ext.methods.ultraep_paper.quota_shipped:QUOTA_SHIPPED",
    "eplb": "megatron_ext.methods.eplb.eplb:EPLB",
    "eplb_exact": "megatron_ext.methods.eplb.eplb:EPLB_EXACT",
    "lplb": "megatron_ext.methods.lplb.lplb:LPLB",
    "llep": "megatron_ext.methods.llep.llep:LLEP",
    "moonep": "megatron_ext.methods.moonep.moonep:MOONEP",
    "taot": "megatron_ext.methods.taot.taot:TAOT",
    "craft": "megatron_ext.methods.craft.craft:CRAFT",
    "libra": "megatron_ext.methods.libra.libra:LIBRA",
    "libra_paper": "megatron_ext.methods.libra.libra_paper:LIBRA_PAPER",
    "sem_moe": "megatron_ext.methods.sem_moe.semantics:SEM_MOE",
}
"""Module and constant of each `Strategy`, by its name."""

LAYERS = {
    "libra": "megatron_ext.methods.libra.lookahead:LookaheadMoELayer",
    "libra_paper": "megatron_ext.methods.libra.lookahead:LookaheadMoELayer",
    "local_first": "megatron_ext.methods.libra.local_first:LocalFirstMoELayer",
}
"""Module and class of balanced layers that a method brings, by strategy or setting of `balance`."""

LIMITS = {
    "libra": "megatron_ext.methods.libra.limits:TO_PREDICT",
    "libra_paper": "megatron_ext.methods.libra.limits:TO_PREDICT",
    "local_first": "megatron_ext.methods.libra.limits:LOCAL_FIRST",
}
"""Module and constant of the rules that these layers add to `mcore/limits.py`."""

RUN_HOOKS = {
    "affinity": "megatron_ext.methods.sem_moe.hooks:SAMPLES",
    "rebatch": "megatron_ext.methods.sem_moe.hooks:TOKENS",
}
"""Module and constant of each `RunHook`, by the setting of `data` that names the hook's file."""
