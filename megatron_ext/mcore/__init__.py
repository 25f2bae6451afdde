"""The plug-in that balances Megatron's MoE layers. Start reading in `moe_layer.py`.

    moe_layer.py            the balanced layer, stage by stage
    equipped_layer.py       what it is made of: settings, dispatcher, state
    layer_state.py          what it holds from its first forward on: slots, plans, planner, costs
    layer_report.py         what it tells its observers of a microbatch
    planning_group.py       the ranks that plan alike, and whether they do
    even_layer.py           the layer of the strategy `ideal`: even routing, forced
    between_steps.py        what is done to all layers of a model where no step is under way
    dispatcher.py           stages 5 and 7: Megatron's dispatchers over physical experts
    experts.py              stage 6: mains and slots, and the registry of kinds
    sequential_experts.py   one module for each expert (Megatron's `SequentialMLP`)
    grouped_experts.py      stacked experts, one grouped matrix product a layer
    grouped_product.py      that product, right for experts without tokens on every device
    te_experts.py           Transformer Engine's grouped experts (Megatron's `TEGroupedMLP`)
    backward.py             the transformer layer around it, whose backward waits for stage 8
    stages.py               names the stages of MoE layers in profiles, also of Megatron's own
    spec.py                 puts the balanced layer into any layer spec
    models.py               the same for all models that a program builds
    provider.py             the same for programs that hold a function of specs
    left_out.py             notices MoE layers that a program did not balance
    lines.py                says that layers are balanced, and what it brings
    lookahead.py            what a layer predicts of the next, and sends ahead
    recompute.py            how a recomputed forward finds the plan of its first pass
    schedule.py             how many plans a pipeline schedule holds
    measure.py              the costs of plans, measured on the ranks that carry them out
    timing.py               how long work takes on ranks that work together
    failures.py             a failed wait ends the step on all ranks
    in_place.py             weights that are not where they seem, gradients without a place
    place.py                where a layer's experts and slots are, and a rank among its like
    step_metrics.py         what balancing did in each step, for the logs of any program
    limits.py               settings that exclude balancing
    check.py                the same and a model's spec, for users, before anything is built

It imports Megatron, and nothing of `methods/`, `trainer/` or `lab/`.
"""
