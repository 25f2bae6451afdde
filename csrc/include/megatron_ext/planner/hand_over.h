// Handing over, the last step of a try: another host takes over one replica of the busiest sender.
// It gets the replica's assignments in return for as many assignments of one of its own experts. No
// rank's load and no slot changes, but the host sends instead of the sender. Two ways, with equal
// results:
//   HandOverInTurn  asks one host after the other
//   HandOverAtOnce  looks at all of them side by side, with lanes' registers
#pragma once

#include "megatron_ext/planner/held.h"
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

// A lane looks at a host. The work is that of one host after the other.
template <class Warp>
class HandOverAtOnce : RankLanes {
    using Amount = typename Warp::Amount;
    static constexpr int kEach = Moves<Warp>::kRanks / kLanes;
    static constexpr int kReplicas = kEach * Moves<Warp>::kSlots;

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
        while (left_ > 0 && !(may_stop && moves_.is_stopped())) {
            uint32_t word = 0;
#pragma unroll
            for (int k = 0; k < kEach; ++k) word = higher(word, word_of(sends_[k], rank_of(k)));
            word = __reduce_max_sync(kAll, word);
            left_ -= rounds_of(sizes_.ranks);
            if (word == 0 || !spare(rank_in(word), number_in(word))) break;
        }
        moves_.leave_work(left_);
    }

    __device__ void load() {
        const auto& at = moves_.at();
        __syncwarp();
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const int t = rank_of(k);
            sends_[k] = t < sizes_.ranks ? at.sends[t] : 0;
        }
#pragma unroll
        for (int j = 0; j < kReplicas; ++j) {
            const int i = replica_of(j);
            const int t = sizes_.rank_of(i);
            const bool is_rank = t < sizes_.ranks;
            const bool is_held = is_rank & (i - t * sizes_.slots < at.held[is_rank ? t : 0]);
            giver_[j] = is_held ? at.giver[is_held ? i : 0] : -1;
        }
        left_ = moves_.work_left();
    }

    // Hand a replica of the sender, which sends so many, to the host that sends least of all hosts
    // that can take one over: the smallest that it can.
    __device__ bool spare(int sender, int32_t sends) {
        const auto& at = moves_.at();
        const int count = list_given(sender);
        const Amount fewer = sends - 1;
        // So many hosts side by side, 2 to the power of `bits`; each for several replicas. Where
        // there are many, the first one comes by itself: it mostly can.
        const int all = count <= 8 ? 3 : count <= 16 ? 4 : 5;
        const uint32_t first_host = count <= 8 ? 0 : find_first(count, fewer);
        int bits = first_host > 0 ? 0 : all;
        uint32_t last_host = kAll;  // of what was found last, and cannot be handed over
        uint32_t last_size = 0;
        MEGATRON_EXT_ROLLED
        while (true) {
            uint32_t host = 0;
            uint32_t smallest = kAll;
            MEGATRON_EXT_ROLLED
            for (int first = 0; first < (bits == 0 ? 1 : count); first += 1 << bits) {
                const int v = first + (lane() & ((1 << bits) - 1));
                const int via = bits == 0 ? rank_in(first_host) : host_of(v < count ? v : 0);
                const uint32_t word = v < count ? word_of(fewer - at.sends[via], via) : 0;
                const Amount most = at.kept[at.hottest[via]];  // no main gives more
                const int slot = via * sizes_.slots;
                const int held = at.held[via];
                HeldExperts<Moves<Warp>::kSlots> experts;
                experts.load(at.expert + slot, held);
                Amount room = -1;  // what a replica of the sender may grow by
                MEGATRON_EXT_ROLLED
                for (int k = 0; k < sizes_.slots; ++k) {
                    const bool is_given = (k < held) & (at.giver[slot + k] == sender);
                    const Amount kept = at.kept[at.expert[slot + k]];
                    room = is_given & (kept > room) ? kept : room;
                }
                MEGATRON_EXT_ROLLED
                for (int next = 0; next < count; next += kLanes >> bits) {
                    const int g = next + (lane() >> bits);
                    const int i = at.given[g < count ? g : 0];
                    const Amount amount = at.amount[i];
                    const uint32_t size = static_cast<uint32_t>(amount) << kIndexBits | g;
                    const bool is_other =
                        static_cast<unsigned>(i - slot) >= static_cast<unsigned>(sizes_.slots);
                    const bool grows = (amount <= room) | experts.has(at.expert[i]);
                    const bool is_new =
                        (word < last_host) | ((word == last_host) & (size > last_size));
                    const bool is_better = (word > host) | ((word == host) & (size < smallest));
                    const bool can = (g < count) & is_other & (amount <= most) & grows & (word > 0);
                    smallest = can & is_new & is_better ? size : smallest;
                    host = can & is_new & is_better ? word : host;
                }
            }
            const uint32_t best = __reduce_max_sync(kAll, host);
            if ((best == 0) & (bits == 0)) {
                bits = all;
                continue;
            }
            const int32_t work = count_asked(count, fewer, best) * each_;
            const uint32_t least = __reduce_min_sync(kAll, host == best ? smallest : kAll);
            if ((best == 0) | (work - each_ >= left_)) {
                // It ends when all is spent.
                left_ -= work < left_ ? work : (left_ + each_ - 1) / each_ * each_;
                return false;
            }
            const int replica = at.given[least & ((1u << kIndexBits) - 1)];
            if (hand_over(sender, rank_in(best), replica)) {
                left_ -= work;
                return true;
            }
            last_host = best;
            last_size = least;
        }
    }

    // The replicas of a sender's mains to `given`, rising; returns how many.
    __device__ int list_given(int sender) const {
        const auto& at = moves_.at();
        const unsigned before = (1u << lane()) - 1;
        int count = 0;
#pragma unroll
        for (int j = 0; j < kReplicas; ++j) {
            const unsigned given = __ballot_sync(kAll, giver_[j] == sender);
            if (giver_[j] == sender) at.given[count + __popc(given & before)] = replica_of(j);
            count += __popc(given);
        }
        __syncwarp();
        return count;
    }

    // Who holds one of the replicas in `given`.
    __device__ int host_of(int g) const { return sizes_.rank_of(moves_.at().given[g]); }

    // The host that is asked first: its word, or 0.
    __device__ uint32_t find_first(int count, Amount fewer) const {
        uint32_t first = 0;
        MEGATRON_EXT_ROLLED
        for (int g = lane(); g < count; g += kLanes) {
            const int via = host_of(g);
            first = higher(first, word_of(fewer - moves_.at().sends[via], via));
        }
        return __reduce_max_sync(kAll, first);
    }

    // How many hosts are asked until the best one, each once; all if there is no best one.
    __device__ int count_asked(int count, Amount fewer, uint32_t best) const {
        const auto& at = moves_.at();
        int asked = 0;
        MEGATRON_EXT_ROLLED
        for (int first = 0; first < count; first += kLanes) {
            const int g = first + lane() < count ? first + lane() : 0;
            const int via = host_of(g);
            const bool is_again = (g > 0) & (host_of(g > 0 ? g - 1 : 0) == via);
            const uint32_t word = word_of(fewer - at.sends[via], via);
            const bool is_asked = (first + lane() < count) & !is_again & (word > 0);
            asked += __popc(__ballot_sync(kAll, is_asked & (word >= best)));
        }
        return asked;
    }

    // False if the host has no main to give instead.
    __device__ bool hand_over(int sender, int host, int replica) {
        const auto& at = moves_.at();
        const int t = sizes_.rank_of(replica);
        const int expert = at.expert[replica];
        const Amount amount = at.amount[replica];
        // A lane looks at a slot of both.
        const bool is_slot = lane() < sizes_.slots;
        const int k = is_slot ? lane() : 0;
        const int own = at.expert[host * sizes_.slots + k];
        const bool is_given = at.giver[host * sizes_.slots + k] == sender;
        const bool grows = (own == expert) | (is_given & (at.kept[own] >= amount));
        const unsigned growing = __ballot_sync(kAll, is_slot & (k < at.held[host]) & grows);
        int main = at.hottest[host];
        const bool is_main = at.expert[t * sizes_.slots + k] == main;
        if (__ballot_sync(kAll, is_slot & (k < at.held[t]) & is_main) != 0) {
            main = moves_.main_for(host, t);
            if (main < 0 || at.kept[main] < amount) return false;
        }
        const int grown = host * sizes_.slots + 31 - __clz(growing & (0u - growing));  // the first
        moves_.warp().once([&] { moves_.hand_over(replica, host, main, grown); });
        MEGATRON_EXT_ROLLED
        for (int i = 0; i < 2; ++i) {
            const int rank = i == 0 ? sender : host;
            const int hottest = moves_.find_hottest(rank);
            if (lane() == 0) at.hottest[rank] = hottest;
        }
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            sends_[j] += (rank_of(j) == host) - (rank_of(j) == sender);
        }
#pragma unroll
        for (int j = 0; j < kReplicas; ++j) {
            giver_[j] = replica_of(j) == replica ? host : giver_[j];
        }
        __syncwarp();
        return true;
    }

    __device__ static int replica_of(int j) { return lane() + j * kLanes; }

    Moves<Warp>& moves_;
    const DomainSizes<Amount> sizes_;
    const int32_t each_;        // work to ask a host
    int32_t sends_[kEach];      // of this lane's ranks
    int32_t giver_[kReplicas];  // of this lane's replicas; -1 where there is none
    int32_t left_ = 0;          // work
};

#endif

}  // namespace megatron_ext
