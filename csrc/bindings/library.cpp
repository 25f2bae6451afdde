// Schemas of torch.ops.megatron_ext.*; the arguments are explained in include/megatron_ext/api.h.

#include <torch/library.h>

TORCH_LIBRARY(megatron_ext, m) {
    m.def("count_load(Tensor routing_map, Tensor? tail=None) -> (Tensor counts, Tensor marks)");
    m.def(
        "solve_quota(Tensor load, int num_slots, int nvlink_domain, int tolerance_ppm, "
        "int min_quota) -> (Tensor quota, Tensor slots)");
    m.def(
        "solve_ladder(Tensor load, int num_slots, int nvlink_domain, int[] tolerances_ppm, "
        "int min_quota) -> (Tensor quota, Tensor slots)");
    m.def(
        "solve_fastest(Tensor load, int num_slots, int nvlink_domain, int[] tolerances_ppm, "
        "int min_quota, int expert_ps, int token_ps, int assignment_ps) -> "
        "(Tensor quota, Tensor slots)");
    m.def(
        "solve_paper(Tensor load, int num_slots, int nvlink_domain, int tolerance_ppm, "
        "int min_quota) -> (Tensor quota, Tensor slots)");
    m.def(
        "solve_shipped(Tensor load, int num_slots, int nvlink_domain, int tolerance_ppm, "
        "int min_quota, int search_min_quota) -> (Tensor quota, Tensor slots)");
    m.def("lower_bound(Tensor load, int num_slots, int nvlink_domain) -> Tensor");
    m.def("split_quota(Tensor load, Tensor quota, int? source_rank) -> Tensor");
    m.def(
        "share_plan(Tensor load, Tensor quota, Tensor slots, int source_rank) -> "
        "(Tensor split, Tensor physical_index, Tensor lines, Tensor arriving, Tensor arrivals)");
    m.def(
        "share_and_seal(Tensor load, Tensor quota, Tensor slots, int source_rank, "
        "Tensor gathered, int layer, Tensor(a!) difference, Tensor(b!) seal) -> "
        "(Tensor split, Tensor physical_index, Tensor lines, Tensor arriving, Tensor arrivals)");
    m.def(
        "assign(Tensor routing_map, Tensor source_quota, Tensor physical_index, int top_k, "
        "Tensor? marks=None, Tensor? lines=None) -> (Tensor logical, Tensor physical)");
    m.def(
        "reroute(Tensor probs, Tensor routing_map, Tensor source_quota, Tensor physical_index, "
        "int top_k, Tensor? marks, Tensor? lines, Tensor(a!) placed, Tensor(b!) placed_map) -> "
        "(Tensor logical, Tensor physical)");
    m.def("set_aside(Tensor(a!)[] main_grads, Tensor slots, int[] experts) -> Tensor[]");
    m.def("place_back(Tensor grad, Tensor logical, Tensor physical, int num_experts) -> Tensor");
}
