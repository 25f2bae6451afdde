// A warp's collectives, once for the host and once for the device, so that an algorithm written on
// them is the same code on both and gives the same bits.
//
// Every function is called by all lanes together with equal arguments, and every lane gets the
// equal result. The functions given run once per index, in any order and on any lane: they may
// write only what belongs to their index. What they wrote is seen by all lanes after the call.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MEGATRON_EXT_HOST_DEVICE __host__ __device__
#else
#define MEGATRON_EXT_HOST_DEVICE
#endif

namespace megatron_ext {

// The index with the highest key above 0, the lowest of equals; -1 if there is none.
template <class Key>
struct Best {
    int index = -1;
    Key key = 0;
};

// How many indices it is true for, where those are the first. By one lane.
template <class Function>
MEGATRON_EXT_HOST_DEVICE int search_first(int count, Function is_it) {
    int first = 0;
    while (count > 0) {
        const int half = count / 2;
        if (is_it(first + half)) {
            first += half + 1;
            count -= half + 1;
        } else {
            count = half;
        }
    }
    return first;
}

// The 32 lanes in a loop.
struct HostWarp {
    template <class Function>
    void for_each(int count, Function function) const {
        for (int i = 0; i < count; ++i) function(i);
    }

    template <class Function>
    auto best(int count, Function key_of) const {
        Best<decltype(key_of(0))> best;
        for (int i = 0; i < count; ++i) {
            const auto key = key_of(i);
            if (key > best.key) best = {i, key};
        }
        return best;
    }

    template <class Function>
    int64_t sum(int count, Function value_of) const {
        int64_t total = 0;
        for (int i = 0; i < count; ++i) total += value_of(i);
        return total;
    }

    // The sum over the first `most` indices that count.
    template <class Counts, class Function>
    int64_t sum_first(int count, int64_t most, Counts counts, Function value_of) const {
        int64_t total = 0;
        for (int i = 0; i < count && most > 0; ++i) {
            if (!counts(i)) continue;
            total += value_of(i);
            --most;
        }
        return total;
    }

    // The lowest index for which it is true, or -1.
    template <class Function>
    int find(int count, Function is_it) const {
        for (int i = 0; i < count; ++i) {
            if (is_it(i)) return i;
        }
        return -1;
    }

    // How many it is true for, where those are the first.
    template <class Function>
    int count_first(int count, Function is_it) const {
        return search_first(count, is_it);
    }

    // Move the entries from `first` to before `last` of two arrays up by one place, or those behind
    // `first` to before `last` down by one.
    template <class A, class B>
    void shift_up(int first, int last, A* a, B* b) const {
        for (int i = last; i > first; --i) {
            a[i] = a[i - 1];
            b[i] = b[i - 1];
        }
    }

    template <class A, class B>
    void shift_down(int first, int last, A* a, B* b) const {
        for (int i = first; i + 1 < last; ++i) {
            a[i] = a[i + 1];
            b[i] = b[i + 1];
        }
    }

    // Sort two arrays by rising a, then rising b.
    template <class A, class B>
    void sort(int count, A* a, B* b) const {
        for (int i = 1; i < count; ++i) {
            const A own_a = a[i];
            const B own_b = b[i];
            int place = i;
            for (; place > 0 &&
                   (a[place - 1] > own_a || (a[place - 1] == own_a && b[place - 1] > own_b));
                 --place) {
                a[place] = a[place - 1];
                b[place] = b[place - 1];
            }
            a[place] = own_a;
            b[place] = own_b;
        }
    }

    // Take the best offers: `make_offers(i, offer)` runs for each index and calls `offer(t, value,
    // id)` as often as it likes. Then taken[t] and taken_id[t] are the highest value offered and
    // the lowest id it came with, unless taken[t] was higher; offers that are not above now[t] do
    // not count. Before, taken[t] is at least now[t], and taken_id[t] above all ids.
    template <class Value, class Function>
    void take_offers(
        int count, const Value* now, Value* taken, int32_t* taken_id, Function make_offers) const {
        const auto offer = [&](int t, Value value, int32_t id) {
            if (value <= now[t] || value < taken[t]) return;
            if (value == taken[t] && id > taken_id[t]) return;
            taken[t] = value;
            taken_id[t] = id;
        };
        for (int i = 0; i < count; ++i) make_offers(i, offer);
    }

    // Run by one lane.
    template <class Function>
    void once(Function function) const {
        function();
    }
};

}  // namespace megatron_ext
