// Stage 2 on the device: what this rank does by a plan.
//
// 1. The rank's row [E, R] of the split, the ids of the instances, and both as lines for assign.cu;
//    what comes to its own instances, and the sums of that; the plan's seal.
// 2. One warp: one expert, or one of the rank's instances. One lane: one instance, or source rank,
//    at a time (shares.cuh). The rank's instances are those of one block, which sums over them. If
//    there is something to seal, one more block does that (seal_plan.cuh).
// 3. A kernel, because load and plan are on the device and the host must not wait for them. One
//    kernel, because all of it needs the plan and nothing else.
// 4. Lanes combine their numbers by prefix sums. Blocks do not meet.
// 5. Deterministic: integers.
// 6. Reads 2 * E * R quotas and loads, writes 2.5 times as much: 0.6 MB at EP64 and 256 experts, so
//    the latency of a few rounds of reads and shuffles decides the time, or the seal.

#include "megatron_ext/cuda_api.h"
#include "seal_plan.cuh"
#include "shares.cuh"

namespace megatron_ext {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / DeviceWarp::kLanes;

// Physical id of expert e's instance on rank t, or -1.
__device__ int64_t id_of(const PlacedInstances& placed, int64_t e, int64_t t, int64_t mains) {
    const int64_t first = t * (mains + placed.num_slots);
    if (e / mains == t) return first + e % mains;
    for (int64_t s = 0; s < placed.num_slots; ++s) {
        if (placed.slots[t * placed.num_slots + s] == e) return first + mains + s;
    }
    return -1;
}

// What comes to the rank's physical expert at `place`, with a warp; returns the sum.
__device__ int64_t count_place(const SharedQuotas& quotas,
                               const PlacedInstances& placed,
                               int64_t rank,
                               int64_t place,
                               int64_t* arriving) {
    const int64_t mains = quotas.num_experts / quotas.num_ranks;
    const int64_t places = mains + placed.num_slots;
    const int64_t e = place < mains ? rank * mains + place
                                    : placed.slots[rank * placed.num_slots + place - mains];
    if (e < 0 || e >= quotas.num_experts) {
        for (int64_t r = DeviceWarp().lane(); r < quotas.num_ranks; r += DeviceWarp::kLanes) {
            arriving[r * places + place] = 0;
        }
        return 0;
    }
    int64_t of_lane = 0;
    share_instance(quotas, e, rank, [&](int64_t r, int64_t share) {
        if (r >= 0) arriving[r * places + place] = share;
        of_lane += share;
    });
    return of_last_lane(sum_up_to_lane(of_lane));
}

// What comes to the rank, and its sums, with a block.
__device__ void count_arriving(const SharedQuotas& quotas,
                               const PlacedInstances& placed,
                               int64_t rank,
                               int64_t* arriving,
                               int64_t* arrivals) {
    const int64_t ranks = quotas.num_ranks;
    const int64_t places = quotas.num_experts / ranks + placed.num_slots;
    for (int64_t place = threadIdx.x / DeviceWarp::kLanes; place < places; place += kWarps) {
        const int64_t sum = count_place(quotas, placed, rank, place, arriving);
        if (DeviceWarp().lane() == 0) arrivals[ranks + place] = sum;
    }
    __syncthreads();  // All places are counted.
    for (int64_t r = threadIdx.x; r < ranks; r += kThreads) {
        int64_t sum = 0;
        for (int64_t place = 0; place < places; ++place) sum += arriving[r * places + place];
        arrivals[r] = sum;
    }
}

__global__ void __launch_bounds__(kThreads) share_plan_kernel(SharedQuotas quotas,
                                                              int64_t source_rank,
                                                              int64_t* split,
                                                              int64_t* arriving,
                                                              int64_t* arrivals,
                                                              PlacedInstances placed,
                                                              Lines lines,
                                                              Sealing sealing) {
    __shared__ SealParts<kThreads> parts;
    // First those that take longest.
    int64_t block = blockIdx.x;
    if (sealing.seal != nullptr && block-- == 0) {
        seal_plan_in_block(sealing, parts);
        return;
    }
    if (block-- == 0) {
        count_arriving(quotas, placed, source_rank, arriving, arrivals);
        return;
    }
    const int64_t e = block * kWarps + threadIdx.x / DeviceWarp::kLanes;
    if (e >= quotas.num_experts) return;  // whole warps
    const int64_t mains = quotas.num_experts / quotas.num_ranks;
    const int64_t row = e * quotas.num_ranks;
    LineOfExpert line(lines, e, quotas.num_ranks);
    share_expert(quotas, e, source_rank, [&](int64_t t, int64_t share) {
        const int64_t id = t >= 0 ? id_of(placed, e, t, mains) : -1;
        if (t >= 0) {
            split[row + t] = share;
            placed.physical_index[row + t] = id;
        }
        line.add(share, id);
    });
    line.end();
}

}  // namespace

cudaError_t share_plan_cuda(const SharedQuotas& quotas,
                            int64_t source_rank,
                            int64_t* split,
                            int64_t* arriving,
                            int64_t* arrivals,
                            const PlacedInstances& placed,
                            const Lines& lines,
                            const Sealing& sealing,
                            cudaStream_t stream) {
    const int64_t blocks = 1 + (quotas.num_experts + kWarps - 1) / kWarps;
    const auto grid = static_cast<unsigned>(blocks + (sealing.seal != nullptr ? 1 : 0));
    share_plan_kernel<<<grid, kThreads, 0, stream>>>(
        quotas, source_rank, split, arriving, arrivals, placed, lines, sealing);
    return cudaGetLastError();
}

}  // namespace megatron_ext
