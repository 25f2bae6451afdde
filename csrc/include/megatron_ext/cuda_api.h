// Launchers of the CUDA kernels, without Torch. Each returns the error of its launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace megatron_ext {

// Count the assignments of each expert, as count_load() of api.h does, on device memory.
//   routing_map  [N, E] bool; counts [E] out, zeroed here
// Runs on `stream`, asks the host for nothing, needs no scratch. Deterministic (integers).
// Moves N * E + 8 * E bytes.
cudaError_t count_load_cuda(const bool* routing_map,
                            int64_t num_tokens,
                            int64_t num_experts,
                            int64_t* counts,
                            cudaStream_t stream);

}  // namespace megatron_ext
