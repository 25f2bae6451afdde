// The CUDA implementations of the ops, on Torch's current stream. Compiled in a CUDA build only.

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <initializer_list>
#include <optional>
#include <tuple>

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

Tensor seal_plan_op(const Tensor& load,
                    const Tensor& quota,
                    const Tensor& slots,
                    const Tensor& gathered,
                    int64_t layer,
                    const Tensor& difference) {
    check_one_device({load, quota, slots, gathered});
    TORCH_CHECK_VALUE(difference.is_pinned(), "difference must be in pinned memory");
    const c10::cuda::CUDAGuard guard(load.device());
    const Tensor loads = load.contiguous();
    const Tensor quotas = quota.contiguous();
    const Tensor held = slots.contiguous();
    Tensor seal = at::empty({1}, load.options());
    C10_CUDA_CHECK(seal_plan_cuda(sealed_plan(loads, quotas, held),
                                  seals_of(gathered, layer, difference),
                                  seal.mutable_data_ptr<int64_t>(),
                                  current_stream()));
    return seal;
}

// Plan each load of a batch, or the one, with each tolerance.
std::tuple<Tensor, Tensor> plan_all(const Tensor& load,
                                    const QuotaProblem& problem,
                                    const Tolerances& tolerances,
                                    std::optional<int64_t> num_tolerances) {
    const c10::cuda::CUDAGuard guard(load.device());
    const Tensor loads = load.contiguous();
    auto [quota, slots] = empty_plan(load, problem, num_tolerances);
    const int64_t batch = load.dim() == 3 ? load.size(0) : 1;
    const Tensor workspace =
        workspace_of(solve_ladder_cuda_bytes(problem, tolerances, batch), load);
    C10_CUDA_CHECK(solve_ladder_cuda(problem,
                                     tolerances,
                                     loads.const_data_ptr<int64_t>(),
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

Tensor split_for(const Tensor& load,
                 const Tensor& quota,
                 std::optional<int64_t> source_rank,
                 const PlacedInstances& placed) {
    const c10::cuda::CUDAGuard guard(load.device());
    const int64_t ranks = load.size(0);
    const int64_t experts = load.size(1);
    const Tensor loads = load.contiguous();
    const Tensor quotas = quota.contiguous();
    Tensor split = source_rank.has_value() ? at::empty({experts, ranks}, load.options())
                                           : at::empty({ranks, experts, ranks}, load.options());
    C10_CUDA_CHECK(split_quota_cuda(ranks,
                                    experts,
                                    loads.const_data_ptr<int64_t>(),
                                    quotas.const_data_ptr<int64_t>(),
                                    source_rank.value_or(0),
                                    source_rank.has_value() ? 1 : ranks,
                                    split.mutable_data_ptr<int64_t>(),
                                    placed,
                                    current_stream()));
    return split;
}

Tensor split_quota_op(const Tensor& load, const Tensor& quota, std::optional<int64_t> source_rank) {
    check_split(load, quota, source_rank);
    check_one_device({load, quota});
    return split_for(load, quota, source_rank, {});
}

std::tuple<Tensor, Tensor> share_plan_op(const Tensor& load,
                                         const Tensor& quota,
                                         const Tensor& slots,
                                         int64_t source_rank) {
    check_planned(load, quota, slots, source_rank);
    check_one_device({load, quota, slots});
    const Tensor held = slots.contiguous();
    Tensor ids = at::empty({load.size(1), load.size(0)}, load.options());
    const PlacedInstances placed{
        held.const_data_ptr<int32_t>(), held.size(1), ids.mutable_data_ptr<int64_t>()};
    return {split_for(load, quota, source_rank, placed), ids};
}

std::tuple<Tensor, Tensor> assign_op(const Tensor& routing_map,
                                     const Tensor& source_quota,
                                     const Tensor& physical_index,
                                     int64_t top_k,
                                     const std::optional<Tensor>& given_marks) {
    const AssignProblem problem = assign_problem(routing_map, source_quota, physical_index, top_k);
    const Tensor map = routing_map.contiguous();
    const Tensor marks =
        given_marks.has_value() ? *given_marks : std::get<1>(count_load_op(map, {}));
    check_marks(marks, {2, TokenMarks::num_tiles(map.size(0)), map.size(1)});
    check_one_device({routing_map, source_quota, physical_index, marks});
    const c10::cuda::CUDAGuard guard(routing_map.device());
    const Tensor quotas = source_quota.contiguous();
    const Tensor ids = physical_index.contiguous();
    const auto options = map.options().dtype(at::kInt);
    Tensor logical = at::empty({problem.num_tokens, top_k}, options);
    Tensor physical = at::empty({problem.num_tokens, top_k}, options);
    const Tensor workspace = workspace_of(assign_cuda_bytes(problem), map);
    C10_CUDA_CHECK(assign_cuda(problem,
                               marks_in(marks, map),
                               quotas.const_data_ptr<int64_t>(),
                               ids.const_data_ptr<int64_t>(),
                               workspace.mutable_data_ptr(),
                               logical.mutable_data_ptr<int32_t>(),
                               physical.mutable_data_ptr<int32_t>(),
                               current_stream()));
    return {logical, physical};
}

// Values from the places that `from_index` names to those of `to_index`; marks them in `map`.
void copy_all(const Tensor& values,
              const Tensor& from_index,
              const Tensor& to_index,
              const Tensor& to,
              bool* map) {
    const c10::cuda::CUDAGuard guard(values.device());
    const Tensor from = values.contiguous();
    const Tensor from_places = from_index.contiguous();
    const Tensor to_places = to_index.contiguous();
    C10_CUDA_CHECK(copy_choices_cuda(from.const_data_ptr(),
                                     from_places.const_data_ptr<int32_t>(),
                                     from.size(1),
                                     to.mutable_data_ptr(),
                                     to_places.const_data_ptr<int32_t>(),
                                     to.size(1),
                                     from.size(0),
                                     from_places.size(1),
                                     from.element_size(),
                                     map,
                                     current_stream()));
}

void place_op(const Tensor& probs,
              const Tensor& logical,
              const Tensor& physical,
              const Tensor& placed,
              const Tensor& routing_map) {
    check_place(probs, logical, physical);
    check_placed(probs, placed, routing_map);
    check_one_device({probs, logical, physical, placed, routing_map});
    copy_all(probs, logical, physical, placed, routing_map.mutable_data_ptr<bool>());
}

Tensor place_back_op(const Tensor& grad,
                     const Tensor& logical,
                     const Tensor& physical,
                     int64_t num_experts) {
    check_place(grad, logical, physical);
    check_one_device({grad, logical, physical});
    Tensor back = at::empty({grad.size(0), num_experts}, grad.options());
    copy_all(grad, physical, logical, back, nullptr);
    return back;
}

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_IMPL(megatron_ext, CUDA, m) {
    m.impl("count_load", &megatron_ext::count_load_op);
    m.impl("seal_plan", &megatron_ext::seal_plan_op);
    m.impl("solve_quota", &megatron_ext::solve_quota_op);
    m.impl("solve_ladder", &megatron_ext::solve_ladder_op);
    m.impl("split_quota", &megatron_ext::split_quota_op);
    m.impl("share_plan", &megatron_ext::share_plan_op);
    m.impl("assign", &megatron_ext::assign_op);
    m.impl("place", &megatron_ext::place_op);
    m.impl("place_back", &megatron_ext::place_back_op);
}
