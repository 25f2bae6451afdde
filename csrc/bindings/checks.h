// Checks of the ops' arguments, for host and device alike. Each failed check is a ValueError that
// names the argument, its value and the rule.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <optional>
#include <vector>

#include "megatron_ext/api.h"
#include "megatron_ext/row_table.h"

namespace megatron_ext {

using at::Tensor;

inline void check_int64(const char* name, const Tensor& tensor) {
    TORCH_CHECK_VALUE(
        tensor.scalar_type() == at::kLong, name, " must be int64, got ", tensor.scalar_type());
}

// The type that a total must have, where it has `type`: the gradients', or float32 for bfloat16.
inline at::ScalarType total_type(at::ScalarType type, at::ScalarType of_grads) {
    return type == of_grads || of_grads != at::kBFloat16 ? of_grads : at::kFloat;
}

// Whether a main is bytes that fill the start of a slot: a part of a quantized weight, which may be
// shorter in one direction than in the other.
inline bool is_shorter(const Tensor& main, const Tensor& slots) {
    return main.scalar_type() == at::kByte && slots.scalar_type() == at::kByte &&
           main.is_contiguous() && main.device() == slots.device() && main.dim() == 1 &&
           slots.dim() == 2 && main.size(0) < slots.size(1);
}

// A row that a table takes.
inline void check_row(const Tensor& row, at::Device device, const RowTable& table) {
    TORCH_CHECK_VALUE(row.dim() == 1 && row.scalar_type() == at::kLong && row.is_contiguous() &&
                          row.device() == device && row.numel() <= table.num_words,
                      "row must be contiguous int64 of at most ",
                      table.num_words,
                      " words on ",
                      device,
                      ", got ",
                      row.scalar_type(),
                      " ",
                      row.sizes(),
                      " on ",
                      row.device());
}

// Memory for the rows of all ranks: `into`, on the row's device or pinned, or new memory.
inline Tensor rows_for(const Tensor& row,
                       const RowTable& table,
                       const std::optional<Tensor>& into) {
    if (!into.has_value()) {
        return at::empty({table.num_ranks, row.numel()}, row.options());
    }
    TORCH_CHECK_VALUE(into->numel() == table.num_ranks * row.numel() &&
                          into->scalar_type() == at::kLong && into->is_contiguous() &&
                          (into->device() == row.device() || into->is_pinned()),
                      "into must be contiguous int64 [",
                      table.num_ranks * row.numel(),
                      "] on ",
                      row.device(),
                      " or pinned, got ",
                      into->scalar_type(),
                      " ",
                      into->sizes(),
                      " on ",
                      into->device());
    return *into;
}

inline void check_routing_map(const Tensor& routing_map) {
    TORCH_CHECK_VALUE(routing_map.dim() == 2 && routing_map.scalar_type() == at::kBool,
                      "routing_map must be bool [N, E], got ",
                      routing_map.scalar_type(),
                      " ",
                      routing_map.sizes());
}

// Counts [E], with room for the `tail` [1] of a message behind them.
inline Tensor empty_counts(const Tensor& routing_map, const std::optional<Tensor>& tail) {
    if (tail.has_value()) {
        check_int64("tail", *tail);
        TORCH_CHECK_VALUE(tail->numel() == 1 && tail->device() == routing_map.device(),
                          "tail must be one number on ",
                          routing_map.device(),
                          ", got ",
                          tail->sizes(),
                          " on ",
                          tail->device());
    }
    return at::empty({routing_map.size(1) + (tail.has_value() ? 1 : 0)},
                     routing_map.options().dtype(at::kLong));
}

inline void check_experts(int64_t ranks, int64_t experts) {
    TORCH_CHECK_VALUE(ranks >= 1 && experts >= ranks && experts % ranks == 0,
                      "load must have a multiple of R >= 1 experts, got R = ",
                      ranks,
                      " and E = ",
                      experts);
}

inline QuotaProblem quota_problem(const Tensor& load,
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

inline Tolerances tolerances_of(at::IntArrayRef ppm) {
    const auto count = static_cast<int64_t>(ppm.size());
    TORCH_CHECK_VALUE(count >= 1 && count <= Tolerances::kMost,
                      "tolerances_ppm must be 1 to ",
                      int{Tolerances::kMost},
                      " tolerances, got ",
                      count);
    Tolerances tolerances{{}, count};
    for (int64_t i = 0; i < count; ++i) {
        TORCH_CHECK_VALUE(ppm[i] >= 0 && (i == 0 || ppm[i] < ppm[i - 1]),
                          "tolerances_ppm must be >= 0 and go from loose to tight, got ",
                          ppm);
        tolerances.ppm[i] = ppm[i];
    }
    return tolerances;
}

inline LayerCosts layer_costs(int64_t expert_ps, int64_t token_ps, int64_t assignment_ps) {
    TORCH_CHECK_VALUE(expert_ps >= 0, "expert_ps (", expert_ps, ") must be >= 0");
    TORCH_CHECK_VALUE(token_ps >= 0, "token_ps (", token_ps, ") must be >= 0");
    TORCH_CHECK_VALUE(assignment_ps >= 0, "assignment_ps (", assignment_ps, ") must be >= 0");
    return {expert_ps, token_ps, assignment_ps};
}

// Empty quota and slots for the loads, a batch or one; with a number of tolerances, [..., T, E, R]
// and [..., T, R, S].
inline std::tuple<Tensor, Tensor> empty_plan(const Tensor& load,
                                             const QuotaProblem& problem,
                                             std::optional<int64_t> num_tolerances = {}) {
    auto quota_shape = load.sizes().vec();
    if (num_tolerances.has_value()) quota_shape.insert(quota_shape.end() - 2, *num_tolerances);
    auto slots_shape = quota_shape;
    slots_shape.end()[-2] = problem.num_ranks;
    quota_shape.end()[-2] = problem.num_experts;
    quota_shape.end()[-1] = problem.num_ranks;
    slots_shape.end()[-1] = problem.num_slots;
    return {at::empty(quota_shape, load.options()),
            at::empty(slots_shape, load.options().dtype(at::kInt))};
}

inline void check_split(const Tensor& load,
                        const Tensor& quota,
                        std::optional<int64_t> source_rank) {
    check_int64("load", load);
    check_int64("quota", quota);
    TORCH_CHECK_VALUE(load.dim() == 2 && quota.dim() == 2 && quota.size(0) == load.size(1) &&
                          quota.size(1) == load.size(0),
                      "load must be [R, E] and quota [E, R], got ",
                      load.sizes(),
                      " and ",
                      quota.sizes());
    check_experts(load.size(0), load.size(1));
    TORCH_CHECK_VALUE(
        !source_rank.has_value() || (*source_rank >= 0 && *source_rank < load.size(0)),
        "source_rank (",
        source_rank.value_or(0),
        ") must be a rank of the EP group, 0 to ",
        load.size(0) - 1);
}

// A plan, and the load that it is for.
inline void check_planned(const Tensor& load,
                          const Tensor& quota,
                          const Tensor& slots,
                          std::optional<int64_t> source_rank = {}) {
    check_split(load, quota, source_rank);
    TORCH_CHECK_VALUE(
        slots.dim() == 2 && slots.scalar_type() == at::kInt && slots.size(0) == load.size(0),
        "slots must be int32 [R, S] with R = ",
        load.size(0),
        ", got ",
        slots.scalar_type(),
        " ",
        slots.sizes());
}

// Physical experts of a rank, M + S.
inline int64_t places_of(const Tensor& load, const Tensor& slots) {
    return load.size(1) / load.size(0) + slots.size(1);
}

// What sharing a plan returns: split, physical_index, lines, arriving, arrivals.
using ShareTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Memory for the sums of `arriving` [R, M + S]; see sum_arriving().
inline Tensor arrivals_for(const Tensor& arriving) {
    return at::empty({arriving.size(0) + arriving.size(1)}, arriving.options());
}

// A load [R, E] as kernels read it, without a copy where they can: its rows may be apart.
inline Tensor with_whole_rows(const Tensor& load) {
    return load.dim() == 2 && load.stride(1) == 1 ? load : load.contiguous();
}

// What is sealed, of a load `with_whole_rows` and a plan that is contiguous.
inline SealedPlan sealed_plan(const Tensor& load, const Tensor& quota, const Tensor& slots) {
    return {load.const_data_ptr<int64_t>(),
            load.stride(0),
            load.size(1),
            quota.const_data_ptr<int64_t>(),
            slots.const_data_ptr<int32_t>(),
            load.numel(),
            slots.numel()};
}

// A gradient for each of the experts, beside the plan's slots, int32 [R, S].
inline void check_set_aside(at::TensorList main_grads,
                            const Tensor& slots,
                            at::IntArrayRef experts) {
    TORCH_CHECK_VALUE(main_grads.size() == experts.size() && slots.scalar_type() == at::kInt,
                      "set_aside must have an expert for each gradient, and int32 slots, got ",
                      main_grads.size(),
                      " gradients, ",
                      experts.size(),
                      " experts and slots of ",
                      slots.scalar_type());
    for (const Tensor& each : main_grads) {
        TORCH_CHECK_VALUE(each.is_contiguous() && each.device() == slots.device(),
                          "main_grads must be contiguous on ",
                          slots.device(),
                          ", got ",
                          each.is_contiguous() ? "" : "non-contiguous ",
                          each.sizes(),
                          " on ",
                          each.device());
    }
}

// Where the seal of a plan goes.
inline void check_seal(const Tensor& seal, at::Device device) {
    TORCH_CHECK_VALUE(
        seal.numel() == 1 && seal.scalar_type() == at::kLong && seal.device() == device,
        "seal must be one int64 on ",
        device,
        ", got ",
        seal.scalar_type(),
        " ",
        seal.sizes(),
        " on ",
        seal.device());
}

// The last column of what was `gathered` [R, any], contiguous; `difference` [2 + R] is where the
// host reads it.
inline Seals seals_of(const Tensor& gathered, int64_t layer, const Tensor& difference) {
    check_int64("gathered", gathered);
    check_int64("difference", difference);
    TORCH_CHECK_VALUE(gathered.dim() == 2 && gathered.size(1) >= 1 && gathered.is_contiguous() &&
                          difference.is_contiguous() && difference.device().is_cpu() &&
                          difference.numel() == 2 + gathered.size(0),
                      "gathered must be [R, 1 or more] and difference [2 + R] on the CPU, got ",
                      gathered.sizes(),
                      " and ",
                      difference.sizes());
    return {gathered.const_data_ptr<int64_t>() + gathered.size(1) - 1,
            gathered.size(1),
            gathered.size(0),
            layer,
            difference.mutable_data_ptr<int64_t>()};
}

inline AssignProblem assign_problem(const Tensor& routing_map,
                                    const Tensor& source_quota,
                                    const Tensor& physical_index,
                                    int64_t top_k) {
    check_routing_map(routing_map);
    check_int64("source_quota", source_quota);
    check_int64("physical_index", physical_index);
    TORCH_CHECK_VALUE(source_quota.dim() == 2 && source_quota.size(0) == routing_map.size(1) &&
                          physical_index.sizes() == source_quota.sizes(),
                      "source_quota and physical_index must be [E, R] with E = ",
                      routing_map.size(1),
                      ", got ",
                      source_quota.sizes(),
                      " and ",
                      physical_index.sizes());
    check_experts(source_quota.size(1), source_quota.size(0));
    TORCH_CHECK_VALUE(top_k >= 1 && top_k <= routing_map.size(1),
                      "top_k (",
                      top_k,
                      ") must be from 1 to the number of experts, ",
                      routing_map.size(1));
    return {routing_map.size(0), routing_map.size(1), source_quota.size(1), top_k};
}

inline void check_marks(const Tensor& marks, at::IntArrayRef shape) {
    TORCH_CHECK_VALUE(
        marks.scalar_type() == at::kInt && marks.sizes() == shape && marks.is_contiguous(),
        "marks must be what count_load gives for routing_map, int32 ",
        shape,
        ", got ",
        marks.scalar_type(),
        " ",
        marks.sizes());
}

inline void check_lines(const Tensor& lines, int64_t bytes) {
    TORCH_CHECK_VALUE(
        lines.scalar_type() == at::kByte && lines.numel() == bytes && lines.is_contiguous(),
        "lines must be what share_plan gives for source_quota, ",
        bytes,
        " bytes, got ",
        lines.scalar_type(),
        " ",
        lines.sizes());
}

inline void check_values(const Tensor& values) {
    TORCH_CHECK_VALUE(values.dim() == 2 && values.is_floating_point() &&
                          (values.element_size() == 2 || values.element_size() == 4 ||
                           values.element_size() == 8),
                      "probabilities must be floating point [N, E] of 2, 4 or 8 bytes, got ",
                      values.scalar_type(),
                      " ",
                      values.sizes());
}

// `values` [N, P] come back from where `physical` [N, K] says to where `logical` says.
inline void check_place_back(const Tensor& values, const Tensor& logical, const Tensor& physical) {
    check_values(values);
    for (const Tensor& index : {logical, physical}) {
        TORCH_CHECK_VALUE(
            index.dim() == 2 && index.scalar_type() == at::kInt && index.size(0) == values.size(0),
            "logical and physical must be int32 [N, K] with N = ",
            values.size(0),
            ", got ",
            index.scalar_type(),
            " ",
            index.sizes());
    }
    TORCH_CHECK_VALUE(logical.sizes() == physical.sizes(),
                      "logical and physical must have the same shape, got ",
                      logical.sizes(),
                      " and ",
                      physical.sizes());
}

// `placed` and `placed_map` [N, P] are written whole, from `probs` of the choices.
inline void check_placed(const Tensor& probs,
                         const Tensor& routing_map,
                         const Tensor& placed,
                         const Tensor& placed_map) {
    check_values(probs);
    TORCH_CHECK_VALUE(probs.sizes() == routing_map.sizes(),
                      "probabilities must be of the routing_map's shape, ",
                      routing_map.sizes(),
                      ", got ",
                      probs.sizes());
    TORCH_CHECK_VALUE(placed.dim() == 2 && placed.size(0) == probs.size(0) &&
                          placed.scalar_type() == probs.scalar_type() && placed.is_contiguous(),
                      "placed must be contiguous [N, P] with N = ",
                      probs.size(0),
                      " and of the probabilities' dtype, ",
                      probs.scalar_type(),
                      ", got ",
                      placed.scalar_type(),
                      " ",
                      placed.sizes());
    TORCH_CHECK_VALUE(placed_map.sizes() == placed.sizes() &&
                          placed_map.scalar_type() == at::kBool && placed_map.is_contiguous(),
                      "placed_map must be contiguous bool ",
                      placed.sizes(),
                      ", got ",
                      placed_map.scalar_type(),
                      " ",
                      placed_map.sizes());
}

}  // namespace megatron_ext
