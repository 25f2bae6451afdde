// Shared by the kernels that move replicas: waiting for a peer with a time limit, and units of work
// within a generation. See peer_exchange.h.
#pragma once

#include "megatron_ext/lived_time.h"
#include "megatron_ext/peer_exchange.h"
#include "ptx.cuh"

namespace megatron_ext {

// A chunk of an expert: which bytes of which segment.
struct PeerChunk {
    int segment;
    int64_t idx;     // in its segment
    int64_t offset;  // in a slot, bytes
    int64_t bytes;
};

__device__ inline PeerChunk peer_chunk(const PeerSegments& segments, int64_t idx) {
    int g = 0;
    while (idx >= segments.each[g].num_chunks()) idx -= segments.each[g++].num_chunks();
    const int64_t offset = idx * kPeerChunkBytes;
    const int64_t left = segments.each[g].used_bytes - offset;
    const int64_t bytes = left < kPeerChunkBytes ? left : kPeerChunkBytes;
    return {g, idx, offset, bytes > 0 ? bytes : 0};
}

// Keep what a wait ended with for the host, if it is the first of this rank that failed.
__device__ inline void record_failure(const PeerRank& self, const PeerFailure& failure) {
    if (atomicExch(&self.state->failed, 1u) != 0) return;
    *self.failure = failure;
    // The host reads the rest once it has seen this.
    fence_system();
    *const_cast<volatile uint32_t*>(&self.failure->is_set) = 1;
}

// Polls before each look at whether to go on, which takes a millisecond at most. Looks read the
// host's memory, and with those of 132 blocks at every 64th poll a pull took 4.5 ms instead of 0.9.
constexpr uint32_t kPollsPerLook = 1024;

// Whether this rank's waits are to end. Once the host has said so, it stands in device memory, for
// its other waits.
__device__ inline bool is_over(const PeerRank& self) {
    auto& failed = *const_cast<volatile uint32_t*>(&self.state->failed);
    if (failed == 0 && *const_cast<const volatile uint32_t*>(self.aborted) != 0) failed = 1;
    return failed != 0;
}

// Wait until `flag` is `generation`. False if that is not to come: a peer is too late or is ahead,
// which is recorded; this rank has failed before, or its host has given up. `place` names the peer
// and the slot.
__device__ inline bool wait_for(const PeerRank& self,
                                const uint64_t* flag,
                                uint64_t generation,
                                PeerDeed deed,
                                PeerPlace place,
                                int64_t chunk) {
    uint64_t seen = load_acquire(flag);
    if (seen == generation) return true;
    LivedTime waited{now_ns()};
    const auto limit = static_cast<uint64_t>(self.timeout_ns);
    for (uint32_t polls = 1; load_relaxed(flag) < generation && waited.at(now_ns()) < limit;
         ++polls) {
        if (polls % kPollsPerLook == 0 && is_over(self)) break;
        pause();
    }
    seen = load_acquire(flag);
    if (seen == generation) return true;
    record_failure(self, {place.rank, place.slot, chunk, generation, seen, self.label, deed, 0});
    return false;
}

// Say that peers may act on this rank's slots; called by one thread or, with its lane, by each of a
// warp.
__device__ inline void offer_slots(
    const PeerRank& self, const PeerSegments& segments, uint64_t generation, int lane, int lanes) {
    if (segments.count == 0) return;
    // One flag for all segments, with the first.
    const PeerSegment& first = segments.each[0];
    for (int64_t slot = lane; slot < first.num_slots; slot += lanes) {
        store_release(first.offered(self.rank, slot), generation);
    }
}

// Called by one thread of each block when all of the block is done with this turn.
__device__ inline void end_turn(PeerTurn* turn) {
    __threadfence();
    if (atomicAdd(&turn->blocks_ended, 1u) != gridDim.x - 1) return;
    // All blocks have read the generation, and none takes a unit any more.
    turn->next_unit = 0;
    turn->blocks_begun = 0;
    turn->blocks_ended = 0;
    ++turn->generation;
}

}  // namespace megatron_ext
