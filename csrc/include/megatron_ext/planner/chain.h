// Chains: assignments that move over several ranks, by existing replicas and by new replicas, until
// a rank with room is reached. Chains get to room behind full slots, and through warm ranks to cold
// ranks. A chain is a widest path, found step by step from the rank that has too much.
#pragma once

#include "megatron_ext/planner/domain.h"

namespace megatron_ext {

constexpr int kChainSteps = 5;  // longer chains found nothing more on any load

template <class Warp>
class Chain {
  public:
    MEGATRON_EXT_HOST_DEVICE explicit Chain(Moves<Warp>& moves) : moves_(moves) {}

    // Move up to `whole` off `rank` along the widest chain; nothing if that is not more than
    // `at_least`.
    MEGATRON_EXT_ONCE_IN_CODE bool move(int rank, int64_t whole, int64_t at_least) {
        const auto& at = moves_.at();
        const int ranks = moves_.domain().ranks;
        moves_.warp().for_each(ranks, [&](int v) { at.width[v] = v == rank ? whole : 0; });
        moves_.spend(rounds_of(ranks));
        int last = -1;
        int64_t carried = at_least;
        MEGATRON_EXT_ROLLED
        for (int step = 0; step < kChainSteps && carried < whole; ++step) {
            if (!widen()) break;
            const auto end = moves_.warp().best(
                ranks, [&](int t) { return moves_.least(at.width[t], at.room[t]); });
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
    // A step is the number of a replica, twice, if it grows, plus one if it shrinks; or, above
    // those, the rank that fills a new replica of its hottest main.
    MEGATRON_EXT_HOST_DEVICE int first_new() const {
        return 2 * moves_.domain().ranks * moves_.domain().slots;
    }

    // Look one step further: what can be carried to each rank from its neighbors of now. Returns
    // whether any rank is reached by more.
    MEGATRON_EXT_HOST_DEVICE bool widen() {
        const auto& at = moves_.at();
        const auto& warp = moves_.warp();
        const int ranks = moves_.domain().ranks;
        const int slots = moves_.domain().slots;
        const int64_t least_new = moves_.least_room();
        // A rank that is not the first choice of a host is not asked any further.
        const auto new_from = [&](int v) {
            const int64_t carried = moves_.least(at.width[v], at.kept[at.hottest[v]]);
            return carried < least_new ? 0 : carried;
        };
        const auto first = warp.best(ranks, new_from);
        const auto second =
            warp.best(ranks, [&](int v) { return v == first.index ? 0 : new_from(v); });
        const auto new_for = [&](int t) {
            if (!moves_.can_take(t)) return Best{};
            if (first.index < 0 || first.index == t) return Best{};
            if (moves_.slot_of(t, at.hottest[first.index]) < 0) return first;
            if (second.index < 0 || second.index == t ||
                moves_.slot_of(t, at.hottest[second.index]) >= 0) {
                return Best{};
            }
            return second;
        };
        warp.for_each(ranks, [&](int t) {
            const auto offer = new_for(t);
            at.wider[t] = moves_.most(at.width[t], offer.key);
            if (offer.key > at.width[t]) at.step[t] = first_new() + offer.index;
        });
        // What each replica lets through, both ways: it grows from its giver to its holder, or its
        // holder gives back. Of equal offers the first counts, so a new replica only if none that
        // is there lets as much through.
        warp.take_offers(ranks * slots,
                         ranks,
                         at.width,
                         at.wider,
                         at.step,
                         at.offers,
                         [&](int i, const auto& offer) {
                             const int t = i / slots;
                             if (i - t * slots >= at.held[t]) return;
                             const int v = at.giver[i];
                             offer(t, moves_.least(at.width[v], at.kept[at.expert[i]]), 2 * i);
                             offer(v, moves_.least(at.width[t], at.amount[i]), 2 * i + 1);
                         });
        const bool changed =
            warp.find(ranks, [&](int t) { return at.wider[t] > at.width[t]; }) >= 0;
        warp.for_each(ranks, [&](int t) { at.width[t] = at.wider[t]; });
        moves_.spend(6 * rounds_of(ranks) + rounds_of(ranks * slots));
        return changed;
    }

    // A step of a chain, taken apart.
    struct Step {
        int from;
        int to;
        int expert;   // whose assignments move
        int replica;  // that grows or shrinks; -1 if it is new
        bool shrinks;
    };

    MEGATRON_EXT_ONCE_IN_CODE Step step_to(int t) const {
        const auto& at = moves_.at();
        const int step = at.step[t];
        if (step >= first_new()) {
            const int from = step - first_new();
            return {from, t, at.hottest[from], -1, false};
        }
        const int replica = step / 2;
        const bool shrinks = step % 2 == 1;
        const int from = shrinks ? replica / moves_.domain().slots : at.giver[replica];
        return {from, t, at.expert[replica], replica, shrinks};
    }

    // What the chain may carry so that every replica on it has at least `min_quota` or nothing.
    MEGATRON_EXT_ONCE_IN_CODE int64_t whole_replicas_only(const Step* steps,
                                                          int length,
                                                          int64_t carried) const {
        const int64_t min_quota = moves_.domain().min_quota;
        bool changed = min_quota > 1;
        MEGATRON_EXT_ROLLED
        while (changed && carried > 0) {
            changed = false;
            MEGATRON_EXT_ROLLED
            for (int i = 0; i < length; ++i) {
                if (steps[i].replica < 0 && carried < min_quota) return 0;
                if (!steps[i].shrinks) continue;
                const int64_t amount = moves_.at().amount[steps[i].replica];
                if (carried < amount && amount - carried < min_quota) {
                    carried = amount - min_quota;
                    changed = true;
                }
            }
        }
        return carried;
    }

    MEGATRON_EXT_ONCE_IN_CODE void take(const Step* steps, int length, int64_t carried) {
        const auto& at = moves_.at();
        const int rank = steps[length - 1].from;
        moves_.warp().once([&] {
            MEGATRON_EXT_ROLLED
            for (int i = 0; i < length; ++i) {
                const Step& step = steps[i];
                if (step.replica < 0) {
                    moves_.place_replica(at, step.expert, step.from, step.to, carried);
                } else {
                    const int64_t more = step.shrinks ? -carried : carried;
                    at.amount[step.replica] += more;
                    at.kept[step.expert] -= more;
                }
            }
            // Only now, because another replica moves to the slot of one that is dropped.
            MEGATRON_EXT_ROLLED
            for (int i = 0; i < length; ++i) {
                if (steps[i].shrinks) moves_.drop_if_empty(steps[i].from, steps[i].expert);
                at.hottest[steps[i].to] = moves_.keeps_most(steps[i].to);
            }
            at.hottest[rank] = moves_.keeps_most(rank);
            at.room[rank] += carried;
            at.room[steps[0].to] -= carried;
        });
        MEGATRON_EXT_ROLLED
        for (int i = 0; i < length; ++i) {
            moves_.update_host(steps[i].to, at.room[steps[i].to]);
        }
        moves_.update_host(rank, at.room[rank]);
        moves_.spend(2 * length * rounds_of(moves_.domain().ranks));
    }

    Moves<Warp>& moves_;
};

}  // namespace megatron_ext
