"""The method, on plain tensors: nothing here knows Megatron.

A microbatch passes the files in this order (numbers as in the package's map):

    layout.py         who holds which expert
    load.py       1   exact load [R, E]
    agreement.py      plans that differ between ranks are noticed
    plan.py       2   replicas and quotas, and every source rank's share of them
    strategies/       our planners, one file each, and the registry of all
    placement.py      replicas placed before the run
    planner.py        a layer's microbatches planned in order, and the layer's history
    solve.py          plans for loads, by the name of a strategy
    costs.py          what a plan costs in time
    bounds.py         lower bounds that no planner can beat, and the load that is aimed at
    reroute.py    3   logical to physical routing that meets the quotas
    main_weights.py   a rank's main experts, however their module holds them
    slots.py    4 8   a rank's slots: replicas materialized, their gradients reduced
    replicas.py 4 8   both as parts of the autograd graph
    in_flight.py      plans kept from forward to backward
    ranges.py         names of the stages in profiles
    stage_times.py    how long they take
    metrics.py        what the reported numbers mean
"""
