// Shedding: the excess of an overloaded rank goes to replicas on other ranks.
//   1. to the tightest host that takes all of the excess, so that roomy hosts stay for larger ones;
//   2. to the tightest pair of hosts (most orders of shedding);
//   3. in the largest piece any host takes, unless a chain carries more;
//   4. where that is less than `min_quota`, by giving more and taking some back.
#pragma once

#include "megatron_ext/planner/chain.h"
#include "megatron_ext/planner/moves.h"

namespace megatron_ext {

template <class Warp>
class Shedding {
    using Amount = typename Warp::Amount;

  public:
    MEGATRON_EXT_HOST_DEVICE Shedding(Moves<Warp>& moves, bool pairs)
        : moves_(moves), chain_(moves), pairs_(pairs) {}

    // Bring `rank` down to what it may keep; false if nothing relieves it, or the work is spent.
    MEGATRON_EXT_HOST_DEVICE bool relieve(int rank) {
        const auto& at = moves_.at();
        Amount whole = -at.room[rank];
        Best<Amount> hot = moves_.hottest(rank);
        MEGATRON_EXT_ROLLED
        while (whole > 0) {
            if (moves_.is_spent()) return false;
            moves_.spend(8 * rounds_of(moves_.domain().ranks));
            // A replica that must carry more than the excess may: nobody is hurt by room.
            const Amount needed = moves_.most(whole, moves_.domain().min_quota);
            int host = -1;
            Amount piece = needed;
            if (hot.key >= needed) {
                host = moves_.tightest_host(hot.index, needed);
                if (host < 0 && pairs_) {
                    const Pair pair = moves_.tightest_pair(hot.index, needed, whole);
                    moves_.spend(6 * rounds_of(pair.values));
                    host = pair.higher;
                    if (host >= 0) piece = at.room[host];
                }
            }
            if (host < 0) {
                // The largest piece, unless a chain carries more.
                host = host_of_largest_piece(hot, whole);
                piece = host < 0 ? 0 : moves_.least(moves_.least(hot.key, at.room[host]), whole);
                const bool is_moved = piece < whole && moves_.is_any_roomier(piece) &&
                                      chain_.move(rank, whole, piece);
                if (is_moved || host < 0) {
                    if (!is_moved && !swap(rank, whole)) return false;
                    whole = -at.room[rank];
                    hot = moves_.hottest(rank);
                    continue;
                }
            }
            hot = moves_.add_here(rank, hot.index, host, piece);
            whole -= piece;
        }
        return true;
    }

  private:
    // The roomiest host, or the tightest that takes all of an expert; -1 if none takes min_quota.
    MEGATRON_EXT_ONCE_IN_CODE int host_of_largest_piece(Best<Amount> expert, Amount whole) const {
        const Amount most = moves_.least(expert.key, whole);
        if (most < moves_.least_room()) return -1;
        // Whether one takes the whole excess was asked before: none does.
        const int tightest = most < whole ? moves_.tightest_host(expert.index, most) : -1;
        return tightest >= 0 ? tightest : moves_.roomiest_host_below(expert.index, most);
    }

    // Move less than `min_quota`: a replica on a rank with room takes that much more than one of
    // that rank's experts, on `rank`, gives back.
    MEGATRON_EXT_ONCE_IN_CODE bool swap(int rank, Amount whole) {
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
