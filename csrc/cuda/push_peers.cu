// Stage 4 on the device: main weights, or what a relay receives, into slots of peers.
//
// 1. Makes this rank's copies: every byte of a source once, to all destinations of the copy.
// 2. A block is four warps, which hand on a chunk of a copy at a time. The taker compiles the
//    plan's slots into the copies, if its block is the first to begin, then takes chunks and waits
//    until they may be moved. One lane of the loader fills tiles by bulk loads, one of the storer
//    copies them to every destination by bulk stores, and the teller's lanes store the flags. So
//    bytes go on moving while the next chunk is taken and the last one's flags are stored.
// 3. A kernel, because flags of other GPUs order it, without the host and in a captured graph.
// 4. Waits until the copies are compiled, by a flag of its own GPU; until a destination is offered
//    and, in a relay, until the chunk has arrived here. A chunk's flags are stored, a lane for each
//    destination behind one fence for the whole system, when the bulk stores are complete there. It
//    is not enough that they have read shared memory. While the taker waits, the storer completes
//    what it has begun: others may wait for it.
// 5. Deterministic: bytes are moved, each by one block.
// 6. A copy reads its source once and writes it to d destinations: 36 MiB to 4 peers at 450 GB/s a
//    GPU of NVLink take 0.34 ms. With a hand-over of 2 us, 0.9 MB of stores must be under way, of
//    32 blocks 28 KiB each.

#include "compile_copies.cuh"
#include "megatron_ext/cuda_api.h"
#include "peers.cuh"

namespace megatron_ext {
namespace {

constexpr int kLanes = 32;
enum Role { kTaker, kLoader, kStorer, kTeller, kNumRoles };  // a warp each
constexpr int kThreads = kNumRoles * kLanes;
constexpr int kBlocks = 2;  // on a multiprocessor, at least
constexpr int kStages = 12;
constexpr int kAhead = 6;  // loads; as many stores as the other stages hold are not awaited
static_assert(0 < kAhead && kAhead < kStages);
constexpr int kUnits = 3;  // one whose stores end, one that is moved, one that is taken meanwhile
// Tiles of a unit that are under way before the storer waits for the end of the unit before it:
// about as many as are stored in the time that one store takes.
constexpr int kUnderWay = 8;
constexpr int64_t kTileBytes = 8 << 10;
constexpr int64_t kBulk = 16;  // bytes; a bulk copy has multiples of this
constexpr unsigned kAll = 0xffffffff;

// A chunk of a copy: `chunk.bytes` at `source` go to this offset of all destinations.
struct Unit {
    bool is_end;  // no unit: there are no more
    PeerChunk chunk;
    const char* source;
    int64_t bulk_bytes;  // from the start; bulk copies do not take what is behind them
    const PeerPlace* destinations;
    int64_t num_destinations;
    char* first_destinations[kLanes];  // the addresses
};

// Things that pass through the places of a ring one after the other, told by a barrier each.
template <int kPlaces>
struct Passed {
    uint64_t barriers[kPlaces];

    __device__ uint64_t* barrier(uint32_t i) { return &barriers[i % kPlaces]; }
    __device__ void init(uint32_t arrivals = 1) {
        for (uint64_t& each : barriers) barrier_init(&each, arrivals);
    }
    __device__ void arrive(uint32_t i) { barrier_arrive(barrier(i)); }
    __device__ bool has(uint32_t i) { return barrier_is_past(barrier(i), i / kPlaces); }
    __device__ void wait(uint32_t i) { barrier_wait(barrier(i), i / kPlaces); }
};

struct Pipeline {
    alignas(128) char tiles[kStages][kTileBytes];
    Passed<kStages> loaded;   // tiles: loader to storer
    Passed<kStages> emptied;  // and back
    Unit units[kUnits];
    Passed<kUnits> taken;  // taker to all others
    Passed<kUnits> moved;  // storer to teller: the bulk stores are complete
    Passed<kUnits> told;   // loader and teller to taker: nobody needs the unit any more

    __device__ Unit& unit(uint32_t n) { return units[n % kUnits]; }
    __device__ char* tile(uint32_t i) { return tiles[i % kStages]; }
};

// Shared, and more than a kernel can declare. A block is done with one before it begins with the
// other.
union Memory {
    compiling::Scratch scratch;
    Pipeline pipeline;
};
extern __shared__ float4 dynamic_memory[];

__device__ uint32_t tile_bytes(int64_t left) {
    return static_cast<uint32_t>(left < kTileBytes ? left : kTileBytes);
}

__device__ char* destination(const PeerSegments& segments, const Unit& unit, int64_t d) {
    const PeerPlace place = unit.destinations[d];
    return segments.each[unit.chunk.segment].slot(place.rank, place.slot) + unit.chunk.offset;
}

// What a block does before it takes units. The block that begins first offers the slots and
// compiles, so the other blocks wait for a block that runs. Called by all lanes of one warp.
__device__ void prepare(const PeerRank& self,
                        const PeerPush& push,
                        uint64_t generation,
                        compiling::Scratch& scratch,
                        int lane) {
    uint64_t* const compiled = &self.state->compiled;
    const uint32_t begun = lane == 0 ? atomicAdd(&self.state->push.blocks_begun, 1u) : 0;
    if (__shfl_sync(kAll, begun, 0) == 0) {
        // What this rank read in its slots was read by earlier work of the stream.
        offer_slots(self, push.segments, generation, lane, kLanes);
        compiling::Compiler(push.problem, push.slots, push.copies, scratch).run();
        __syncwarp();  // All lanes have written what the flag speaks of.
        if (lane == 0) store_release(compiled, generation);
    } else if (lane == 0) {
        while (load_acquire(compiled) != generation) pause();
    }
    __syncwarp();
}

// Find unit `taken` and wait until it may be moved; `copy` has row `last_copy`. False if that is
// not to come. Called by all lanes of the taker.
__device__ bool find_unit(const PeerRank& self,
                          const PeerPush& push,
                          uint64_t generation,
                          uint32_t taken,
                          PeerCopy& copy,
                          int64_t& last_copy,
                          Unit& unit,
                          int lane) {
    const auto chunks = static_cast<uint32_t>(push.segments.num_chunks());
    const int64_t c = taken / chunks;
    const bool is_new = c != last_copy;
    if (is_new) copy = push.copies.rows[c];
    last_copy = c;
    const PeerChunk chunk = peer_chunk(push.segments, taken % chunks);
    const PeerSegment& segment = push.segments.each[chunk.segment];
    const PeerPlace* const destinations = push.copies.destinations + copy.first_destination;

    bool ready = true;
    const char* source;
    if (copy.relayed.rank < 0) {
        source = push.mains[copy.main_idx * push.segments.count + chunk.segment];
    } else {
        source = segment.slot(self.rank, copy.relayed.slot);
        // The sending rank stores the chunk's flag behind the chunk's bytes.
        ready = wait_for(self,
                         segment.done(self.rank, copy.relayed.slot, chunk.idx),
                         generation,
                         PeerDeed::kFill,
                         copy.relayed,
                         chunk.idx);
    }
    source += chunk.offset;
    if (is_new) {
        // The destination's rank offers the slot when it reads it no more.
        for (int64_t d = lane; d < copy.num_destinations; d += kLanes) {
            const PeerPlace place = destinations[d];
            ready = ready && wait_for(self,
                                      push.segments.each[0].offered(place.rank, place.slot),
                                      generation,
                                      PeerDeed::kFree,
                                      place,
                                      0);
        }
    }
    bool aligned = reinterpret_cast<uintptr_t>(source) % kBulk == 0;
    for (int64_t d = lane; d < copy.num_destinations; d += kLanes) {
        const PeerPlace place = destinations[d];
        char* const there = segment.slot(place.rank, place.slot) + chunk.offset;
        aligned = aligned && reinterpret_cast<uintptr_t>(there) % kBulk == 0;
        if (d < kLanes) unit.first_destinations[d] = there;
    }
    aligned = __ballot_sync(kAll, !aligned) == 0;
    if (lane == 0) {
        unit.chunk = chunk;
        unit.source = source;
        unit.bulk_bytes = aligned ? chunk.bytes / kBulk * kBulk : 0;
        unit.destinations = destinations;
        unit.num_destinations = copy.num_destinations;
    }
    return __ballot_sync(kAll, !ready) == 0;
}

// Called by all lanes of the taker.
__device__ void take_units(
    const PeerRank& self, const PeerPush& push, uint64_t generation, Pipeline& pipeline, int lane) {
    const int64_t num_units = *push.copies.num_rows * push.segments.num_chunks();
    PeerCopy copy{};
    int64_t last_copy = -1;
    bool goes_on = true;
    for (uint32_t n = 0; goes_on; ++n) {
        uint32_t taken = 0;
        if (lane == 0) {
            if (n >= kUnits) pipeline.told.wait(n - kUnits);
            taken = atomicAdd(&self.state->push.next_unit, 1u);
        }
        __syncwarp();  // Nobody needs what any lane writes over.
        taken = __shfl_sync(kAll, taken, 0);
        Unit& unit = pipeline.unit(n);
        goes_on = taken < num_units &&
                  find_unit(self, push, generation, taken, copy, last_copy, unit, lane);
        __syncwarp();  // What any lane has written or waited for holds for lane 0.
        if (lane == 0) {
            unit.is_end = !goes_on;
            fence_bulk();
            pipeline.taken.arrive(n);
        }
    }
}

// Called by one thread.
__device__ void load_tiles(Pipeline& pipeline) {
    uint32_t tile = 0;  // of all units
    for (uint32_t n = 0;; ++n) {
        // The storer does not wait for who reads a unit of no tiles.
        if (n > 0) pipeline.told.arrive(n - 1);
        pipeline.taken.wait(n);
        const Unit& unit = pipeline.unit(n);
        if (unit.is_end) return;
        const char* source = unit.source;
        for (int64_t left = unit.bulk_bytes; left > 0; left -= kTileBytes, ++tile) {
            if (tile >= kStages) pipeline.emptied.wait(tile - kStages);
            uint64_t* const loaded = pipeline.loaded.barrier(tile);
            barrier_expect(loaded, tile_bytes(left));
            bulk_load(pipeline.tile(tile), source, tile_bytes(left), loaded);
            source += kTileBytes;
        }
    }
}

// Called by one thread.
__device__ void store_tiles(const PeerSegments& segments, Pipeline& pipeline) {
    constexpr int kReading = kStages - kAhead;
    uint32_t tile = 0;   // of all units
    uint32_t moved = 0;  // units told to be; what was stored of the others may not be complete
    for (uint32_t n = 0;; ++n) {
        const auto complete = [&] {
            if (moved == n) return;
            bulk_wait();
            pipeline.moved.arrive(moved++);
        };
        if (!pipeline.taken.has(n)) complete();
        pipeline.taken.wait(n);
        const Unit& unit = pipeline.unit(n);
        if (unit.is_end) return complete();
        const int64_t num_destinations = unit.num_destinations, bytes = unit.bulk_bytes;
        for (int64_t at = 0; at < bytes; at += kTileBytes, ++tile) {
            pipeline.loaded.wait(tile);
            for (int64_t d = 0; d < num_destinations; ++d) {
                char* const there =
                    d < kLanes ? unit.first_destinations[d] : destination(segments, unit, d);
                bulk_store(there + at, pipeline.tile(tile), tile_bytes(bytes - at));
            }
            bulk_commit();
            bulk_wait_read<kReading>();
            if (tile >= kReading) pipeline.emptied.arrive(tile - kReading);
            if (moved < n && at == (kUnderWay - 1) * kTileBytes) {
                bulk_wait<kUnderWay>();
                pipeline.moved.arrive(moved++);
            }
        }
        complete();  // It had fewer tiles.
    }
}

// Bytes that no bulk copy takes: behind the last multiple of kBulk, or all where one of the
// addresses is not aligned. Called by all lanes of one warp.
__device__ void copy_plainly(const PeerSegments& segments, const Unit& unit, int lane) {
    for (int64_t i = unit.bulk_bytes + lane; i < unit.chunk.bytes; i += kLanes) {
        const char byte = unit.source[i];
        for (int64_t d = 0; d < unit.num_destinations; ++d) {
            destination(segments, unit, d)[i] = byte;
        }
    }
}

// Called by all lanes of the teller.
__device__ void tell_units(const PeerPush& push,
                           uint64_t generation,
                           Pipeline& pipeline,
                           int lane) {
    for (uint32_t n = 0;; ++n) {
        if (lane == 0) pipeline.taken.wait(n);
        __syncwarp();
        const Unit& unit = pipeline.unit(n);
        if (unit.is_end) return;
        const PeerSegment& segment = push.segments.each[unit.chunk.segment];
        const auto flag = [&](int64_t d) {
            const PeerPlace place = unit.destinations[d];
            return segment.done(place.rank, place.slot, unit.chunk.idx);
        };
        // Found while the bytes move.
        uint64_t* const first = lane < unit.num_destinations ? flag(lane) : nullptr;
        copy_plainly(push.segments, unit, lane);
        if (lane == 0) pipeline.moved.wait(n);
        __syncwarp();  // All lanes have written what the flags speak of.
        if (first != nullptr) {
            fence_system();
            store_relaxed(first, generation);
        }
        for (int64_t d = lane + kLanes; d < unit.num_destinations; d += kLanes) {
            store_relaxed(flag(d), generation);
        }
        __syncwarp();  // All lanes have read the unit.
        if (lane == 0) pipeline.told.arrive(n);
    }
}

__global__ void __launch_bounds__(kThreads, kBlocks) push_kernel(PeerRank self, PeerPush push) {
    Memory& memory = *reinterpret_cast<Memory*>(dynamic_memory);
    Pipeline& pipeline = memory.pipeline;
    const int role = static_cast<int>(threadIdx.x) / kLanes;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    PeerTurn* const turn = &self.state->push;
    const uint64_t generation = turn->generation + 1;
    if (role == kTaker) {
        prepare(self, push, generation, memory.scratch, lane);
        if (lane == 0) {
            pipeline.loaded.init();
            pipeline.emptied.init();
            pipeline.taken.init();
            pipeline.moved.init();
            pipeline.told.init(2);
        }
    }
    __syncthreads();

    if (role == kTaker) take_units(self, push, generation, pipeline, lane);
    if (role == kLoader && lane == 0) load_tiles(pipeline);
    if (role == kStorer && lane == 0) store_tiles(push.segments, pipeline);
    if (role == kTeller) {
        tell_units(push, generation, pipeline, lane);
        if (lane == 0) end_turn(turn);  // The teller ends last.
    }
}

}  // namespace

cudaError_t push_peers_cuda(const PeerRank& self,
                            const PeerPush& push,
                            int num_blocks,
                            cudaStream_t stream) {
    const cudaError_t allowed = cudaFuncSetAttribute(
        push_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Memory));
    if (allowed != cudaSuccess) return allowed;
    push_kernel<<<num_blocks, kThreads, sizeof(Memory), stream>>>(self, push);
    return cudaGetLastError();
}

}  // namespace megatron_ext
