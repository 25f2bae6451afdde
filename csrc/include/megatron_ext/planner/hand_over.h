// Handing over, the last step of a try: another host takes over one replica of the busiest sender.
// It gets the replica's assignments in return for as many assignments of one of its own experts. No
// rank's load and no slot changes, but the host sends instead of the sender.
#pragma once

#include "megatron_ext/planner/moves.h"

namespace megatron_ext {

template <class Warp>
class HandOver {
    using Amount = typename Warp::Amount;

  public:
    MEGATRON_EXT_HOST_DEVICE explicit HandOver(Moves<Warp>& moves) : moves_(moves) {}

    // Spare the busiest sender of each round, until no host can take anything off the sender.
    MEGATRON_EXT_ONCE_IN_CODE void run() {
        const auto& at = moves_.at();
        MEGATRON_EXT_ROLLED
        while (!moves_.is_spent() && !moves_.is_stopped()) {
            const int sender = moves_.best_rank([&](int r) -> Amount { return at.sends[r]; }).index;
            moves_.spend(rounds_of(moves_.domain().ranks));
            if (sender < 0 || !spare(sender)) return;
        }
    }

  private:
    static constexpr int kTries = 2;  // hosts that are asked one after the other

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
    MEGATRON_EXT_ONCE_IN_CODE bool may_spare(int sender, int count, KeyOf key_of) const {
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
            const int main = moves_.find_main_for(via, t);
            return main < 0 || at.kept[main] < amount ? 0 : most - amount;
        });
        return smallest.index < 0 ? -1 : at.given[smallest.index];
    }

    MEGATRON_EXT_HOST_DEVICE void hand_over(int sender, int via, int replica) {
        const auto& at = moves_.at();
        const int slots = moves_.domain().slots;
        moves_.warp().once([&] {
            // Reads come first: see `place_replica`.
            const int expert = at.expert[replica];
            const Amount amount = at.amount[replica];
            const int main = moves_.main_for(via, moves_.domain().rank_of(replica));
            const int grown = via * slots + slot_that_grows(sender, via, expert, amount);
            const int returned = at.expert[grown];
            const Amount of_grown = at.amount[grown] + amount;
            const Amount of_main = at.kept[main] - amount;
            const Amount of_expert = at.kept[expert] + amount;
            const Amount of_returned = at.kept[returned] - amount;
            const int32_t fewer = at.sends[sender] - 1;
            const int32_t more = at.sends[via] + 1;
            at.amount[grown] = of_grown;
            at.kept[main] = of_main;
            // What the host returns of the very expert goes back and forth.
            if (returned != expert) {
                at.kept[expert] = of_expert;
                at.kept[returned] = of_returned;
            }
            at.expert[replica] = main;
            at.giver[replica] = via;
            moves_.given().remove(sender, replica);
            moves_.given().add(via, replica);
            at.sends[sender] = fewer;
            at.sends[via] = more;
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

}  // namespace megatron_ext
