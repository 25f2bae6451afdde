// Stage 8 on the device: the gradients of a main's replicas, from the slots of peers.
//
// 1. Adds the sum of a main's replicas' gradients, and what was set aside, to the main's total.
// 2. The first block to begin compiles the plan's slots into the sums of this rank's mains. Then a
//    block takes a chunk of a main at a time. One step is one tile of one replica: kStages bulk
//    loads are under way while all threads add an earlier tile. A thread has the same elements of
//    all replicas, and keeps their sums in registers until the last one. Last come the chunks of
//    this rank's own slots, which are zeroed.
// 3. A kernel, because flags of other GPUs order it, without the host and in a captured graph; and
//    because the gradients are read once and nothing but the total is written.
// 4. Waits until the sums are compiled, by a flag of its own GPU, and until a replica's rank offers
//    the gradient. The chunk's flag at the replica's rank is stored when all threads have read the
//    chunk. Nothing is cleared over the link: the replica's rank waits for that flag and zeroes its
//    own memory. Sums wait for no zeroes, so all ranks come to an end.
// 5. Deterministic: each element is added by one thread in float32, in the order of the replicas'
//    ranks, and rounded once.
// 6. Reads r gradients and a total, and writes the total: 72 MiB float32 from 4 peers at 450 GB/s a
//    GPU of NVLink take 0.67 ms.

#include "megatron_ext/cuda_api.h"
#include "peers.cuh"

namespace megatron_ext {
namespace {

constexpr int kThreads = 256;
constexpr int kStages = 4;
constexpr int64_t kTileBytes = 8 << 10;
constexpr int64_t kBulk = 16;  // bytes; a bulk copy has multiples of this

struct alignas(kBulk) Vector {
    uint32_t words[4];
};
constexpr int kVectors = kTileBytes / (kThreads * sizeof(Vector));  // of a tile, for each thread

struct Tiles {
    alignas(128) char bytes[kStages][kTileBytes];
    uint64_t loaded[kStages];  // barriers
};

// A chunk of a sum.
struct Unit {
    const PeerSegment* segment;
    PeerChunk chunk;
    const PeerPlace* replicas;
    int64_t num_replicas;
    char* total;        // of the chunk's first element
    const char* aside;  // likewise; null for nothing

    __device__ const char* source(int64_t r) const {
        return segment->slot(replicas[r].rank, replicas[r].slot) + chunk.offset;
    }
};

__device__ float float_of(uint32_t bits) { return __uint_as_float(bits); }

// How numbers are stored.
struct Float32 {
    using Stored = uint32_t;
    __device__ static float widen(Stored bits) { return float_of(bits); }
    __device__ static Stored narrow(float value) { return __float_as_uint(value); }
    // Element i of a vector.
    __device__ static float at(const Vector& vector, int i) { return float_of(vector.words[i]); }
};
struct BFloat16 {
    using Stored = uint16_t;
    __device__ static float widen(Stored bits) { return float_of(uint32_t{bits} << 16); }
    // To nearest, ties to even.
    __device__ static Stored narrow(float value) {
        const uint32_t bits = __float_as_uint(value);
        const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
        return static_cast<Stored>(value != value ? 0x7fc0 : rounded >> 16);
    }
    __device__ static float at(const Vector& vector, int i) {
        const uint32_t word = vector.words[i / 2];
        return float_of(i % 2 == 0 ? word << 16 : word & 0xffff0000);
    }
};

// Four elements side by side.
template <class Stored>
struct alignas(4 * sizeof(Stored)) Four {
    Stored each[4];
};

// Add four sums to elements `first` to `first + 3` of the total, with what was set aside.
template <class Total>
__device__ void add_four(const Unit& unit, int64_t first, const float* sums) {
    using Some = Four<typename Total::Stored>;
    auto* const to = reinterpret_cast<Some*>(unit.total) + first / 4;
    Some total = *to;
    Some aside{};
    if (unit.aside != nullptr) aside = reinterpret_cast<const Some*>(unit.aside)[first / 4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float sum = sums[i];
        if (unit.aside != nullptr) sum += Total::widen(aside.each[i]);
        total.each[i] = Total::narrow(Total::widen(total.each[i]) + sum);
    }
    *to = total;
}

// Add `bytes`, a multiple of kBulk, through the tiles; `used` counts the tiles so far, which says
// the stage and its phase. Called by all threads.
template <class Grad, class Total>
__device__ void add_in_bulk(const Unit& unit, int64_t bytes, Tiles& tiles, uint32_t& used) {
    constexpr int kElements = sizeof(Vector) / sizeof(typename Grad::Stored);
    const int replicas = static_cast<int>(unit.num_replicas);
    const int num_tiles = static_cast<int>((bytes + kTileBytes - 1) / kTileBytes);
    const int steps = num_tiles * replicas;
    const auto size = [&](int tile) {
        const int64_t left = bytes - tile * kTileBytes;
        return static_cast<uint32_t>(left < kTileBytes ? left : kTileBytes);
    };
    const auto load = [&](int step) {
        const uint32_t stage = (used + step) % kStages;
        const int tile = step / replicas;
        barrier_expect(&tiles.loaded[stage], size(tile));
        bulk_load(tiles.bytes[stage],
                  unit.source(step % replicas) + tile * kTileBytes,
                  size(tile),
                  &tiles.loaded[stage]);
    };
    if (threadIdx.x == 0) {
        fence_bulk();
        for (int step = 0; step < steps && step < kStages; ++step) load(step);
    }
    int step = 0;
    for (int tile = 0; tile < num_tiles; ++tile) {
        float sum[kVectors][kElements];
        for (int r = 0; r < replicas; ++r, ++step) {
            const uint32_t stage = (used + step) % kStages;
            barrier_wait(&tiles.loaded[stage], (used + step) / kStages % 2);
            const auto* const vectors = reinterpret_cast<const Vector*>(tiles.bytes[stage]);
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                // Behind the end of a tile there is garbage, which is added but not stored.
                const Vector vector = vectors[v * kThreads + threadIdx.x];
#pragma unroll
                for (int i = 0; i < kElements; ++i) {
                    const float value = Grad::at(vector, i);
                    sum[v][i] = r == 0 ? value : sum[v][i] + value;
                }
            }
            __syncthreads();  // All have read the stage, so it can be loaded again.
            if (threadIdx.x == 0 && step + kStages < steps) load(step + kStages);
        }
        const int64_t first = tile * (kTileBytes / sizeof(typename Grad::Stored));
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const int at = v * kThreads + static_cast<int>(threadIdx.x);
            if (at * sizeof(Vector) >= size(tile)) break;
#pragma unroll
            for (int i = 0; i < kElements; i += 4) {
                add_four<Total>(unit, first + at * kElements + i, &sum[v][i]);
            }
        }
    }
    used += steps;
}

// Elements that no bulk load takes: behind the last multiple of kBulk bytes, or all where one of
// the gradients or totals is not aligned. Called by all threads.
template <class Grad, class Total>
__device__ void add_plainly(const Unit& unit, int64_t first_byte) {
    using Stored = typename Grad::Stored;
    auto* const totals = reinterpret_cast<typename Total::Stored*>(unit.total);
    const auto* const asides = reinterpret_cast<const typename Total::Stored*>(unit.aside);
    const int64_t count = unit.chunk.bytes / sizeof(Stored);
    for (int64_t i = first_byte / sizeof(Stored) + threadIdx.x; i < count; i += kThreads) {
        const auto value = [&](int64_t r) {
            return Grad::widen(reinterpret_cast<const Stored*>(unit.source(r))[i]);
        };
        float sum = value(0);
        for (int64_t r = 1; r < unit.num_replicas; ++r) sum += value(r);
        if (asides != nullptr) sum += Total::widen(asides[i]);
        totals[i] = Total::narrow(Total::widen(totals[i]) + sum);
    }
}

__device__ bool is_aligned(const char* address) {
    return reinterpret_cast<uintptr_t>(address) % kBulk == 0;
}

template <class Grad, class Total>
__device__ void add(const Unit& unit, Tiles& tiles, uint32_t& used) {
    bool aligned = is_aligned(unit.total) && is_aligned(unit.aside);
    for (int64_t r = 0; r < unit.num_replicas; ++r) aligned = aligned && is_aligned(unit.source(r));
    const int64_t bulk = aligned ? unit.chunk.bytes / kBulk * kBulk : 0;
    if (bulk > 0) add_in_bulk<Grad, Total>(unit, bulk, tiles, used);
    if (bulk < unit.chunk.bytes) add_plainly<Grad, Total>(unit, bulk);
}

// Called by all threads.
__device__ void zero(char* memory, int64_t bytes) {
    const int64_t whole = is_aligned(memory) ? bytes / kBulk : 0;
    for (int64_t i = threadIdx.x; i < whole; i += kThreads) {
        reinterpret_cast<Vector*>(memory)[i] = {};
    }
    for (int64_t i = whole * kBulk + threadIdx.x; i < bytes; i += kThreads) memory[i] = 0;
}

// Make the plan's slots into the sums of this rank's mains. Called by all threads of a block: a
// warp takes every kWarps-th main, and a lane every kLanes-th slot.
__device__ void compile_sums(const PeerPull& pull) {
    constexpr int kLanes = 32;
    constexpr int kWarps = kThreads / kLanes;
    constexpr unsigned kAll = 0xffffffff;
    const CopyProblem& problem = pull.problem;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int warp = static_cast<int>(threadIdx.x) / kLanes;
    const int64_t first_place = problem.first_peer * problem.num_slots;
    const int64_t end_place = first_place + problem.num_peers * problem.num_slots;
    // Calls `found(place, lanes)` for each kLanes slots: whether the lane's has the main's replica,
    // and which lanes' have.
    const auto look = [&](int64_t main_idx, auto found) {
        const int64_t expert = problem.rank * problem.mains_per_rank + main_idx;
        for (int64_t first = first_place; first < end_place; first += kLanes) {
            const int64_t place = first + lane;
            const bool is_there = place < end_place && pull.slots[place] == expert;
            found(is_there ? place : -1, __ballot_sync(kAll, is_there));
        }
    };
    for (int64_t m = warp; m < problem.mains_per_rank; m += kWarps) {
        int64_t count = 0;
        look(m, [&](int64_t, unsigned lanes) { count += __popc(lanes); });
        if (lane == 0) pull.sums.each[m] = {m, 0, count};
    }
    __syncthreads();  // All are counted.
    if (threadIdx.x == 0) {
        int64_t num_sums = 0, num_replicas = 0;
        for (int64_t m = 0; m < problem.mains_per_rank; ++m) {
            const int64_t count = pull.sums.each[m].num_replicas;
            if (count == 0) continue;
            pull.sums.each[num_sums++] = {m, num_replicas, count};
            num_replicas += count;
        }
        *pull.sums.count = num_sums;
    }
    __syncthreads();  // All know where the replicas of their mains begin.
    for (int64_t s = warp; s < *pull.sums.count; s += kWarps) {
        PeerPlace* next = pull.sums.replicas + pull.sums.each[s].first_replica;
        look(pull.sums.each[s].main_idx, [&](int64_t place, unsigned lanes) {
            if (place >= 0) {
                next[__popc(lanes & ((1u << lane) - 1))] = {place / problem.num_slots,
                                                            place % problem.num_slots};
            }
            next += __popc(lanes);
        });
    }
}

// One block of it on a multiprocessor is enough: without the 1, registers are spilled for more.
__global__ void __launch_bounds__(kThreads, 1) pull_add_kernel(PeerRank self, PeerPull pull) {
    __shared__ Tiles tiles;
    __shared__ uint32_t taken;
    __shared__ bool ready;
    const int thread = static_cast<int>(threadIdx.x);
    PeerTurn* const turn = &self.state->pull;
    const uint64_t generation = turn->generation + 1;
    const int64_t chunks = pull.segments.num_chunks();
    if (thread == 0) {
        for (int stage = 0; stage < kStages; ++stage) barrier_init(&tiles.loaded[stage]);
        taken = atomicAdd(&turn->blocks_begun, 1u);
    }
    __syncthreads();
    if (taken == 0) {
        // The gradients were written by earlier work of the stream. The block that begins first
        // offers and compiles, so the other blocks wait for a block that runs.
        offer_slots(self, pull.segments, generation, thread, kThreads);
        compile_sums(pull);
        __syncthreads();  // All have written what the flag speaks of.
        if (thread == 0) store_release(&self.state->summed, generation);
    } else if (thread == 0) {
        while (load_acquire(&self.state->summed) != generation) pause();
    }
    __syncthreads();

    const int64_t num_added = *pull.sums.count * chunks;
    const int64_t num_units = num_added + pull.problem.num_slots * chunks;
    uint32_t tiles_used = 0;
    int64_t last_sum = -1;
    while (true) {
        if (thread == 0) {
            taken = atomicAdd(&turn->next_unit, 1u);
            ready = true;
        }
        __syncthreads();
        if (taken >= num_units) break;
        const PeerChunk chunk = peer_chunk(pull.segments, taken % chunks);
        const PeerSegment& segment = pull.segments.each[chunk.segment];
        if (taken >= num_added) {
            const int64_t slot = (taken - num_added) / chunks;
            const int64_t expert = pull.slots[self.rank * pull.problem.num_slots + slot];
            if (expert >= 0 && thread == 0) {
                const PeerPlace place{expert / pull.problem.mains_per_rank, slot};
                const uint64_t* const done = segment.done(self.rank, slot, chunk.idx);
                ready = wait_for(self, done, generation, PeerDeed::kTakeGrad, place, chunk.idx);
            }
            __syncthreads();  // The main's rank has read the chunk.
            if (!ready) break;
            if (expert >= 0) zero(segment.slot(self.rank, slot) + chunk.offset, chunk.bytes);
            __syncthreads();  // All have read `taken`.
            continue;
        }
        const int64_t s = taken / chunks;
        const PeerSum& sum = pull.sums.each[s];
        const int g = chunk.segment;
        Unit unit{&segment, chunk, pull.sums.replicas + sum.first_replica, sum.num_replicas};
        const int64_t first = chunk.offset / (pull.is_bfloat16[g] ? 2 : 4);
        const int64_t offset = first * (pull.is_total_bfloat16[g] ? 2 : 4);
        const int64_t at = sum.main_idx * pull.segments.count + g;
        unit.total = pull.totals[at] + offset;
        unit.aside = pull.asides[at] != nullptr ? pull.asides[at] + offset : nullptr;

        // The replica's rank offers a gradient when it has written it.
        for (int64_t r = thread; s != last_sum && r < unit.num_replicas; r += kThreads) {
            const PeerPlace place = unit.replicas[r];
            const uint64_t* const offered = pull.segments.each[0].offered(place.rank, place.slot);
            if (!wait_for(self, offered, generation, PeerDeed::kOfferGrad, place, 0)) ready = false;
        }
        last_sum = s;
        __syncthreads();  // What any thread has waited for holds for all of them.
        if (!ready) break;
        if (!pull.is_bfloat16[g]) {
            add<Float32, Float32>(unit, tiles, tiles_used);
        } else if (!pull.is_total_bfloat16[g]) {
            add<BFloat16, Float32>(unit, tiles, tiles_used);
        } else {
            add<BFloat16, BFloat16>(unit, tiles, tiles_used);
        }
        __syncthreads();  // All have read what the flags speak of.
        for (int64_t r = thread; r < unit.num_replicas; r += kThreads) {
            const PeerPlace place = unit.replicas[r];
            store_release(unit.segment->done(place.rank, place.slot, unit.chunk.idx), generation);
        }
    }
    __syncthreads();
    if (thread == 0) end_turn(turn);
}

}  // namespace

cudaError_t pull_add_peers_cuda(const PeerRank& self,
                                const PeerPull& pull,
                                int num_blocks,
                                cudaStream_t stream) {
    pull_add_kernel<<<num_blocks, kThreads, 0, stream>>>(self, pull);
    return cudaGetLastError();
}

}  // namespace megatron_ext
