// Before fused products add to gradients that are narrower than float32: empty those of mains that
// have replicas, which get two additions.
//
// 1. Copies the gradients of experts that are in a slot, and zeroes them; others stay.
// 2. Many blocks a gradient, and each looks for the expert in the slots first. One thread: 16 bytes
//    at a time.
// 3. A kernel, because the plan is on the device and the host must not wait for it.
// 4. Needs no synchronization but the stream's.
// 5. Deterministic: bytes are moved, each by one thread.
// 6. Reads a gradient and writes it twice: 36 MiB in bfloat16 take 0.03 ms at 4 TB/s. Of an expert
//    without replicas it reads the slots, 4 bytes each.

#include "megatron_ext/cuda_api.h"

namespace megatron_ext {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 64;  // of each gradient

struct alignas(16) Vector {
    uint32_t words[4];
};

template <class Piece>
__device__ void move(const AsideTask& task, int64_t first_byte) {
    auto* const from = reinterpret_cast<Piece*>(task.main_grad);
    auto* const to = reinterpret_cast<Piece*>(task.copy);
    const int64_t first = first_byte / static_cast<int64_t>(sizeof(Piece));
    const int64_t count = task.bytes / static_cast<int64_t>(sizeof(Piece));
    const int64_t start = blockIdx.x % kBlocks * kThreads + threadIdx.x;
    for (int64_t i = first + start; i < count; i += kBlocks * kThreads) {
        to[i] = from[i];
        from[i] = {};
    }
}

__global__ void __launch_bounds__(kThreads)
    set_aside_kernel(const __grid_constant__ AsideTasks tasks,
                     const int32_t* slots,
                     int64_t num_replicas) {
    __shared__ int has_replicas;
    const AsideTask& task = tasks.each[blockIdx.x / kBlocks];
    if (threadIdx.x == 0) has_replicas = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < num_replicas; i += kThreads) {
        if (slots[i] == task.expert) has_replicas = 1;
    }
    __syncthreads();  // All have looked.
    if (has_replicas == 0) return;
    const auto ends = reinterpret_cast<uintptr_t>(task.main_grad) |
                      reinterpret_cast<uintptr_t>(task.copy);
    const int64_t whole = ends % sizeof(Vector) == 0 ? task.bytes / 16 * 16 : 0;
    if (whole > 0) move<Vector>({task.main_grad, task.copy, whole, 0}, 0);
    move<uint16_t>(task, whole);
}

}  // namespace

cudaError_t set_aside_cuda(const AsideTasks& tasks,
                           const int32_t* slots,
                           int64_t num_replicas,
                           cudaStream_t stream) {
    if (tasks.count == 0) return cudaSuccess;
    set_aside_kernel<<<tasks.count * kBlocks, kThreads, 0, stream>>>(tasks, slots, num_replicas);
    return cudaGetLastError();
}

}  // namespace megatron_ext
