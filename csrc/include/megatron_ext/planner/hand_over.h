// Handing over, the last step of a try: another host takes over one replica of the busiest sender.
// It gets the replica's assignments in return for as many assignments of one of its own experts. No
// rank's load and no slot changes, but the host sends instead of the sender. Two ways, with equal
// results:
//   HandOverInTurn  asks one host after the other
//   HandOverAtOnce  looks at all of them side by side, in registers
#pragma once

#include "megatron_ext/planner/at_hand.h"
#include "megatron_ext/planner/moves.h"

namespace megatron_ext {

template <class Warp>
class HandOverInTurn {
    using Amount = typename Warp::Amount;

  public:
    MEGATRON_EXT_HOST_DEVICE explicit HandOverInTurn(Moves<Warp>& moves) : moves_(moves) {}

    // Spare the busiest sender of each round, until no host can take anything off the sender.
    MEGATRON_EXT_HOST_DEVICE static void run(Moves<Warp>& moves) {
        HandOverInTurn(moves).spare_all();
    }

  private:
    static constexpr int kTries = 2;  // hosts that are asked one after the other

    MEGATRON_EXT_HOST_DEVICE void spare_all() {
        const auto& at = moves_.at();
        MEGATRON_EXT_ROLLED
        while (!moves_.is_spent() && !moves_.is_stopped()) {
            const int sender = moves_.best_rank([&](int r) -> Amount { return at.sends[r]; }).index;
            moves_.spend(rounds_of(moves_.domain().ranks));
            if (sender < 0 || !spare(sender)) return;
        }
    }

    // Hand a replica to the host that sends least of all hosts that can take one over.
    MEGATRON_EXT_HOST_DEVICE bool spare(int sender) {
        const auto& at = moves_.at();
        const int ranks = moves_.domain().ranks;
        const auto& warp = moves_.warp();
        const int slots = moves_.domain().slots;
        const int count = moves_.given().gather(moves_, sender, at.given);
        const Amount fewer = at.sends[sender] - 1;
        // One host after the other: by how much more it can send without being the busiest.
        Best<Amount> last{-1, Moves<Warp>::kMost};
        const auto key_of = [&](int g) -> Amount {
            const int r = host_of(g);
            const Amount key = fewer - at.sends[r];
            return key < last.key || (key == last.key && r > last.index) ? key : 0;
        };
        const int32_t each = 3 * rounds_of(ranks) + rounds_of(ranks * slots);
        int tried = 0;
        MEGATRON_EXT_ROLLED
        while (!moves_.is_spent()) {
            const auto next = warp.best_of_few(count, key_of);
            if (next.index < 0) return false;
            const int via = host_of(next.index);
            last = {via, next.key};
            const int replica = smallest_for(sender, via, count);
            moves_.spend(each);
            if (replica >= 0) {
                hand_over(sender, via, replica);
                return true;
            }
            if (++tried == kTries && !may_spare(sender, count, key_of)) {
                const auto left = static_cast<int>(warp.sum(count, [&](int g) -> int64_t {
                    return key_of(g) > 0 && (g == 0 || host_of(g - 1) != host_of(g));
                }));
                moves_.spend_until_spent(left, each);
                return false;
            }
        }
        return false;
    }

    // Whether any host with a key may take over any of the sender's `count` replicas, as far as
    // that is seen without the main that it would give instead. It mostly says that none can, for
    // less than it takes to ask two of them.
    template <class KeyOf>
    MEGATRON_EXT_HOST_DEVICE bool may_spare(int sender, int count, KeyOf key_of) const {
        const auto& at = moves_.at();
        const auto may = [&](int g) -> bool {
            const int via = host_of(g);
            if (key_of(g) == 0) return false;
            const Amount hot = moves_.hottest(via).key;
            const int first = via * moves_.domain().slots;
            MEGATRON_EXT_ROLLED
            for (int k = first; k < first + at.held[via]; ++k) {
                const int e = at.expert[k];
                const Amount most = at.giver[k] == sender ? at.kept[e] : 0;
                MEGATRON_EXT_ROLLED
                for (int other = 0; other < count; ++other) {
                    const int i = at.given[other];
                    const Amount amount = at.amount[i];
                    const bool grows = amount <= most || at.expert[i] == e;
                    if (grows && amount <= hot && host_of(other) != via) return true;
                }
            }
            return false;
        };
        return moves_.warp().best_of_few(count, [&](int g) -> Amount { return may(g); }).index >= 0;
    }

    // Who holds one of the replicas in `given`.
    MEGATRON_EXT_HOST_DEVICE int host_of(int g) const {
        return moves_.domain().rank_of(moves_.at().given[g]);
    }

    // The smallest of the sender's `count` replicas that `via` can take over, or -1.
    MEGATRON_EXT_HOST_DEVICE int smallest_for(int sender, int via, int count) const {
        const auto& at = moves_.at();
        const Amount most = moves_.domain().home_load[sender] + 1;  // more than any of them
        const Amount hot = moves_.hottest(via).key;                 // no main of `via` gives more
        const auto smallest = moves_.warp().best_of_few(count, [&](int g) -> Amount {
            const int i = at.given[g];
            const int t = moves_.domain().rank_of(i);
            const Amount amount = at.amount[i];
            if (t == via || amount > hot) return 0;
            if (slot_that_grows(sender, via, at.expert[i], amount) < 0) return 0;
            const int main = moves_.main_for(via, t);
            return main < 0 || at.kept[main] < amount ? 0 : most - amount;
        });
        return smallest.index < 0 ? -1 : at.given[smallest.index];
    }

    MEGATRON_EXT_HOST_DEVICE void hand_over(int sender, int via, int replica) {
        const auto& at = moves_.at();
        const int slots = moves_.domain().slots;
        moves_.warp().once([&] {
            const int t = moves_.domain().rank_of(replica);
            const int main = moves_.main_for(via, t);
            const int grown = slot_that_grows(sender, via, at.expert[replica], at.amount[replica]);
            moves_.hand_over(replica, via, main, via * slots + grown);
        });
        const int of_sender = moves_.find_hottest(sender);
        const int of_via = moves_.find_hottest(via);
        moves_.warp().once([&] {
            at.hottest[sender] = of_sender;
            at.hottest[via] = of_via;
        });
    }

    // A slot of rank `via` whose replica can take `amount` that `expert` of the sender gets back.
    MEGATRON_EXT_HOST_DEVICE int slot_that_grows(int sender,
                                                 int via,
                                                 int expert,
                                                 Amount amount) const {
        const auto& at = moves_.at();
        const int first = via * moves_.domain().slots;
        MEGATRON_EXT_ROLLED
        for (int k = 0; k < at.held[via]; ++k) {
            const int e = at.expert[first + k];
            if (e == expert) return k;
            if (at.giver[first + k] == sender && at.kept[e] >= amount) return k;
        }
        return -1;
    }

    Moves<Warp>& moves_;
};

#ifdef __CUDACC__

// A lane has of its own ranks what they send, keep and hold. The work is that of one host after the
// other. No branches where a lane's values differ from another's.
template <class Warp>
class HandOverAtOnce : MainLanes {
    using Amount = typename Warp::Amount;
    static constexpr int kEach = Moves<Warp>::kRanks / kLanes;
    static constexpr int kSlots = Moves<Warp>::kSlots;
    static constexpr int kMains = Warp::Memory::kMains;
    static constexpr uint32_t kLastReplica = (1 << kIndexBits) - 1;

  public:
    __device__ explicit HandOverAtOnce(Moves<Warp>& moves)
        : moves_(moves),
          sizes_(moves.domain()),
          each_(3 * rounds_of(sizes_.ranks) + rounds_of(sizes_.ranks * sizes_.slots)) {}

    // Spare the busiest sender of each round, until no host can take anything off the sender.
    __device__ __noinline__ static void run(Moves<Warp>& moves) {
        HandOverAtOnce(moves).spare_all();
    }

  private:
    __device__ void spare_all() {
        load();
        const bool may_stop = moves_.may_stop();
        MEGATRON_EXT_ROLLED
        while (true) {
            uint32_t word = 0;
#pragma unroll
            for (int k = 0; k < kEach; ++k) word = higher(word, word_of(sends_[k], rank_of(k)));
            word = __reduce_max_sync(kAll, word);
            const bool is_spent = left_ <= 0;
            left_ -= is_spent ? 0 : rounds_of(sizes_.ranks);
            const bool is_over = is_spent | (word == 0);
            if (is_over | may_stop) {
                if (is_over || moves_.is_stopped()) break;
            }
            if (!spare(rank_in(word), number_in(word))) break;
        }
        store();
    }

    __device__ void load() {
        const auto& at = moves_.at();
        __syncwarp();
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const bool is_rank = rank_of(k) < sizes_.ranks;
            const int t = is_rank ? rank_of(k) : 0;
            const int held = is_rank ? at.held[t] : 0;
            sends_[k] = is_rank ? at.sends[t] : 0;
            hottest_[k] = at.hottest[t];
            most_[k] = at.kept[hottest_[k]];
#pragma unroll
            for (int s = 0; s < kSlots; ++s) {
                const int i = s < held ? replica_of(k, s) : 0;
                expert_[k][s] = s < held ? at.expert[i] : -1;
                size_[k][s] = static_cast<uint32_t>(at.amount[i]) << kIndexBits | i;
            }
        }
        left_ = moves_.work_left();
    }

    // Experts are there already. Who gives a replica is not asked any more.
    __device__ void store() {
        const auto& at = moves_.at();
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            at.sends[rank_of(k)] = sends_[k];
#pragma unroll
            for (int s = 0; s < kSlots; ++s) {
                if (expert_[k][s] >= 0) at.amount[replica_of(k, s)] = amount_in(size_[k][s]);
            }
        }
        moves_.leave_work(left_);
        __syncwarp();
    }

    // Hand a replica of the sender, which sends so many, to the host that sends least of all hosts
    // that can take one over: the smallest that it can.
    __device__ bool spare(int sender, int32_t sends) {
        look_at(sender, sends - 1);
        uint32_t size;
        uint32_t host = find_host(kAll, size);
        MEGATRON_EXT_ROLLED
        while (true) {
            const int32_t work = count_asked(host) * each_;
            if ((host == 0) | (left_ < each_ * sizes_.ranks)) {  // Mostly all could be asked.
                if (host == 0 || work - each_ >= left_) {
                    // It ends when all is spent.
                    left_ -= work < left_ ? work : (left_ + each_ - 1) / each_ * each_;
                    return false;
                }
            }
            if (size > 0 && hand_over(sender, rank_in(host), size)) {
                left_ -= work;
                return true;
            }
            size = smallest_for(rank_in(host), size);
            if (size == kAll) host = find_host(host, size);
        }
    }

    // What the lane's ranks have of the sender, and which of them may send more: not as many as
    // that, `fewer`.
    __device__ void look_at(int sender, Amount fewer) {
        const auto& at = moves_.at();
        first_ = sender * sizes_.mains;
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            room_[k] = -1;
#pragma unroll
            for (int s = 0; s < kSlots; ++s) {
                const bool is_given = static_cast<unsigned>(expert_[k][s] - first_) <
                                      static_cast<unsigned>(sizes_.mains);
                const Amount kept = at.kept[is_given ? expert_[k][s] : 0];
                kept_[k][s] = is_given ? kept : -1;
                room_[k] = kept_[k][s] > room_[k] ? kept_[k][s] : room_[k];
            }
            host_[k] = room_[k] >= 0 ? word_of(fewer - sends_[k], rank_of(k)) : 0;
        }
    }

    // The host that sends least, of those whose words are below that and that may be able to take a
    // replica over; its word, or 0. `size` becomes the smallest replica that it can, or 0 where
    // that is not known yet.
    __device__ uint32_t find_host(uint32_t below, uint32_t& size) const {
        // Mostly a replica that it holds has room for the sender's smallest one elsewhere.
        uint32_t own = kAll;
        for_each_given([&](int, int, uint32_t each) { own = lower(own, each); });
        const uint32_t smallest = __reduce_min_sync(kAll, own);
        const int there = sizes_.rank_of(static_cast<int>(smallest & kLastReplica));
        own = kAll;
        for_each_given([&](int k, int, uint32_t each) {
            own = lower(own, rank_of(k) != there ? each : kAll);
        });
        const uint32_t elsewhere = __reduce_min_sync(kAll, own);
        uint32_t word = 0;
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const uint32_t for_host = rank_of(k) == there ? elsewhere : smallest;
            const Amount amount = amount_in(for_host);
            const bool may = (host_[k] < below) & (for_host != kAll) & (amount <= most_[k]);
            const uint32_t has_room = amount <= room_[k] ? 1 : 0;
            word = higher(word, may ? host_[k] << 1 | has_room : 0);
        }
        word = __reduce_max_sync(kAll, word);
        const uint32_t host = word >> 1;
        size = (word & 1) == 0 ? 0 : rank_in(host) == there ? elsewhere : smallest;
        return host;
    }

    // The smallest replica above `last` that a host can take over, or kAll.
    __device__ uint32_t smallest_for(int host, uint32_t last) const {
        const Amount most = of_rank(most_, host);
        const Amount room = of_rank(room_, host);
        bool has[kEach][kSlots] = {};
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            int32_t of_slot[kEach];
#pragma unroll
            for (int k = 0; k < kEach; ++k) of_slot[k] = expert_[k][slot];
            const int32_t expert = of_rank(of_slot, host);
            for_each_given([&](int k, int s, uint32_t) { has[k][s] |= expert_[k][s] == expert; });
        }
        uint32_t own = kAll;
        for_each_given([&](int k, int s, uint32_t size) {
            const Amount amount = amount_in(size);
            const bool can = (rank_of(k) != host) & (size > last) & (amount <= most) &
                             ((amount <= room) | has[k][s]);
            own = lower(own, can ? size : kAll);
        });
        return __reduce_min_sync(kAll, own);
    }

    // How many hosts are asked until that one; all if there is none.
    __device__ int count_asked(uint32_t host) const {
        int asked = 0;
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            asked += __popc(__ballot_sync(kAll, (host_[k] > 0) & (host_[k] >= host)));
        }
        return asked;
    }

    // False if the host has no main to give instead.
    __device__ bool hand_over(int sender, int host, uint32_t size) {
        const auto& at = moves_.at();
        const auto replica = static_cast<int>(size & kLastReplica);
        const Amount amount = amount_in(size);
        const int t = sizes_.rank_of(replica);
        const int slot = replica - t * sizes_.slots;
        const int expert = at.expert[replica];
        int main = of_rank(hottest_, host);
        Amount kept = of_rank(most_, host);
        bool is_there = false;
        // What the host returns of the very expert goes back and forth.
        const Amount of_expert = at.kept[expert] + amount;
        int returned = -1;
        Amount of_returned = 0;
        bool grows[kEach][kSlots];
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const int rank = rank_of(k);
#pragma unroll
            for (int s = 0; s < kSlots; ++s) {
                is_there |= (rank == t) & (expert_[k][s] == main);
                grows[k][s] = (rank == host) & (returned < 0) &
                              ((expert_[k][s] == expert) | (kept_[k][s] >= amount));
                returned = grows[k][s] ? expert_[k][s] : returned;
                of_returned = grows[k][s] ? kept_[k][s] - amount : of_returned;
            }
        }
        if (__ballot_sync(kAll, is_there) != 0) {
            main = moves_.other_main_for(host, t);
            kept = main < 0 ? 0 : at.kept[main];
            if (kept < amount) return false;
        }
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const int rank = rank_of(k);
#pragma unroll
            for (int s = 0; s < kSlots; ++s) {
                size_[k][s] += grows[k][s] ? static_cast<uint32_t>(amount) << kIndexBits : 0;
                expert_[k][s] = (rank == t) & (s == slot) ? main : expert_[k][s];
            }
            sends_[k] += (rank == host) - (rank == sender);
        }
        __syncwarp();  // What lanes still read must not change under them.
        if (returned >= 0) {
            at.expert[replica] = main;
            at.kept[main] = kept - amount;
            if (returned != expert) {
                at.kept[expert] = of_expert;
                at.kept[returned] = of_returned;
            }
        }
        __syncwarp();
        const uint32_t of_sender = __reduce_max_sync(
            kAll, highest_word<kMains>(at.kept, sender * sizes_.mains, sizes_.mains));
        const uint32_t of_host = __reduce_max_sync(
            kAll, highest_word<kMains>(at.kept, host * sizes_.mains, sizes_.mains));
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const bool is_host = rank_of(k) == host;
            const uint32_t word = is_host ? of_host : of_sender;
            const bool is_other = is_host | (rank_of(k) == sender);
            hottest_[k] = is_other ? rank_of(k) * sizes_.mains + main_in(word) : hottest_[k];
            most_[k] = is_other ? kept_in(word) : most_[k];
        }
        return true;
    }

    // found(k, s, size): of the lane's replicas that the sender gave.
    template <class Found>
    __device__ void for_each_given(Found found) const {
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
#pragma unroll
            for (int s = 0; s < kSlots; ++s) found(k, s, kept_[k][s] >= 0 ? size_[k][s] : kAll);
        }
    }

    // What lanes have of a rank.
    template <class Value>
    __device__ static Value of_rank(const Value (&values)[kEach], int rank) {
        Value value = values[0];
#pragma unroll
        for (int k = 1; k < kEach; ++k) value = rank >= k * kLanes ? values[k] : value;
        return __shfl_sync(kAll, value, lane_of(rank));
    }

    __device__ int replica_of(int k, int s) const { return rank_of(k) * sizes_.slots + s; }
    __device__ static Amount amount_in(uint32_t size) {
        return static_cast<Amount>(size >> kIndexBits);
    }

    Moves<Warp>& moves_;
    const DomainSizes<Amount> sizes_;
    const int32_t each_;  // work to ask a host
    int32_t left_ = 0;    // work
    // Of this lane's ranks, and their slots.
    int32_t sends_[kEach];
    int32_t hottest_[kEach];         // main that keeps most
    Amount most_[kEach];             // what it keeps
    int32_t expert_[kEach][kSlots];  // -1 where there is no replica
    uint32_t size_[kEach][kSlots];   // assignments above the replica's number
    // The same for one sender.
    int first_ = 0;               // of its mains
    Amount kept_[kEach][kSlots];  // by the main of a replica that it gave; else -1
    Amount room_[kEach];          // most of these
    uint32_t host_[kEach];        // the word of a rank that may send more
};

#endif

}  // namespace megatron_ext
