// Two published planners, as tries of their own, so that a plan is never worse than theirs.
#pragma once

#include "megatron_ext/planner/moves.h"

namespace megatron_ext {

// UltraEP, Algorithm 1 (SolveReplication): the busiest rank first, from its hottest expert on,
// always to the roomiest host. Its release keeps assignments with every main (kStays), and in some
// tries gives none of the hosts less than an equal part of what the rank has to shed (kByNeed).
template <int kStays = 0, bool kByNeed = false, class Warp>
MEGATRON_EXT_ONCE_IN_CODE bool shed_to_roomiest(Moves<Warp>& moves) {
    using Amount = typename Warp::Amount;
    const auto& at = moves.at();
    const auto& domain = moves.domain();
    MEGATRON_EXT_ROLLED
    for (int i = 0; i < domain.ranks; ++i) {
        const int rank = domain.busiest_first[i];
        if (at.room[rank] >= 0) return true;
        if (moves.is_stopped()) return false;
        // Counted here, and not read as -at.room[rank] where it is needed: ptxas 13.0 loses the
        // minus of one of three numbers whose least it looks for, and then no replica is made.
        Amount whole = -at.room[rank];
        int expert = -1;
        MEGATRON_EXT_ROLLED
        for (int m = 0; m < domain.mains && whole > 0; ++m) {
            // The next by falling load.
            const int last = expert;
            const int first = rank * domain.mains;
            const auto next = moves.best_main([&](int i) -> Amount {
                const int e = first + i;
                const Amount below =
                    last < 0 ? 1 : domain.expert_load[last] - domain.expert_load[e];
                return below > 0 || (below == 0 && e > last) ? domain.expert_load[e] : 0;
            });
            if (next.index < 0) return false;
            expert = first + next.index;
            MEGATRON_EXT_ROLLED
            while (whole > 0 && at.kept[expert] > kStays) {
                const int t = moves.roomiest_host();
                if (t < 0) return false;
                moves.spend(4 * rounds_of(domain.ranks));
                const Amount piece =
                    moves.least(moves.least(whole, at.room[t]), at.kept[expert] - kStays);
                if (piece < domain.min_quota) break;
                if (kByNeed && piece < 1 + (whole - 1) / moves.hosts()) break;
                moves.add(rank, expert, t, piece);
                whole -= piece;
            }
        }
        if (whole > 0) return false;
    }
    return true;
}

// MoonEP's exact fill: the busiest rank gives the roomiest one all that it lacks.
template <class Warp>
MEGATRON_EXT_ONCE_IN_CODE bool fill_exactly(Moves<Warp>& moves) {
    using Amount = typename Warp::Amount;
    const auto& at = moves.at();
    const auto& domain = moves.domain();
    MEGATRON_EXT_ROLLED
    while (true) {
        const int rank = moves.busiest().index;
        if (rank < 0) return true;
        const int t = moves
                          .best_rank([&](int t) -> Amount {
                              const bool is_free = at.held[t] == 0 && domain.slots > 0;
                              return is_free ? at.room[t] : Amount{0};
                          })
                          .index;
        if (t < 0) return false;
        MEGATRON_EXT_ROLLED
        while (at.room[t] > 0) {
            moves.spend(5 * rounds_of(domain.ranks));
            if (!moves.can_take(t)) return false;
            const int hot = moves.main_for(rank, t);
            const Amount piece = hot < 0 ? 0 : moves.least(at.room[t], at.kept[hot]);
            if (piece < domain.min_quota) return false;
            moves.add(rank, hot, t, piece);
        }
    }
}

}  // namespace megatron_ext
