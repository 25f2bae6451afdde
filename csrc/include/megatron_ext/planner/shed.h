// Shedding: the excess of an overloaded rank goes to replicas on other ranks.
//   1. to the tightest host that takes all of the excess, so that roomy hosts stay for larger ones;
//   2. to the tightest pair of hosts (most orders of shedding);
//   3. in the largest piece any host takes, unless a chain carries more;
//   4. where that is less than `min_quota`, by giving more and taking some back.
#pragma once

#include "megatron_ext/planner/at_hand.h"
#include "megatron_ext/planner/chain.h"
#include "megatron_ext/planner/moves.h"

namespace megatron_ext {

template <class Warp>
class Shedding {
    using Amount = typename Warp::Amount;
    using At = typename Warp::template AtHand<Warp>;

  public:
    MEGATRON_EXT_HOST_DEVICE Shedding(Moves<Warp>& moves, bool pairs)
        : moves_(moves), chain_(moves), pairs_(pairs) {}

    // Relieve all ranks, in the try's order, until one is left with too much: nothing relieves it,
    // or the work is spent. Returns its place in the order, or -1.
    MEGATRON_EXT_HOST_DEVICE int relieve_all() {
        const auto& at = moves_.at();
        At at_hand(moves_);
        const int last = at_hand.sizes().ranks - 1;
        const int32_t pass = rounds_of(at_hand.sizes().ranks);
        const Amount min_quota = at_hand.sizes().min_quota;
        const Amount least_room = moves_.most(min_quota, 1);
        int place = 0;
        int rank = at.order[0];
        at_hand.fetch(rank);
        at_hand.turn_to(rank);
        if (at_hand.excess() <= 0) return -1;
        int next = at.order[last > 0 ? 1 : 0];
        at_hand.fetch(next);
        MEGATRON_EXT_ROLLED
        while (true) {
            if (at_hand.excess() <= 0) {
                at_hand.leave();
                ++place;
                rank = next;
                at_hand.turn_to(rank);
                next = at.order[place < last ? place + 1 : last];
                at_hand.fetch(next);
            }
            // Those that have too much come first, and one has not: else there is no room anywhere.
            const bool is_over = (at_hand.excess() <= 0) | at_hand.is_spent();
            const Amount whole = at_hand.excess();
            const Best<Amount> hot = at_hand.hottest();
            // A replica that must carry more than the excess may: nobody is hurt by room.
            const Amount needed = moves_.most(whole, min_quota);
            const bool is_enough = hot.key >= needed;
            const Amount most = moves_.least(hot.key, whole);
            // Hosts with less room than the least piece there are none.
            const Amount from = is_enough ? needed : most >= least_room ? most : Moves<Warp>::kMost;
            at_hand.look(hot.index, from, is_enough ? needed : most);
            const Best<Amount> tightest = at_hand.tightest();
            const bool fits = is_enough && tightest.index >= 0;
            Best<Amount> host = tightest;
            Amount piece = needed;
            int32_t work = 8 * pass;
            bool may_pair = false;
            bool may_chain = false;
            // Where all of it is found already, a branch takes longer than what is not needed.
            if (At::kFindsAll || !fits) {
                const HostsBelow<Amount> below = at_hand.hosts_below();
                const bool asks_pair = pairs_ && is_enough && !fits;
                if (asks_pair) work += 6 * rounds_of(below.count);
                // What is too little with the roomiest is too little with any.
                may_pair = asks_pair && whole - below.most <= below.most;
                // The largest piece, unless a chain carries more.
                if (tightest.index < 0) host = at_hand.roomiest_below();
                if (!fits) piece = moves_.least(most, host.key);
                may_chain = piece < whole && at_hand.is_any_roomier(piece);
            }
            at_hand.spend(is_over ? 0 : work);
            if (is_over | may_pair | may_chain | (host.index < 0)) {  // Mostly it is none of these.
                if (is_over) break;
                const Best<Amount> roomier =
                    may_pair ? at_hand.tightest_pair(whole) : Best<Amount>{};
                if (roomier.index >= 0) {
                    host = roomier;
                    piece = host.key;
                } else if (may_chain || host.index < 0) {
                    at_hand.leave();
                    at_hand.store();
                    const bool is_moved = (may_chain && chain_.move(rank, whole, piece)) ||
                                          (host.index < 0 && swap(rank, whole));
                    at_hand.load();
                    if (is_moved) {
                        at_hand.fetch(rank);
                        at_hand.turn_to(rank);
                        at_hand.fetch(next);
                        continue;
                    }
                    if (host.index < 0) break;
                }
            }
            at_hand.give(hot, host, piece);
        }
        const bool is_stuck = at_hand.excess() > 0;
        at_hand.store();
        return is_stuck ? place : -1;
    }

  private:
    // Move less than `min_quota`: a replica on a rank with room takes that much more than one of
    // that rank's experts, on `rank`, gives back.
    MEGATRON_EXT_HOST_DEVICE bool swap(int rank, Amount whole) {
        const auto& at = moves_.at();
        const Amount min_quota = moves_.domain().min_quota;
        if (min_quota == 1) return false;
        const auto host = moves_.warp().best(moves_.domain().ranks, [&](int t) -> Amount {
            if (at.room[t] <= 0 || t == rank || !moves_.can_take(t) || !moves_.can_take(rank)) {
                return 0;
            }
            const Amount piece = moves_.least(at.room[t], whole);
            const int there = moves_.main_for(rank, t);
            const int back = moves_.main_for(t, rank);
            if (there < 0 || at.kept[there] - piece < min_quota) return 0;
            return back < 0 || at.kept[back] < min_quota ? 0 : piece;
        });
        if (host.index < 0) return false;
        const int there = moves_.main_for(rank, host.index);
        const int back = moves_.main_for(host.index, rank);
        moves_.add(rank, there, host.index, min_quota + host.key);
        moves_.add(host.index, back, rank, min_quota);
        return true;
    }

    Moves<Warp>& moves_;
    Chain<Warp> chain_;
    const bool pairs_;
};

}  // namespace megatron_ext
