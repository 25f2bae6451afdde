"""Settings of Megatron that exclude Libra's two ways, beside those that exclude balancing."""

from megatron_ext.mcore.limits import SHARDS_FLAG, Demand

TO_PREDICT = (
    Demand("moe_enable_routing_replay", (False,), "the replay would record predictions as choices"),
    Demand(
        "mlp_chunks_for_training",
        (1,),
        "a layer would predict a chunk from another chunk's tokens",
    ),
    Demand(
        "overlap_moe_expert_parallel_comm",
        (False,),
        "replicas sent ahead would meet those of the other microbatch's backward",
    ),
    Demand(
        "expert_gtp_weight_remat_size",
        (1,),
        "replicas are sent in the layer before, which has not gathered the weights",
        SHARDS_FLAG,
    ),
    Demand(
        "first_last_layers_bf16",
        (False,),
        "replicas are quantized in the layer before, which may have another precision",
    ),
)
"""Rules for layers that predict the next layer's load."""

LOCAL_FIRST = (
    Demand(
        "moe_token_dispatcher_type",
        ("alltoall",),
        "only alltoall can leave own tokens on their rank",
        "set --moe-token-dispatcher-type alltoall",
    ),
    Demand("moe_pad_expert_input_to_capacity", (False,), "local_first sends no padding"),
    Demand(
        "expert_tensor_parallel_size",
        (1,),
        "every token travels to all shards of its expert, so no token stays on its rank",
        "set --expert-tensor-parallel-size 1",
    ),
    Demand(
        "expert_gtp_weight_remat_size",
        (1,),
        "experts run twice, and Megatron gathers their weights once",
        SHARDS_FLAG,
    ),
    Demand(
        "moe_shared_expert_overlap",
        (False,),
        "shared experts would overlap with the same parts of dispatch and combine",
    ),
    Demand(
        "overlap_moe_expert_parallel_comm",
        (False,),
        "Megatron's combined schedule takes the dispatched tokens as one tensor",
    ),
    Demand(
        "overlap_dispatch_backward_with_experts_wgrad",
        (False,),
        "own tokens' weight gradients come while the dispatch's backward has begun",
    ),
)
"""Rules with `balance.local_first`."""
