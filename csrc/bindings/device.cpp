// The CUDA implementations of the ops, on Torch's current stream. Compiled in a CUDA build only.

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "megatron_ext/cuda_api.h"

namespace megatron_ext {
namespace {

using at::Tensor;

Tensor count_load_op(const Tensor& routing_map) {
    TORCH_CHECK_VALUE(routing_map.dim() == 2 && routing_map.scalar_type() == at::kBool,
                      "routing_map must be bool [N, E], got ",
                      routing_map.scalar_type(),
                      " ",
                      routing_map.sizes());
    const c10::cuda::CUDAGuard guard(routing_map.device());
    const Tensor map = routing_map.contiguous();
    Tensor counts = at::empty({map.size(1)}, map.options().dtype(at::kLong));
    C10_CUDA_CHECK(count_load_cuda(map.const_data_ptr<bool>(),
                                   map.size(0),
                                   map.size(1),
                                   counts.mutable_data_ptr<int64_t>(),
                                   c10::cuda::getCurrentCUDAStream()));
    return counts;
}

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_IMPL(megatron_ext, CUDA, m) { m.impl("count_load", &megatron_ext::count_load_op); }
