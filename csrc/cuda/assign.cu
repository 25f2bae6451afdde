// Stage 3 on the device: an instance for every assignment, and routing over instances.
//
// 1. assign: [N, E] choices to [N, K] tables. copy_choices: values along these tables.
// 2. assign is two kernels. line: a warp for one expert lays the expert's instances on a line.
//    token: a warp for one token. copy_choices: a warp for one token.
// 3. Kernels, because shares and marks (count_load.cu) are on the device.
// 4. Kernels hand their results on in the workspace.
// 5. Deterministic: integers; values are moved, not computed with.
// 6. assign reads a quarter of N * E bytes: 0.5 MB at 8192 tokens and 256 experts, so launches and
//    latency dominate. copy_choices writes its outputs:
//    element size + 1 bytes an entry, 7 MB for bfloat16 and 272 physical experts.

#include "lines.cuh"
#include "megatron_ext/cuda_api.h"
#include "megatron_ext/interleave.h"
#include "megatron_ext/warp.h"

namespace megatron_ext {
namespace {

constexpr int kLanes = DeviceWarp::kLanes;
constexpr int kThreads = 256;

// The workspace of assign, array after array.
struct Work {
    int64_t* count;          // [E] assignments of the expert on this rank
    int64_t* stride;         // [E] of their interleaving
    int64_t* end;            // [E, R] where an instance's piece of the line ends
    int32_t* instance;       // [E, R] its physical id
    int32_t* num_instances;  // [E]
};

Work work_in(char* memory, const AssignProblem& problem) {
    const int64_t experts = problem.num_experts;
    const int64_t pairs = experts * problem.num_ranks;
    Work work;
    work.count = reinterpret_cast<int64_t*>(memory);
    work.stride = work.count + experts;
    work.end = work.stride + experts;
    work.instance = reinterpret_cast<int32_t*>(work.end + pairs);
    work.num_instances = work.instance + pairs;
    return work;
}

__global__ void line_kernel(AssignProblem problem,
                            const int64_t* source_quota,
                            const int64_t* physical_index,
                            Work work) {
    const int64_t e = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
    if (e >= problem.num_experts) return;  // whole warps
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int64_t experts = problem.num_experts;
    const int64_t ranks = problem.num_ranks;

    int64_t count = 0;
    int pieces = 0;
    for (int64_t first = 0; first < ranks; first += kLanes) {
        const int64_t i = first + lane;
        const int64_t t = rank_at(i, e / (experts / ranks));
        const int64_t share = i < ranks ? source_quota[e * ranks + t] : 0;
        const int64_t end = count + sum_up_to_lane(share);
        const unsigned used = __ballot_sync(DeviceWarp::kAll, share != 0);
        if (share != 0) {
            const int64_t piece = e * ranks + pieces + count_before_lane(used);
            work.end[piece] = end;
            work.instance[piece] = static_cast<int32_t>(physical_index[e * ranks + t]);
        }
        count = of_last_lane(end);
        pieces += __popc(used);
    }
    if (lane != 0) return;
    work.count[e] = count;
    work.stride[e] = count > 0 ? interleave_stride(count) : 1;
    work.num_instances[e] = pieces;
}

__global__ void token_kernel(AssignProblem problem,
                             TokenMarks marks,
                             Work work,
                             int32_t* logical,
                             int32_t* physical) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
    if (n >= problem.num_tokens) return;  // whole warps
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int64_t experts = problem.num_experts;
    const int64_t tile = n / TokenMarks::kTile;
    const int bit = static_cast<int>(n % TokenMarks::kTile);

    int64_t k = 0;
    for (int64_t first = 0; first < experts; first += kLanes) {
        const int64_t e = first + lane;
        const uint32_t mask = e < experts ? marks.mask[tile * experts + e] : 0;
        const bool chosen = mask >> bit & 1;
        const int64_t j =
            chosen ? marks.before[tile * experts + e] + __popc(mask & ((1u << bit) - 1)) : 0;
        const bool fits = chosen && j < work.count[e];
        const unsigned choices = __ballot_sync(DeviceWarp::kAll, fits);
        const int64_t place_k = k + count_before_lane(choices);
        if (fits && place_k < problem.top_k) {
            const int64_t place = interleaved_place(j, work.count[e], work.stride[e]);
            const int64_t* end = work.end + e * problem.num_ranks;
            int piece = 0;
            while (piece + 1 < work.num_instances[e] && end[piece] <= place) ++piece;
            logical[n * problem.top_k + place_k] = static_cast<int32_t>(e);
            physical[n * problem.top_k + place_k] = work.instance[e * problem.num_ranks + piece];
        }
        k += __popc(choices);
    }
    for (int64_t i = k + lane; i < problem.top_k; i += kLanes) {
        logical[n * problem.top_k + i] = -1;
        physical[n * problem.top_k + i] = -1;
    }
}

template <class Element>
__global__ void copy_kernel(const Element* from,
                            const int32_t* from_index,
                            int64_t from_width,
                            Element* to,
                            const int32_t* to_index,
                            int64_t to_width,
                            int64_t num_tokens,
                            int64_t top_k,
                            bool* map) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
    if (n >= num_tokens) return;  // whole warps
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    for (int64_t i = lane; i < to_width; i += kLanes) {
        to[n * to_width + i] = 0;
        if (map != nullptr) map[n * to_width + i] = false;
    }
    __syncwarp();  // Another lane cleared what this lane writes.
    for (int64_t k = lane; k < top_k; k += kLanes) {
        const int64_t source = from_index[n * top_k + k];
        const int64_t target = to_index[n * top_k + k];
        if (source < 0 || source >= from_width || target < 0 || target >= to_width) continue;
        to[n * to_width + target] = from[n * from_width + source];
        if (map != nullptr) map[n * to_width + target] = true;
    }
}

unsigned blocks_for_warps(int64_t warps) {
    constexpr int64_t kPerBlock = kThreads / kLanes;
    return static_cast<unsigned>((warps + kPerBlock - 1) / kPerBlock);
}

}  // namespace

int64_t assign_cuda_bytes(const AssignProblem& problem) {
    const Work work = work_in(nullptr, problem);
    return reinterpret_cast<char*>(work.num_instances + problem.num_experts) -
           static_cast<char*>(nullptr);
}

cudaError_t assign_cuda(const AssignProblem& problem,
                        const TokenMarks& marks,
                        const int64_t* source_quota,
                        const int64_t* physical_index,
                        void* workspace,
                        int32_t* logical,
                        int32_t* physical,
                        cudaStream_t stream) {
    if (problem.num_tokens == 0) return cudaSuccess;
    const Work work = work_in(static_cast<char*>(workspace), problem);
    line_kernel<<<blocks_for_warps(problem.num_experts), kThreads, 0, stream>>>(
        problem, source_quota, physical_index, work);
    token_kernel<<<blocks_for_warps(problem.num_tokens), kThreads, 0, stream>>>(
        problem, marks, work, logical, physical);
    return cudaGetLastError();
}

cudaError_t copy_choices_cuda(const void* from,
                              const int32_t* from_index,
                              int64_t from_width,
                              void* to,
                              const int32_t* to_index,
                              int64_t to_width,
                              int64_t num_tokens,
                              int64_t top_k,
                              int64_t element_size,
                              bool* map,
                              cudaStream_t stream) {
    if (num_tokens == 0) return cudaSuccess;
    // The bits are moved, whatever number they are.
    const auto copy = [&](auto element) {
        using Element = decltype(element);
        copy_kernel<<<blocks_for_warps(num_tokens), kThreads, 0, stream>>>(
            static_cast<const Element*>(from),
            from_index,
            from_width,
            static_cast<Element*>(to),
            to_index,
            to_width,
            num_tokens,
            top_k,
            map);
        return cudaGetLastError();
    };
    switch (element_size) {
        case 2:
            return copy(uint16_t{});
        case 4:
            return copy(uint32_t{});
        default:
            return copy(uint64_t{});
    }
}

}  // namespace megatron_ext
