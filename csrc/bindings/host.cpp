// The host implementations of the ops: checks, outputs, and the call.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "megatron_ext/api.h"

namespace megatron_ext {
namespace {

using at::Tensor;

Tensor count_load_op(const Tensor& routing_map) {
    TORCH_CHECK_VALUE(routing_map.dim() == 2 && routing_map.scalar_type() == at::kBool,
                      "routing_map must be bool [N, E], got ",
                      routing_map.scalar_type(),
                      " ",
                      routing_map.sizes());
    const Tensor map = routing_map.contiguous();
    Tensor counts = at::empty({map.size(1)}, map.options().dtype(at::kLong));
    count_load(
        map.const_data_ptr<bool>(), map.size(0), map.size(1), counts.mutable_data_ptr<int64_t>());
    return counts;
}

void check_int64(const char* name, const Tensor& tensor) {
    TORCH_CHECK_VALUE(
        tensor.scalar_type() == at::kLong, name, " must be int64, got ", tensor.scalar_type());
}

void check_experts(int64_t ranks, int64_t experts) {
    TORCH_CHECK_VALUE(ranks >= 1 && experts >= ranks && experts % ranks == 0,
                      "load must have a multiple of R >= 1 experts, got R = ",
                      ranks,
                      " and E = ",
                      experts);
}

QuotaProblem quota_problem(const Tensor& load,
                           int64_t num_slots,
                           int64_t nvlink_domain,
                           int64_t tolerance_ppm,
                           int64_t min_quota) {
    check_int64("load", load);
    TORCH_CHECK_VALUE(
        load.dim() == 2 || load.dim() == 3, "load must be [R, E] or [B, R, E], got ", load.sizes());
    const int64_t ranks = load.size(-2);
    const int64_t experts = load.size(-1);
    check_experts(ranks, experts);
    TORCH_CHECK_VALUE(num_slots >= 0, "num_slots (", num_slots, ") must be >= 0");
    TORCH_CHECK_VALUE(nvlink_domain >= 1 && ranks % nvlink_domain == 0,
                      "nvlink_domain (",
                      nvlink_domain,
                      ") must divide R (",
                      ranks,
                      ")");
    TORCH_CHECK_VALUE(tolerance_ppm >= 0, "tolerance_ppm (", tolerance_ppm, ") must be >= 0");
    TORCH_CHECK_VALUE(min_quota >= 1, "min_quota (", min_quota, ") must be >= 1");
    return {ranks, experts, num_slots, nvlink_domain, tolerance_ppm, min_quota};
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
    const Tensor loads = load.contiguous();
    auto quota_shape = load.sizes().vec();
    auto slots_shape = quota_shape;
    quota_shape.end()[-2] = problem.num_experts;
    quota_shape.end()[-1] = problem.num_ranks;
    slots_shape.end()[-1] = num_slots;
    Tensor quota = at::empty(quota_shape, load.options());
    Tensor slots = at::empty(slots_shape, load.options().dtype(at::kInt));

    const int64_t batch = load.dim() == 3 ? load.size(0) : 1;
    const int64_t pairs = problem.num_ranks * problem.num_experts;
    for (int64_t b = 0; b < batch; ++b) {
        solver(problem,
               loads.const_data_ptr<int64_t>() + b * pairs,
               quota.mutable_data_ptr<int64_t>() + b * pairs,
               slots.mutable_data_ptr<int32_t>() + b * problem.num_ranks * num_slots);
    }
    return {quota, slots};
}

Tensor lower_bound_op(const Tensor& load, int64_t num_slots, int64_t nvlink_domain) {
    const QuotaProblem problem = quota_problem(load, num_slots, nvlink_domain, 0, 1);
    const Tensor loads = load.contiguous();
    Tensor bounds = at::empty(load.sizes().slice(0, load.dim() - 2), load.options());
    for (int64_t b = 0; b < bounds.numel(); ++b) {
        bounds.mutable_data_ptr<int64_t>()[b] = lower_bound(
            problem, loads.const_data_ptr<int64_t>() + b * problem.num_ranks * problem.num_experts);
    }
    return bounds;
}

Tensor split_quota_op(const Tensor& load, const Tensor& quota, std::optional<int64_t> source_rank) {
    check_int64("load", load);
    check_int64("quota", quota);
    TORCH_CHECK_VALUE(load.dim() == 2 && quota.dim() == 2 && quota.size(0) == load.size(1) &&
                          quota.size(1) == load.size(0),
                      "load must be [R, E] and quota [E, R], got ",
                      load.sizes(),
                      " and ",
                      quota.sizes());
    const int64_t ranks = load.size(0);
    const int64_t experts = load.size(1);
    check_experts(ranks, experts);
    const Tensor loads = load.contiguous();
    const Tensor quotas = quota.contiguous();
    const auto fill = [&](int64_t source, int64_t* split) {
        split_quota(ranks,
                    experts,
                    loads.const_data_ptr<int64_t>(),
                    quotas.const_data_ptr<int64_t>(),
                    source,
                    split);
    };

    if (source_rank.has_value()) {
        TORCH_CHECK_VALUE(*source_rank >= 0 && *source_rank < ranks,
                          "source_rank (",
                          *source_rank,
                          ") must be a rank of the EP group, 0 to ",
                          ranks - 1);
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

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_IMPL(megatron_ext, CPU, m) {
    m.impl("count_load", &megatron_ext::count_load_op);
    m.impl("solve_quota", &megatron_ext::solve_op<megatron_ext::solve_quota>);
    m.impl("solve_paper", &megatron_ext::solve_op<megatron_ext::solve_paper>);
    m.impl("lower_bound", &megatron_ext::lower_bound_op);
    m.impl("split_quota", &megatron_ext::split_quota_op);
}
