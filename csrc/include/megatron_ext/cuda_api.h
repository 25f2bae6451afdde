// Launchers of the CUDA kernels, without Torch. Each returns the error of its launches.
//
// All pointers are device memory, unless said otherwise. Launchers allocate nothing, ask the host
// for nothing, and put all work on `stream`: each can be captured in a CUDA graph. Legend and
// meanings: api.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megatron_ext/api.h"
#include "megatron_ext/peer_exchange.h"

namespace megatron_ext {

// Which tokens chose each expert, a tile of tokens a word.
struct TokenMarks {
    static constexpr int64_t kTile = 32;  // tokens, one a bit of a mask
    uint32_t* mask;                       // [tiles, E] tokens of the tile that chose the expert
    int32_t* before;                      // [tiles, E] tokens of earlier tiles that chose it

    static int64_t num_tiles(int64_t num_tokens) { return (num_tokens + kTile - 1) / kTile; }

    // In the memory of an int32 [2, tiles, E].
    static TokenMarks in(int32_t* memory, int64_t num_tokens, int64_t num_experts) {
        return {reinterpret_cast<uint32_t*>(memory), memory + num_tiles(num_tokens) * num_experts};
    }
};

// Count the assignments of each expert, as count_load() does, and mark them for assign_cuda().
//   routing_map  [N, E] bool
//   tail         one number that is to stand behind the counts, or null
//   marks        out
//   counts       [E] out, or [E + 1] with a tail
// Moves 1.5 * N * E bytes.
cudaError_t count_load_cuda(const bool* routing_map,
                            int64_t num_tokens,
                            int64_t num_experts,
                            const int64_t* tail,
                            const TokenMarks& marks,
                            int64_t* counts,
                            cudaStream_t stream);

// Choose replicas and quotas for `batch` loads and each tolerance, bit by bit as solve_ladder()
// does.
//   load [batch, R, E], its rows `load_stride` apart; quota [batch, T, E, R] and slots [batch, T,
//   R, S] out workspace  of solve_ladder_cuda_bytes(), aligned to 16
int64_t solve_ladder_cuda_bytes(const QuotaProblem& problem,
                                const Tolerances& tolerances,
                                int64_t batch);
cudaError_t solve_ladder_cuda(const QuotaProblem& problem,
                              const Tolerances& tolerances,
                              const int64_t* load,
                              int64_t load_stride,
                              int64_t batch,
                              void* workspace,
                              int64_t* quota,
                              int32_t* slots,
                              cudaStream_t stream);

// A load and the quotas that are to be shared among its source ranks.
struct SharedQuotas {
    int64_t num_ranks;     // R
    int64_t num_experts;   // E
    const int64_t* load;   // [R, E]
    int64_t load_stride;   // from a row of the load to the next
    const int64_t* quota;  // [E, R]
};

// What number_instances() reads and writes.
struct PlacedInstances {
    const int32_t* slots;     // [R, S]
    int64_t num_slots;        // S
    int64_t* physical_index;  // [E, R] out
};

// A rank's share of each expert, as a line that has a piece for each instance with a share, in
// instance order.
struct Lines {
    int64_t* count;       // [E] the line's length: assignments of the expert on this rank
    int64_t* stride;      // [E] of their interleaving
    int64_t* end;         // [E, R] where a piece ends
    int32_t* instance;    // [E, R] physical id of its instance
    int32_t* num_pieces;  // [E]

    // In memory of bytes(), aligned to 16.
    static Lines in(void* memory, int64_t num_experts, int64_t num_ranks) {
        auto* const count = static_cast<int64_t*>(memory);
        auto* const end = count + 2 * num_experts;
        const int64_t pairs = num_experts * num_ranks;
        auto* const instance = reinterpret_cast<int32_t*>(end + pairs);
        return {count, count + num_experts, end, instance, instance + pairs};
    }

    static int64_t bytes(int64_t num_experts, int64_t num_ranks) {
        return num_experts * (8 * (2 + num_ranks) + 4 * (num_ranks + 1));
    }
};

// What is sealed beside a launch; nothing where `seal` is null.
struct Sealing {
    SealedPlan plan;
    Seals before;   // `difference` is memory of the host that the device reaches
    int64_t* seal;  // [1] out
};

// Share every quota, as split_quota() does, number the instances, lay the shares on
// lines, and count what comes to the rank, as count_arriving() and sum_arriving() do; seal the
// plan, as seal_plan() does.
//   split     [E, R] out
//   arriving  [R, M + S] out
//   arrivals  [R + (M + S)] out
//   lines     out
cudaError_t share_plan_cuda(const SharedQuotas& quotas,
                            int64_t source_rank,
                            int64_t* split,
                            int64_t* arriving,
                            int64_t* arrivals,
                            const PlacedInstances& placed,
                            const Lines& lines,
                            const Sealing& sealing,
                            cudaStream_t stream);

// Lay one rank's shares on lines.
//   source_quota, physical_index  [E, R], as of assign()
//   lines                         out
cudaError_t lay_lines_cuda(int64_t num_ranks,
                           int64_t num_experts,
                           const int64_t* source_quota,
                           const int64_t* physical_index,
                           const Lines& lines,
                           cudaStream_t stream);

// Where the values of choices go, as of copy_choices() and mark_choices(); nowhere where `to` is
// null.
struct Placing {
    const void* from;      // [N, E]
    void* to;              // [N, width] out
    bool* map;             // [N, width] out
    int64_t width;         // physical ids beyond it are left out
    int64_t element_size;  // 2, 4 or 8
};

// Give every assignment an instance, as assign() does, except that a routing map and lines that
// disagree are no error: a choice beyond the shares, or beyond K, is left out of its row. And move
// the values of the choices there.
//   marks  of the routing map, from count_load_cuda()
cudaError_t assign_cuda(const AssignProblem& problem,
                        const TokenMarks& marks,
                        const Lines& lines,
                        int32_t* logical,
                        int32_t* physical,
                        const Placing& placing,
                        cudaStream_t stream);

// Copy choices, as copy_choices() does; indices outside their width are left out.
cudaError_t copy_choices_cuda(const void* from,
                              const int32_t* from_index,
                              int64_t from_width,
                              void* to,
                              const int32_t* to_index,
                              int64_t to_width,
                              int64_t num_tokens,
                              int64_t top_k,
                              int64_t element_size,
                              cudaStream_t stream);

// Gradients of experts to empty, where the expert has a replica.
struct AsideTask {
    char* main_grad;
    char* copy;
    int64_t bytes;   // of each; elements of 2 bytes
    int64_t expert;  // logical
};
struct AsideTasks {
    static constexpr int kMost = 120;  // all arguments of a launch together have at most 4096 bytes
    AsideTask each[kMost];
    int count;
};

// Copy and zero the gradients of those experts that are in one of the slots [num_replicas].
cudaError_t set_aside_cuda(const AsideTasks& tasks,
                           const int32_t* slots,
                           int64_t num_replicas,
                           cudaStream_t stream);

// Write `count` words of the host to device memory; they may be changed when this returns.
cudaError_t write_words_cuda(const int64_t* words, int64_t count, int64_t* to, cudaStream_t stream);

// Offer this rank's slots, choose who copies what to whom, as compile_copies() of
// megatron_ext/transport/relay.py does, write this rank's part into `push.copies`, and make its
// copies; peer_exchange.h says what waits for what. Mains and
// the slots that are relayed have been read, and peers' slots written, when the launch has ended;
// this rank's own slots are filled when peers say so (`wait_peers_cuda`).
//   num_blocks  >= 1; push_peers.cu says what each takes of a multiprocessor
cudaError_t push_peers_cuda(const PeerRank& self,
                            const PeerPush& push,
                            int num_blocks,
                            cudaStream_t stream);

// Offer this rank's slot gradients, compile the plan's slots into this rank's sums (`pull.sums`),
// and add the sums to the totals of mains with replicas. This rank's slots with a replica are zero
// when the launch has ended, which waits for peers that read them.
//   num_blocks  >= 1; bounds what the launch takes of the GPU beside a backward pass.
//               pull_add_peers.cu says what each takes of a multiprocessor
cudaError_t pull_add_peers_cuda(const PeerRank& self,
                                const PeerPull& pull,
                                int num_blocks,
                                cudaStream_t stream);

// Give all ranks a row, and take theirs; that of a rank that does not come in time is zeros. All
// ranks of the tables must reach each other.
cudaError_t gather_rows_cuda(const PeerRank& self, const PeerRows& rows, cudaStream_t stream);

// Make `stream` wait until peers have filled this rank's slots `used` [num_used], in the last push
// that ended on the device before. Those of rank -1 are left out.
cudaError_t wait_peers_cuda(const PeerRank& self,
                            const PeerSegments& segments,
                            const PeerPlace* used,
                            int64_t num_used,
                            cudaStream_t stream);

}  // namespace megatron_ext
