// How much a chain can carry to each rank, and by which last step, found one step further at a
// time. Three ways, with equal results:
//   SparsePaths  looks on from ranks that were just reached by more, for one thread
//   FlatPaths    looks at all ranks and replicas, for lanes side by side
//   LanesPaths   the same, in a lane's registers
// `Memory::width` has what can be carried, `step` the last step. A step is the number of a replica,
// twice, if it grows, plus one if it shrinks; or, above those, the rank that fills a new replica of
// its hottest main. Of equal offers to a rank the lowest step counts, so a new replica only if none
// that is there lets as much through.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "megatron_ext/planner/domain.h"
#include "megatron_ext/planner/held.h"
#include "megatron_ext/warp.h"

namespace megatron_ext {

template <class Moves>
MEGATRON_EXT_HOST_DEVICE int first_new_step(const Moves& moves) {
    return 2 * moves.domain().ranks * moves.domain().slots;
}

template <class Amount>
class SparsePaths {
    using Memory = TryMemory<Amount>;

  public:
    // Nothing can be carried yet, but `whole` from `rank` on.
    template <class Moves>
    SparsePaths& start(const Moves& moves, int rank, Amount whole) {
        const Memory& at = moves.at();
        const int ranks = moves.domain().ranks;
        std::fill_n(at.width, ranks, Amount{0});
        std::fill_n(at.wider, ranks, Amount{0});
        at.width[rank] = whole;
        changed_.resize(ranks);
        next_.resize(ranks);
        id_.resize(ranks);
        changed_[0] = rank;
        count_ = 1;
        first_ = second_ = {};
        return *this;
    }

    // Look one step further; whether any rank is reached by more. A rank that was not reached by
    // more in the step before has nothing to offer that it did not offer then.
    template <class Moves>
    bool widen(const Moves& moves) {
        const Memory& at = moves.at();
        const bool other_givers = choose_givers(moves);
        next_count_ = 0;
        for (int c = 0; c < count_; ++c) {
            const int v = changed_[c];
            const Amount width = at.width[v];
            const int slots = moves.domain().slots;
            for (int i = v * slots; i < v * slots + at.held[v]; ++i) {
                const int home = at.giver[i];
                if (at.width[home] < width) {
                    offer(at, home, std::min(width, at.amount[i]), 2 * i + 1);
                }
            }
            for (int i = moves.given().first(v); i >= 0; i = moves.given().next(i)) {
                const int t = moves.domain().rank_of(i);
                if (at.width[t] < width) {
                    offer(at, t, std::min(width, at.kept[at.expert[i]]), 2 * i);
                }
            }
        }
        if (other_givers) offer_new(moves);
        for (int i = 0; i < next_count_; ++i) {
            const int t = next_[i];
            at.width[t] = at.wider[t];
            at.wider[t] = 0;
            at.step[t] = id_[t];
        }
        changed_.swap(next_);
        count_ = next_count_;
        return count_ > 0;
    }

    // The rank with room for most of what can be carried to it, if that is more than before.
    template <class Moves>
    Best<Amount> end(const Moves& moves) const {
        const Memory& at = moves.at();
        Best<Amount> end;
        for (int c = 0; c < count_; ++c) {
            const int t = changed_[c];
            const Best<Amount> own{t, std::min(at.width[t], at.room[t])};
            if (own.key > 0 && is_above(own, end)) end = own;
        }
        return end;
    }

  private:
    static bool is_above(const Best<Amount>& a, const Best<Amount>& b) {
        return a.key > b.key || (a.key == b.key && a.index < b.index);
    }

    // The two ranks that can fill a new replica with most; whether they, or what they can, changed.
    template <class Moves>
    bool choose_givers(const Moves& moves) {
        const Memory& at = moves.at();
        const Amount least = moves.least_room();
        bool is_changed = false;
        for (int c = 0; c < count_; ++c) {
            const int v = changed_[c];
            if (at.width[v] < least || at.width[v] < second_.key) continue;
            const Best<Amount> own{v, std::min(at.width[v], at.kept[at.hottest[v]])};
            if (own.key < least) continue;
            if (v == first_.index) {
                first_.key = own.key;
            } else if (is_above(own, first_)) {
                second_ = first_;
                first_ = own;
            } else if (v == second_.index || is_above(own, second_)) {
                second_ = own;
            } else {
                continue;
            }
            is_changed = true;
        }
        return is_changed;
    }

    template <class Moves>
    void offer_new(const Moves& moves) {
        const Memory& at = moves.at();
        const int steps = first_new_step(moves);
        const auto may_give = [&](const Best<Amount>& giver, int t) {
            return giver.index != t && giver.index >= 0 &&
                   moves.slot_of(t, at.hottest[giver.index]) < 0;
        };
        for (int t = 0; t < moves.domain().ranks; ++t) {
            if (at.width[t] >= first_.key || !moves.can_take(t) || t == first_.index) continue;
            if (may_give(first_, t)) {
                offer(at, t, first_.key, steps + first_.index);
            } else if (may_give(second_, t)) {
                offer(at, t, second_.key, steps + second_.index);
            }
        }
    }

    void offer(const Memory& at, int t, Amount value, int id) {
        if (value <= at.width[t] || value < at.wider[t]) return;
        if (value == at.wider[t]) {
            id_[t] = std::min(id_[t], id);
            return;
        }
        if (at.wider[t] == 0) next_[next_count_++] = t;
        at.wider[t] = value;
        id_[t] = id;
    }

    std::vector<int> changed_;  // ranks that were reached by more in the last step
    std::vector<int> next_;     // the same of the step that is looked at
    int count_ = 0;
    int next_count_ = 0;
    std::vector<int> id_;  // of the step to each of those
    Best<Amount> first_;
    Best<Amount> second_;
};

template <class Amount>
class FlatPaths {
  public:
    template <class Moves>
    MEGATRON_EXT_HOST_DEVICE FlatPaths& start(const Moves& moves, int rank, Amount whole) {
        const auto& at = moves.at();
        moves.warp().for_each(moves.domain().ranks,
                              [&](int v) { at.width[v] = v == rank ? whole : 0; });
        return *this;
    }

    template <class Moves>
    MEGATRON_EXT_HOST_DEVICE bool widen(const Moves& moves) {
        const auto& at = moves.at();
        const auto& warp = moves.warp();
        const int ranks = moves.domain().ranks;
        const int slots = moves.domain().slots;
        const Amount least_new = moves.least_room();
        // A rank that is not the first choice of a host is not asked any further.
        const auto new_from = [&](int v) -> Amount {
            const Amount carried = moves.least(at.width[v], at.kept[at.hottest[v]]);
            return carried < least_new ? 0 : carried;
        };
        const auto first = warp.best(ranks, new_from);
        const auto second =
            warp.best(ranks, [&](int v) -> Amount { return v == first.index ? 0 : new_from(v); });
        const auto hot_of = [&](int r) { return at.hottest[r < 0 ? 0 : r]; };
        const int first_main = hot_of(first.index);
        const int second_main = hot_of(second.index);
        const int steps = first_new_step(moves);
        // No branches: lanes would wait for what they read one after the other.
        const auto new_for = [&](int t) -> Offer<Amount> {
            const int held = at.held[t];
            bool has_first = false;
            bool has_second = false;
            MEGATRON_EXT_ROLLED
            for (int k = 0; k < slots; ++k) {
                const int e = at.expert[t * slots + k];
                has_first |= (k < held) & (e == first_main);
                has_second |= (k < held) & (e == second_main);
            }
            const bool is_host = (held < slots) & (first.index >= 0) & (first.index != t);
            const bool by_first = is_host & !has_first;
            const bool by_second =
                is_host & has_first & !has_second & (second.index >= 0) & (second.index != t);
            return {by_first    ? first.key
                    : by_second ? second.key
                                : 0,
                    steps + (by_first ? first.index : second.index)};
        };
        // What each replica lets through, both ways: it grows from its giver to its holder, or its
        // holder gives back.
        const auto by_replica = [&](int i) -> Exchange<Amount> {
            const int t = moves.domain().rank_of(i);
            const int v = at.giver[i];
            const Amount forth = moves.least(at.width[v], at.kept[at.expert[i]]);
            const Amount back = moves.least(at.width[t], at.amount[i]);
            const bool is_there = i - t * slots < at.held[t];
            return {v, t, is_there ? forth : 0, is_there ? back : 0};
        };
        return warp.take_offers(
            ranks, new_for, ranks * slots, by_replica, at.width, at.step, at.wider, at.words);
    }

    template <class Moves>
    MEGATRON_EXT_HOST_DEVICE Best<Amount> end(const Moves& moves) const {
        const auto& at = moves.at();
        return moves.best_rank(
            [&](int t) -> Amount { return moves.least(at.width[t], at.room[t]); });
    }
};

#ifdef __CUDACC__

// What LanesPaths looks with, for one chain. Nothing else changes meanwhile, so a lane reads what
// it knows of its ranks and replicas once.
template <class Moves>
class LanesSearch : RankLanes {
    using Amount = typename Moves::Amount;
    static constexpr int kEach = Moves::kRanks / kLanes;
    static constexpr int kSlots = Moves::kSlots;

  public:
    __device__ LanesSearch(const Moves& moves, int rank, Amount whole)
        : sizes_(moves.domain()), least_new_(moves.least_room()) {
        const auto& at = moves.at();
        __syncwarp();
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const int t = rank_of(k);
            const bool is_rank = t < sizes_.ranks;
            const int held = is_rank ? at.held[t] : sizes_.slots;
            experts_[k].load(at.expert + t * sizes_.slots, is_rank ? held : 0);
            room_[k] = is_rank ? at.room[t] : 0;
            may_give_[k] = is_rank ? at.kept[at.hottest[is_rank ? t : 0]] : 0;
            has_slot_[k] = held < sizes_.slots;
            width_[k] = t == rank ? whole : 0;
            at.width[t] = width_[k];
#pragma unroll
            for (int s = 0; s < kSlots; ++s) {
                const bool is_held = is_rank & (s < held);
                const int replica = is_held ? t * sizes_.slots + s : 0;
                giver_[k][s] = is_held ? at.giver[replica] : 0;
                forth_[k][s] = is_held ? at.kept[is_held ? at.expert[replica] : 0] : 0;
                back_[k][s] = is_held ? at.amount[replica] : 0;
            }
        }
        __syncwarp();
    }

    __device__ bool widen(const Moves& moves) {
        const auto& at = moves.at();
        // The two ranks that can fill a new replica with most. One that is not the first choice of
        // a host is not asked any further.
        uint32_t own = 0;
        uint32_t less = 0;
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const Amount carried = Moves::least(width_[k], may_give_[k]);
            const uint32_t word = carried < least_new_ ? 0 : word_of(carried, rank_of(k));
            less = higher(less, word < own ? word : own);
            own = higher(own, word);
        }
        const uint32_t first = __reduce_max_sync(kAll, own);
        const uint32_t second = __reduce_max_sync(kAll, own == first ? less : own);
        const int first_rank = first > 0 ? rank_in(first) : -1;
        const int second_rank = second > 0 ? rank_in(second) : -1;
        const int first_main = at.hottest[first > 0 ? first_rank : 0];
        const int second_main = at.hottest[second > 0 ? second_rank : 0];
        // Offers to a rank: what is offered, above the inverted step. The highest is the best. A
        // lane makes those of its replicas, that grow to its ranks, and that shrink to their
        // givers.
        auto* const offers = reinterpret_cast<uint32_t*>(at.words);
        const int steps = first_new_step(moves);
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const int t = rank_of(k);
            const bool has_first = experts_[k].has(first_main);
            const bool is_host = has_slot_[k] & (first > 0) & (first_rank != t);
            const bool by_second = is_host & has_first & (second > 0) & (second_rank != t) &
                                   !experts_[k].has(second_main);
            const uint32_t by_first = is_host & !has_first ? first : 0;
            const uint32_t giver = by_second ? second : by_first;
            uint32_t best = offer(number_in(giver), steps + rank_in(giver));
#pragma unroll
            for (int s = 0; s < kSlots; ++s) {
                const Amount forth = Moves::least(at.width[giver_[k][s]], forth_[k][s]);
                best = higher(best, offer(forth, 2 * (t * sizes_.slots + s)));
            }
            offers[t] = best;
        }
        __syncwarp();
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
#pragma unroll
            for (int s = 0; s < kSlots; ++s) {
                const Amount back = Moves::least(width_[k], back_[k][s]);
                const int step = 2 * (rank_of(k) * sizes_.slots + s) + 1;
                if (back > 0) atomicMax(&offers[giver_[k][s]], offer(back, step));
            }
        }
        __syncwarp();
        bool is_wider = false;
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const int t = rank_of(k);
            const uint32_t best = offers[t];
            const auto offered = static_cast<Amount>(best >> kIndexBits);
            if ((t >= sizes_.ranks) | (offered <= width_[k])) continue;
            width_[k] = offered;
            at.width[t] = offered;
            at.step[t] = static_cast<int32_t>(kLastStep - (best & kLastStep));
            is_wider = true;
        }
        __syncwarp();
        return __ballot_sync(kAll, is_wider) != 0;
    }

    __device__ Best<Amount> end(const Moves&) const {
        uint32_t word = 0;
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const Amount carried = Moves::least(width_[k], room_[k]);
            word = higher(word, word_of(carried, rank_of(k)));
        }
        word = __reduce_max_sync(kAll, word);
        return {word > 0 ? rank_in(word) : -1, number_in(word)};
    }

  private:
    static constexpr uint32_t kLastStep = (1u << kIndexBits) - 1;

    __device__ static uint32_t offer(Amount value, int step) {
        return static_cast<uint32_t>(value) << kIndexBits |
               (kLastStep - static_cast<uint32_t>(step));
    }
    const DomainSizes<Amount> sizes_;
    const Amount least_new_;
    // Of this lane's ranks.
    HeldExperts<Moves::kSlots> experts_[kEach];
    Amount room_[kEach];
    Amount may_give_[kEach];  // to a new replica
    Amount width_[kEach];
    bool has_slot_[kEach];
    // Of the replicas that they hold; 0 where there is none.
    int32_t giver_[kEach][kSlots];
    Amount forth_[kEach][kSlots];  // by how much it may grow
    Amount back_[kEach][kSlots];   // and shrink
};

template <class Amount>
class LanesPaths {
  public:
    template <class Moves>
    __device__ LanesSearch<Moves> start(const Moves& moves, int rank, Amount whole) const {
        return {moves, rank, whole};
    }
};

#endif

}  // namespace megatron_ext
