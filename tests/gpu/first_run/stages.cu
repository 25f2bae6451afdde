// How fast a push moves one expert, with the stages that push_peers.cu was compiled with.
//
//   stages FROM TO BYTES ROUNDS BLOCKS
//
// FROM and TO are devices, which may be one. Rank 0 is on FROM and copies its main of BYTES into
// the slot of rank 1, which is on TO, with so many blocks of the project's own kernel; a plain copy
// of the same bytes is timed beside it. Prints the medians of ROUNDS in GB/s, and whether the slot
// has the main's bytes.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "megatron_ext/cuda_api.h"
#include "megatron_ext/peer_exchange.h"
#include "ptx.cuh"

namespace {

using namespace megatron_ext;

constexpr int kRanks = 2;
constexpr int64_t kTimeoutNs = 20'000'000'000;

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    std::fprintf(stderr, "stages: %s: %s\n", what, cudaGetErrorString(status));
    std::exit(1);
}

template <typename T>
T* allocate(int device, int64_t count) {
    T* memory = nullptr;
    check(cudaSetDevice(device), "device");
    check(cudaMalloc(&memory, count * sizeof(T)), "memory");
    check(cudaMemset(memory, 0, count * sizeof(T)), "memory");
    return memory;
}

template <typename T>
T* copy_of(int device, const std::vector<T>& values) {
    T* const memory = allocate<T>(device, static_cast<int64_t>(values.size()));
    check(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyDefault),
          "memory");
    return memory;
}

template <typename T>
T* pinned() {
    T* memory = nullptr;
    check(cudaMallocHost(&memory, sizeof(T)), "memory");
    *memory = T{};
    return memory;
}

// One rank with its slot, and its part of the push.
struct Rank {
    int device;
    cudaStream_t stream;
    PeerRank self;
    PeerPush push;

    Rank(int64_t rank, int on, PeerSegment segment, const std::vector<char*>& buffers, char* main)
        : device(on), push{} {
        segment.buffers = copy_of(device, buffers);
        self = {rank,
                kTimeoutNs,
                0,
                allocate<PeerState>(device, 1),
                pinned<PeerFailure>(),
                pinned<uint32_t>()};
        push.segments = {{segment}, 1};
        push.problem = {rank, 0, kRanks, kRanks, 1, 1, kRanks};
        push.slots = copy_of<int32_t>(device, {-1, 0});
        push.copies =
            PeerCopies::in(allocate<char>(device, PeerCopies::bytes(kRanks, 1)), kRanks, 1);
        push.mains = copy_of<const char*>(device, {main});
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    }

    void go(int blocks) {
        check(cudaSetDevice(device), "device");
        check(push_peers_cuda(self, push, blocks, stream), "push");
        check(wait_peers_cuda(self, push.segments, push.copies.used, 1, stream), "wait");
    }

    void end() {
        check(cudaStreamSynchronize(stream), "push");
        if (self.failure->is_set == 0) return;
        std::fprintf(stderr, "stages: a wait was given up\n");
        std::exit(1);
    }
};

__global__ void hold() {
    const uint64_t start = now_ns();
    while (now_ns() - start < 100'000) megatron_ext::pause();
}

// The median time of `rounds` calls of `work` on a stream, in ms; the first does not count.
template <typename Work>
float median_ms(cudaStream_t stream, int rounds, Work work) {
    std::vector<float> times;
    cudaEvent_t before, after;
    check(cudaEventCreate(&before), "event");
    check(cudaEventCreate(&after), "event");
    for (int round = 0; round <= rounds; ++round) {
        hold<<<1, 1, 0, stream>>>();  // what the host takes to launch must not be timed
        check(cudaGetLastError(), "hold");
        check(cudaEventRecord(before, stream), "event");
        work();
        check(cudaEventRecord(after, stream), "event");
        check(cudaEventSynchronize(after), "event");
        float ms = 0;
        check(cudaEventElapsedTime(&ms, before, after), "event");
        if (round > 0) times.push_back(ms);
    }
    std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
    return times[rounds / 2];
}

void reach(int device, int peer) {
    if (device == peer) return;
    check(cudaSetDevice(device), "device");
    check(cudaDeviceEnablePeerAccess(peer, 0), "peer access");
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 6) {
        std::fprintf(stderr, "stages FROM TO BYTES ROUNDS BLOCKS\n");
        return 2;
    }
    const int devices[kRanks] = {std::atoi(argv[1]), std::atoi(argv[2])};
    const int64_t bytes = std::atoll(argv[3]);
    const int rounds = std::atoi(argv[4]), blocks = std::atoi(argv[5]);
    reach(devices[0], devices[1]);
    reach(devices[1], devices[0]);
    std::vector<char> there(bytes), expected(bytes);
    for (int64_t i = 0; i < bytes; ++i) expected[i] = static_cast<char>(i * 31 + i / 4096);

    const PeerSegment segment{nullptr, 1, bytes, bytes};
    std::vector<char*> buffers;
    for (const int device : devices) buffers.push_back(allocate<char>(device, segment.bytes()));
    char* const main = copy_of(devices[0], expected);
    Rank from(0, devices[0], segment, buffers, main);
    Rank to(1, devices[1], segment, buffers, copy_of(devices[1], expected));

    // Rank 1's call comes first, so its slot is offered when rank 0 begins.
    check(cudaSetDevice(devices[0]), "device");
    const float push_ms = median_ms(from.stream, rounds, [&] {
        to.go(1);
        from.go(blocks);
    });
    from.end();
    to.end();
    check(cudaMemcpy(there.data(), buffers[1], bytes, cudaMemcpyDefault), "result");
    check(cudaSetDevice(devices[0]), "device");
    const float copy_ms = median_ms(from.stream, rounds, [&] {
        check(cudaMemcpyAsync(buffers[1], main, bytes, cudaMemcpyDefault, from.stream), "copy");
    });
    const double gigabytes = static_cast<double>(bytes) / 1e6;
    std::printf("{\"GB/s\": %.1f, \"of a copy\": %.3f, \"right\": %s}\n",
                gigabytes / push_ms,
                copy_ms / push_ms,
                there == expected ? "true" : "false");
    return there == expected ? 0 : 1;
}
