// What tries ask again and again: which hosts there are, and what the rank that gives keeps.
// Two ways to have it at hand, with equal results:
//   MemoryAtHand     looks it up in memory, each time
//   RegistersAtHand  in registers: a lane has it of its own ranks, and of its own mains
// In between memory is behind. `store` brings it up to date, and `load` takes over what others have
// changed there.
#pragma once

#include <cstdint>

#include "megatron_ext/planner/held.h"
#include "megatron_ext/planner/moves.h"

namespace megatron_ext {

template <class Warp>
class MemoryAtHand {
    using Amount = typename Warp::Amount;

  public:
    // Whether `look` finds all that is asked behind it.
    static constexpr bool kFindsAll = false;

    MEGATRON_EXT_HOST_DEVICE explicit MemoryAtHand(Moves<Warp>& moves) : moves_(moves) {}

    MEGATRON_EXT_HOST_DEVICE decltype(auto) sizes() const { return moves_.domain(); }

    MEGATRON_EXT_HOST_DEVICE void load() {}
    MEGATRON_EXT_HOST_DEVICE void store() {}

    // Begin to read about the next rank to turn to.
    MEGATRON_EXT_HOST_DEVICE void fetch(int) {}

    // The rank that was fetched gives from now on, until `leave`.
    MEGATRON_EXT_HOST_DEVICE void turn_to(int rank) {
        rank_ = rank;
        excess_ = -moves_.at().room[rank];
        hottest_ = moves_.hottest(rank);
        last_ = -1;
    }
    MEGATRON_EXT_HOST_DEVICE void leave() {}

    // What the rank has too much, and its main that keeps most.
    MEGATRON_EXT_HOST_DEVICE Amount excess() const { return excess_; }
    MEGATRON_EXT_HOST_DEVICE Best<Amount> hottest() const { return hottest_; }

    // The rank's next main by falling load, and its load; -1 behind the last that has some.
    MEGATRON_EXT_HOST_DEVICE Best<Amount> next_main() {
        const auto& load = moves_.domain().expert_load;
        const int first = rank_ * moves_.domain().mains;
        const int last = last_;
        Best<Amount> next = moves_.best_main([&](int m) -> Amount {
            const int e = first + m;
            const Amount below = last < 0 ? 1 : load[last] - load[e];
            return below > 0 || (below == 0 && e > last) ? load[e] : 0;
        });
        if (next.index >= 0) last_ = next.index += first;
        return next;
    }

    // Look for hosts of `expert`: the tightest that takes `from`, the roomiest that takes less than
    // `below`. The next functions say what was found: a host and its room, or -1.
    MEGATRON_EXT_HOST_DEVICE void look(int expert, Amount from, Amount below) {
        expert_ = expert;
        from_ = from;
        below_ = below;
    }
    MEGATRON_EXT_HOST_DEVICE Best<Amount> tightest() const {
        return with_room(moves_.tightest_host(expert_, from_));
    }
    MEGATRON_EXT_HOST_DEVICE Best<Amount> roomiest_below() const {
        return with_room(moves_.roomiest_host_below(expert_, below_));
    }
    // Those that take less than `below`, also with a replica of the expert.
    MEGATRON_EXT_HOST_DEVICE HostsBelow<Amount> hosts_below() const {
        return moves_.hosts_below(below_);
    }
    // The roomier one of two that take less than `below` each, and `whole` together, with the least
    // room left over.
    MEGATRON_EXT_HOST_DEVICE Best<Amount> tightest_pair(Amount whole) const {
        return moves_.tightest_pair(expert_, below_, whole);
    }
    // Whether any rank, host or not, has more room than that.
    MEGATRON_EXT_HOST_DEVICE bool is_any_roomier(Amount than) const {
        return moves_.is_any_roomier(than);
    }

    // The roomiest host of all, and its room; -1 if there is none.
    MEGATRON_EXT_HOST_DEVICE Best<Amount> roomiest() const {
        return with_room(moves_.roomiest_host());
    }

    // The roomiest rank without replicas, and its room.
    MEGATRON_EXT_HOST_DEVICE Best<Amount> roomiest_empty() const {
        const auto& at = moves_.at();
        return moves_.best_rank([&](int r) -> Amount {
            return (at.held[r] == 0) & (moves_.domain().slots > 0) ? at.room[r] : 0;
        });
    }

    // The rank with the highest key above 0, the lowest of equals.
    //   key_of(r, room)  of rank r, which may take so much
    template <class Function>
    MEGATRON_EXT_HOST_DEVICE Best<Amount> best_rank(Function key_of) const {
        const auto& at = moves_.at();
        return moves_.best_rank([&](int r) -> Amount { return key_of(r, at.room[r]); });
    }
    // The same of ranks that may, on the host.
    template <class Function, class May>
    Best<Amount> best_rank(Function key_of, May may) const {
        const auto& at = moves_.at();
        return moves_.warp().best_that_may(
            moves_.domain().ranks, [&](int r) -> Amount { return key_of(r, at.room[r]); }, may);
    }

    // What rank t holds: has(expert), and how many replicas.
    struct Held {
        const Moves<Warp>& moves;
        int t;
        int count;

        MEGATRON_EXT_HOST_DEVICE bool has(int expert) const {
            return moves.slot_of(t, expert) >= 0;
        }
    };
    MEGATRON_EXT_HOST_DEVICE Held held_by(int t) const { return {moves_, t, moves_.at().held[t]}; }

    // Give `host` a replica of `main` with `amount` assignments.
    MEGATRON_EXT_HOST_DEVICE void give(Best<Amount> main, Best<Amount> host, Amount amount) {
        hottest_ = moves_.add(rank_, main.index, host.index, amount);
        excess_ -= amount;
    }

    MEGATRON_EXT_HOST_DEVICE void spend(int32_t rounds) { moves_.spend(rounds); }
    MEGATRON_EXT_HOST_DEVICE bool is_spent() const { return moves_.is_spent(); }

  private:
    MEGATRON_EXT_HOST_DEVICE Best<Amount> with_room(int t) const {
        return {t, t < 0 ? 0 : moves_.at().room[t]};
    }

    Moves<Warp>& moves_;
    int rank_ = 0;
    Amount excess_ = 0;
    Best<Amount> hottest_;
    int last_ = -1;
    int expert_ = 0;
    Amount from_ = 0;
    Amount below_ = 0;
};

#ifdef __CUDACC__

// A rank's mains by lanes, and words of what one keeps above its inverted number among the rank's:
// so the first one is the hottest if nothing is left of any.
struct MainLanes : RankLanes {
    static constexpr uint32_t kLastMain = (1 << kIndexBits) - 1;

    __device__ static uint32_t word_of_main(int32_t kept, int m) {
        return (static_cast<uint32_t>(kept) << kIndexBits) + (kLastMain - m);
    }
    __device__ static int main_in(uint32_t word) {
        return static_cast<int>(kLastMain - (word & kLastMain));
    }
    __device__ static int32_t kept_in(uint32_t word) {
        return static_cast<int32_t>(word >> kIndexBits);
    }

    // The highest word of this lane's mains. Where it may have several: below `below`, and main
    // `changed` keeps `kept`.
    //   amounts  of experts; the mains are `mains` of them, from `first` on, at most kMost
    template <int kMost>
    __device__ static uint32_t highest_word(const int32_t* amounts,
                                            int first,
                                            int mains,
                                            uint32_t below = kAll,
                                            int changed = -1,
                                            int32_t kept = 0) {
        if constexpr (kMost <= kLanes) {
            const bool is_main = lane() < mains;
            const uint32_t word = word_of_main(amounts[first + (is_main ? lane() : 0)], lane());
            return is_main ? word : 0;
        } else {
            const auto word_at = [&](int m) {
                const uint32_t word = word_of_main(m == changed ? kept : amounts[first + m], m);
                return word < below ? word : 0;
            };
            uint32_t word = 0;
#pragma unroll 1
            for (int m = lane(); m < mains; m += kLanes) word = higher(word, word_at(m));
            return word;
        }
    }
};

// As MemoryAtHand, function by function. No branches where a lane's values differ from another's:
// all lanes would wait for them.
template <class Warp>
class RegistersAtHand : MainLanes {
    using Amount = typename Warp::Amount;
    static constexpr int kMains = Warp::Memory::kMains;
    static constexpr int kEach = Warp::Memory::kRanks / kLanes;

  public:
    static constexpr bool kFindsAll = true;

    __device__ explicit RegistersAtHand(Moves<Warp>& moves)
        : moves_(moves), sizes_(moves.domain()), least_(moves.least_room()) {
        load();
    }

    __device__ const DomainSizes<Amount>& sizes() const { return sizes_; }

    __device__ void load() {
        const auto& at = moves_.at();
        __syncwarp();
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const int t = rank_of(k);
            const bool is_rank = t < sizes_.ranks;
            room_[k] = is_rank ? at.room[t] : 0;
            held_[k] = is_rank ? at.held[t] : sizes_.slots;
            experts_[k].load(at.expert + t * sizes_.slots, is_rank ? held_[k] : 0);
            host_[k] = host_word(t, room_[k], held_[k]);
        }
        left_ = moves_.work_left();
    }

    __device__ void store() {
        const auto& at = moves_.at();
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            at.room[rank_of(k)] = room_[k];
            at.held[rank_of(k)] = held_[k];
        }
        moves_.leave_work(left_);
        __syncwarp();
    }

    __device__ void fetch(int rank) {
        next_word_ = highest_word<kMains>(moves_.at().kept, rank * sizes_.mains, sizes_.mains);
        next_room_ = __shfl_sync(kAll, of_lane(room_, rank), lane_of(rank));
        next_sends_ = moves_.at().sends[rank];
    }

    __device__ void turn_to(int rank) {
        home_ = rank;
        first_ = rank * sizes_.mains;
        by_load_ = word_ = next_word_;
        sends_ = next_sends_;
        excess_ = -next_room_;
        find_hottest();
    }

    __device__ void leave() {
        const auto& at = moves_.at();
        const Amount room = -excess_;
        const uint32_t host_then = host_word(home_, room, of_lane(held_, home_));
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const bool is_home = rank_of(k) == home_;
            room_[k] = is_home ? room : room_[k];
            host_[k] = is_home ? host_then : host_[k];
        }
        if (lane() == 0) {
            at.sends[home_] = sends_;
            at.hottest[home_] = hottest().index;
        }
        __syncwarp();
    }

    __device__ Amount excess() const { return excess_; }
    __device__ Best<Amount> hottest() const { return main_of(hottest_); }

    __device__ Best<Amount> next_main() {
        const uint32_t word = __reduce_max_sync(kAll, by_load_);
        if (word <= kLastMain) return {};
        if (by_load_ == word) {
            by_load_ =
                kMains <= kLanes
                    ? 0
                    : highest_word<kMains>(moves_.domain().expert_load, first_, sizes_.mains, word);
        }
        return main_of(word);
    }

    __device__ void look(int expert, Amount from, Amount below) {
        const uint32_t first = room_word(from, 0);
        below_ = room_word(below, 0);
        expert_ = expert;
        uint32_t tight = kAll;
        uint32_t roomy = 0;
        Amount most = room_[0];
        num_below_ = 0;
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const bool may = !experts_[k].has(expert);
            tight = lower(tight, (host_[k] >= first) & may ? host_[k] : kAll);
            roomy = higher(roomy, (host_[k] < below_) & may ? host_[k] : 0);
            most = room_[k] > most ? room_[k] : most;
            num_below_ += __popc(__ballot_sync(kAll, is_below(k)));
        }
        tight_ = __reduce_min_sync(kAll, tight);
        roomy_ = __reduce_max_sync(kAll, roomy);
        most_room_ = __reduce_max_sync(kAll, most);
    }
    __device__ Best<Amount> tightest() const {
        return {tight_ == kAll ? -1 : static_cast<int>(tight_ & kMostRank), number_in(tight_)};
    }
    __device__ Best<Amount> roomiest_below() const { return best_of(roomy_); }
    __device__ bool is_any_roomier(Amount than) const { return most_room_ > than; }

    // The lowest rank of those with most room.
    __device__ Best<Amount> roomiest() const {
        uint32_t word = 0;
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            word = higher(word, host_[k] ^ kMostRank);
        }
        word = __reduce_max_sync(kAll, word);
        const Amount room = number_in(word);
        return {room > 0 ? rank_in(word) : -1, room};
    }

    __device__ Best<Amount> roomiest_empty() const {
        uint32_t word = 0;
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const bool is_empty = (held_[k] == 0) & (sizes_.slots > 0);
            word = higher(word, is_empty ? word_of(room_[k], rank_of(k)) : 0);
        }
        return best_in(__reduce_max_sync(kAll, word));
    }

    template <class Function>
    __device__ Best<Amount> best_rank(Function key_of) const {
        uint32_t word = 0;
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const int r = rank_of(k);
            const Amount key = key_of(r < sizes_.ranks ? r : 0, room_[k]);
            word = higher(word, r < sizes_.ranks ? word_of(key, r) : 0);
        }
        return best_in(__reduce_max_sync(kAll, word));
    }

    struct Held {
        HeldExperts<Moves<Warp>::kSlots> experts;
        int count;

        __device__ bool has(int expert) const { return experts.has(expert); }
    };
    __device__ Held held_by(int t) const {
        Held held{experts_[0], held_[0]};
#pragma unroll
        for (int k = 1; k < kEach; ++k) {
            if (t >= k * kLanes) held = {experts_[k], held_[k]};
        }
        held.experts = held.experts.of_lane(lane_of(t));
        held.count = __shfl_sync(kAll, held.count, lane_of(t));
        return held;
    }

    __device__ HostsBelow<Amount> hosts_below() const { return {num_below_, number_in(roomy_)}; }

    __device__ Best<Amount> tightest_pair(Amount whole) const {
        auto* const words = reinterpret_cast<uint32_t*>(moves_.at().words);
        const Amount most_room = number_in(roomy_);
        const uint32_t least = room_word(whole - most_room > 1 ? whole - most_room : 1, 0);
        bool may[kEach];
        int before[kEach];
        int found = 0;
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            may[k] = is_below(k) & (host_[k] >= least) & !experts_[k].has(expert_);
            const unsigned partners = __ballot_sync(kAll, may[k]);
            before[k] = found + __popc(partners & ((1u << lane()) - 1));
            found += __popc(partners);
        }
        if (found < 2) return {};
        constexpr int kAtOnce = 16;
        // Those that may come first, and zeros behind them.
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            words[may[k] ? before[k] : found + rank_of(k) - before[k]] = may[k] ? host_[k] : 0;
        }
        __syncwarp();
        Amount least_over = whole;
        uint32_t least_higher = kAll;
#pragma unroll 1
        for (int i = lane(); i - lane() < found; i += kLanes) {
            // The lowest word from a bound on: words below it wrap around.
            const uint32_t higher = i < found ? words[i] : 0;
            const Amount rest = whole - number_in(higher);
            const uint32_t bound = room_word(rest > 1 ? rest : 1, 0);
            uint32_t above = kAll;
#pragma unroll 1
            for (int first = 0; first < found; first += kAtOnce) {
#pragma unroll
                for (int j = 0; j < kAtOnce; j += 4) {
                    const auto four = *reinterpret_cast<const FourWords*>(words + first + j);
#pragma unroll
                    for (int k = 0; k < 4; ++k) above = lower(above, four.each[k] - bound);
                }
            }
            const uint32_t partner = above + bound;
            const Amount over = number_in(higher) - (whole - number_in(partner));
            const bool is_pair = (partner >= bound) & (partner < higher);
            const bool is_better =
                (over < least_over) | ((over == least_over) & (higher < least_higher));
            if (is_pair & (over < whole) & is_better) {
                least_over = over;
                least_higher = higher;
            }
        }
        const Amount least_of_all = __reduce_min_sync(kAll, least_over);
        const uint32_t first =
            __reduce_min_sync(kAll, least_over == least_of_all ? least_higher : kAll);
        __syncwarp();  // The words may be overwritten.
        return first == kAll ? Best<Amount>{} : best_of(first);
    }

    __device__ void give(Best<Amount> main, Best<Amount> host, Amount amount) {
        const auto& at = moves_.at();
        const int t = host.index;
        const Amount room = host.key - amount;
        const Amount kept = main.key - amount;
        const int32_t held = of_lane(held_, t);
        const uint32_t host_then = host_word(t, room, held + 1);
        const int replica = t * sizes_.slots + held;
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const bool is_host = rank_of(k) == t;
            held_[k] = is_host ? held + 1 : held_[k];
            room_[k] = is_host ? room : room_[k];
            host_[k] = is_host ? host_then : host_[k];
            experts_[k].add(main.index, is_host);
        }
        const int m = main.index - first_;
        const bool is_main = lane() == lane_of(m);
        word_ = is_main ? word_of_main(kept, m) : word_;
        // Last, in front of what all lanes do together: a compiler may write out twice, for lanes
        // that store and for those that do not, what comes between.
        __syncwarp();  // What lanes still read must not change under them.
        if (lane() == lane_of(t)) {
            at.expert[replica] = main.index;
            at.giver[replica] = home_;
            at.amount[replica] = amount;
            at.kept[main.index] = kept;
        }
        if constexpr (kMains > kLanes) {
            __syncwarp();  // Other lanes have written what mains keep.
            const uint32_t word =
                highest_word<kMains>(at.kept, first_, sizes_.mains, kAll, m, kept);
            word_ = is_main ? word : word_;
        }
        find_hottest();
        ++sends_;
        excess_ -= amount;
    }

    __device__ void spend(int32_t rounds) { left_ -= rounds; }
    __device__ bool is_spent() const { return left_ <= 0; }

  private:
    // A host's room above its number, in one word; of a rank that is no host, no room.
    __device__ static uint32_t room_word(Amount room, int rank) {
        return static_cast<uint32_t>(room) << kRankBits | static_cast<uint32_t>(rank);
    }
    __device__ static Best<Amount> best_of(uint32_t word) {
        const Amount room = number_in(word);
        return {room > 0 ? static_cast<int>(word & kMostRank) : -1, room};
    }

    // Of the highest word of a number and a rank.
    __device__ static Best<Amount> best_in(uint32_t word) {
        return {word > 0 ? rank_in(word) : -1, number_in(word)};
    }

    // What the lane that has a rank has of it.
    template <class Value>
    __device__ static Value of_lane(const Value (&values)[kEach], int rank) {
        Value value = values[0];
#pragma unroll
        for (int k = 1; k < kEach; ++k) value = rank >= k * kLanes ? values[k] : value;
        return value;
    }

    __device__ bool is_below(int k) const { return (host_[k] > kMostRank) & (host_[k] < below_); }

    __device__ Best<Amount> main_of(uint32_t word) const {
        return {first_ + main_in(word), static_cast<Amount>(kept_in(word))};
    }
    __device__ void find_hottest() { hottest_ = __reduce_max_sync(kAll, word_); }

    __device__ uint32_t host_word(int t, Amount room, int32_t held) const {
        const bool is_host = (room >= least_) & (held < sizes_.slots);
        return room_word(is_host ? room : 0, t);
    }

    Moves<Warp>& moves_;
    const DomainSizes<Amount> sizes_;
    const Amount least_;  // room of a host
    int32_t left_ = 0;    // work
    // Of this lane's ranks.
    Amount room_[kEach];
    uint32_t host_[kEach];  // words
    int32_t held_[kEach];   // slots in use
    HeldExperts<Moves<Warp>::kSlots> experts_[kEach];
    // Of the rank that gives.
    int home_ = 0;
    int first_ = 0;  // of its mains
    Amount excess_ = 0;
    int32_t sends_ = 0;
    uint32_t word_ = 0;     // of this lane's mains the hottest
    uint32_t hottest_ = 0;  // of all its mains
    uint32_t by_load_ = 0;  // of this lane's mains, which were not asked for, the next by load
    // Of the next one.
    Amount next_room_ = 0;
    int32_t next_sends_ = 0;
    uint32_t next_word_ = 0;
    // What was looked for, and found.
    int expert_ = 0;
    uint32_t below_ = 0;
    uint32_t tight_ = 0;
    uint32_t roomy_ = 0;
    Amount most_room_ = 0;
    int num_below_ = 0;
};

#endif

}  // namespace megatron_ext
