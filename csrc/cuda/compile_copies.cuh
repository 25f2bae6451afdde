// At the start of a push on the device: the slots of this rank's domain compiled into its copies,
// with relays.
//
// 1. Makes the choices of compile_copies() in megatron_ext/transport/relay.py, which says why, and
//    keeps this rank's part: what it copies where, and which ranks write its slots. Every rank
//    makes the same choices.
// 2. One warp. A lane takes ranks, slots, replicas or relays, each kLanes apart.
// 3. On the device, because the plan is there: a host that compiled it would have to wait for the
//    plan, in every layer, and a captured graph would repeat the plan of its capture. In the push,
//    not in a kernel before it: where a GPU has one queue of work, a launch that depends on
//    another one holds up all later work.
// 4. Experts are treated one after the other, because a relay that was chosen is busier for the
//    next expert; all lanes see the same expert. Needs no order but the warp's barriers.
// 5. Deterministic: positions in an order are counted, not raced for. Integers only.
// 6. Reads 4 bytes a slot and writes at most 56. All time is latency: with 64 ranks of 2 slots a
//    sort of 28 steps, 4 pairs a lane, then two barriers for each expert of this rank or of a busy
//    one.
//
// For each further replica in turn, the expert's relay with the fewest sends is chosen, of equal
// relays the lowest rank; that adds one to its sends. So the relays' sends rise level by level.
// Before relay i is chosen at a level, each relay was chosen once for every level between its own
// sends and that level, and relays of lower rank once more at that level. The number of these
// choices says which replica relay i sends. So every relay finds its replicas without looking at
// the others' choices.

#pragma once

#include <cstdint>

#include "megatron_ext/peer_exchange.h"

namespace megatron_ext::compiling {

constexpr int kLanes = 32;

// An entry to sort: home rank, busiest first, and main, then where the replica is in `slots`.
constexpr int kPlaceBits = 13;
constexpr uint32_t kUnused = 0xffffffff;  // behind all others
static_assert(kMaxPeerReplicas == 1 << kPlaceBits);
static_assert(kMaxPeerExperts == 1 << (32 - kPlaceBits));

struct Scratch {
    uint32_t entries[kMaxPeerReplicas];
    int num_sends[kMaxPeerRanks];  // of a home rank to slots, all its experts together
    int home_at[kMaxPeerRanks];    // busiest first
    int planned[kMaxPeerRanks];    // what each rank sends by the choices made so far
    // Of one expert, relays first: where its replicas are, and how busy they were before it.
    int place[kMaxPeerRanks];
    int level[kMaxPeerRanks];
    int num_from_mains;  // rows of this rank
    int num_relayed;
    int num_destinations;
};

// One expert with replicas.
struct Expert {
    int home;
    int main_idx;
    int begin;  // of its entries
    int num_replicas;
    int num_relays;  // that the home rank sends to; all replicas where it needs no relays
    bool is_relayed;
};

// ceil(replicas / sqrt(sends)).
__device__ inline int num_relays(int replicas, int sends) {
    int relays = 1;
    while (relays * relays * sends < replicas * replicas) ++relays;
    return relays;
}

// How many of `count` come before one.
template <class Function>
__device__ int count_before(int count, Function comes_before) {
    int before = 0;
    for (int j = 0; j < count; ++j) before += comes_before(j) ? 1 : 0;
    return before;
}

// Called by all lanes; `count` is a power of two. A bitonic sort.
__device__ inline void sort(uint32_t* values, int count) {
    for (int run = 2; run <= count; run *= 2) {
        for (int distance = run / 2; distance > 0; distance /= 2) {
            __syncwarp();
            for (int i = static_cast<int>(threadIdx.x); i < count; i += kLanes) {
                const int other = i ^ distance;
                if (other < i) continue;  // the pair is the other's
                const uint32_t a = values[i], b = values[other];
                const bool rises = (i & run) == 0;
                if ((a > b) == rises) {
                    values[i] = b;
                    values[other] = a;
                }
            }
        }
    }
    __syncwarp();
}

class Compiler {
  public:
    __device__ Compiler(const CopyProblem& problem,
                        const int32_t* slots,
                        const PeerCopies& out,
                        Scratch& scratch)
        : first_(static_cast<int>(problem.first_peer)),
          rank_(static_cast<int>(problem.rank) - first_),
          num_ranks_(static_cast<int>(problem.num_peers)),
          num_slots_(static_cast<int>(problem.num_slots)),
          num_mains_(static_cast<int>(problem.mains_per_rank)),
          threshold_(problem.relay_threshold),
          num_places_(num_ranks_ * num_slots_),
          slots_(slots + first_ * num_slots_),
          out_(out),
          scratch_(scratch) {}

    __device__ void run() {
        count_sends();
        order_homes();
        sort_entries();
        int num_done = 0;  // rows from mains
        for (int begin = 0; begin < num_places_ && scratch_.entries[begin] != kUnused;) {
            const Expert expert = expert_at(begin);
            if (!expert.is_relayed && expert.home != rank_) {
                begin += scratch_.num_sends[expert.home];  // sends directly, all of its experts
                continue;
            }
            const int first = scratch_.num_destinations;
            order_replicas(expert);
            __syncwarp();
            if (expert.home == rank_) copy_main(expert, num_done++, first);
            if (expert.is_relayed) pass_on(expert, first);
            __syncwarp();
            begin += expert.num_replicas;
        }
        if (lane() == 0) *out_.num_rows = scratch_.num_from_mains + scratch_.num_relayed;
    }

  private:
    __device__ static int lane() { return static_cast<int>(threadIdx.x); }

    __device__ PeerPlace place_of(int place) const {
        return {first_ + place / num_slots_, place % num_slots_};
    }

    // The expert there, counted from the domain's first; negative for an empty slot.
    __device__ int expert_in(int place) const {
        return slots_[place] < 0 ? -1 : slots_[place] - first_ * num_mains_;
    }

    __device__ int rank_of_entry(int i) const {
        return static_cast<int>(scratch_.entries[i] & (kMaxPeerReplicas - 1)) / num_slots_;
    }

    __device__ uint32_t expert_of_entry(int i) const { return scratch_.entries[i] >> kPlaceBits; }

    __device__ int home_of_entry(int i) const {
        return scratch_.home_at[expert_of_entry(i) / num_mains_];
    }

    // Also who fills this rank's slots where no relay does.
    __device__ void count_sends() {
        for (int r = lane(); r < num_ranks_; r += kLanes) scratch_.num_sends[r] = 0;
        if (lane() == 0) {
            scratch_.num_from_mains = scratch_.num_relayed = scratch_.num_destinations = 0;
        }
        __syncwarp();
        for (int i = lane(); i < num_places_; i += kLanes) {
            const int expert = expert_in(i);
            if (expert >= 0) atomicAdd(&scratch_.num_sends[expert / num_mains_], 1);
        }
        for (int slot = lane(); slot < num_slots_; slot += kLanes) {
            const int expert = expert_in(rank_ * num_slots_ + slot);
            out_.used[slot] = {expert < 0 ? -1 : first_ + expert / num_mains_, slot};
        }
        __syncwarp();
    }

    // Leaves in `level` the place of each home, for `sort_entries`.
    __device__ void order_homes() {
        for (int home = lane(); home < num_ranks_; home += kLanes) {
            const int sends = scratch_.num_sends[home];
            const int at = count_before(num_ranks_, [&](int other) {
                const int others = scratch_.num_sends[other];
                return others > sends || (others == sends && other < home);
            });
            scratch_.home_at[at] = home;
            scratch_.level[home] = at;
            scratch_.planned[home] = sends <= threshold_ ? sends : 0;
        }
        __syncwarp();
    }

    __device__ void sort_entries() {
        int count = 1;
        while (count < num_places_) count *= 2;
        for (int i = lane(); i < count; i += kLanes) {
            const int expert = i < num_places_ ? expert_in(i) : -1;
            scratch_.entries[i] = expert < 0 ? kUnused : entry(expert, i);
        }
        sort(scratch_.entries, count);
        for (int i = lane(); i < num_places_; i += kLanes) {
            if (scratch_.entries[i] == kUnused) break;
            const bool is_first = i == 0 || expert_of_entry(i) != expert_of_entry(i - 1);
            if (is_first && home_of_entry(i) == rank_) atomicAdd(&scratch_.num_from_mains, 1);
        }
        __syncwarp();
    }

    __device__ uint32_t entry(int expert, int place) const {
        const int home = scratch_.level[expert / num_mains_];
        return static_cast<uint32_t>(home * num_mains_ + expert % num_mains_) << kPlaceBits |
               static_cast<uint32_t>(place);
    }

    // The expert whose entries begin there.
    __device__ Expert expert_at(int begin) const {
        Expert expert{home_of_entry(begin)};
        expert.main_idx = static_cast<int>(expert_of_entry(begin)) % num_mains_;
        expert.begin = begin;
        const int sends = scratch_.num_sends[expert.home];
        expert.is_relayed = sends > threshold_;
        int end = begin + 1;
        while (end < num_places_ && expert_of_entry(end) == expert_of_entry(begin)) ++end;
        expert.num_replicas = end - begin;
        expert.num_relays =
            expert.is_relayed ? num_relays(expert.num_replicas, sends) : expert.num_replicas;
        return expert;
    }

    // Relays are those that have least to send; without relays the ranks' order stays.
    __device__ void order_replicas(const Expert& expert) {
        for (int i = lane(); i < expert.num_replicas; i += kLanes) {
            const int planned = scratch_.planned[rank_of_entry(expert.begin + i)];
            int at = i;
            if (expert.is_relayed) {
                at = count_before(expert.num_replicas, [&](int j) {
                    const int other = scratch_.planned[rank_of_entry(expert.begin + j)];
                    return other < planned || (other == planned && j < i);
                });
            }
            scratch_.place[at] =
                static_cast<int>(scratch_.entries[expert.begin + i] & (kMaxPeerReplicas - 1));
            scratch_.level[at] = planned;
        }
    }

    // The home rank's own row, to the relays.
    __device__ void copy_main(const Expert& expert, int row, int first) {
        for (int i = lane(); i < expert.num_relays; i += kLanes) {
            out_.destinations[first + i] = place_of(scratch_.place[i]);
        }
        if (lane() != 0) return;
        out_.rows[row] = {{-1, -1}, expert.main_idx, first, expert.num_relays};
        scratch_.num_destinations += expert.num_relays;
    }

    __device__ void pass_on(const Expert& expert, int first) {
        for (int i = lane(); i < expert.num_relays; i += kLanes) relay(expert, i, first);
        if (lane() == 0) scratch_.planned[expert.home] += expert.num_relays;
    }

    // What relay i passes on; called by one lane.
    __device__ void relay(const Expert& expert, int i, int first) {
        const PeerPlace relay = place_of(scratch_.place[i]);
        const int64_t mine = first_ + rank_;
        int level = scratch_.level[i];
        int count = 0;
        for (;; ++level, ++count) {
            const int at = expert.num_relays + num_chosen_before(expert, i, level);
            if (at >= expert.num_replicas) break;
            const PeerPlace other = place_of(scratch_.place[at]);
            if (relay.rank == mine) out_.destinations[first + count] = other;
            if (other.rank == mine) out_.used[other.slot].rank = relay.rank;
        }
        scratch_.planned[relay.rank - first_] = level;
        if (relay.rank != mine || count == 0) return;
        const int row = scratch_.num_from_mains + scratch_.num_relayed++;
        out_.rows[row] = {{first_ + expert.home, relay.slot}, expert.main_idx, first, count};
        scratch_.num_destinations += count;
    }

    // Choices among the relays before relay i is chosen at `level`.
    __device__ int num_chosen_before(const Expert& expert, int i, int level) const {
        int before = 0;
        for (int j = 0; j < expert.num_relays; ++j) {
            const int above = level - scratch_.level[j];
            if (above < 0) continue;
            before += above;
            if (scratch_.place[j] < scratch_.place[i]) ++before;  // places go by rank
        }
        return before;
    }

    // Ranks, places and experts are counted from the domain's first one.
    const int first_, rank_, num_ranks_, num_slots_, num_mains_;
    const int64_t threshold_;
    const int num_places_;
    const int32_t* const slots_;
    const PeerCopies out_;
    Scratch& scratch_;
};

}  // namespace megatron_ext::compiling
