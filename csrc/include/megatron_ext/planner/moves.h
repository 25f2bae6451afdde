// The state of a try, and what tries do to it.
#pragma once

#include <cstdint>
#include <limits>

#include "megatron_ext/planner/domain.h"
#include "megatron_ext/planner/given.h"
#include "megatron_ext/planner/hosts.h"
#include "megatron_ext/planner/paths.h"
#include "megatron_ext/warp.h"

namespace megatron_ext {

template <class Warp>
class MemoryAtHand;
template <class Warp>
class HandOverInTurn;

// What a try works on, on the host: places are kept. (On a GPU it takes less time to compute an
// address than to read it.)
template <class Amount>
struct PlacedMemory {
    static constexpr int kRanks = 0;  // at most so many, or 0: any number
    const Domain<Amount>* of;
    const TryMemory<Amount>* placed;

    const Domain<Amount>& domain() const { return *of; }
    const TryMemory<Amount>& arrays() const { return *placed; }
    static bool is_stopped() { return false; }  // There is only one try at a time.
};

template <class Amount>
struct HostPlannerWarp : HostWarp<Amount> {
    using Memory = PlacedMemory<Amount>;
    using Hosts = SortedHosts<Amount>;
    using Given = LinkedGiven;
    using Paths = SparsePaths<Amount>;
    template <class Warp>
    using AtHand = MemoryAtHand<Warp>;
    template <class Warp>
    using HandOver = HandOverInTurn<Warp>;
};

// The state of a try and what may be done to it. `Warp::Memory` says where its arrays are, and
// `Warp::Hosts`, `Warp::Given` and `Warp::Paths` how hosts, a rank's replicas and chains are found.
template <class Warp>
class Moves {
  public:
    using Amount = typename Warp::Amount;
    static constexpr Amount kMost = std::numeric_limits<Amount>::max();
    static constexpr int kRanks = Warp::Memory::kRanks;
    static constexpr int kSlots = Warp::Memory::kSlots;

    MEGATRON_EXT_HOST_DEVICE Moves(typename Warp::Memory memory,
                                   int32_t work_limit,
                                   bool may_stop = false)
        : memory_(memory), work_limit_(work_limit), may_stop_(may_stop) {}

    // Nothing has moved, and every rank may keep `threshold`. For an even plan that leaves less
    // than one spare assignment a rank, the coldest ranks stay below it, so that nothing is spare.
    MEGATRON_EXT_HOST_DEVICE void reset(Amount threshold) {
        const auto& domain = this->domain();
        const int ranks = domain.ranks;
        int coldest = 0;
        if (domain.even) {
            // What is spare beyond a whole assignment a rank does not matter.
            const auto total = static_cast<Amount>(
                warp_.sum(ranks, [&](int r) -> int64_t { return domain.home_load[r]; }));
            const Amount rest = total % ranks;
            if (threshold == total / ranks + (rest > 0)) {
                coldest = rest > 0 ? static_cast<int>(ranks - rest) : 0;
            }
        }
        const auto& at = this->at();
        warp_.copy(domain.experts(), domain.expert_load, at.kept);
        warp_.for_each(ranks, [&](int i) {
            const int r = domain.busiest_first[i];
            at.room[r] = threshold - (i >= ranks - coldest) - domain.home_load[r];
            at.held[r] = 0;
            at.sends[r] = 0;
            at.hottest[r] = r * domain.mains + domain.hottest[r];
        });
        hosts_.list(*this, /*rising=*/coldest == 0);
        given_.reset(ranks, domain.slots);
        spend(rounds_of(domain.experts()) + 3 * rounds_of(ranks));
    }

    // Give rank t a replica of `expert`, whose home is given, with `amount` assignments. Returns
    // the home's main that keeps most then, and what it keeps.
    MEGATRON_EXT_HOST_DEVICE Best<Amount> add(int home, int expert, int t, Amount amount) {
        const auto& at = this->at();
        const int first = home * domain().mains;
        const Amount kept = at.kept[expert] - amount;
        Best<Amount> hottest = best_main(
            [&](int m) -> Amount { return first + m == expert ? kept : at.kept[first + m]; });
        // The first one if nothing is left of any.
        hottest.index = hottest.index < 0 ? first : first + hottest.index;
        warp_.once([&] {
            const Amount room_there = at.room[t] - amount;
            const Amount room_home = at.room[home] + amount;
            const int32_t held_home = at.held[home];
            const int32_t held_there = place_replica(at, expert, home, t, amount);
            at.kept[expert] = kept;
            at.room[t] = room_there;
            at.room[home] = room_home;
            hosts_.update(at, t, room_of_host(room_there, held_there));
            hosts_.update(at, home, room_of_host(room_home, held_home));
            at.hottest[home] = hottest.index;
        });
        return hottest;
    }

    // The main of a rank that keeps most, and what it keeps.
    MEGATRON_EXT_HOST_DEVICE Best<Amount> hottest(int rank) const {
        const auto& at = this->at();
        const int hot = at.hottest[rank];
        return {hot, at.kept[hot]};
    }

    // By one lane; returns how many replicas rank t holds then. Reads come first, so that they do
    // not wait for each other behind writes.
    MEGATRON_EXT_HOST_DEVICE int32_t
    place_replica(const TryMemory<Amount>& at, int expert, int home, int t, Amount amount) {
        const int32_t held = at.held[t];
        const int32_t sends = at.sends[home];
        const int k = t * domain().slots + held;
        at.held[t] = held + 1;
        at.sends[home] = sends + 1;
        at.expert[k] = expert;
        at.giver[k] = home;
        at.amount[k] = amount;
        given_.add(home, k);
        return held + 1;
    }

    // By one lane: the replica that rank t holds of `expert`, if it has no assignments.
    MEGATRON_EXT_HOST_DEVICE void drop_if_empty(int t, int expert) {
        const auto& at = this->at();
        const int k = t * domain().slots + slot_of(t, expert);
        if (at.amount[k] > 0) return;
        --at.sends[at.giver[k]];
        const int last = t * domain().slots + --at.held[t];
        given_.drop(at, k, last);
        at.expert[k] = at.expert[last];
        at.giver[k] = at.giver[last];
        at.amount[k] = at.amount[last];
    }

    // By one lane: `via` takes over a replica of another sender. It gives as much of `main` there,
    // and its own replica `grown` takes what that was of. Reads come first: see `place_replica`.
    MEGATRON_EXT_HOST_DEVICE void hand_over(int replica, int via, int main, int grown) {
        const auto& at = this->at();
        const int sender = at.giver[replica];
        const int expert = at.expert[replica];
        const Amount amount = at.amount[replica];
        const int returned = at.expert[grown];
        // What the host returns of the very expert goes back and forth.
        const Amount back = returned == expert ? 0 : amount;
        const Amount of_grown = at.amount[grown] + amount;
        const Amount of_main = at.kept[main] - amount;
        const Amount of_expert = at.kept[expert] + back;
        const Amount of_returned = at.kept[returned] - back;
        const int32_t fewer = at.sends[sender] - 1;
        const int32_t more = at.sends[via] + 1;
        at.amount[grown] = of_grown;
        at.kept[main] = of_main;
        at.kept[expert] = of_expert;
        at.kept[returned] = of_returned;
        at.expert[replica] = main;
        at.giver[replica] = via;
        given_.remove(sender, replica);
        given_.add(via, replica);
        at.sends[sender] = fewer;
        at.sends[via] = more;
    }

    // By one lane: whether rank t is a host, or its room, may have changed.
    MEGATRON_EXT_HOST_DEVICE void update_host(int t) {
        const auto& at = this->at();
        hosts_.update(at, t, room_of_host(at.room[t], at.held[t]));
    }

    // The main of a rank that keeps most, found anew.
    MEGATRON_EXT_HOST_DEVICE int find_hottest(int rank) const {
        const auto& at = this->at();
        const int first = rank * domain().mains;
        const auto hottest = best_main([&](int m) -> Amount { return at.kept[first + m]; });
        return hottest.index < 0 ? first : first + hottest.index;  // if nothing is left of any
    }

    MEGATRON_EXT_HOST_DEVICE int hosts() const { return hosts_.count(*this); }

    // The tightest host that takes `amount` of `expert`, above 0; -1 if there is none.
    MEGATRON_EXT_HOST_DEVICE int tightest_host(int expert, Amount amount) const {
        return hosts_.tightest(*this, expert, amount);
    }

    // The host with most room below `most` that may get a replica of `expert`; -1 if there is none.
    MEGATRON_EXT_HOST_DEVICE int roomiest_host_below(int expert, Amount most) const {
        return hosts_.roomiest_below(*this, expert, most);
    }

    MEGATRON_EXT_HOST_DEVICE HostsBelow<Amount> hosts_below(Amount most) const {
        return hosts_.below(*this, most);
    }

    // The roomier one of two hosts with less room than `most` that take `whole` of `expert`
    // together, with the least room left over; -1 if there are none.
    MEGATRON_EXT_HOST_DEVICE Best<Amount> tightest_pair(int expert,
                                                        Amount most,
                                                        Amount whole) const {
        return hosts_.tightest_pair(*this, expert, most, whole);
    }

    // The roomiest host, or -1.
    MEGATRON_EXT_HOST_DEVICE int roomiest_host() const { return hosts_.roomiest(*this); }

    // What a rank has room for as a host; 0 if it is none.
    MEGATRON_EXT_HOST_DEVICE Amount room_of_host(Amount room, int32_t held) const {
        return room >= least_room() && held < domain().slots ? room : 0;
    }

    // The main with the highest key above 0, counted within a rank's; the lowest of equals.
    template <class Function>
    MEGATRON_EXT_HOST_DEVICE Best<Amount> best_main(Function key_of) const {
        return warp_.template best_of_few</*kMostlyOne=*/true>(domain().mains, key_of);
    }

    // The rank with the highest key above 0, the lowest of equals.
    template <class Function>
    MEGATRON_EXT_HOST_DEVICE Best<Amount> best_rank(Function key_of) const {
        return warp_.template best<kRanks>(domain().ranks, key_of);
    }

    // Whether any rank has more room than that.
    MEGATRON_EXT_HOST_DEVICE bool is_any_roomier(Amount than) const {
        return hosts_.is_any_roomier(*this, than);
    }

    MEGATRON_EXT_HOST_DEVICE bool can_take(int t) const { return at().held[t] < domain().slots; }

    // The slot in which rank t holds `expert`, or -1.
    MEGATRON_EXT_HOST_DEVICE int slot_of(int t, int expert) const {
        const auto& at = this->at();
        const int first = t * domain().slots;
        const int held = at.held[t];
        MEGATRON_EXT_ROLLED
        for (int k = 0; k < held; ++k) {
            if (at.expert[first + k] == expert) return k;
        }
        return -1;
    }

    // By one lane: the main of `rank` that keeps most.
    MEGATRON_EXT_HOST_DEVICE int keeps_most(int rank) const {
        return warp_.highest_entry(this->at().kept, rank * domain().mains, domain().mains);
    }

    // The main of `rank` that keeps most of those that are not on rank t; -1 if all are there.
    MEGATRON_EXT_HOST_DEVICE int main_for(int rank, int t) const {
        const int hot = this->at().hottest[rank];
        return slot_of(t, hot) < 0 ? hot : other_main_for(rank, t);
    }

    // As main_for, where the hottest main is on rank t.
    MEGATRON_EXT_HOST_DEVICE int other_main_for(int rank, int t) const {
        const auto& at = this->at();
        int best = -1;
        MEGATRON_EXT_ROLLED
        for (int e = rank * domain().mains; e < (rank + 1) * domain().mains; ++e) {
            if ((best < 0 || at.kept[e] > at.kept[best]) && slot_of(t, e) < 0) best = e;
        }
        return best;
    }

    MEGATRON_EXT_HOST_DEVICE Amount least_room() const {
        return domain().min_quota > 1 ? domain().min_quota : 1;
    }

    MEGATRON_EXT_HOST_DEVICE static Amount least(Amount a, Amount b) { return a < b ? a : b; }
    MEGATRON_EXT_HOST_DEVICE static Amount most(Amount a, Amount b) { return a > b ? a : b; }

    MEGATRON_EXT_HOST_DEVICE void spend(int32_t rounds) { work_ += rounds; }
    // So many times, or until it is spent; mostly at once, as a try has much left.
    MEGATRON_EXT_HOST_DEVICE void spend_until_spent(int32_t times, int32_t rounds) {
        if (int64_t{times} * rounds < work_limit_ - work_) {
            spend(times * rounds);
            return;
        }
        MEGATRON_EXT_ROLLED
        for (; times > 0 && !is_spent(); --times) spend(rounds);
    }
    MEGATRON_EXT_HOST_DEVICE int32_t work() const { return work_; }
    MEGATRON_EXT_HOST_DEVICE int32_t work_left() const { return work_limit_ - work_; }
    MEGATRON_EXT_HOST_DEVICE void leave_work(int32_t left) { work_ = work_limit_ - left; }
    MEGATRON_EXT_HOST_DEVICE bool is_spent() const { return work_ >= work_limit_; }
    MEGATRON_EXT_HOST_DEVICE bool may_stop() const { return may_stop_; }
    // Whether a try beside this one has shown that it is not needed.
    MEGATRON_EXT_HOST_DEVICE bool is_stopped() const { return may_stop_ && memory_.is_stopped(); }

    // Replicas that the busiest sender has to fill.
    MEGATRON_EXT_HOST_DEVICE int32_t most_sends() const {
        return best_rank([&](int r) -> Amount { return at().sends[r]; }).key;
    }

    MEGATRON_EXT_HOST_DEVICE int32_t replicas() const {
        return static_cast<int32_t>(
            warp_.sum(domain().ranks, [&](int r) -> int64_t { return at().held[r]; }));
    }

    MEGATRON_EXT_HOST_DEVICE decltype(auto) domain() const { return memory_.domain(); }
    // The arrays.
    MEGATRON_EXT_HOST_DEVICE decltype(auto) at() const { return memory_.arrays(); }
    MEGATRON_EXT_HOST_DEVICE const Warp& warp() const { return warp_; }
    MEGATRON_EXT_HOST_DEVICE typename Warp::Given& given() { return given_; }
    MEGATRON_EXT_HOST_DEVICE const typename Warp::Given& given() const { return given_; }

  private:
    const typename Warp::Memory memory_;
    const Warp warp_{};
    const int32_t work_limit_;
    const bool may_stop_;
    int32_t work_ = 0;
    typename Warp::Hosts hosts_{};
    typename Warp::Given given_{};
};

}  // namespace megatron_ext
