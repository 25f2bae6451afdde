// How much a chain can carry to each rank, and by which last step, found one step further at a
// time. Three ways, with equal results:
//   SparsePaths  looks only at ranks that may yet be reached by more, for one thread
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

// The first step mostly reaches all ranks with a free slot, each by as much as any rank will ever
// be reached by. Only the others, the open ranks, change later:
//   1. from the rank, to all: no replicas of other ranks are looked at
//   2. to the open ranks, from all
//   3. and further: over the replicas that open ranks hold of open ranks, since no others have
//      anything to offer that they did not offer in step 2
template <class Amount>
class SparsePaths {
    using Memory = TryMemory<Amount>;

  public:
    // Nothing can be carried yet, but `whole` from `rank` on.
    template <class Moves>
    SparsePaths& start(const Moves& moves, int rank, Amount whole) {
        rank_ = rank;
        whole_ = whole;
        steps_ = 0;
        next_.resize(moves.domain().ranks);
        id_.resize(moves.domain().ranks);
        open_.resize(moves.domain().ranks);
        inner_.resize(moves.domain().ranks * moves.domain().slots + 1);
        wider_.resize(moves.domain().ranks);
        return *this;
    }

    // Look one step further; whether any rank is reached by more.
    template <class Moves>
    bool widen(const Moves& moves) {
        const Memory& at = moves.at();
        if (++steps_ == 1) return look_from_rank(moves);
        next_count_ = 0;
        if (steps_ == 2) {
            look_at_open(moves);
        } else {
            look_among_open(moves);
        }
        if (most_ > most_new_) offer_new(moves);  // Else no open rank has a free slot.
        for (int i = 0; i < next_count_; ++i) {
            const int t = next_[i];
            at.width[t] = wider_[t];
            wider_[t] = 0;
            at.step[t] = id_[t];
        }
        return next_count_ > 0;
    }

    // The rank with room for most of what can be carried to it, if that is more than before.
    template <class Moves>
    Best<Amount> end(const Moves& moves) const {
        const Memory& at = moves.at();
        if (steps_ == 1) {
            return moves.best_rank(
                [&](int t) -> Amount { return std::min(at.width[t], at.room[t]); });
        }
        Best<Amount> end;
        for (int i = 0; i < next_count_; ++i) {
            const int t = next_[i];
            const Amount carried = std::min(at.width[t], at.room[t]);
            if (carried > end.key || (carried == end.key && t < end.index)) end = {t, carried};
        }
        return end;
    }

  private:
    // The first step: to all ranks with a free slot, and over replicas of the rank's mains and of
    // its slots. A replica of its hottest main that is there comes before a new one, as an equal
    // offer with a lower step.
    template <class Moves>
    bool look_from_rank(const Moves& moves) {
        const Memory at = moves.at();
        const int ranks = moves.domain().ranks;
        const int slots = moves.domain().slots;
        const int new_replica = first_new_step(moves) + rank_;
        Amount most_new = std::min(whole_, at.kept[at.hottest[rank_]]);
        if (most_new < moves.least_room()) most_new = 0;
        int hosts = 0;
        for (int t = 0; t < ranks; ++t) {
            const bool is_host = at.held[t] < slots;
            at.width[t] = is_host ? most_new : 0;
            hosts += is_host;
        }
        most_new_ = hosts > moves.can_take(rank_) ? most_new : 0;
        std::fill_n(at.step, ranks, new_replica);
        at.width[rank_] = whole_;
        most_ = most_new_;
        const auto reach = [&](int t, Amount value, int step) {
            most_ = std::max(most_, value);
            if (value < at.width[t] || (value == at.width[t] && step > at.step[t])) return;
            at.width[t] = value;
            at.step[t] = step;
        };
        for (int i = rank_ * slots; i < rank_ * slots + at.held[rank_]; ++i) {
            reach(at.giver[i], std::min(whole_, at.amount[i]), 2 * i + 1);
        }
        for (int i = moves.given().first(rank_); i >= 0; i = moves.given().next(i)) {
            reach(moves.domain().rank_of(i), std::min(whole_, at.kept[at.expert[i]]), 2 * i);
        }
        return most_ > 0;
    }

    // The second step. It lists the open ranks, too, and the replicas that they hold of each other.
    template <class Moves>
    void look_at_open(const Moves& moves) {
        const Memory at = moves.at();
        const int ranks = moves.domain().ranks;
        const int slots = moves.domain().slots;
        const Amount most = most_;
        int32_t* const open = open_.data();
        int count = 0;
        for (int t = 0; t < ranks; ++t) {
            open[count] = t;
            count += at.width[t] < most;
        }
        open_count_ = count;
        int32_t* const inner = inner_.data();
        int inner_count = 0;
        for (int c = 0; c < count; ++c) {
            const int t = open[c];
            Amount best = 0;
            int id = 0;
            // No branches: what comes next is as good as chance.
            for (int i = t * slots; i < t * slots + at.held[t]; ++i) {
                const Amount there = at.width[at.giver[i]];
                const Amount value = std::min(there, at.kept[at.expert[i]]);
                inner[inner_count] = i;
                inner_count += there < most;
                id = value > best ? 2 * i : id;
                best = std::max(value, best);
            }
            for (int i = moves.given().first(t); i >= 0; i = moves.given().next(i)) {
                const Amount value = std::min(at.width[moves.domain().rank_of(i)], at.amount[i]);
                if (value < best || (value == best && 2 * i > id)) continue;
                best = value;
                id = 2 * i + 1;
            }
            offer(at, t, best, id);
        }
        inner_count_ = inner_count;
    }

    template <class Moves>
    void look_among_open(const Moves& moves) {
        const Memory& at = moves.at();
        for (int c = 0; c < inner_count_; ++c) {
            const int i = inner_[c];
            const int t = moves.domain().rank_of(i);
            const int home = at.giver[i];
            offer(at, t, std::min(at.width[home], at.kept[at.expert[i]]), 2 * i);
            offer(at, home, std::min(at.width[t], at.amount[i]), 2 * i + 1);
        }
    }

    // New replicas of the hottest mains of the two ranks that can fill them with most.
    template <class Moves>
    void offer_new(const Moves& moves) {
        const Memory& at = moves.at();
        const Amount least = moves.least_room();
        const int steps = first_new_step(moves);
        const auto fills = [&](int v) -> Amount {
            const Amount carried = std::min(at.width[v], at.kept[at.hottest[v]]);
            return carried < least ? 0 : carried;
        };
        const Best<Amount> first = moves.best_rank(fills);
        const Best<Amount> second =
            moves.best_rank([&](int v) -> Amount { return v == first.index ? 0 : fills(v); });
        const auto may_give = [&](const Best<Amount>& giver, int t) {
            return giver.index != t && giver.index >= 0 &&
                   moves.slot_of(t, at.hottest[giver.index]) < 0;
        };
        for (int c = 0; c < open_count_; ++c) {
            const int t = open_[c];
            if (!moves.can_take(t) || t == first.index) continue;
            if (may_give(first, t)) {
                offer(at, t, first.key, steps + first.index);
            } else if (may_give(second, t)) {
                offer(at, t, second.key, steps + second.index);
            }
        }
    }

    void offer(const Memory& at, int t, Amount value, int id) {
        if (value <= at.width[t] || value < wider_[t]) return;
        if (value == wider_[t]) {
            id_[t] = std::min(id_[t], id);
            return;
        }
        if (wider_[t] == 0) next_[next_count_++] = t;
        wider_[t] = value;
        id_[t] = id;
    }

    int rank_ = 0;
    Amount whole_ = 0;
    int steps_ = 0;
    Amount most_new_ = 0;         // that a new replica carries in the first step
    Amount most_ = 0;             // that any other rank is reached by, in the first step and later
    std::vector<int32_t> open_;   // ranks that the first step reached by less
    std::vector<int32_t> inner_;  // replicas that they hold of each other
    std::vector<int32_t> next_;   // ranks that are reached by more in a step
    std::vector<Amount> wider_;   // by how much; else 0
    std::vector<int> id_;         // of the step to them
    int open_count_ = 0;
    int inner_count_ = 0;
    int next_count_ = 0;
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
