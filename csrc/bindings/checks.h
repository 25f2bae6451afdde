// Checks of what the ops and the native classes are given, for host and device alike. Each failed
// check is a ValueError that names the argument, its value and the rule. What tensors on a GPU hold
// is trusted: to look at it, the host would have to wait.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "megatron_ext/api.h"
#include "megatron_ext/exchange.h"
#include "megatron_ext/row_table.h"

namespace megatron_ext {

using at::Tensor;

inline void check_number(const char* name, int64_t number, int64_t least, int64_t most) {
    TORCH_CHECK_VALUE(number >= least && number <= most,
                      name,
                      " (",
                      number,
                      ") must be from ",
                      least,
                      " to ",
                      most);
}

inline void check_length(const char* name, size_t length, size_t expected) {
    TORCH_CHECK_VALUE(length == expected, name, " must be ", expected, " here, got ", length);
}

// What a tensor is, for messages.
inline std::string kind_of(const Tensor& tensor) {
    const bool strided = tensor.layout() == at::kStrided;
    return c10::str(strided && tensor.is_contiguous() ? "" : "non-contiguous ",
                    tensor.scalar_type(),
                    " ",
                    tensor.sizes(),
                    " on ",
                    tensor.device());
}

// Whether it is memory that may be read and written from its first element on.
inline bool is_memory(const Tensor& tensor, at::ScalarType type, at::Device device) {
    return tensor.layout() == at::kStrided && tensor.scalar_type() == type &&
           tensor.device() == device && tensor.is_contiguous();
}

// The bits of all words together: no less than the largest of them, and negative if one is. Eight
// at a time, because one after the other would wait for each other.
inline int64_t bits_of(const int64_t* words, int64_t count) {
    int64_t bits[8] = {};
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        for (int lane = 0; lane < 8; ++lane) bits[lane] |= words[i + lane];
    }
    for (; i < count; ++i) bits[0] |= words[i];
    for (int lane = 1; lane < 8; ++lane) bits[0] |= bits[lane];
    return bits[0];
}

// Assignments in memory of the host, whose sum has to fit.
inline void check_counts(const char* name, const int64_t* counts, int64_t count) {
    const int64_t bits = bits_of(counts, count);
    if (bits >= 0 && bits <= INT64_MAX / std::max<int64_t>(count, 1)) return;
    __int128 sum = 0;
    for (int64_t i = 0; i < count; ++i) {
        TORCH_CHECK_VALUE(
            counts[i] >= 0, name, " must have assignments of 0 or more, got ", counts[i]);
        sum += counts[i];
    }
    TORCH_CHECK_VALUE(sum <= INT64_MAX,
                      name,
                      " must have assignments whose sum fits int64, got a sum of ",
                      static_cast<double>(sum));
}

// A load [R, E], or a batch of loads that follow each other.
inline void check_load(const Tensor& loads) {
    const int64_t pairs = loads.size(-2) * loads.size(-1);
    const auto* const first = loads.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < loads.numel(); i += pairs) check_counts("load", first + i, pairs);
}

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
    return is_memory(main, at::kByte, slots.device()) && slots.scalar_type() == at::kByte &&
           main.dim() == 1 && slots.dim() == 2 && main.size(0) < slots.size(1);
}

// A row that a table takes.
inline void check_row(const Tensor& row, at::Device device, const RowTable& table) {
    TORCH_CHECK(table.num_ranks > 0, "gather needs a table of rows: call set_table() first");
    TORCH_CHECK_VALUE(
        is_memory(row, at::kLong, device) && row.dim() == 1 && row.numel() <= table.num_words,
        "row must be contiguous int64 of at most ",
        table.num_words,
        " words on ",
        device,
        ", got ",
        kind_of(row));
}

// Memory for the rows of all ranks: `into`, on the row's device or pinned, or new memory.
inline Tensor rows_for(const Tensor& row,
                       const RowTable& table,
                       const std::optional<Tensor>& into) {
    if (!into.has_value()) {
        return at::empty({table.num_ranks, row.numel()}, row.options());
    }
    TORCH_CHECK_VALUE(is_memory(*into, at::kLong, into->device()) &&
                          into->numel() == table.num_ranks * row.numel() &&
                          (into->device() == row.device() || into->is_pinned()),
                      "into must be contiguous int64 [",
                      table.num_ranks * row.numel(),
                      "] on ",
                      row.device(),
                      " or pinned, got ",
                      kind_of(*into));
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
    TORCH_CHECK_VALUE(ranks <= kMaxRanks && experts <= kMaxExperts,
                      "there must be at most ",
                      kMaxRanks,
                      " ranks and ",
                      kMaxExperts,
                      " experts, got R = ",
                      ranks,
                      " and E = ",
                      experts);
}

// Slots of a rank in domains of so many ranks.
inline void check_num_slots(int64_t num_slots, int64_t ranks, int64_t domain) {
    const auto exact = std::sqrt(static_cast<double>(INT32_MAX) / static_cast<double>(domain));
    check_number(
        "num_slots", num_slots, 0, std::min(kMaxReplicas / ranks, static_cast<int64_t>(exact)));
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
    TORCH_CHECK_VALUE(nvlink_domain >= 1 && ranks % nvlink_domain == 0,
                      "nvlink_domain (",
                      nvlink_domain,
                      ") must divide R (",
                      ranks,
                      ")");
    check_num_slots(num_slots, ranks, nvlink_domain);
    check_number("tolerance_ppm", tolerance_ppm, 0, kMaxTolerancePpm);
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
        TORCH_CHECK_VALUE(
            ppm[i] >= 0 && ppm[i] <= kMaxTolerancePpm && (i == 0 || ppm[i] < ppm[i - 1]),
            "tolerances_ppm must be from 0 to ",
            kMaxTolerancePpm,
            " and go from loose to tight, got ",
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
    if (source_rank.has_value()) check_number("source_rank", *source_rank, 0, load.size(0) - 1);
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
    check_num_slots(slots.size(1), load.size(0), 1);
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

// The last column of what was `gathered` [R * T, any]; `difference` [2 + R * T] is where the host
// reads it.
inline Seals seals_of(const Tensor& gathered, int64_t layer, const Tensor& difference) {
    TORCH_CHECK_VALUE(is_memory(gathered, at::kLong, gathered.device()) && gathered.dim() == 2 &&
                          gathered.size(1) >= 1,
                      "gathered must be contiguous int64 [R * T, 1 or more], got ",
                      kind_of(gathered));
    TORCH_CHECK_VALUE(
        is_memory(difference, at::kLong, at::kCPU) && difference.numel() == 2 + gathered.size(0),
        "difference must be contiguous int64 [",
        2 + gathered.size(0),
        "] on the CPU, got ",
        kind_of(difference));
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
    check_number("top_k", top_k, 1, routing_map.size(1));
    return {routing_map.size(0), routing_map.size(1), source_quota.size(1), top_k};
}

// What `assign` has found wrong.
inline void check_assigned(bool agree,
                           const AssignProblem& problem,
                           const int64_t* source_quota,
                           const int64_t* physical_index) {
    if (agree) return;
    for (int64_t i = 0; i < problem.num_experts * problem.num_ranks; ++i) {
        if (source_quota[i] == 0) continue;
        TORCH_CHECK_VALUE(source_quota[i] > 0,
                          "source_quota must be >= 0, got ",
                          source_quota[i],
                          " of expert ",
                          i / problem.num_ranks);
        TORCH_CHECK_VALUE(physical_index[i] >= 0 && physical_index[i] <= INT32_MAX,
                          "physical_index must be from 0 to ",
                          INT32_MAX,
                          " where source_quota is not 0, got ",
                          physical_index[i],
                          " of expert ",
                          i / problem.num_ranks);
    }
    TORCH_CHECK(false,
                "routing_map and source_quota count different assignments: not the same "
                "microbatch, or a token has more than top_k (",
                problem.top_k,
                ") choices");
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
inline void check_place_back(const Tensor& values,
                             const Tensor& logical,
                             const Tensor& physical,
                             int64_t num_experts) {
    check_values(values);
    check_number("num_experts", num_experts, 1, kMaxExperts);
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

// A time limit of waits, as double and in nanoseconds.
inline void check_timeout(double timeout_s) {
    constexpr double kMost = 9e9;  // nearly 2^63 nanoseconds
    TORCH_CHECK_VALUE(timeout_s > 0 && timeout_s <= kMost,
                      "timeout_s (",
                      timeout_s,
                      ") must be above 0 and at most ",
                      kMost,
                      " seconds");
}

// A generation to go on behind, once what was under way is aborted. The last one used is
// `aborted_at`, if there was an abort.
inline void check_restart(int64_t generation, std::optional<int64_t> aborted_at) {
    TORCH_CHECK(aborted_at.has_value(), "restart must follow abort");
    check_number("generation", generation, *aborted_at, kMaxGeneration);
}

inline RowTable row_table(int64_t num_ranks, int64_t num_words) {
    check_number("num_ranks", num_ranks, 1, kMaxRanks);
    check_number("num_words", num_words, 1, int64_t{1} << 40);
    return {num_ranks, num_words};
}

// `segments` are ids of the `slots` that were added, for each part of an expert. Returns how many
// slots a rank has: all of them the same; 0 of none.
inline int64_t check_segments(const std::vector<int64_t>& segments,
                              const std::vector<Tensor>& slots) {
    for (const int64_t segment : segments) {
        TORCH_CHECK_VALUE(segment >= 0 && segment < static_cast<int64_t>(slots.size()),
                          "segments must be ids of the ",
                          slots.size(),
                          " that were added, got ",
                          segment);
        TORCH_CHECK_VALUE(slots[segment].size(0) == slots[segments.front()].size(0),
                          "segments must have equally many slots, got ",
                          slots[segments.front()].size(0),
                          " and ",
                          slots[segment].size(0));
    }
    return segments.empty() ? 0 : slots[segments.front()].size(0);
}

// A plan's slots, int32 [R, S].
inline void check_slots(const Tensor& slots,
                        int64_t num_ranks,
                        int64_t num_slots,
                        at::Device device) {
    TORCH_CHECK_VALUE(is_memory(slots, at::kInt, device) && slots.dim() == 2 &&
                          slots.size(0) == num_ranks && slots.size(1) == num_slots,
                      "slots must be contiguous int32 [",
                      num_ranks,
                      ", ",
                      num_slots,
                      "] on ",
                      device,
                      ", got ",
                      kind_of(slots));
}

// A tensor that is moved to or from a slot, or added to a slot's.
inline void check_like_slot(const char* name,
                            const Tensor& tensor,
                            const Tensor& slots,
                            at::ScalarType type) {
    const at::IntArrayRef shape = slots.sizes().slice(1);
    TORCH_CHECK_VALUE(is_memory(tensor, type, slots.device()) && tensor.sizes() == shape,
                      name,
                      " must be contiguous ",
                      type,
                      " ",
                      shape,
                      " on ",
                      slots.device(),
                      ", as its slot is, got ",
                      kind_of(tensor));
}

// The memory that the ranks of an exchange share: the regions of one use by rank, each as this
// rank's own or, of a rank that is out of reach, empty. Flags are the first and say who is.
class Reach {
  public:
    explicit Reach(int64_t rank) : rank_(rank) { check_number("rank", rank, 0, kMaxRanks - 1); }

    int64_t num_ranks() const { return static_cast<int64_t>(is_near_.size()); }

    void set_flags(const std::vector<Tensor>& by_rank) {
        TORCH_CHECK(is_near_.empty(), "the flags are set already");
        TORCH_CHECK_VALUE(static_cast<int64_t>(by_rank.size()) > rank_ &&
                              static_cast<int64_t>(by_rank.size()) <= kMaxRanks,
                          "flags must be of more ranks than rank (",
                          rank_,
                          ") and at most ",
                          kMaxRanks,
                          ", got ",
                          by_rank.size());
        std::vector<bool> is_near;
        for (const Tensor& each : by_rank) is_near.push_back(each.numel() > 0);
        const auto bytes = static_cast<int64_t>(sizeof(SlotFlags));
        TORCH_CHECK_VALUE(is_near[rank_] && by_rank[rank_].numel() % bytes == 0,
                          "flags must be ",
                          bytes,
                          " bytes for each slot, got ",
                          kind_of(by_rank[rank_]));
        check_regions("flags", by_rank, is_near, at::kByte);
        is_near_ = std::move(is_near);
    }

    void check_segment(const std::vector<Tensor>& by_rank, int64_t most_slots) const {
        check_length("slot buffers", by_rank.size(), is_near_.size());
        const Tensor& mine = by_rank[rank_];
        TORCH_CHECK_VALUE(
            mine.dim() >= 1 && mine.size(0) >= 1 && mine.size(0) <= most_slots && mine.numel() > 0,
            "a slot buffer must have 1 to ",
            most_slots,
            " slots with elements, got ",
            mine.sizes());
        check_regions("slot buffer", by_rank, is_near_, mine.scalar_type());
    }

    // Of the table of rows, where each rank waits for all.
    void check_table(const std::vector<Tensor>& by_rank, const RowTable& table) const {
        check_length("tables", by_rank.size(), is_near_.size());
        TORCH_CHECK_VALUE(by_rank[rank_].numel() == table.bytes(),
                          "a table must be ",
                          table.bytes(),
                          " bytes, got ",
                          kind_of(by_rank[rank_]));
        check_regions("table", by_rank, std::vector<bool>(is_near_.size(), true), at::kByte);
    }

    // Another rank, and a slot of it or of this rank.
    void check(const char* name, const Place& place, int64_t num_slots) const {
        TORCH_CHECK_VALUE(place.rank >= 0 && place.rank < num_ranks() && place.rank != rank_ &&
                              is_near_[place.rank],
                          name,
                          " must name other ranks in reach of rank ",
                          rank_,
                          ", below ",
                          num_ranks(),
                          ", got rank ",
                          place.rank);
        TORCH_CHECK_VALUE(place.slot >= 0 && place.slot < num_slots,
                          name,
                          " must name slots from 0 to ",
                          num_slots - 1,
                          ", got slot ",
                          place.slot);
    }

    // Places in a list of ranks and slots: `count` of them from `first` on, or all.
    std::vector<Place> places(const char* name,
                              const std::vector<int64_t>& flat,
                              int64_t num_slots,
                              size_t first,
                              int64_t count) const {
        const auto left = static_cast<int64_t>(flat.size() - first);
        TORCH_CHECK_VALUE(count >= 1 && count <= left / 2,
                          name,
                          " must have 1 or more ranks and slots behind their number, got the "
                          "number ",
                          count,
                          " and ",
                          left,
                          " behind it");
        std::vector<Place> found;
        for (size_t i = first; i < first + 2 * static_cast<size_t>(count); i += 2) {
            found.push_back({flat[i], flat[i + 1]});
            check(name, found.back(), num_slots);
        }
        return found;
    }
    std::vector<Place> places(const char* name,
                              const std::vector<int64_t>& flat,
                              int64_t num_slots) const {
        TORCH_CHECK_VALUE(
            flat.size() % 2 == 0, name, " must be ranks and slots, got ", flat.size(), " numbers");
        if (flat.empty()) return {};
        return places(name, flat, num_slots, 0, static_cast<int64_t>(flat.size()) / 2);
    }

  private:
    void check_regions(const char* name,
                       const std::vector<Tensor>& by_rank,
                       const std::vector<bool>& is_near,
                       at::ScalarType type) const {
        const Tensor& mine = by_rank[rank_];
        for (size_t r = 0; r < by_rank.size(); ++r) {
            const Tensor& each = by_rank[r];
            TORCH_CHECK_VALUE(is_near[r] || each.numel() == 0,
                              name,
                              " of rank ",
                              r,
                              " must be empty, as the rank is out of reach, got ",
                              kind_of(each));
            if (!is_near[r]) continue;
            TORCH_CHECK_VALUE(
                is_memory(each, type, at::kCPU) && each.sizes() == mine.sizes() &&
                    reinterpret_cast<uintptr_t>(each.const_data_ptr()) % alignof(SlotFlags) == 0,
                name,
                " of rank ",
                r,
                " must be contiguous ",
                type,
                " ",
                mine.sizes(),
                " on the CPU, aligned to ",
                alignof(SlotFlags),
                " bytes, got ",
                kind_of(each));
        }
    }

    const int64_t rank_;
    std::vector<bool> is_near_;  // [R]; none before the flags are set
};

}  // namespace megatron_ext
