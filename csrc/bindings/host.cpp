// The host implementations of the ops: they check arguments, allocate outputs, and call csrc/cpu.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "checks.h"
#include "megatron_ext/api.h"

namespace megatron_ext {
namespace {

std::tuple<Tensor, Tensor> count_load_op(const Tensor& routing_map,
                                         const std::optional<Tensor>& tail) {
    check_routing_map(routing_map);
    const Tensor map = routing_map.contiguous();
    Tensor counts = empty_counts(map, tail);
    auto* const to = counts.mutable_data_ptr<int64_t>();
    count_load(map.const_data_ptr<bool>(), map.size(0), map.size(1), to);
    if (tail.has_value()) to[map.size(1)] = *tail->const_data_ptr<int64_t>();
    // Here `assign` needs no marks.
    return {counts, at::empty({2, 0, map.size(1)}, map.options().dtype(at::kInt))};
}

// Plan each load of a batch, or the one, by `solver(load, quota, slots)`.
template <class Solver>
std::tuple<Tensor, Tensor> plan_each(const Tensor& load,
                                     const QuotaProblem& problem,
                                     std::optional<int64_t> num_tolerances,
                                     Solver solver) {
    const Tensor loads = load.contiguous();
    check_load(loads);
    auto [quota, slots] = empty_plan(load, problem, num_tolerances);
    const int64_t batch = load.dim() == 3 ? load.size(0) : 1;
    const int64_t pairs = problem.num_ranks * problem.num_experts;
    const int64_t plans = num_tolerances.value_or(1);
    for (int64_t b = 0; b < batch; ++b) {
        solver(loads.const_data_ptr<int64_t>() + b * pairs,
               quota.template mutable_data_ptr<int64_t>() + b * plans * pairs,
               slots.template mutable_data_ptr<int32_t>() +
                   b * plans * problem.num_ranks * problem.num_slots);
    }
    return {quota, slots};
}

// A solver of api.h as an op.
template <void (*solver)(const QuotaProblem&, const int64_t*, int64_t*, int32_t*)>
std::tuple<Tensor, Tensor> solve_op(const Tensor& load,
                                    int64_t num_slots,
                                    int64_t nvlink_domain,
                                    int64_t tolerance_ppm,
                                    int64_t min_quota) {
    const QuotaProblem problem =
        quota_problem(load, num_slots, nvlink_domain, tolerance_ppm, min_quota);
    return plan_each(load, problem, {}, [&](auto... pointers) { solver(problem, pointers...); });
}

std::tuple<Tensor, Tensor> solve_shipped_op(const Tensor& load,
                                            int64_t num_slots,
                                            int64_t nvlink_domain,
                                            int64_t tolerance_ppm,
                                            int64_t min_quota,
                                            int64_t search_min_quota) {
    const QuotaProblem problem =
        quota_problem(load, num_slots, nvlink_domain, tolerance_ppm, min_quota);
    TORCH_CHECK_VALUE(search_min_quota >= min_quota,
                      "search_min_quota (",
                      search_min_quota,
                      ") must be >= min_quota (",
                      min_quota,
                      ")");
    return plan_each(load, problem, {}, [&](auto... pointers) {
        solve_shipped(problem, search_min_quota, pointers...);
    });
}

std::tuple<Tensor, Tensor> solve_ladder_op(const Tensor& load,
                                           int64_t num_slots,
                                           int64_t nvlink_domain,
                                           at::IntArrayRef tolerances_ppm,
                                           int64_t min_quota) {
    const QuotaProblem problem = quota_problem(load, num_slots, nvlink_domain, 0, min_quota);
    const Tolerances tolerances = tolerances_of(tolerances_ppm);
    return plan_each(load, problem, tolerances.count, [&](auto... pointers) {
        solve_ladder(problem, tolerances, pointers...);
    });
}

std::tuple<Tensor, Tensor> solve_fastest_op(const Tensor& load,
                                            int64_t num_slots,
                                            int64_t nvlink_domain,
                                            at::IntArrayRef tolerances_ppm,
                                            int64_t min_quota,
                                            int64_t expert_ps,
                                            int64_t token_ps,
                                            int64_t assignment_ps) {
    const QuotaProblem problem = quota_problem(load, num_slots, nvlink_domain, 0, min_quota);
    const Tolerances tolerances = tolerances_of(tolerances_ppm);
    const LayerCosts costs = layer_costs(expert_ps, token_ps, assignment_ps);
    return plan_each(load, problem, {}, [&](auto... pointers) {
        solve_fastest(problem, tolerances, costs, pointers...);
    });
}

Tensor lower_bound_op(const Tensor& load, int64_t num_slots, int64_t nvlink_domain) {
    const QuotaProblem problem = quota_problem(load, num_slots, nvlink_domain, 0, 1);
    const Tensor loads = load.contiguous();
    check_load(loads);
    Tensor bounds = at::empty(load.sizes().slice(0, load.dim() - 2), load.options());
    const int64_t pairs = problem.num_ranks * problem.num_experts;
    for (int64_t b = 0; b < bounds.numel(); ++b) {
        bounds.mutable_data_ptr<int64_t>()[b] =
            lower_bound(problem, loads.const_data_ptr<int64_t>() + b * pairs);
    }
    return bounds;
}

Tensor split_quota_op(const Tensor& load, const Tensor& quota, std::optional<int64_t> source_rank) {
    check_split(load, quota, source_rank);
    const int64_t ranks = load.size(0);
    const int64_t experts = load.size(1);
    const Tensor loads = load.contiguous();
    const Tensor quotas = quota.contiguous();
    check_load(loads);
    check_counts("quota", quotas.const_data_ptr<int64_t>(), quotas.numel());
    const auto fill = [&](int64_t source, int64_t* split) {
        split_quota(ranks,
                    experts,
                    loads.const_data_ptr<int64_t>(),
                    quotas.const_data_ptr<int64_t>(),
                    source,
                    split);
    };

    if (source_rank.has_value()) {
        Tensor split = at::empty({experts, ranks}, load.options());
        fill(*source_rank, split.mutable_data_ptr<int64_t>());
        return split;
    }
    Tensor split = at::empty({ranks, experts, ranks}, load.options());
    for (int64_t r = 0; r < ranks; ++r) {
        fill(r, split.mutable_data_ptr<int64_t>() + r * experts * ranks);
    }
    return split;
}

// Lines are for kernels; here `assign` needs none.
Tensor no_lines(const Tensor& load) { return at::empty({0}, load.options().dtype(at::kByte)); }

ShareTensors share_plan_op(const Tensor& load,
                           const Tensor& quota,
                           const Tensor& slots,
                           int64_t source_rank) {
    check_planned(load, quota, slots, source_rank);
    Tensor split = split_quota_op(load, quota, source_rank);
    const Tensor held = slots.contiguous();
    Tensor ids = at::empty_like(split);
    number_instances(load.size(0),
                     load.size(1),
                     held.size(1),
                     held.const_data_ptr<int32_t>(),
                     ids.mutable_data_ptr<int64_t>());
    const Tensor loads = load.contiguous();
    const Tensor quotas = quota.contiguous();
    Tensor arriving = at::empty({load.size(0), places_of(load, held)}, load.options());
    count_arriving(load.size(0),
                   load.size(1),
                   held.size(1),
                   loads.const_data_ptr<int64_t>(),
                   quotas.const_data_ptr<int64_t>(),
                   held.const_data_ptr<int32_t>() + source_rank * held.size(1),
                   source_rank,
                   arriving.mutable_data_ptr<int64_t>());
    Tensor arrivals = arrivals_for(arriving);
    sum_arriving(arriving.size(0),
                 arriving.size(1),
                 arriving.const_data_ptr<int64_t>(),
                 arrivals.mutable_data_ptr<int64_t>());
    return {split, ids, no_lines(load), arriving, arrivals};
}

ShareTensors share_and_seal_op(const Tensor& load,
                               const Tensor& quota,
                               const Tensor& slots,
                               int64_t source_rank,
                               const Tensor& gathered,
                               int64_t layer,
                               const Tensor& difference,
                               const Tensor& seal) {
    check_seal(seal, load.device());
    const Seals before = seals_of(gathered, layer, difference);
    auto shares = share_plan_op(load, quota, slots, source_rank);
    const Tensor loads = with_whole_rows(load);
    const Tensor quotas = quota.contiguous();
    const Tensor held = slots.contiguous();
    *seal.mutable_data_ptr<int64_t>() = seal_plan(sealed_plan(loads, quotas, held), before);
    return shares;
}

std::tuple<Tensor, Tensor> assign_op(const Tensor& routing_map,
                                     const Tensor& source_quota,
                                     const Tensor& physical_index,
                                     int64_t top_k,
                                     const std::optional<Tensor>&,
                                     const std::optional<Tensor>&) {
    const AssignProblem problem = assign_problem(routing_map, source_quota, physical_index, top_k);
    const Tensor map = routing_map.contiguous();
    const Tensor quotas = source_quota.contiguous();
    const Tensor ids = physical_index.contiguous();
    const auto options = map.options().dtype(at::kInt);
    Tensor logical = at::empty({problem.num_tokens, top_k}, options);
    Tensor physical = at::empty({problem.num_tokens, top_k}, options);
    const bool agree = assign(problem,
                              map.const_data_ptr<bool>(),
                              quotas.const_data_ptr<int64_t>(),
                              ids.const_data_ptr<int64_t>(),
                              logical.mutable_data_ptr<int32_t>(),
                              physical.mutable_data_ptr<int32_t>());
    check_assigned(agree, problem, quotas.const_data_ptr<int64_t>(), ids.const_data_ptr<int64_t>());
    return {logical, physical};
}

// Values from the places that `from_index` names to those of `to_index`.
void copy_all(const Tensor& values,
              const Tensor& from_index,
              const Tensor& to_index,
              const Tensor& to) {
    const Tensor from = values.contiguous();
    const bool inside = copy_choices(static_cast<const char*>(from.const_data_ptr()),
                                     from_index.const_data_ptr<int32_t>(),
                                     from.size(1),
                                     static_cast<char*>(to.mutable_data_ptr()),
                                     to_index.const_data_ptr<int32_t>(),
                                     to.size(1),
                                     from.size(0),
                                     from_index.size(1),
                                     from.element_size());
    TORCH_CHECK_INDEX(inside,
                      "logical and physical must be below ",
                      from.size(1),
                      " and ",
                      to.size(1),
                      ", or the other way round in backward");
}

std::tuple<Tensor, Tensor> reroute_op(const Tensor& probs,
                                      const Tensor& routing_map,
                                      const Tensor& source_quota,
                                      const Tensor& physical_index,
                                      int64_t top_k,
                                      const std::optional<Tensor>& marks,
                                      const std::optional<Tensor>& lines,
                                      const Tensor& placed,
                                      const Tensor& placed_map) {
    check_routing_map(routing_map);
    check_placed(probs, routing_map, placed, placed_map);
    const auto [logical, physical] =
        assign_op(routing_map, source_quota, physical_index, top_k, marks, lines);
    copy_all(probs, logical, physical, placed);
    mark_choices(physical.const_data_ptr<int32_t>(),
                 placed.size(1),
                 physical.size(0),
                 physical.size(1),
                 placed_map.mutable_data_ptr<bool>());
    return {logical, physical};
}

Tensor place_back_op(const Tensor& grad,
                     const Tensor& logical,
                     const Tensor& physical,
                     int64_t num_experts) {
    check_place_back(grad, logical, physical, num_experts);
    Tensor back = at::empty({grad.size(0), num_experts}, grad.options());
    copy_all(grad, physical.contiguous(), logical.contiguous(), back);
    return back;
}

std::vector<Tensor> set_aside_op(at::TensorList main_grads,
                                 const Tensor& slots,
                                 at::IntArrayRef experts) {
    check_set_aside(main_grads, slots, experts);
    const Tensor held = slots.contiguous();
    const auto* const first = held.const_data_ptr<int32_t>();
    std::vector<Tensor> copies;
    for (size_t i = 0; i < main_grads.size(); ++i) {
        copies.push_back(at::empty_like(main_grads[i]));
        if (std::find(first, first + held.numel(), experts[i]) == first + held.numel()) continue;
        copies.back().copy_(main_grads[i]);
        main_grads[i].zero_();
    }
    return copies;
}

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_IMPL(megatron_ext, CPU, m) {
    m.impl("count_load", &megatron_ext::count_load_op);
    m.impl("solve_quota", &megatron_ext::solve_op<megatron_ext::solve_quota>);
    m.impl("solve_ladder", &megatron_ext::solve_ladder_op);
    m.impl("solve_fastest", &megatron_ext::solve_fastest_op);
    m.impl("solve_paper", &megatron_ext::solve_op<megatron_ext::solve_paper>);
    m.impl("solve_shipped", &megatron_ext::solve_shipped_op);
    m.impl("lower_bound", &megatron_ext::lower_bound_op);
    m.impl("split_quota", &megatron_ext::split_quota_op);
    m.impl("share_plan", &megatron_ext::share_plan_op);
    m.impl("share_and_seal", &megatron_ext::share_and_seal_op);
    m.impl("assign", &megatron_ext::assign_op);
    m.impl("reroute", &megatron_ext::reroute_op);
    m.impl("place_back", &megatron_ext::place_back_op);
    m.impl("set_aside", &megatron_ext::set_aside_op);
}
