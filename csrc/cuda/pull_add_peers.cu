// Stage 8 on the device: the gradients of a main's replicas, from the slots of peers.
//
// 1. Overwrites each total with the sum of the main's replicas' gradients.
// 2. One block takes a chunk of a main at a time. One step is one tile of one replica: kStages bulk
//    loads are under way while all threads add an earlier tile. A thread has the same elements of
//    all replicas, and keeps their sums in registers until the last one.
// 3. A kernel, because flags of other GPUs order it, without the host and in a captured graph; and
//    because the gradients are read once and nothing but the sum is written.
// 4. Waits until a replica's rank offers the gradient. The chunk's flag at the replica's rank is
//    stored when all threads have read the chunk. Nothing is cleared over the link: after that the
//    replica's rank may overwrite its own memory.
// 5. Deterministic: each element is added by one thread in float32, in the order of the replicas.
// 6. Reads r gradients and writes one sum: 72 MiB float32 from 4 peers at 450 GB/s a GPU of NVLink
//    take 0.67 ms.

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
    float* total;  // of the chunk's first element

    __device__ const char* source(int64_t r) const {
        return segment->slot(replicas[r].rank, replicas[r].slot) + chunk.offset;
    }
};

__device__ float float_of(uint32_t bits) { return __uint_as_float(bits); }

// How gradients are stored.
struct Float32 {
    using Stored = uint32_t;
    __device__ static float widen(Stored bits) { return float_of(bits); }
    // Element i of a vector.
    __device__ static float at(const Vector& vector, int i) { return float_of(vector.words[i]); }
};
struct BFloat16 {
    using Stored = uint16_t;
    __device__ static float widen(Stored bits) { return float_of(uint32_t{bits} << 16); }
    __device__ static float at(const Vector& vector, int i) {
        const uint32_t word = vector.words[i / 2];
        return float_of(i % 2 == 0 ? word << 16 : word & 0xffff0000);
    }
};

// Add `bytes`, a multiple of kBulk, through the tiles; `used` counts the tiles so far, which says
// the stage and its phase. Called by all threads.
template <class Grad>
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
        float* const total = unit.total + tile * (kTileBytes / sizeof(typename Grad::Stored));
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const int at = v * kThreads + static_cast<int>(threadIdx.x);
            if (at * sizeof(Vector) >= size(tile)) break;
#pragma unroll
            for (int i = 0; i < kElements; i += 4) {
                *reinterpret_cast<float4*>(total + at * kElements + i) =
                    float4{sum[v][i], sum[v][i + 1], sum[v][i + 2], sum[v][i + 3]};
            }
        }
    }
    used += steps;
}

// Elements that no bulk load takes: behind the last multiple of kBulk bytes, or all where one of
// the gradients is not aligned. Called by all threads.
template <class Grad>
__device__ void add_plainly(const Unit& unit, int64_t first_byte) {
    using Stored = typename Grad::Stored;
    const int64_t count = unit.chunk.bytes / sizeof(Stored);
    for (int64_t i = first_byte / sizeof(Stored) + threadIdx.x; i < count; i += kThreads) {
        const auto value = [&](int64_t r) {
            return Grad::widen(reinterpret_cast<const Stored*>(unit.source(r))[i]);
        };
        float sum = value(0);
        for (int64_t r = 1; r < unit.num_replicas; ++r) sum += value(r);
        unit.total[i] = sum;
    }
}

template <class Grad>
__device__ void add(const Unit& unit, Tiles& tiles, uint32_t& used) {
    bool aligned = true;
    for (int64_t r = 0; r < unit.num_replicas; ++r) {
        aligned = aligned && reinterpret_cast<uintptr_t>(unit.source(r)) % kBulk == 0;
    }
    const int64_t bulk = aligned ? unit.chunk.bytes / kBulk * kBulk : 0;
    if (bulk > 0) add_in_bulk<Grad>(unit, bulk, tiles, used);
    if (bulk < unit.chunk.bytes) add_plainly<Grad>(unit, bulk);
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
    }
    // The gradients were written by earlier work of the stream.
    if (blockIdx.x == 0) offer_slots(self, pull.segments, generation, thread, kThreads);

    uint32_t tiles_used = 0;
    int64_t last_sum = -1;
    while (true) {
        if (thread == 0) {
            taken = atomicAdd(&turn->next_unit, 1u);
            ready = true;
        }
        __syncthreads();
        if (taken >= pull.num_sums * chunks) break;
        const int64_t s = taken / chunks;
        Unit unit;
        unit.chunk = peer_chunk(pull.segments, taken % chunks);
        const int g = unit.chunk.segment;
        unit.segment = &pull.segments.each[g];
        unit.replicas = pull.replicas + pull.sums[s].first_replica;
        unit.num_replicas = pull.sums[s].num_replicas;
        const int64_t element_bytes = pull.is_bfloat16[g] ? 2 : 4;
        unit.total = pull.totals[s * pull.segments.count + g] + unit.chunk.offset / element_bytes;

        // The replica's rank offers a gradient when it has written it.
        for (int64_t r = thread; s != last_sum && r < unit.num_replicas; r += kThreads) {
            const PeerPlace place = unit.replicas[r];
            const uint64_t* const offered = pull.segments.each[0].offered(place.rank, place.slot);
            if (!wait_for(self, offered, generation, PeerDeed::kOfferGrad, place, 0)) ready = false;
        }
        last_sum = s;
        __syncthreads();  // What any thread has waited for holds for all of them.
        if (!ready) break;
        if (pull.is_bfloat16[g]) {
            add<BFloat16>(unit, tiles, tiles_used);
        } else {
            add<Float32>(unit, tiles, tiles_used);
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
