// The replicas of a rank's mains, by number. Two ways to find them, with equal results:
//   LinkedGiven  a list for each rank, for one thread
//   FlatGiven    all replicas are looked at, lanes side by side
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "megatron_ext/planner/domain.h"

namespace megatron_ext {

class LinkedGiven {
  public:
    void reset(int ranks, int slots) {
        ranks_ = ranks;
        links_.assign(ranks + ranks * slots, -1);
    }

    void add(int home, int replica) {
        links_[ranks_ + replica] = links_[home];
        links_[home] = replica;
    }

    void remove(int home, int replica) {
        int32_t* place = &links_[home];
        while (*place != replica) place = &links_[ranks_ + *place];
        *place = next(replica);
    }

    // A replica is dropped, and the one numbered `last` gets its number, but has not moved yet.
    template <class Memory>
    void drop(const Memory& at, int replica, int last) {
        remove(at.giver[replica], replica);
        if (last == replica) return;
        remove(at.giver[last], last);
        add(at.giver[last], replica);
    }

    // In any order; -1 behind the last.
    int first(int home) const { return links_[home]; }
    int next(int replica) const { return links_[ranks_ + replica]; }

    // To `list`, rising; returns how many. From then on the rank's list is in that order, too, as
    // it will be asked for again.
    template <class Moves>
    int gather(const Moves&, int home, int32_t* list) {
        int count = 0;
        for (int i = first(home); i >= 0; i = next(i)) list[count++] = i;
        if (!std::is_sorted(list, list + count)) {
            std::sort(list, list + count);
            links_[home] = -1;
            for (int i = count - 1; i >= 0; --i) add(home, list[i]);
        }
        return count;
    }

  private:
    int ranks_ = 0;
    std::vector<int32_t> links_;  // to the first of each rank, then behind each replica
};

// As LinkedGiven, as far as anybody asks.
class FlatGiven {
  public:
    MEGATRON_EXT_HOST_DEVICE void reset(int, int) {}
    MEGATRON_EXT_HOST_DEVICE void add(int, int) {}
    MEGATRON_EXT_HOST_DEVICE void remove(int, int) {}
    template <class Memory>
    MEGATRON_EXT_HOST_DEVICE void drop(const Memory&, int, int) {}

    template <class Moves, class List>
    MEGATRON_EXT_HOST_DEVICE int gather(const Moves& moves, int home, List list) const {
        const auto& at = moves.at();
        const int slots = moves.domain().slots;
        return moves.warp().gather(moves.domain().ranks * slots, list, [&](int i) {
            const int t = moves.domain().rank_of(i);
            return i - t * slots < at.held[t] && at.giver[i] == home;
        });
    }
};

}  // namespace megatron_ext
