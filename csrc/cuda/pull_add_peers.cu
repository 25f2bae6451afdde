// Stage 8 on the device: the gradients of a main's replicas, from the slots of peers.
//
// 1. Adds the sum of a main's replicas' gradients, and what was set aside, to the main's total.
// 2. The first block to begin compiles the plan's slots into the sums of this rank's mains. Then a
//    block takes a chunk of a main at a time. One warp loads, the others add. One step is one tile
//    of one source: the replicas, what was set aside, and last the total. Bulk loads of the next
//    kStages steps are under way while a tile is added, over the ends of chunks, too. A thread has
//    the same elements of all sources, and keeps their sums in registers until the total comes.
//    Last come the chunks of this rank's own slots, which are zeroed.
// 3. A kernel, because flags of other GPUs order it, without the host and in a captured graph; and
//    because the gradients are read once and nothing but the total is written.
// 4. Waits until the sums are compiled, by a flag of its own GPU, and until a replica's rank offers
//    the gradient. The chunk's flag at the replica's rank is stored when all warps have read the
//    chunk, whatever the loading warp waits for by then. Nothing is cleared over the link: the
//    replica's rank waits for that flag and zeroes its own memory. Sums wait for no zeroes, so all
//    ranks come to an end.
// 5. Deterministic: each element is added by one thread in float32, in the order of the replicas'
//    ranks, and rounded once.
// 6. Reads r gradients and a total, and writes the total: 72 MiB float32 from 4 peers at 450 GB/s a
//    GPU of NVLink take 0.67 ms.

#include "megatron_ext/cuda_api.h"
#include "peers.cuh"

namespace megatron_ext {
namespace {

constexpr int kLanes = 32;
constexpr int kAdders = 256;
constexpr int kAddingWarps = kAdders / kLanes;
constexpr int kThreads = kAdders + kLanes;  // the last warp loads
constexpr unsigned kAll = 0xffffffff;
constexpr int kStages = 6;
constexpr int kUnits = 2;  // that the loading warp has told the others of
constexpr int64_t kTileBytes = 16 << 10;
constexpr int64_t kBulk = 16;  // bytes; a bulk copy has multiples of this
// A main has one replica in each other rank at most; what was set aside; and the total.
constexpr int kMaxSources = kMaxPeerRanks - 1 + 2;

enum class Work : int32_t { kAdd, kZero, kEnd };

// A chunk of a sum or of an own slot. It stands in shared memory, so it points to no argument of
// the kernel: those would be copied for each thread.
struct Unit {
    Work work;
    PeerChunk chunk;
    char* to;  // the chunk in the total, or in the slot
    const PeerPlace* replicas;
    int32_t num_replicas;
    bool has_aside;
    int64_t bulk_bytes;  // of each replica's chunk, from its start, that come through the tiles

    __device__ int num_sources() const { return num_replicas + (has_aside ? 2 : 1); }
};

// A barrier's phases follow each other as what it guards is used; `loaded` and `told` are for the
// adding warps, `read` and `done` for the loading warp.
struct Shared {
    alignas(128) char tiles[kStages][kTileBytes];
    uint64_t loaded[kStages];
    uint64_t read[kStages];
    Unit units[kUnits];
    const char* sources[kUnits][kMaxSources];  // chunks, in the order in which they are added
    uint64_t told[kUnits];
    uint64_t done[kUnits];
    uint32_t begun;  // blocks before this one
};
static_assert(sizeof(Shared) == 106880, "megatron_ext/transport/gpus.py says how much a pull takes");
extern __shared__ float4 dynamic_memory[];

// How numbers are stored.
struct Float32 {
    using Stored = uint32_t;
    __device__ static float widen(Stored bits) { return __uint_as_float(bits); }
    __device__ static Stored narrow(float value) { return __float_as_uint(value); }
};
struct BFloat16 {
    using Stored = uint16_t;
    __device__ static float widen(Stored bits) { return __uint_as_float(uint32_t{bits} << 16); }
    // To nearest, ties to even.
    __device__ static Stored narrow(float value) {
        const uint32_t bits = __float_as_uint(value);
        const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
        return static_cast<Stored>(value != value ? 0x7fc0 : rounded >> 16);
    }
};

// Four elements side by side.
template <class Number>
struct alignas(4 * sizeof(typename Number::Stored)) Four {
    typename Number::Stored each[4];
};

// Elements of a tile: so many that a tile of every source fits into a stage.
__host__ __device__ constexpr int tile_elements(bool is_total_bfloat16) {
    return static_cast<int>(kTileBytes) / (is_total_bfloat16 ? 2 : 4);
}

// Add the chunk as far as it comes through the tiles; `steps` counts those so far, which says the
// stage and its phase. Called by all adding warps.
template <class Grad, class Total>
__device__ void add_in_bulk(const Unit& unit, Shared& shared, uint32_t& steps) {
    constexpr int kElements = tile_elements(sizeof(typename Total::Stored) == 2);
    constexpr int kFours = kElements / (4 * kAdders);  // of a thread in a tile
    const int count = static_cast<int>(unit.bulk_bytes / sizeof(typename Grad::Stored));
    // Calls `each(v, four)` for the thread's elements in the next stage. Behind the end of a tile
    // there is garbage, which is added but not stored.
    const auto take = [&](auto number, auto each) {
        const uint32_t stage = steps % kStages;
        barrier_wait(&shared.loaded[stage], steps / kStages);
        const auto* const fours =
            reinterpret_cast<const Four<decltype(number)>*>(shared.tiles[stage]);
        Four<decltype(number)> mine[kFours];
#pragma unroll
        for (int v = 0; v < kFours; ++v) mine[v] = fours[v * kAdders + threadIdx.x];
        __syncwarp();  // All lanes have read the stage, so it can be loaded again.
        if (threadIdx.x % kLanes == 0) barrier_arrive(&shared.read[stage]);
#pragma unroll
        for (int v = 0; v < kFours; ++v) each(v, mine[v]);
        ++steps;
    };
    for (int first = 0; first < count; first += kElements) {
        float sums[kFours][4];
        take(Grad{}, [&](int v, const Four<Grad>& four) {
            for (int i = 0; i < 4; ++i) sums[v][i] = Grad::widen(four.each[i]);
        });
        for (int r = 1; r < unit.num_replicas; ++r) {
            take(Grad{}, [&](int v, const Four<Grad>& four) {
                for (int i = 0; i < 4; ++i) sums[v][i] += Grad::widen(four.each[i]);
            });
        }
        if (unit.has_aside) {
            take(Total{}, [&](int v, const Four<Total>& four) {
                for (int i = 0; i < 4; ++i) sums[v][i] += Total::widen(four.each[i]);
            });
        }
        take(Total{}, [&](int v, const Four<Total>& four) {
            const int at = first + 4 * (v * kAdders + static_cast<int>(threadIdx.x));
            if (at >= count) return;
            Four<Total> total;
            for (int i = 0; i < 4; ++i) {
                total.each[i] = Total::narrow(Total::widen(four.each[i]) + sums[v][i]);
            }
            reinterpret_cast<Four<Total>*>(unit.to)[at / 4] = total;
        });
    }
}

// Elements that no bulk load takes: behind the last multiple of kBulk bytes, or all where one of
// the gradients or totals is not aligned. Called by all adding warps.
template <class Grad, class Total>
__device__ void add_plainly(const Unit& unit, const char* const* sources) {
    using Stored = typename Grad::Stored;
    auto* const totals = reinterpret_cast<typename Total::Stored*>(unit.to);
    const int count = static_cast<int>(unit.chunk.bytes / sizeof(Stored));
    const int first = static_cast<int>(unit.bulk_bytes / sizeof(Stored));
    for (int i = first + static_cast<int>(threadIdx.x); i < count; i += kAdders) {
        const auto value = [&](int r) {
            return Grad::widen(reinterpret_cast<const Stored*>(sources[r])[i]);
        };
        float sum = value(0);
        for (int r = 1; r < unit.num_replicas; ++r) sum += value(r);
        if (unit.has_aside) {
            const char* const aside = sources[unit.num_replicas];
            sum += Total::widen(reinterpret_cast<const typename Total::Stored*>(aside)[i]);
        }
        totals[i] = Total::narrow(Total::widen(totals[i]) + sum);
    }
}

__device__ bool is_aligned(const char* address) {
    return reinterpret_cast<uintptr_t>(address) % kBulk == 0;
}

// Called by all adding warps.
__device__ void zero(char* memory, int64_t bytes) {
    const int64_t whole = is_aligned(memory) ? bytes / kBulk : 0;
    for (int64_t i = threadIdx.x; i < whole; i += kAdders) {
        reinterpret_cast<float4*>(memory)[i] = {};
    }
    for (int64_t i = whole * kBulk + threadIdx.x; i < bytes; i += kAdders) memory[i] = 0;
}

// Make the plan's slots into the sums of this rank's mains. Called by all threads of a block: a
// warp takes every kWarps-th main, and a lane every kLanes-th slot.
__device__ void compile_sums(const PeerPull& pull) {
    constexpr int kWarps = kThreads / kLanes;
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

// Take units and start the loads of their sources, until there are no more units or a wait fails.
// Called by the loading warp.
struct Loader {
    const PeerRank& self;
    const PeerPull& pull;
    const uint64_t generation;
    Shared& shared;
    const int lane;
    uint32_t num_told = 0;
    uint32_t num_steps = 0;

    __device__ void run() {
        const int64_t chunks = pull.segments.num_chunks();
        const int64_t num_added = *pull.sums.count * chunks;
        const int64_t num_units = num_added + pull.problem.num_slots * chunks;
        int64_t last_sum = -1;
        bool ready = true;
        uint32_t next = take();
        while (ready) {
            const uint32_t taken = __shfl_sync(kAll, next, 0);
            if (taken >= num_units) break;
            next = take();  // what that takes is hidden behind the unit before it
            Unit unit{};
            unit.chunk = peer_chunk(pull.segments, taken % chunks);
            if (taken >= num_added) {
                ready = zero_slot(unit, (taken - num_added) / chunks);
            } else {
                const int64_t s = taken / chunks;
                ready = add_sum(unit, s, s != last_sum);
                last_sum = s;
            }
        }
        wait_for_room();
        tell({Work::kEnd});
    }

  private:
    __device__ uint32_t take() const {
        return lane == 0 ? atomicAdd(&self.state->pull.next_unit, 1u) : 0;
    }

    // Where the next unit is told. Until the unit before there is done, nothing of it may change.
    __device__ int room() const { return static_cast<int>(num_told % kUnits); }
    __device__ void wait_for_room() {
        if (num_told >= kUnits) barrier_wait(&shared.done[room()], num_told / kUnits - 1);
    }
    __device__ void tell(const Unit& unit) {
        if (lane == 0) {
            shared.units[room()] = unit;
            barrier_arrive(&shared.told[room()]);
        }
        ++num_told;
    }

    // Whether a slot's chunk may be zeroed, which is told.
    __device__ bool zero_slot(Unit& unit, int64_t slot) {
        const int64_t expert = pull.slots[self.rank * pull.problem.num_slots + slot];
        if (expert < 0) return true;
        const PeerSegment& segment = pull.segments.each[unit.chunk.segment];
        bool ready = true;
        if (lane == 0) {
            const PeerPlace place{expert / pull.problem.mains_per_rank, slot};
            const uint64_t* const done = segment.done(self.rank, slot, unit.chunk.idx);
            ready = wait_for(self, done, generation, PeerDeed::kTakeGrad, place, unit.chunk.idx);
        }
        if (__ballot_sync(kAll, !ready) != 0) return false;
        unit.work = Work::kZero;
        unit.to = segment.slot(self.rank, slot) + unit.chunk.offset;
        wait_for_room();
        tell(unit);
        return true;
    }

    // Whether a chunk of a sum can be added, which is told, and all of it loaded then.
    __device__ bool add_sum(Unit& unit, int64_t s, bool is_new) {
        const PeerSum& sum = pull.sums.each[s];
        const int g = unit.chunk.segment;
        const PeerSegment& segment = pull.segments.each[g];
        unit.replicas = pull.sums.replicas + sum.first_replica;
        unit.num_replicas = static_cast<int32_t>(sum.num_replicas);
        bool ready = true;
        // The replica's rank offers a gradient when it has written it.
        for (int r = lane; is_new && r < unit.num_replicas; r += kLanes) {
            const PeerPlace place = unit.replicas[r];
            const uint64_t* const offered = pull.segments.each[0].offered(place.rank, place.slot);
            if (!wait_for(self, offered, generation, PeerDeed::kOfferGrad, place, 0)) ready = false;
        }
        if (__ballot_sync(kAll, !ready) != 0) return false;

        wait_for_room();
        const char** const sources = shared.sources[room()];
        const int64_t grad_bytes = pull.is_bfloat16[g] ? 2 : 4;
        const int64_t total_bytes = pull.is_total_bfloat16[g] ? 2 : 4;
        const int64_t offset = unit.chunk.offset / grad_bytes * total_bytes;
        const int64_t at = sum.main_idx * pull.segments.count + g;
        const char* const aside = pull.asides[at];
        unit.to = pull.totals[at] + offset;
        unit.has_aside = aside != nullptr;
        bool aligned = is_aligned(unit.to) && is_aligned(aside);
        for (int r = lane; r < unit.num_replicas; r += kLanes) {
            const PeerPlace place = unit.replicas[r];
            sources[r] = segment.slot(place.rank, place.slot) + unit.chunk.offset;
            aligned = aligned && is_aligned(sources[r]);
        }
        if (lane == 0) {
            if (unit.has_aside) sources[unit.num_replicas] = aside + offset;
            sources[unit.num_sources() - 1] = unit.to;
        }
        const bool all_aligned = __ballot_sync(kAll, !aligned) == 0;
        // All lanes have written their sources, and what any has waited for holds for all of them.
        // A vote alone orders nothing.
        __syncwarp();
        unit.bulk_bytes = all_aligned ? unit.chunk.bytes / kBulk * kBulk : 0;
        tell(unit);
        if (lane == 0) {
            if (is_new) fence_bulk();
            load(unit, sources, static_cast<int>(grad_bytes), static_cast<int>(total_bytes));
        }
        return true;
    }

    // Called by one lane.
    __device__ void load(const Unit& unit,
                         const char* const* sources,
                         int grad_bytes,
                         int total_bytes) {
        const int tile = tile_elements(total_bytes == 2);
        const int count = static_cast<int>(unit.bulk_bytes) / grad_bytes;
        const int num_sources = unit.num_sources();
        for (int first = 0; first < count; first += tile) {
            const int elements = count - first < tile ? count - first : tile;
            for (int i = 0; i < num_sources; ++i, ++num_steps) {
                const int bytes = i < unit.num_replicas ? grad_bytes : total_bytes;
                const uint32_t stage = num_steps % kStages;
                if (num_steps >= kStages) {
                    barrier_wait(&shared.read[stage], num_steps / kStages - 1);
                }
                barrier_expect(&shared.loaded[stage], elements * bytes);
                bulk_load(shared.tiles[stage],
                          sources[i] + first * bytes,
                          elements * bytes,
                          &shared.loaded[stage]);
            }
        }
    }
};

// Do the units that the loading warp tells of. Called by all adding warps.
__device__ void do_units(const PeerPull& pull, uint64_t generation, Shared& shared) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    uint32_t steps = 0;
    for (uint32_t n = 0;; ++n) {
        const int room = static_cast<int>(n % kUnits);
        const uint32_t phase = n / kUnits;
        barrier_wait(&shared.told[room], phase);
        const Unit unit = shared.units[room];
        if (unit.work == Work::kEnd) return;
        const int g = unit.chunk.segment;
        const auto add = [&](auto grad, auto total) {
            using Grad = decltype(grad);
            using Total = decltype(total);
            add_in_bulk<Grad, Total>(unit, shared, steps);
            if (unit.bulk_bytes < unit.chunk.bytes) {
                add_plainly<Grad, Total>(unit, shared.sources[room]);
            }
        };
        if (unit.work == Work::kZero) {
            zero(unit.to, unit.chunk.bytes);
        } else if (!pull.is_bfloat16[g]) {
            add(Float32{}, Float32{});
        } else if (!pull.is_total_bfloat16[g]) {
            add(BFloat16{}, Float32{});
        } else {
            add(BFloat16{}, BFloat16{});
        }
        __syncwarp();  // All lanes are done.
        if (lane == 0) barrier_arrive(&shared.done[room]);
        if (unit.work == Work::kZero || threadIdx.x >= kLanes) continue;
        barrier_wait(&shared.done[room], phase);  // All warps have read what the flags speak of.
        const PeerSegment& segment = pull.segments.each[g];
        for (int r = lane; r < unit.num_replicas; r += kLanes) {
            const PeerPlace place = unit.replicas[r];
            store_release(segment.done(place.rank, place.slot, unit.chunk.idx), generation);
        }
    }
}

// One block of it on a multiprocessor is enough: without the 1, registers are spilled for more.
__global__ void __launch_bounds__(kThreads, 1) pull_add_kernel(PeerRank self, PeerPull pull) {
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_memory);
    const int thread = static_cast<int>(threadIdx.x);
    PeerTurn* const turn = &self.state->pull;
    const uint64_t generation = turn->generation + 1;
    if (thread == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            barrier_init(&shared.loaded[stage]);
            barrier_init(&shared.read[stage], kAddingWarps);
        }
        for (int room = 0; room < kUnits; ++room) {
            barrier_init(&shared.told[room]);
            barrier_init(&shared.done[room], kAddingWarps);
        }
        shared.begun = atomicAdd(&turn->blocks_begun, 1u);
    }
    __syncthreads();
    if (shared.begun == 0) {
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
    if (thread >= kAdders) {
        Loader{self, pull, generation, shared, thread % kLanes}.run();
    } else {
        do_units(pull, generation, shared);
    }
    __syncthreads();
    if (thread == 0) end_turn(turn);
}

}  // namespace

cudaError_t pull_add_peers_cuda(const PeerRank& self,
                                const PeerPull& pull,
                                int num_blocks,
                                cudaStream_t stream) {
    const cudaError_t allowed = cudaFuncSetAttribute(
        pull_add_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
    if (allowed != cudaSuccess) return allowed;
    pull_add_kernel<<<num_blocks, kThreads, sizeof(Shared), stream>>>(self, pull);
    return cudaGetLastError();
}

}  // namespace megatron_ext
