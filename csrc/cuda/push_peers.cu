// Stage 4 on the device: main weights, or what a relay receives, into slots of peers.
//
// 1. Makes this rank's copies: every byte of a source once, to all destinations of the copy.
// 2. One block is one warp. The first to begin compiles the plan's slots into the copies; then each
//    takes a chunk of a copy at a time. Its first lane keeps kStages tiles moving: bulk loads write
//    kAhead of them, bulk stores copy the others to every destination.
// 3. A kernel, because flags of other GPUs order it, without the host and in a captured graph.
// 4. Waits until the copies are compiled, by a flag of its own GPU; until a destination is offered
//    and, in a relay, until the chunk has arrived here. A chunk's flags are stored, a lane for each
//    destination behind one fence for the whole system, when the bulk stores are complete there. It
//    is not enough that they have read shared memory.
// 5. Deterministic: bytes are moved, each by one block.
// 6. A copy reads its source once and writes it to d destinations: 36 MiB to 4 peers at 450 GB/s a
//    GPU of NVLink take 0.34 ms. With a hand-over of 2 us, 0.9 MB of stores must be under way: a
//    store keeps its stage until it is written, so 32 blocks of kStages - kAhead tiles are 1.3 MB.

#include "compile_copies.cuh"
#include "megatron_ext/cuda_api.h"
#include "peers.cuh"

namespace megatron_ext {
namespace {

constexpr int kLanes = 32;
constexpr int kStages = 8;
constexpr int kAhead = 3;  // loads; they come from memory of the same GPU, and are done sooner
static_assert(kAhead < kStages);
constexpr int64_t kTileBytes = 8 << 10;
constexpr int64_t kBulk = 16;  // bytes; a bulk copy has multiples of this
constexpr unsigned kAll = 0xffffffff;

struct Tiles {
    alignas(128) char bytes[kStages][kTileBytes];
    uint64_t loaded[kStages];  // barriers
};

// Shared, and more than a kernel can declare. A block is done with one before it begins with the
// other.
union Memory {
    compiling::Scratch scratch;
    Tiles tiles;
};
extern __shared__ float4 dynamic_memory[];

// A chunk of a copy: `chunk.bytes` at `source` go to this offset of all destinations.
struct Unit {
    const PeerSegment* segment;
    PeerChunk chunk;
    const char* source;
    const PeerPlace* destinations;
    int64_t num_destinations;

    __device__ char* destination(int64_t d) const {
        return segment->slot(destinations[d].rank, destinations[d].slot) + chunk.offset;
    }
};

// Move `bytes`, a multiple of kBulk, through the tiles; `used` counts the tiles so far, which says
// the stage and its phase. Called by one thread; all is at the destinations when it returns.
__device__ void stream(const Unit& unit, int64_t bytes, Tiles& tiles, uint32_t& used) {
    const int count = static_cast<int>((bytes + kTileBytes - 1) / kTileBytes);
    const auto size = [&](int tile) {
        const int64_t left = bytes - tile * kTileBytes;
        return static_cast<uint32_t>(left < kTileBytes ? left : kTileBytes);
    };
    const auto load = [&](int tile) {
        const uint32_t stage = (used + tile) % kStages;
        barrier_expect(&tiles.loaded[stage], size(tile));
        bulk_load(
            tiles.bytes[stage], unit.source + tile * kTileBytes, size(tile), &tiles.loaded[stage]);
    };
    for (int tile = 0; tile < count && tile < kAhead; ++tile) load(tile);
    for (int tile = 0; tile < count; ++tile) {
        const uint32_t stage = (used + tile) % kStages;
        barrier_wait(&tiles.loaded[stage], (used + tile) / kStages % 2);
        for (int64_t d = 0; d < unit.num_destinations; ++d) {
            bulk_store(unit.destination(d) + tile * kTileBytes, tiles.bytes[stage], size(tile));
        }
        bulk_commit();
        const int next = tile + kAhead;
        if (next < count) {
            bulk_wait_read<kStages - kAhead>();  // of those before them one has the stage of `next`
            load(next);
        }
    }
    bulk_wait();
    used += count;
}

// Bytes that no bulk copy takes: behind the last multiple of kBulk, or all where one of the
// addresses is not aligned. Called by all lanes.
__device__ void copy_plainly(const Unit& unit, int64_t first, int lane) {
    for (int64_t i = first + lane; i < unit.chunk.bytes; i += kLanes) {
        const char byte = unit.source[i];
        for (int64_t d = 0; d < unit.num_destinations; ++d) unit.destination(d)[i] = byte;
    }
}

__device__ bool is_aligned(const Unit& unit, int lane) {
    bool aligned = reinterpret_cast<uintptr_t>(unit.source) % kBulk == 0;
    for (int64_t d = lane; d < unit.num_destinations; d += kLanes) {
        aligned = aligned && reinterpret_cast<uintptr_t>(unit.destination(d)) % kBulk == 0;
    }
    return __ballot_sync(kAll, !aligned) == 0;
}

// What a block does before it takes units. The block that begins first offers the slots and
// compiles, so the other blocks wait for a block that runs. Called by all lanes.
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

__global__ void __launch_bounds__(kLanes) push_kernel(PeerRank self, PeerPush push) {
    Memory& memory = *reinterpret_cast<Memory*>(dynamic_memory);
    Tiles& tiles = memory.tiles;
    const int lane = static_cast<int>(threadIdx.x);
    PeerTurn* const turn = &self.state->push;
    const uint64_t generation = turn->generation + 1;
    prepare(self, push, generation, memory.scratch, lane);
    const int64_t chunks = push.segments.num_chunks();
    const int64_t num_units = *push.copies.num_rows * chunks;
    if (lane == 0) {
        for (int stage = 0; stage < kStages; ++stage) barrier_init(&tiles.loaded[stage]);
    }
    __syncwarp();

    uint32_t tiles_used = 0;
    int64_t last_copy = -1;
    while (true) {
        uint32_t taken = lane == 0 ? atomicAdd(&turn->next_unit, 1u) : 0;
        taken = __shfl_sync(kAll, taken, 0);
        if (taken >= num_units) break;
        const int64_t c = taken / chunks;
        const PeerCopy& copy = push.copies.rows[c];
        Unit unit;
        unit.chunk = peer_chunk(push.segments, taken % chunks);
        unit.segment = &push.segments.each[unit.chunk.segment];
        unit.destinations = push.copies.destinations + copy.first_destination;
        unit.num_destinations = copy.num_destinations;

        bool ready = true;
        if (copy.relayed.rank < 0) {
            unit.source = push.mains[copy.main_idx * push.segments.count + unit.chunk.segment];
        } else {
            unit.source = unit.segment->slot(self.rank, copy.relayed.slot);
            // The sending rank stores the chunk's flag behind the chunk's bytes.
            ready = wait_for(self,
                             unit.segment->done(self.rank, copy.relayed.slot, unit.chunk.idx),
                             generation,
                             PeerDeed::kFill,
                             copy.relayed,
                             unit.chunk.idx);
        }
        unit.source += unit.chunk.offset;
        if (c != last_copy) {
            // The destination's rank offers the slot when it reads it no more.
            for (int64_t d = lane; d < unit.num_destinations; d += kLanes) {
                const PeerPlace place = unit.destinations[d];
                ready = ready && wait_for(self,
                                          push.segments.each[0].offered(place.rank, place.slot),
                                          generation,
                                          PeerDeed::kFree,
                                          place,
                                          0);
            }
            last_copy = c;
        }
        if (__ballot_sync(kAll, !ready) != 0) break;
        __syncwarp();  // What any lane has waited for holds for all of them.

        const int64_t bulk = is_aligned(unit, lane) ? unit.chunk.bytes / kBulk * kBulk : 0;
        if (bulk < unit.chunk.bytes) copy_plainly(unit, bulk, lane);
        if (lane == 0 && bulk > 0) {
            fence_bulk();
            stream(unit, bulk, tiles, tiles_used);
        }
        __syncwarp();  // All lanes have written what the flags speak of.
        if (lane < unit.num_destinations) fence_system();
        for (int64_t d = lane; d < unit.num_destinations; d += kLanes) {
            const PeerPlace place = unit.destinations[d];
            store_relaxed(unit.segment->done(place.rank, place.slot, unit.chunk.idx), generation);
        }
    }
    __syncwarp();
    if (lane == 0) end_turn(turn);
}

}  // namespace

cudaError_t push_peers_cuda(const PeerRank& self,
                            const PeerPush& push,
                            int num_blocks,
                            cudaStream_t stream) {
    const cudaError_t allowed = cudaFuncSetAttribute(
        push_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Memory));
    if (allowed != cudaSuccess) return allowed;
    push_kernel<<<num_blocks, kLanes, sizeof(Memory), stream>>>(self, push);
    return cudaGetLastError();
}

}  // namespace megatron_ext
