// A row of words from every rank to every rank, over memory that they reach.
//
// 1. Stores this rank's row into the table of each rank, waits for all rows in its own table, and
//    copies them out.
// 2. One block. A warp for one peer at a time, a lane for every 32nd word.
// 3. A kernel, because the words are on the device, and a collective of torch.distributed takes
//    several times as long for a few KiB. One block stores all rows before it waits for any, so
//    ranks that all make the call finish.
// 4. A warp's flags are stored, a lane each behind one fence, when all its lanes have stored their
//    words. Each lane waits for the flag itself, so what it reads then is there. The generation is
//    counted when nobody reads it any more.
// 5. Deterministic: copies, in the order of ranks.
// 6. Writes R rows over NVLink: 128 KiB at EP64 and 256 experts, about 2 us, and waits for the last
//    rank.

#include <algorithm>

#include "megatron_ext/cuda_api.h"
#include "peers.cuh"

namespace megatron_ext {
namespace {

constexpr int kLanes = 32;
constexpr int64_t kMostWarps = 32;

__global__ void __launch_bounds__(kLanes* kMostWarps) gather_kernel(PeerRank self, PeerRows given) {
    const uint64_t generation = self.state->gathered + 1;
    const RowTable& table = given.table;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int64_t warp = threadIdx.x / kLanes;
    const int64_t num_warps = blockDim.x / kLanes;
    for (int64_t peer = warp; peer < table.num_ranks; peer += num_warps) {
        int64_t* const there = table.row(given.tables[peer], generation, self.rank);
        for (int64_t i = lane; i < given.num_words; i += kLanes) there[i] = given.row[i];
    }
    __syncwarp();  // All lanes have stored what the flags report.
    const auto peer_of = [&](int64_t turn) { return warp + turn * num_warps; };
    if (peer_of(lane) < table.num_ranks) fence_system();
    for (int64_t turn = lane; peer_of(turn) < table.num_ranks; turn += kLanes) {
        char* const there = given.tables[peer_of(turn)];
        store_relaxed(table.flag(there, generation, self.rank), generation);
    }
    char* const here = given.tables[self.rank];
    for (int64_t peer = warp; peer < table.num_ranks; peer += num_warps) {
        const bool is_there = wait_for(self,
                                       table.flag(here, generation, peer),
                                       generation,
                                       PeerDeed::kSendRow,
                                       {peer, -1},
                                       0);
        const int64_t* const row = table.row(here, generation, peer);
        for (int64_t i = lane; i < given.num_words; i += kLanes) {
            given.rows[peer * given.num_words + i] = is_there ? row[i] : 0;
        }
    }
    __syncthreads();  // All have read the generation.
    if (threadIdx.x == 0) self.state->gathered = generation;
}

}  // namespace

cudaError_t gather_rows_cuda(const PeerRank& self, const PeerRows& rows, cudaStream_t stream) {
    const auto warps = static_cast<unsigned>(std::min(rows.table.num_ranks, kMostWarps));
    gather_kernel<<<1, kLanes * warps, 0, stream>>>(self, rows);
    return cudaGetLastError();
}

}  // namespace megatron_ext
