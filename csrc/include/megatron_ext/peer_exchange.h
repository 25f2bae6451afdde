// The memory that the kernels which move replicas between GPUs read and write. The file needs no
// Torch, and does not say how a rank came to the addresses of its peers' memory: ranks may be
// processes or, in a test, streams of one GPU ("virtual ranks") whose buffers all lie in its
// memory.
//
// Ordering. The flags are those of exchange.h, but many blocks write a slot at a time. So `filled`
// and `grad_taken` are kept for each chunk of a slot. Every flag then is the generation itself,
// stored by one thread of one rank and never added to. A segment's flags lie with the segment:
//
//   offered[slot]      by the slot's rank   weights: freed      gradients: grad_ready
//   done[slot][chunk]  by the other rank    weights: filled     gradients: grad_taken
//
// Generations are counted in device memory by the kernel that moves the bytes: the last block of a
// launch to end adds one. No launch carries a generation, so a captured graph goes on counting when
// it is replayed. Nor does a launch carry who copies or adds what: its first block compiles that
// from the plan in device memory, so a replay follows the plan that is there then.
//
// Blocks take units of work (a chunk of a copy or of a sum) from a counter, copies from mains
// first. A launch offers its slots before it waits, copies from mains and sums wait for offers only,
// and units that wait for other ranks' copies or sums come behind them. So
// ranks that all make the call finish, however many blocks run at a time, as long as one block of
// every rank's launch runs. Virtual ranks share the GPU: the blocks of all launches that wait for
// each other must fit on it together.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megatron_ext/row_table.h"

namespace megatron_ext {

// A unit of work, and what a flag of `done` speaks of. Long enough to keep a block's pipeline full,
// short enough for relays to follow closely and for all blocks to end together.
constexpr int64_t kPeerChunkBytes = 128 << 10;
constexpr int kMaxPeerSegments = 8;

// What a plan may have at most for its copies to be compiled on the device, in shared memory.
constexpr int kMaxPeerRanks = 512;
constexpr int kMaxPeerReplicas = 8192;    // R * S
constexpr int kMaxPeerExperts = 1 << 19;  // less than this

// One part of an expert, in the slots of all ranks. A rank's buffer of `bytes()`, zeroed before the
// first use and aligned to 16, holds its slots, then the flags. Slots that are a multiple of 16
// bytes and mains aligned to 16 move at full speed, others slowly.
struct PeerSegment {
    char* const* buffers;  // [R] in device memory: each rank's, null where it is out of reach
    int64_t num_slots;     // of a rank
    int64_t slot_bytes;
    int64_t used_bytes;  // what a push fills, or a pull reads, from a slot's start

    // Of a whole slot: the flags stand where they stand, however much a push fills.
    __host__ __device__ int64_t num_chunks() const {
        return (slot_bytes + kPeerChunkBytes - 1) / kPeerChunkBytes;
    }
    __host__ __device__ int64_t flags_offset() const {
        constexpr int64_t kLine = 128;  // flags are polled while slots are written
        return (num_slots * slot_bytes + kLine - 1) / kLine * kLine;
    }
    __host__ __device__ int64_t bytes() const {
        return flags_offset() +
               num_slots * (1 + num_chunks()) * static_cast<int64_t>(sizeof(uint64_t));
    }
    __device__ char* slot(int64_t rank, int64_t slot) const {
        return buffers[rank] + slot * slot_bytes;
    }
    __device__ uint64_t* offered(int64_t rank, int64_t slot) const {
        return reinterpret_cast<uint64_t*>(buffers[rank] + flags_offset()) + slot;
    }
    __device__ uint64_t* done(int64_t rank, int64_t slot, int64_t chunk) const {
        return offered(rank, num_slots + slot * num_chunks() + chunk);
    }
};

// The parts of an expert, in the order in which its chunks are counted.
struct PeerSegments {
    PeerSegment each[kMaxPeerSegments];
    int32_t count;

    __host__ __device__ int64_t num_chunks() const {
        int64_t chunks = 0;
        for (int g = 0; g < count; ++g) chunks += each[g].num_chunks();
        return chunks;
    }
};

// A slot of a rank, or, where it stands for an own slot, that slot and the rank that acts on it.
struct PeerPlace {
    int64_t rank;
    int64_t slot;
};

// One source to all its destinations.
struct PeerCopy {
    PeerPlace relayed;  // own slot where the bytes arrive and who sends them; rank -1: from a main
    int64_t main_idx;   // of its home rank
    int64_t first_destination;
    int64_t num_destinations;
};

// What is compiled into the copies of one rank: the slots of its domain, and who asks.
struct CopyProblem {
    int64_t rank;
    int64_t first_peer;  // the ranks of the domain follow each other; no replica leaves it
    int64_t num_peers;
    int64_t num_ranks;  // R
    int64_t num_slots;  // S of a rank
    int64_t mains_per_rank;
    int64_t relay_threshold;  // most sends of a rank, all its experts together, without relays

    // Whether the kernel has room for it.
    __host__ __device__ bool fits() const {
        return num_ranks <= kMaxPeerRanks && num_ranks * num_slots <= kMaxPeerReplicas &&
               num_ranks * mains_per_rank < kMaxPeerExperts;
    }
};

// A rank's part of a push, in device memory that is large enough for every plan.
struct PeerCopies {
    PeerCopy* rows;           // [R * S] from mains first
    PeerPlace* destinations;  // [R * S] of all rows
    PeerPlace* used;          // [S] each own slot and who fills it; rank -1: nobody
    int64_t* num_rows;        // so many rows are there

    static int64_t bytes(int64_t num_ranks, int64_t num_slots) {
        const int64_t replicas = num_ranks * num_slots;
        return replicas * static_cast<int64_t>(sizeof(PeerCopy) + sizeof(PeerPlace)) +
               num_slots * static_cast<int64_t>(sizeof(PeerPlace)) +
               static_cast<int64_t>(sizeof(int64_t));
    }
    // `memory` of so many bytes, aligned to 8.
    static PeerCopies in(void* memory, int64_t num_ranks, int64_t num_slots) {
        const int64_t replicas = num_ranks * num_slots;
        auto* const rows = static_cast<PeerCopy*>(memory);
        auto* const destinations = reinterpret_cast<PeerPlace*>(rows + replicas);
        PeerPlace* const used = destinations + replicas;
        return {rows, destinations, used, reinterpret_cast<int64_t*>(used + num_slots)};
    }
};

// The sum over the replicas of one main, in the order of their ranks.
struct PeerSum {
    int64_t main_idx;
    int64_t first_replica;
    int64_t num_replicas;
};

// A rank's part of a pull, in device memory that is large enough for every plan.
struct PeerSums {
    PeerSum* each;        // [M]
    PeerPlace* replicas;  // [R * S] of all sums
    int64_t* count;       // so many sums are there

    static int64_t bytes(const CopyProblem& problem) {
        return problem.mains_per_rank * static_cast<int64_t>(sizeof(PeerSum)) +
               problem.num_ranks * problem.num_slots * static_cast<int64_t>(sizeof(PeerPlace)) +
               static_cast<int64_t>(sizeof(int64_t));
    }
    // `memory` of so many bytes, aligned to 8.
    static PeerSums in(void* memory, const CopyProblem& problem) {
        auto* const sums = static_cast<PeerSum*>(memory);
        auto* const replicas = reinterpret_cast<PeerPlace*>(sums + problem.mains_per_rank);
        PeerPlace* const end = replicas + problem.num_ranks * problem.num_slots;
        return {sums, replicas, reinterpret_cast<int64_t*>(end)};
    }
};

// One kind of call of a rank: what is counted on the device.
struct PeerTurn {
    uint64_t generation;  // calls done
    uint32_t next_unit;   // of the call under way
    uint32_t blocks_begun;
    uint32_t blocks_ended;
};

// A rank's counters, in its device memory; zeroed before the first use.
struct PeerState {
    PeerTurn push;
    PeerTurn pull;
    uint64_t compiled;  // generation of the push whose copies are compiled
    uint64_t summed;    // generation of the pull whose sums are compiled
    uint64_t gathered;  // rows gathered so often
    uint32_t failed;    // a wait was given up; later ones of this rank do not wait
};

// What a peer had not done; exchange.h's messages.
enum class PeerDeed : int32_t { kFree, kFill, kOfferGrad, kTakeGrad, kSendRow };

// The first wait that was given up, in pinned host memory; zeroed before the first use.
struct PeerFailure {
    int64_t peer;
    int64_t slot;
    int64_t chunk;
    uint64_t expected;  // generation; below `seen` if the ranks did not make the same calls
    uint64_t seen;
    int64_t label;  // of the call
    PeerDeed deed;
    uint32_t is_set;  // stored last
};

// Who makes a call.
struct PeerRank {
    int64_t rank;
    int64_t timeout_ns;  // longest wait
    int64_t label;       // what to call this call in a failure
    PeerState* state;
    PeerFailure* failure;
    // In pinned host memory: not 0 once the host has given up what is under way. The device reads it
    // while it waits, so the host's store queues behind nothing.
    const uint32_t* aborted;
};

// A rank's part of a push. Pointers are device memory.
struct PeerPush {
    PeerSegments segments;     // slot weights
    CopyProblem problem;       // one that fits()
    const int32_t* slots;      // [R, S] logical expert in each slot, or -1; expert e is main e % M of
                               // rank e / M, is in at most one slot of a rank, and in none of its
                               // home rank
    PeerCopies copies;         // compiled from the slots when the launch runs
    const char* const* mains;  // [M, segments] contiguous, of the slots' sizes
};

// Rows for each other (row_table.h).
struct PeerRows {
    RowTable table;
    char* const* tables;  // [R] in device memory: each rank's
    const int64_t* row;   // [num_words] that this rank gives
    int64_t num_words;
    int64_t* rows;  // [R, num_words] out
};

// A rank's part of a pull. Pointers are device memory.
struct PeerPull {
    PeerSegments segments;                     // slot gradients
    bool is_bfloat16[kMaxPeerSegments];        // else float32; for each segment
    bool is_total_bfloat16[kMaxPeerSegments];  // its totals, and what was set aside of them
    CopyProblem problem;                       // one that fits()
    const int32_t* slots;                      // [R, S] as of a push
    PeerSums sums;                             // compiled from the slots when the launch runs
    char* const* totals;                       // [M, segments]
    const char* const* asides;                 // [M, segments]; null where nothing was set aside
};

}  // namespace megatron_ext
