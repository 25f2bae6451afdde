// The parts of planning one NVLink domain: the domain, the state of a try, and the moves that
// change the state. The other files of this folder choose moves; attempt.h runs a try.
//
// Legend: D ranks of the domain, M mains per rank, S slots per rank. Ranks and experts are counted
// from the domain's first; the main of expert e lives on rank e / M. Where nothing else is said,
// ties go to the lowest index.
#pragma once

#include <cstdint>

#include "megatron_ext/warp.h"

namespace megatron_ext {

// An array that tries read. tests/perf/warp_ops.cpp has a class in its place, which counts.
#ifndef MEGATRON_EXT_COUNTED
template <class T>
using Array = T*;
#endif

struct Domain {
    int ranks;  // D
    int mains;  // M
    int slots;  // S
    int64_t min_quota;
    bool even;  // whether no rank may be idler than the others by more than one assignment
    Array<const int64_t> expert_load;    // [D * M] assignments of all sources
    Array<const int64_t> home_load;      // [D] assignments of a rank's mains
    Array<const int32_t> busiest_first;  // [D] ranks

    MEGATRON_EXT_HOST_DEVICE int experts() const { return ranks * mains; }
    MEGATRON_EXT_HOST_DEVICE int64_t before() const { return home_load[busiest_first[0]]; }
};

// Work is counted in rounds of a warp: one operation on 32 indices. So many rounds a pass over all
// ranks takes.
MEGATRON_EXT_HOST_DEVICE inline int32_t rounds_of(int count) { return (count + 31) / 32; }

// Arrays of a try, in memory of the caller.
struct TryMemory {
    Array<int64_t> room;       // [D] assignments a rank may still take; below 0 it has to shed some
    Array<int64_t> kept;       // [D * M] assignments that stay with the main
    Array<int64_t> amount;     // [D * S] assignments of a replica
    Array<int64_t> host_room;  // [D] of the hosts, rising
    Array<int64_t> width;      // [D] what a chain carries to a rank
    Array<int64_t> wider;      // [D] the same after one more step
    Array<int64_t> offers;     // [D] for Warp::take_offers
    Array<int32_t> host;       // [D] ranks that can take a replica, by rising room; see Moves
    Array<int32_t> expert;     // [D * S] expert of a replica
    Array<int32_t> giver;      // [D * S] home of that expert
    Array<int32_t> given;      // [D * S] replicas of one rank's mains
    Array<int32_t> held;       // [D] slots in use, from slot 0
    Array<int32_t> sends;      // [D] replicas of a rank's mains
    Array<int32_t> hottest;    // [D] expert of a rank that keeps most
    Array<int32_t> order;      // [D] ranks, in the order of shedding
    Array<int32_t> step;       // [D] last step of the chain to a rank

    // Lay the arrays out behind `memory`, which has `bytes` for them; for `ranks` ranks or fewer.
    MEGATRON_EXT_HOST_DEVICE static int64_t bytes(int ranks, int experts, int slots) {
        TryMemory memory{};
        return memory.lay_out(nullptr, ranks, experts, slots);
    }

    MEGATRON_EXT_HOST_DEVICE int64_t lay_out(char* memory, int ranks, int experts, int slots) {
        int64_t offset = 0;
        const int64_t d = ranks;
        // Those of one number first: where that is known to the compiler, so is their place. Before
        // 64-bit arrays is an even number of 32-bit ones.
        put(offers, memory, offset, d);
        put(room, memory, offset, d);
        put(host_room, memory, offset, d);
        put(width, memory, offset, d);
        put(wider, memory, offset, d);
        put(host, memory, offset, d);
        put(held, memory, offset, d);
        put(sends, memory, offset, d);
        put(hottest, memory, offset, d);
        put(order, memory, offset, d);
        put(step, memory, offset, d);
        put(amount, memory, offset, d * slots);
        put(kept, memory, offset, experts);
        put(expert, memory, offset, d * slots);
        put(giver, memory, offset, d * slots);
        put(given, memory, offset, d * slots);
        return (offset + 15) / 16 * 16;
    }

  private:
    template <class T>
    MEGATRON_EXT_HOST_DEVICE static void put(Array<T>& array,
                                             char* memory,
                                             int64_t& offset,
                                             int64_t n) {
        if (memory != nullptr) array = reinterpret_cast<T*>(memory + offset);
        offset += n * static_cast<int64_t>(sizeof(T));
    }
};

// On the host: the arrays' places are kept. (On a GPU it takes less time to compute an address than
// to read it.)
struct PlacedMemory {
    const TryMemory* placed;

    const TryMemory& arrays(const Domain&) const { return *placed; }
};

struct HostPlannerWarp : HostWarp {
    using Memory = PlacedMemory;
};

// The state of a try and what may be done to it. `Warp::Memory` says where its arrays are.
//
// Hosts are the ranks that have a free slot and room for the smallest replica. They are kept sorted
// by room, so that the tightest and the roomiest one are found without looking at all.
template <class Warp>
class Moves {
  public:
    static constexpr int64_t kMost = INT64_MAX;

    MEGATRON_EXT_HOST_DEVICE Moves(const Domain& domain,
                                   typename Warp::Memory memory,
                                   Warp warp,
                                   int32_t work_limit)
        : domain_(domain), memory_(memory), warp_(warp), work_limit_(work_limit) {}

    // Nothing has moved, and every rank may keep `threshold`. For an even plan that leaves less
    // than one spare assignment a rank, the coldest ranks stay below it, so that nothing is spare.
    // A method that never asks for hosts needs no list of them.
    MEGATRON_EXT_ONCE_IN_CODE void reset(int64_t threshold, bool lists_hosts) {
        const int ranks = domain_.ranks;
        int coldest = 0;
        if (domain_.even) {
            // What is spare beyond a whole assignment a rank does not matter.
            const int64_t total =
                warp_.sum(ranks, [&](int r) -> int64_t { return domain_.home_load[r]; });
            const int64_t rest = total % ranks;
            if (threshold == total / ranks + (rest > 0)) {
                coldest = rest > 0 ? static_cast<int>(ranks - rest) : 0;
            }
        }
        const auto& at = this->at();
        warp_.for_each(domain_.experts(), [&](int e) { at.kept[e] = domain_.expert_load[e]; });
        warp_.for_each(ranks, [&](int i) {
            const int r = domain_.busiest_first[i];
            at.room[r] = threshold - (i >= ranks - coldest) - domain_.home_load[r];
            at.held[r] = 0;
            at.sends[r] = 0;
        });
        warp_.for_each(ranks, [&](int r) { at.hottest[r] = keeps_most(r); });
        lists_hosts_ = lists_hosts;
        if (lists_hosts) list_hosts(coldest == 0);
        spend(rounds_of(domain_.experts()) + 3 * rounds_of(ranks));
    }

    // Give rank t a replica of `expert`, whose home is given, with `amount` assignments.
    MEGATRON_EXT_ONCE_IN_CODE void add(int home, int expert, int t, int64_t amount) {
        const auto& at = this->at();
        const int first = home * domain_.mains;
        const int64_t room_there = at.room[t] - amount;
        const int64_t room_home = at.room[home] + amount;
        warp_.once([&] {
            place_replica(at, expert, home, t, amount);
            at.room[home] = room_home;
            at.room[t] = room_there;
            if (!has_many_mains()) {
                at.hottest[home] = warp_.highest_entry(at.kept, first, domain_.mains);
            }
        });
        if (has_many_mains()) {
            const int hottest =
                warp_.best(domain_.mains, [&](int m) { return at.kept[first + m]; }).index;
            // The first one if nothing is left of any.
            warp_.once([&] { at.hottest[home] = hottest < 0 ? first : first + hottest; });
        }
        if (!lists_hosts_) return;
        update_host(t, room_there);
        if (room_home > 0) update_host(home, room_home);
    }

    // By one lane. Reads come first, so that they do not wait for each other behind writes.
    MEGATRON_EXT_HOST_DEVICE void place_replica(
        const TryMemory& at, int expert, int home, int t, int64_t amount) const {
        const int32_t held = at.held[t];
        const int32_t sends = at.sends[home];
        const int64_t kept = at.kept[expert] - amount;
        const int k = t * domain_.slots + held;
        at.held[t] = held + 1;
        at.sends[home] = sends + 1;
        at.kept[expert] = kept;
        at.expert[k] = expert;
        at.giver[k] = home;
        at.amount[k] = amount;
    }

    // By one lane: the replica that rank t holds of `expert`, if it has no assignments.
    MEGATRON_EXT_ONCE_IN_CODE void drop_if_empty(int t, int expert) {
        const auto& at = this->at();
        const int k = t * domain_.slots + slot_of(t, expert);
        if (at.amount[k] > 0) return;
        --at.sends[at.giver[k]];
        const int last = t * domain_.slots + --at.held[t];
        at.expert[k] = at.expert[last];
        at.giver[k] = at.giver[last];
        at.amount[k] = at.amount[last];
    }

    // Put rank t, which has `room`, where it now belongs among the hosts, or nowhere.
    MEGATRON_EXT_ONCE_IN_CODE void update_host(int t, int64_t room) {
        const auto& at = this->at();
        const bool can_host = room >= least_room() && can_take(t);
        const auto place = warp_.find_and_count(
            hosts_,
            [&](int i) { return at.host[i] == t; },
            [&](int i) {
                const int64_t other = at.host_room[i];
                return other < room || (other == room && at.host[i] < t);
            });
        const int from = place.found;
        // It was counted itself if it lies before.
        const int to = place.count - (from >= 0 && from < place.count);
        if (!can_host) {
            if (from < 0) return;
            --hosts_;
            warp_.move_up(from, hosts_, at.host_room, at.host, room, t);
        } else if (from < 0) {
            warp_.move_down(hosts_, to, at.host_room, at.host, room, t);
            ++hosts_;
        } else if (from < to) {
            warp_.move_up(from, to, at.host_room, at.host, room, t);
        } else {
            warp_.move_down(from, to, at.host_room, at.host, room, t);
        }
    }

    MEGATRON_EXT_HOST_DEVICE int hosts() const { return hosts_; }

    // How many hosts have less room.
    MEGATRON_EXT_HOST_DEVICE int hosts_below(int64_t room) const {
        const auto& at = this->at();
        return warp_.count_first(hosts_, [&](int i) { return at.host_room[i] < room; });
    }

    // The first host from `place` on, in steps of `by`, that may get a replica of `expert`; -1 if
    // there is none.
    MEGATRON_EXT_ONCE_IN_CODE int host_for(int expert, int place, int by) const {
        const auto& at = this->at();
        MEGATRON_EXT_ROLLED
        for (; place >= 0 && place < hosts_; place += by) {
            const int t = at.host[place];
            if (find_slot(at, t, expert) < 0) return t;
        }
        return -1;
    }

    // Ranks that have to shed; 0 when the threshold is reached.
    MEGATRON_EXT_HOST_DEVICE Best busiest() const {
        return warp_.best(domain_.ranks, [&](int r) { return -at().room[r]; });
    }

    MEGATRON_EXT_HOST_DEVICE Best roomiest() const {
        return warp_.best(domain_.ranks, [&](int r) { return at().room[r]; });
    }

    MEGATRON_EXT_HOST_DEVICE bool can_take(int t) const { return at().held[t] < domain_.slots; }

    // The slot in which rank t holds `expert`, or -1.
    MEGATRON_EXT_ONCE_IN_CODE int slot_of(int t, int expert) const {
        return find_slot(this->at(), t, expert);
    }

    // By one lane: the main of `rank` that keeps most.
    MEGATRON_EXT_ONCE_IN_CODE int keeps_most(int rank) const {
        return warp_.highest_entry(this->at().kept, rank * domain_.mains, domain_.mains);
    }

    // The main of `rank` that keeps most of those that are not on rank t; -1 if all are there.
    MEGATRON_EXT_ONCE_IN_CODE int main_for(int rank, int t) const {
        const auto& at = this->at();
        const int hot = at.hottest[rank];
        if (slot_of(t, hot) < 0) return hot;
        int best = -1;
        MEGATRON_EXT_ROLLED
        for (int e = rank * domain_.mains; e < (rank + 1) * domain_.mains; ++e) {
            if ((best < 0 || at.kept[e] > at.kept[best]) && slot_of(t, e) < 0) best = e;
        }
        return best;
    }

    MEGATRON_EXT_HOST_DEVICE int64_t least_room() const {
        return domain_.min_quota > 1 ? domain_.min_quota : 1;
    }

    MEGATRON_EXT_HOST_DEVICE static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
    MEGATRON_EXT_HOST_DEVICE static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

    MEGATRON_EXT_HOST_DEVICE void spend(int32_t rounds) { work_ += rounds; }
    MEGATRON_EXT_HOST_DEVICE int32_t work() const { return work_; }
    MEGATRON_EXT_HOST_DEVICE bool is_spent() const { return work_ >= work_limit_; }

    // Replicas that the busiest sender has to fill.
    MEGATRON_EXT_HOST_DEVICE int32_t most_sends() const {
        return warp_.best(domain_.ranks, [&](int r) { return at().sends[r]; }).key;
    }

    MEGATRON_EXT_HOST_DEVICE int32_t replicas() const {
        return static_cast<int32_t>(
            warp_.sum(domain_.ranks, [&](int r) -> int64_t { return at().held[r]; }));
    }

    MEGATRON_EXT_HOST_DEVICE const Domain& domain() const { return domain_; }
    // The arrays.
    MEGATRON_EXT_HOST_DEVICE decltype(auto) at() const { return memory_.arrays(domain_); }
    MEGATRON_EXT_HOST_DEVICE const Warp& warp() const { return warp_; }

  private:
    MEGATRON_EXT_HOST_DEVICE int find_slot(const TryMemory& at, int t, int expert) const {
        const int first = t * domain_.slots;
        const int held = at.held[t];
        MEGATRON_EXT_ROLLED
        for (int k = 0; k < held; ++k) {
            if (at.expert[first + k] == expert) return k;
        }
        return -1;
    }

    // So many that the lanes look through them more quickly than one does.
    MEGATRON_EXT_HOST_DEVICE bool has_many_mains() const { return domain_.mains > 8; }

    // The ranks from the busiest to the coldest have rising room: those that can host are the last.
    // Not so if the coldest of an even plan may keep one less; then they are sorted anew.
    MEGATRON_EXT_ONCE_IN_CODE void list_hosts(bool sorted) {
        const auto& at = this->at();
        const int ranks = domain_.ranks;
        const auto can_host = [&](int t) { return at.room[t] >= least_room() && can_take(t); };
        hosts_ = static_cast<int>(warp_.sum(ranks, [&](int t) -> int64_t { return can_host(t); }));
        const int first = sorted ? ranks - hosts_ : 0;
        warp_.for_each(ranks - first, [&](int i) {
            const int t = domain_.busiest_first[first + i];
            at.host[i] = t;
            at.host_room[i] = can_host(t) ? at.room[t] : kMost;
        });
        if (!sorted) warp_.sort(ranks, at.host_room, at.host, at.width, at.step);
    }

    const Domain& domain_;
    const typename Warp::Memory memory_;
    const Warp warp_;
    const int32_t work_limit_;
    int32_t work_ = 0;
    int hosts_ = 0;
    bool lists_hosts_ = true;
};

}  // namespace megatron_ext
