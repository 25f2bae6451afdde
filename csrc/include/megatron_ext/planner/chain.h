// Chains: assignments that move over several ranks, by existing replicas and by new replicas, until
// a rank with room is reached. Chains get to room behind full slots, and through warm ranks to cold
// ranks. A chain is a widest path, found step by step from the rank that has too much.
#pragma once

#include "megatron_ext/planner/moves.h"
#include "megatron_ext/planner/paths.h"

namespace megatron_ext {

constexpr int kChainSteps = 5;  // longer chains found nothing more on any load

template <class Warp>
class Chain {
    using Amount = typename Warp::Amount;

  public:
    MEGATRON_EXT_HOST_DEVICE explicit Chain(Moves<Warp>& moves) : moves_(moves) {}

    // Move up to `whole` off `rank` along the widest chain; nothing if that is not more than
    // `at_least`.
    MEGATRON_EXT_HOST_DEVICE bool move(int rank, Amount whole, Amount at_least) {
        const int ranks = moves_.domain().ranks;
        auto&& paths = paths_.start(moves_, rank, whole);
        moves_.spend(rounds_of(ranks));
        int last = -1;
        Amount carried = at_least;
        MEGATRON_EXT_ROLLED
        for (int step = 0; step < kChainSteps && carried < whole; ++step) {
            const bool is_wider = paths.widen(moves_);
            moves_.spend(6 * rounds_of(ranks) + rounds_of(ranks * moves_.domain().slots));
            if (!is_wider) break;
            const Best<Amount> end = paths.end(moves_);
            if (end.key > carried) {
                last = end.index;
                carried = end.key;
            }
        }
        if (last < 0) return false;
        // The steps, from the last to the first.
        Step steps[kChainSteps];
        int length = 0;
        MEGATRON_EXT_ROLLED
        for (int t = last; t != rank; t = steps[length++].from) {
            // A rank on the way may since be reached by more, but over more ranks.
            if (length == kChainSteps) return false;
            steps[length] = step_to(t);
        }
        carried = whole_replicas_only(steps, length, carried);
        if (carried <= at_least) return false;
        take(steps, length, carried);
        return true;
    }

  private:
    // A step of a chain, taken apart.
    struct Step {
        int from;
        int to;
        int expert;   // whose assignments move
        int replica;  // that grows or shrinks; -1 if it is new
        bool shrinks;
    };

    MEGATRON_EXT_HOST_DEVICE Step step_to(int t) const {
        const auto& at = moves_.at();
        const int step = at.step[t];
        const int first_new = first_new_step(moves_);
        if (step >= first_new) {
            const int from = step - first_new;
            return {from, t, at.hottest[from], -1, false};
        }
        const int replica = step / 2;
        const bool shrinks = step % 2 == 1;
        const int from = shrinks ? moves_.domain().rank_of(replica) : at.giver[replica];
        return {from, t, at.expert[replica], replica, shrinks};
    }

    // What the chain may carry so that every replica on it has at least `min_quota` or nothing.
    MEGATRON_EXT_HOST_DEVICE Amount whole_replicas_only(const Step* steps,
                                                        int length,
                                                        Amount carried) const {
        const Amount min_quota = moves_.domain().min_quota;
        bool changed = min_quota > 1;
        MEGATRON_EXT_ROLLED
        while (changed && carried > 0) {
            changed = false;
            MEGATRON_EXT_ROLLED
            for (int i = 0; i < length; ++i) {
                if (steps[i].replica < 0 && carried < min_quota) return 0;
                if (!steps[i].shrinks) continue;
                const Amount amount = moves_.at().amount[steps[i].replica];
                if (carried < amount && amount - carried < min_quota) {
                    carried = amount - min_quota;
                    changed = true;
                }
            }
        }
        return carried;
    }

    MEGATRON_EXT_HOST_DEVICE void take(const Step* steps, int length, Amount carried) {
        const auto& at = moves_.at();
        const auto& warp = moves_.warp();
        const int rank = steps[length - 1].from;
        // Each rank of a chain is the end of one step, so of these no two change the same; but
        // two may change what a main keeps: a replica of it may shrink before another one grows.
        warp.for_each(length, [&](int i) {
            const Step& step = steps[i];
            const Amount more = step.shrinks ? -carried : carried;
            warp.add(at.kept[step.expert], -more);
            if (step.replica < 0) {
                moves_.place_replica(at, step.expert, step.from, step.to, carried);
            } else {
                at.amount[step.replica] += more;
            }
            if (i == 0) at.room[step.to] -= carried;
            if (i == length - 1) at.room[rank] += carried;
        });
        // Only now, because another replica moves to the slot of one that is dropped.
        warp.for_each(length, [&](int i) {
            if (steps[i].shrinks) moves_.drop_if_empty(steps[i].from, steps[i].expert);
        });
        warp.for_each(length + 1, [&](int i) {
            const int changed = i < length ? steps[i].to : rank;
            at.hottest[changed] = moves_.keeps_most(changed);
            moves_.update_host(changed);
        });
        moves_.spend(2 * length * rounds_of(moves_.domain().ranks));
    }

    Moves<Warp>& moves_;
    typename Warp::Paths paths_{};
};

}  // namespace megatron_ext
