// The CUDA implementations of the ops, on Torch's current stream. Compiled in a CUDA build only.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <vector>

#include "checks.h"
#include "megatron_ext/cuda_api.h"

namespace megatron_ext {
namespace {

// An op comes here when any of its tensors is on a GPU; the kernels read all of them there.
void check_one_device(std::initializer_list<Tensor> tensors) {
    const at::Device device = tensors.begin()->device();
    for (const Tensor& tensor : tensors) {
        TORCH_CHECK_VALUE(tensor.device() == device,
                          "all tensors must be on one device, got ",
                          device,
                          " and ",
                          tensor.device());
    }
}

// Scratch memory of a launch; Torch's allocator keeps it until the stream is past it.
Tensor workspace_of(int64_t bytes, const Tensor& like) {
    return at::empty({bytes}, like.options().dtype(at::kByte));
}

cudaStream_t current_stream() { return c10::cuda::getCurrentCUDAStream(); }

TokenMarks marks_in(const Tensor& memory, const Tensor& map) {
    return TokenMarks::in(memory.mutable_data_ptr<int32_t>(), map.size(0), map.size(1));
}

std::tuple<Tensor, Tensor> count_load_op(const Tensor& routing_map,
                                         const std::optional<Tensor>& tail) {
    check_routing_map(routing_map);
    const c10::cuda::CUDAGuard guard(routing_map.device());
    const Tensor map = routing_map.contiguous();
    Tensor counts = empty_counts(map, tail);
    Tensor marks = at::empty({2, TokenMarks::num_tiles(map.size(0)), map.size(1)},
                             map.options().dtype(at::kInt));
    C10_CUDA_CHECK(count_load_cuda(map.const_data_ptr<bool>(),
                                   map.size(0),
                                   map.size(1),
                                   tail.has_value() ? tail->const_data_ptr<int64_t>() : nullptr,
                                   marks_in(marks, map),
                                   counts.mutable_data_ptr<int64_t>(),
                                   current_stream()));
    return {counts, marks};
}

// Plan each load of a batch, or the one, with each tolerance.
std::tuple<Tensor, Tensor> plan_all(const Tensor& load,
                                    const QuotaProblem& problem,
                                    const Tolerances& tolerances,
                                    std::optional<int64_t> num_tolerances) {
    const c10::cuda::CUDAGuard guard(load.device());
    const Tensor loads = with_whole_rows(load);
    auto [quota, slots] = empty_plan(load, problem, num_tolerances);
    const int64_t batch = load.dim() == 3 ? load.size(0) : 1;
    const Tensor workspace =
        workspace_of(solve_ladder_cuda_bytes(problem, tolerances, batch), load);
    C10_CUDA_CHECK(solve_ladder_cuda(problem,
                                     tolerances,
                                     loads.const_data_ptr<int64_t>(),
                                     loads.stride(-2),
                                     batch,
                                     workspace.mutable_data_ptr(),
                                     quota.mutable_data_ptr<int64_t>(),
                                     slots.mutable_data_ptr<int32_t>(),
                                     current_stream()));
    return {quota, slots};
}

std::tuple<Tensor, Tensor> solve_quota_op(const Tensor& load,
                                          int64_t num_slots,
                                          int64_t nvlink_domain,
                                          int64_t tolerance_ppm,
                                          int64_t min_quota) {
    const QuotaProblem problem =
        quota_problem(load, num_slots, nvlink_domain, tolerance_ppm, min_quota);
    return plan_all(load, problem, {{tolerance_ppm}, 1}, {});
}

std::tuple<Tensor, Tensor> solve_ladder_op(const Tensor& load,
                                           int64_t num_slots,
                                           int64_t nvlink_domain,
                                           at::IntArrayRef tolerances_ppm,
                                           int64_t min_quota) {
    const QuotaProblem problem = quota_problem(load, num_slots, nvlink_domain, 0, min_quota);
    const Tolerances tolerances = tolerances_of(tolerances_ppm);
    return plan_all(load, problem, tolerances, tolerances.count);
}

// Of a load `with_whole_rows` and a quota that is contiguous.
SharedQuotas shared_quotas(const Tensor& load, const Tensor& quota) {
    return {load.size(0),
            load.size(1),
            load.const_data_ptr<int64_t>(),
            load.stride(0),
            quota.const_data_ptr<int64_t>()};
}

Lines lines_in(const Tensor& memory, int64_t experts, int64_t ranks) {
    return Lines::in(memory.mutable_data_ptr(), experts, ranks);
}

// What `sealing` says of what is sealed is added here.
ShareTensors share(const Tensor& load,
                   const Tensor& quota,
                   const Tensor& slots,
                   int64_t source_rank,
                   Sealing sealing) {
    const int64_t ranks = load.size(0);
    const int64_t experts = load.size(1);
    const Tensor loads = with_whole_rows(load);
    const Tensor quotas = quota.contiguous();
    const Tensor held = slots.contiguous();
    sealing.plan = sealed_plan(loads, quotas, held);
    Tensor split = at::empty({experts, ranks}, load.options());
    Tensor ids = at::empty({experts, ranks}, load.options());
    Tensor lines = workspace_of(Lines::bytes(experts, ranks), load);
    Tensor arriving = at::empty({ranks, places_of(load, held)}, load.options());
    Tensor arrivals = arrivals_for(arriving);
    C10_CUDA_CHECK(share_plan_cuda(
        shared_quotas(loads, quotas),
        source_rank,
        split.mutable_data_ptr<int64_t>(),
        arriving.mutable_data_ptr<int64_t>(),
        arrivals.mutable_data_ptr<int64_t>(),
        {held.const_data_ptr<int32_t>(), held.size(1), ids.mutable_data_ptr<int64_t>()},
        lines_in(lines, experts, ranks),
        sealing,
        current_stream()));
    return {split, ids, lines, arriving, arrivals};
}

ShareTensors share_plan_op(const Tensor& load,
                           const Tensor& quota,
                           const Tensor& slots,
                           int64_t source_rank) {
    check_planned(load, quota, slots, source_rank);
    check_one_device({load, quota, slots});
    const c10::cuda::CUDAGuard guard(load.device());
    return share(load, quota, slots, source_rank, {});
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
    check_planned(load, quota, slots, source_rank);
    check_one_device({load, quota, slots, gathered});
    TORCH_CHECK_VALUE(difference.is_pinned(), "difference must be in pinned memory");
    const c10::cuda::CUDAGuard guard(load.device());
    return share(load,
                 quota,
                 slots,
                 source_rank,
                 {{}, seals_of(gathered, layer, difference), seal.mutable_data_ptr<int64_t>()});
}

// Assigns all choices, and places their values as `placing` says.
std::tuple<Tensor, Tensor> assign_all(const AssignProblem& problem,
                                      const Tensor& routing_map,
                                      const Tensor& source_quota,
                                      const Tensor& physical_index,
                                      const std::optional<Tensor>& given_marks,
                                      const std::optional<Tensor>& given_lines,
                                      const Placing& placing) {
    const int64_t experts = problem.num_experts;
    const int64_t ranks = problem.num_ranks;
    const c10::cuda::CUDAGuard guard(routing_map.device());
    const Tensor map = routing_map.contiguous();
    const Tensor marks =
        given_marks.has_value() ? *given_marks : std::get<1>(count_load_op(map, {}));
    check_marks(marks, {2, TokenMarks::num_tiles(map.size(0)), experts});
    const Tensor memory =
        given_lines.has_value() ? *given_lines : workspace_of(Lines::bytes(experts, ranks), map);
    check_lines(memory, Lines::bytes(experts, ranks));
    check_one_device({routing_map, source_quota, physical_index, marks, memory});
    const Lines lines = lines_in(memory, experts, ranks);
    if (!given_lines.has_value()) {
        const Tensor quotas = source_quota.contiguous();
        const Tensor ids = physical_index.contiguous();
        C10_CUDA_CHECK(lay_lines_cuda(ranks,
                                      experts,
                                      quotas.const_data_ptr<int64_t>(),
                                      ids.const_data_ptr<int64_t>(),
                                      lines,
                                      current_stream()));
    }
    const auto options = map.options().dtype(at::kInt);
    Tensor logical = at::empty({problem.num_tokens, problem.top_k}, options);
    Tensor physical = at::empty({problem.num_tokens, problem.top_k}, options);
    C10_CUDA_CHECK(assign_cuda(problem,
                               marks_in(marks, map),
                               lines,
                               logical.mutable_data_ptr<int32_t>(),
                               physical.mutable_data_ptr<int32_t>(),
                               placing,
                               current_stream()));
    return {logical, physical};
}

std::tuple<Tensor, Tensor> assign_op(const Tensor& routing_map,
                                     const Tensor& source_quota,
                                     const Tensor& physical_index,
                                     int64_t top_k,
                                     const std::optional<Tensor>& marks,
                                     const std::optional<Tensor>& lines) {
    const AssignProblem problem = assign_problem(routing_map, source_quota, physical_index, top_k);
    return assign_all(problem, routing_map, source_quota, physical_index, marks, lines, {});
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
    const AssignProblem problem = assign_problem(routing_map, source_quota, physical_index, top_k);
    check_placed(probs, routing_map, placed, placed_map);
    check_one_device({routing_map, probs, placed, placed_map});
    const Tensor from = probs.contiguous();
    const Placing placing{from.const_data_ptr(),
                          placed.mutable_data_ptr(),
                          placed_map.mutable_data_ptr<bool>(),
                          placed.size(1),
                          from.element_size()};
    return assign_all(problem, routing_map, source_quota, physical_index, marks, lines, placing);
}

Tensor place_back_op(const Tensor& grad,
                     const Tensor& logical,
                     const Tensor& physical,
                     int64_t num_experts) {
    check_place_back(grad, logical, physical, num_experts);
    check_one_device({grad, logical, physical});
    const c10::cuda::CUDAGuard guard(grad.device());
    const Tensor from = grad.contiguous();
    const Tensor from_places = physical.contiguous();
    const Tensor to_places = logical.contiguous();
    Tensor back = at::empty({grad.size(0), num_experts}, grad.options());
    C10_CUDA_CHECK(copy_choices_cuda(from.const_data_ptr(),
                                     from_places.const_data_ptr<int32_t>(),
                                     from.size(1),
                                     back.mutable_data_ptr(),
                                     to_places.const_data_ptr<int32_t>(),
                                     back.size(1),
                                     from.size(0),
                                     from_places.size(1),
                                     from.element_size(),
                                     current_stream()));
    return back;
}

std::vector<Tensor> set_aside_op(at::TensorList main_grads,
                                 const Tensor& slots,
                                 at::IntArrayRef experts) {
    check_set_aside(main_grads, slots, experts);
    const c10::cuda::CUDAGuard guard(slots.device());
    const Tensor held = slots.contiguous();
    std::vector<Tensor> copies;
    for (const Tensor& each : main_grads) copies.push_back(at::empty_like(each));
    for (size_t first = 0; first < copies.size(); first += AsideTasks::kMost) {
        AsideTasks tasks{};
        tasks.count = static_cast<int>(std::min(copies.size() - first, size_t{AsideTasks::kMost}));
        for (int i = 0; i < tasks.count; ++i) {
            tasks.each[i] = {static_cast<char*>(main_grads[first + i].mutable_data_ptr()),
                             static_cast<char*>(copies[first + i].mutable_data_ptr()),
                             static_cast<int64_t>(copies[first + i].nbytes()),
                             experts[first + i]};
        }
        C10_CUDA_CHECK(
            set_aside_cuda(tasks, held.const_data_ptr<int32_t>(), held.numel(), current_stream()));
    }
    return copies;
}

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_IMPL(megatron_ext, CUDA, m) {
    m.impl("count_load", &megatron_ext::count_load_op);
    m.impl("solve_quota", &megatron_ext::solve_quota_op);
    m.impl("solve_ladder", &megatron_ext::solve_ladder_op);
    m.impl("share_plan", &megatron_ext::share_plan_op);
    m.impl("share_and_seal", &megatron_ext::share_and_seal_op);
    m.impl("assign", &megatron_ext::assign_op);
    m.impl("reroute", &megatron_ext::reroute_op);
    m.impl("place_back", &megatron_ext::place_back_op);
    m.impl("set_aside", &megatron_ext::set_aside_op);
}
