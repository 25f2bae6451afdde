// Stage 3 on the device: an instance for every assignment, and routing over instances.
//
// 1. assign: [N, E] choices to [N, K] tables, and their values to where the tables say.
//    copy_choices: values along these tables. lay_lines: lines, for shares that share_plan.cu did
//    not make as they are.
// 2. A warp for one token; of lay_lines, for one expert.
// 3. Kernels, because shares and marks (count_load.cu) are on the device.
// 4. A warp clears a row, and then writes to it.
// 5. Deterministic: integers; values are moved, not computed with.
// 6. assign reads a quarter of N * E bytes: 0.5 MB at 8192 tokens and 256 experts. It writes its
//    outputs: element size + 1 bytes an entry, 7 MB for bfloat16 and 272 physical experts.

#include "lines.cuh"
#include "megatron_ext/cuda_api.h"
#include "megatron_ext/interleave.h"
#include "megatron_ext/warp.h"

namespace megatron_ext {
namespace {

constexpr int kLanes = DeviceWarp::kLanes;
constexpr int kThreads = 256;

__global__ void lay_lines_kernel(int64_t ranks,
                                 int64_t experts,
                                 const int64_t* source_quota,
                                 const int64_t* physical_index,
                                 Lines lines) {
    const int64_t e = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
    if (e >= experts) return;  // whole warps
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    LineOfExpert line(lines, e, ranks);
    for (int64_t first = 0; first < ranks; first += kLanes) {
        const int64_t i = first + lane;
        const int64_t at = e * ranks + rank_at(i, e / (experts / ranks));
        line.add(i < ranks ? source_quota[at] : 0, i < ranks ? physical_index[at] : -1);
    }
    line.end();
}

// Where the value of token n's choice of expert e goes: nowhere.
struct PlaceNothing {
    __device__ void clear(int64_t) const {}
    __device__ void put(int64_t, int64_t, int64_t) const {}
};

// To the instance's column.
template <class Element>
struct PlaceValue {
    const Element* from;
    int64_t from_width;
    Element* to;
    bool* map;
    int64_t width;

    // By all lanes, before any of them puts something there.
    __device__ void clear(int64_t n) const {
        for (int64_t i = DeviceWarp().lane(); i < width; i += kLanes) {
            to[n * width + i] = 0;
            map[n * width + i] = false;
        }
        __syncwarp();  // Another lane cleared what this lane writes.
    }

    __device__ void put(int64_t n, int64_t e, int64_t instance) const {
        if (instance < 0 || instance >= width) return;
        to[n * width + instance] = from[n * from_width + e];
        map[n * width + instance] = true;
    }
};

template <class Places>
__global__ void assign_kernel(AssignProblem problem,
                              TokenMarks marks,
                              Lines lines,
                              int32_t* logical,
                              int32_t* physical,
                              Places places) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
    if (n >= problem.num_tokens) return;  // whole warps
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int64_t experts = problem.num_experts;
    const int64_t tile = n / TokenMarks::kTile;
    const int bit = static_cast<int>(n % TokenMarks::kTile);

    places.clear(n);
    int64_t k = 0;
    for (int64_t first = 0; first < experts; first += kLanes) {
        const int64_t e = first + lane;
        const uint32_t mask = e < experts ? marks.mask[tile * experts + e] : 0;
        const bool chosen = mask >> bit & 1;
        const int64_t j =
            chosen ? marks.before[tile * experts + e] + __popc(mask & ((1u << bit) - 1)) : 0;
        const bool fits = chosen && j < lines.count[e];
        const unsigned choices = __ballot_sync(DeviceWarp::kAll, fits);
        const int64_t place_k = k + count_before_lane(choices);
        if (fits && place_k < problem.top_k) {
            const int64_t place = interleaved_place(j, lines.count[e], lines.stride[e]);
            const int64_t* end = lines.end + e * problem.num_ranks;
            int piece = 0;
            while (piece + 1 < lines.num_pieces[e] && end[piece] <= place) ++piece;
            const int32_t instance = lines.instance[e * problem.num_ranks + piece];
            logical[n * problem.top_k + place_k] = static_cast<int32_t>(e);
            physical[n * problem.top_k + place_k] = instance;
            places.put(n, e, instance);
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
                            int64_t top_k) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
    if (n >= num_tokens) return;  // whole warps
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    for (int64_t i = lane; i < to_width; i += kLanes) {
        to[n * to_width + i] = 0;
    }
    __syncwarp();  // Another lane cleared what this lane writes.
    for (int64_t k = lane; k < top_k; k += kLanes) {
        const int64_t source = from_index[n * top_k + k];
        const int64_t target = to_index[n * top_k + k];
        if (source < 0 || source >= from_width || target < 0 || target >= to_width) continue;
        to[n * to_width + target] = from[n * from_width + source];
    }
}

unsigned blocks_for_warps(int64_t warps) {
    constexpr int64_t kPerBlock = kThreads / kLanes;
    return static_cast<unsigned>((warps + kPerBlock - 1) / kPerBlock);
}

// `launch` of a zero of the type that has so many bytes: kernels move bits, and read no number.
template <class Launch>
void launch_for(int64_t element_size, Launch launch) {
    switch (element_size) {
        case 2:
            return launch(uint16_t{});
        case 4:
            return launch(uint32_t{});
        default:
            return launch(uint64_t{});
    }
}

}  // namespace

cudaError_t lay_lines_cuda(int64_t num_ranks,
                           int64_t num_experts,
                           const int64_t* source_quota,
                           const int64_t* physical_index,
                           const Lines& lines,
                           cudaStream_t stream) {
    lay_lines_kernel<<<blocks_for_warps(num_experts), kThreads, 0, stream>>>(
        num_ranks, num_experts, source_quota, physical_index, lines);
    return cudaGetLastError();
}

cudaError_t assign_cuda(const AssignProblem& problem,
                        const TokenMarks& marks,
                        const Lines& lines,
                        int32_t* logical,
                        int32_t* physical,
                        const Placing& placing,
                        cudaStream_t stream) {
    if (problem.num_tokens == 0) return cudaSuccess;
    const auto launch = [&](auto places) {
        assign_kernel<<<blocks_for_warps(problem.num_tokens), kThreads, 0, stream>>>(
            problem, marks, lines, logical, physical, places);
    };
    if (placing.to == nullptr) {
        launch(PlaceNothing{});
    } else {
        launch_for(placing.element_size, [&](auto zero) {
            using Element = decltype(zero);
            launch(PlaceValue<Element>{static_cast<const Element*>(placing.from),
                                       problem.num_experts,
                                       static_cast<Element*>(placing.to),
                                       placing.map,
                                       placing.width});
        });
    }
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
                              cudaStream_t stream) {
    if (num_tokens == 0) return cudaSuccess;
    launch_for(element_size, [&](auto zero) {
        using Element = decltype(zero);
        copy_kernel<<<blocks_for_warps(num_tokens), kThreads, 0, stream>>>(
            static_cast<const Element*>(from),
            from_index,
            from_width,
            static_cast<Element*>(to),
            to_index,
            to_width,
            num_tokens,
            top_k);
    });
    return cudaGetLastError();
}

}  // namespace megatron_ext
