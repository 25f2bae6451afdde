// After a push on the device: wait until peers have filled this rank's slots.
//
// 1. Waits until every chunk of the used slots is written.
// 2. One block; a thread looks at every kThreads-th flag. All are in this GPU's own memory.
// 3. A kernel of its own, so that a push goes on beside other work. Work that needs the slots waits
//    on its own stream, for one block instead of all blocks that move bytes.
// 4. The chunks that the flags report are visible to kernels behind this kernel on the stream. The
//    generation is read from the counter, so this kernel comes behind the push that it waits for.
// 5. Deterministic: writes nothing but a failure.
// 6. Reads 8 bytes for every 128 KiB of a slot; a look at all flags takes about 1 us.

#include "megatron_ext/cuda_api.h"
#include "peers.cuh"

namespace megatron_ext {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) wait_kernel(
    PeerRank self, PeerSegments segments, const PeerPlace* used, int64_t num_used) {
    const uint64_t generation = self.state->push.generation;
    const int64_t chunks = segments.num_chunks();
    for (int64_t i = threadIdx.x; i < num_used * chunks; i += kThreads) {
        const PeerPlace place = used[i / chunks];
        if (place.rank < 0) continue;  // nobody fills this slot
        const PeerChunk chunk = peer_chunk(segments, i % chunks);
        const uint64_t* const flag =
            segments.each[chunk.segment].done(self.rank, place.slot, chunk.idx);
        if (!wait_for(self, flag, generation, PeerDeed::kFill, place, chunk.idx)) return;
    }
}

}  // namespace

cudaError_t wait_peers_cuda(const PeerRank& self,
                            const PeerSegments& segments,
                            const PeerPlace* used,
                            int64_t num_used,
                            cudaStream_t stream) {
    wait_kernel<<<1, kThreads, 0, stream>>>(self, segments, used, num_used);
    return cudaGetLastError();
}

}  // namespace megatron_ext
