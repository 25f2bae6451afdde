// Whether who sees a flag sees the bytes that bulk stores put before it: the order on which
// replicas rest (csrc/cuda/push_peers.cu), with the project's own instructions.
//
//   litmus FROM RELAY TO BYTES ROUNDS PAIRS RIGHT|READ|BROKEN BULK|PLAIN QUIET|BUSY
//
// FROM, RELAY and TO are devices, RELAY -1 for none; they may be one. In each round a writer stores
// BYTES with the round's number in every word and then a flag; a reader waits for the flag,
// compares all words by plain loads, and answers. With a relay the bytes pass through its memory by
// bulk loads and bulk stores. PLAIN is the gather's way (csrc/cuda/gather_rows.cu): all lanes store
// plainly. A lane that need not have stored anything sets the flag, behind a fence of its own.
// PAIRS of them run at a time, one warp each.
//
// BROKEN sets the flag without a fence, right behind the bulk stores' commit or the plain stores:
// if no round of it differs, the test sees nothing. READ waits until the bulk stores have read
// shared memory, which PTX does not promise to be enough; for information. BUSY copies between FROM
// and TO meanwhile. Prints how many rounds had a wrong word.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "ptx.cuh"

namespace {

using namespace megatron_ext;

constexpr int kLanes = 32;
constexpr int kTeller = 1;  // the lane that sets a flag
constexpr int kTileBytes = 8 << 10;
constexpr uint64_t kLimitNs = 20'000'000'000;
constexpr int64_t kBusyBytes = 64 << 20;

// A way from one rank to the next, one of each for a pair.
struct Hop {
    char* bytes;     // at the receiver
    uint64_t* told;  // at the receiver: the round that has arrived
    uint64_t* seen;  // at the sender: the round that has been read
};

struct Sizes {
    int64_t bytes;
    uint64_t rounds;

    __device__ int tile(int64_t offset) const {
        return static_cast<int>(bytes - offset < kTileBytes ? bytes - offset : kTileBytes);
    }
};

// Wait for a round; false if it does not come.
__device__ bool wait_round(const uint64_t* flag, uint64_t round) {
    const uint64_t start = now_ns();
    while (load_relaxed(flag) < round) {
        if (now_ns() - start > kLimitNs) return false;
        pause();
    }
    return load_acquire(flag) >= round;
}

enum class Order { kRight, kRead, kBroken };

template <Order kOrder>
__device__ void end_stores() {
    bulk_commit();
    if constexpr (kOrder == Order::kRight) bulk_wait();
    if constexpr (kOrder == Order::kRead) bulk_wait_read<0>();
}

template <Order kOrder>
__device__ void tell(uint64_t* flag, uint64_t round) {
    if constexpr (kOrder != Order::kBroken) fence_system();
    store_relaxed(flag, round);
}

template <Order kOrder>
__global__ void write_plainly(Hop hop, Sizes sizes, unsigned* late) {
    const int lane = static_cast<int>(threadIdx.x);
    const int64_t pair = blockIdx.x;
    auto* const words = reinterpret_cast<uint32_t*>(hop.bytes + pair * sizes.bytes);
    for (uint64_t round = 1; round <= sizes.rounds; ++round) {
        for (int64_t i = lane; i < sizes.bytes / 4; i += kLanes) {
            words[i] = static_cast<uint32_t>(round);
        }
        __syncwarp();
        bool goes_on = true;
        if (lane == kTeller) tell<kOrder>(&hop.told[pair], round);
        if (lane == 0) {
            goes_on = wait_round(&hop.seen[pair], round);
            if (!goes_on) atomicAdd(late, 1u);
        }
        if (!__shfl_sync(0xffffffff, goes_on, 0)) return;
    }
}

template <Order kOrder>
__global__ void write_rounds(Hop hop, Sizes sizes, unsigned* late) {
    __shared__ alignas(128) uint32_t tile[kTileBytes / sizeof(uint32_t)];
    const int lane = static_cast<int>(threadIdx.x);
    const int64_t pair = blockIdx.x;
    for (uint64_t round = 1; round <= sizes.rounds; ++round) {
        for (int i = lane; i < kTileBytes / 4; i += kLanes) tile[i] = static_cast<uint32_t>(round);
        fence_bulk();  // each lane's words, before lane 0 copies them
        __syncwarp();
        bool goes_on = true;
        if (lane == 0) {
            for (int64_t at = 0; at < sizes.bytes; at += kTileBytes) {
                bulk_store(hop.bytes + pair * sizes.bytes + at, tile, sizes.tile(at));
            }
            end_stores<kOrder>();
        }
        __syncwarp();
        if (lane == kTeller) tell<kOrder>(&hop.told[pair], round);
        if (lane == 0) {
            goes_on = wait_round(&hop.seen[pair], round);
            if (!goes_on) atomicAdd(late, 1u);
            bulk_wait_read<0>();  // the next round fills the tile
        }
        if (!__shfl_sync(0xffffffff, goes_on, 0)) return;
    }
}

template <Order kOrder>
__global__ void relay_rounds(Hop from, Hop to, Sizes sizes, unsigned* late) {
    __shared__ alignas(128) char tile[kTileBytes];
    __shared__ uint64_t loaded;
    if (threadIdx.x != 0) return;
    barrier_init(&loaded);
    const int64_t pair = blockIdx.x;
    uint32_t used = 0;
    for (uint64_t round = 1; round <= sizes.rounds; ++round) {
        if (!wait_round(&from.told[pair], round)) {
            atomicAdd(late, 1u);
            return;
        }
        fence_bulk();
        for (int64_t at = 0; at < sizes.bytes; at += kTileBytes) {
            barrier_expect(&loaded, sizes.tile(at));
            bulk_load(tile, from.bytes + pair * sizes.bytes + at, sizes.tile(at), &loaded);
            barrier_wait(&loaded, used++);
            bulk_store(to.bytes + pair * sizes.bytes + at, tile, sizes.tile(at));
            bulk_commit();
            // The next load takes the tile. The last store has what `end_stores` waits for.
            if (at + kTileBytes < sizes.bytes) bulk_wait_read<0>();
        }
        end_stores<kOrder>();
        tell<kOrder>(&to.told[pair], round);
        if (!wait_round(&to.seen[pair], round)) {
            atomicAdd(late, 1u);
            return;
        }
        bulk_wait_read<0>();
        store_release(&from.seen[pair], round);
    }
}

__global__ void read_rounds(Hop hop, Sizes sizes, unsigned long long* wrong, unsigned* late) {
    const int lane = static_cast<int>(threadIdx.x);
    const int64_t pair = blockIdx.x;
    const auto* const words = reinterpret_cast<const uint4*>(hop.bytes + pair * sizes.bytes);
    for (uint64_t round = 1; round <= sizes.rounds; ++round) {
        bool goes_on = lane != 0 || wait_round(&hop.told[pair], round);
        goes_on = __shfl_sync(0xffffffff, goes_on, 0);
        if (!goes_on) {
            if (lane == 0) atomicAdd(late, 1u);
            return;
        }
        bool differs = false;
        const auto expected = static_cast<uint32_t>(round);
#pragma unroll 8
        for (int64_t i = lane; i < sizes.bytes / 16; i += kLanes) {
            const uint4 found = words[i];
            differs |= found.x != expected || found.y != expected || found.z != expected ||
                       found.w != expected;
        }
        differs = __any_sync(0xffffffff, differs);
        if (lane == 0) {
            if (differs) atomicAdd(wrong, 1ull);
            store_release(&hop.seen[pair], round);
        }
        __syncwarp();
    }
}

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    std::fprintf(stderr, "litmus: %s: %s\n", what, cudaGetErrorString(status));
    std::exit(1);
}

template <typename T>
T* allocate(int device, int64_t count) {
    T* memory = nullptr;
    check(cudaSetDevice(device), "device");
    check(cudaMalloc(&memory, count * sizeof(T)), "memory");
    check(cudaMemset(memory, 0, count * sizeof(T)), "memory");
    check(cudaDeviceSynchronize(), "memory");
    return memory;
}

Hop make_hop(int from, int to, int64_t bytes, int pairs) {
    return {allocate<char>(to, bytes * pairs),
            allocate<uint64_t>(to, pairs),
            allocate<uint64_t>(from, pairs)};
}

void reach(int device, int peer) {
    if (device == peer) return;
    check(cudaSetDevice(device), "device");
    const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
    } else {
        check(status, "peer access");
    }
}

cudaStream_t make_stream(int device) {
    cudaStream_t stream;
    check(cudaSetDevice(device), "device");
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    return stream;
}

template <Order kOrder>
void run(int from, int relay, int to, Sizes sizes, int pairs, bool plain, bool busy) {
    for (int device : {from, relay, to}) {
        for (int peer : {from, relay, to}) {
            if (device >= 0 && peer >= 0) reach(device, peer);
        }
    }
    const bool relayed = relay >= 0;
    const Hop first = make_hop(from, relayed ? relay : to, sizes.bytes, pairs);
    const Hop last = relayed ? make_hop(relay, to, sizes.bytes, pairs) : first;
    auto* const wrong = allocate<unsigned long long>(to, 1);
    unsigned* late = nullptr;  // of all devices
    check(cudaMallocHost(&late, sizeof(unsigned)), "memory");
    *late = 0;

    const cudaStream_t reads = make_stream(to), writes = make_stream(from);
    const cudaStream_t relays = make_stream(relayed ? relay : from);
    // Made before anything runs: `allocate` waits for all that does.
    char* const source = allocate<char>(from, kBusyBytes);
    char* const target = allocate<char>(to, kBusyBytes);
    const cudaStream_t copies = make_stream(from);
    check(cudaSetDevice(to), "device");
    read_rounds<<<pairs, kLanes, 0, reads>>>(last, sizes, wrong, late);
    check(cudaGetLastError(), "reader");
    if (relayed) {
        check(cudaSetDevice(relay), "device");
        relay_rounds<kOrder><<<pairs, kLanes, 0, relays>>>(first, last, sizes, late);
        check(cudaGetLastError(), "relay");
    }
    check(cudaSetDevice(from), "device");
    const auto write = plain ? write_plainly<kOrder> : write_rounds<kOrder>;
    write<<<pairs, kLanes, 0, writes>>>(first, sizes, late);
    check(cudaGetLastError(), "writer");
    if (busy) {
        while (cudaStreamQuery(reads) == cudaErrorNotReady) {
            check(cudaMemcpyAsync(target, source, kBusyBytes, cudaMemcpyDefault, copies), "copy");
            check(cudaStreamSynchronize(copies), "copy");
        }
    }
    check(cudaStreamSynchronize(writes), "writer");
    check(cudaStreamSynchronize(reads), "reader");
    unsigned long long num_wrong = 0;
    check(cudaMemcpy(&num_wrong, wrong, sizeof(num_wrong), cudaMemcpyDefault), "result");
    std::printf("{\"wrong rounds\": %llu, \"late\": %u}\n", num_wrong, *late);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 10) {
        std::fprintf(stderr,
                     "litmus FROM RELAY TO BYTES ROUNDS PAIRS RIGHT|READ|BROKEN BULK|PLAIN "
                     "QUIET|BUSY\n");
        return 2;
    }
    // A kernel that is loaded at its first launch may wait for the one that waits for it.
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    const int from = std::atoi(argv[1]), relay = std::atoi(argv[2]), to = std::atoi(argv[3]);
    const int pairs = std::atoi(argv[6]);
    const Sizes sizes{std::atoll(argv[4]), std::strtoull(argv[5], nullptr, 10)};
    const auto is = [argv](int i, const char* word) { return std::strcmp(argv[i], word) == 0; };
    const auto run_it = is(7, "RIGHT")  ? run<Order::kRight>
                        : is(7, "READ") ? run<Order::kRead>
                                        : run<Order::kBroken>;
    run_it(from, relay, to, sizes, pairs, is(8, "PLAIN"), is(9, "BUSY"));
    return 0;
}
