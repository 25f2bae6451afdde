// A warp's collectives, once for the host and once for the device, so that an algorithm written on
// them is the same code on both and gives the same bits.
//
// All lanes call every function together with equal arguments, and every lane gets the equal
// result. Functions passed as arguments run once per index, in any order and on any lane: they may
// write only what belongs to their index. All lanes see what they wrote after the call.
#pragma once

#include <cstdint>

#include "megatron_ext/host_device.h"

#ifdef __CUDACC__
// A function that stays one: a kernel that runs once a layer finds its code in no cache, so every
// copy costs.
#define MEGATRON_EXT_ONCE_IN_CODE __host__ __device__ __noinline__
#define MEGATRON_EXT_ROLLED _Pragma("unroll 1")  // a loop that is not written out either
#else
#define MEGATRON_EXT_ONCE_IN_CODE
#define MEGATRON_EXT_ROLLED
#endif

namespace megatron_ext {

// The index with the highest key above 0, the lowest of equals; -1 if there is none.
struct Best {
    int index = -1;
    int64_t key = 0;
};

// What `find_and_count` tells.
struct Place {
    int found;  // the lowest index that is the one looked for, or -1
    int count;  // how many come before what is to be placed
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
    Best best(int count, Function key_of) const {
        Best best;
        for (int i = 0; i < count; ++i) {
            const int64_t key = key_of(i);
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

    // The sum over the first `most` indices that count, of values that are not negative; anything
    // from `enough` on if it is that much.
    template <class Counts, class Function>
    int64_t sum_first(
        int count, int64_t most, int64_t enough, Counts counts, Function value_of) const {
        int64_t total = 0;
        for (int i = 0; i < count && most > 0 && total < enough; ++i) {
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

    // Both at once.
    template <class Is, class Before>
    Place find_and_count(int count, Is is_it, Before comes_before) const {
        return {find(count, is_it), count_first(count, comes_before)};
    }

    // The indices that it is true for, rising, to `list`; returns how many.
    template <class List, class Function>
    int gather(int count, List list, Function is_it) const {
        int found = 0;
        for (int i = 0; i < count; ++i) {
            if (is_it(i)) list[found++] = i;
        }
        return found;
    }

    // By one lane: the index of the highest of `count` entries from `first` on, which are not
    // negative; the lowest of equals.
    template <class Values>
    int highest_entry(const Values& values, int first, int count) const {
        int best = first;
        for (int i = first + 1; i < first + count; ++i) {
            if (values[i] > values[best]) best = i;
        }
        return best;
    }

    // Move an entry of two arrays from one place to another, down or up; those between make room.
    // What arrives is new_a and new_b.
    template <class A, class B>
    void move_down(int from, int to, A* a, B* b, A new_a, B new_b) const {
        for (int i = from; i > to; --i) {
            a[i] = a[i - 1];
            b[i] = b[i - 1];
        }
        a[to] = new_a;
        b[to] = new_b;
    }

    template <class A, class B>
    void move_up(int from, int to, A* a, B* b, A new_a, B new_b) const {
        for (int i = from; i < to; ++i) {
            a[i] = a[i + 1];
            b[i] = b[i + 1];
        }
        a[to] = new_a;
        b[to] = new_b;
    }

    // Sort two arrays by rising a, then rising b; `scratch` is as large as they are.
    template <class A, class B>
    void sort(int count, A* a, B* b, A* /*scratch_a*/, B* /*scratch_b*/) const {
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

    // Take the best offers: `make_offers(i, offer)` runs for each index below `count` and calls
    // `offer(t, value, id)` for any t below `takers`, as often as it likes. Then taken[t] and
    // taken_id[t] are the highest value offered and the lowest id it came with, unless taken[t] was
    // higher. Offers that are not above now[t] do not count. Before, taken[t] is at least now[t],
    // and taken_id[t] is above all ids. `scratch` is as large as `takers`.
    template <class Function>
    void take_offers(int count,
                     int /*takers*/,
                     const int64_t* now,
                     int64_t* taken,
                     int32_t* taken_id,
                     int64_t* /*scratch*/,
                     Function make_offers) const {
        const auto offer = [&](int t, int64_t value, int32_t id) {
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

#ifdef __CUDACC__

// One lane a thread.
struct DeviceWarp {
    // Whether all keys and offers are below 2^31: half the work.
    bool narrow = false;

    static constexpr unsigned kAll = 0xffffffffu;
    static constexpr int kLanes = 32;

    __device__ int lane() const { return static_cast<int>(threadIdx.x) % kLanes; }

    template <class Function>
    __device__ void for_each(int count, Function function) const {
        __syncwarp();  // What other lanes still read must not change under them.
#pragma unroll 1
        for (int i = lane(); i < count; i += kLanes) function(i);
        __syncwarp();
    }

    template <class Function>
    __device__ Best best(int count, Function key_of) const {
        const bool narrow = this->narrow;  // read beside the first keys, not behind them
        Best best;
#pragma unroll 1
        for (int i = lane(); i < count; i += kLanes) {
            const int64_t key = key_of(i);
            if (key > best.key) best = {i, key};
        }
        return best_of_lanes(best, narrow);
    }

    template <class Function>
    __device__ int64_t sum(int count, Function value_of) const {
        long long total = 0;
#pragma unroll 1
        for (int i = lane(); i < count; i += kLanes) total += value_of(i);
        return sum_of_lanes(total);
    }

    template <class Counts, class Function>
    __device__ int64_t
    sum_first(int count, int64_t most, int64_t enough, Counts counts, Function value_of) const {
        int64_t total = 0;
#pragma unroll 1
        for (int first = 0; first < count && most > 0 && total < enough; first += kLanes) {
            const int i = first + lane();
            const unsigned counting = __ballot_sync(kAll, i < count && counts(i));
            const unsigned before = counting & ((1u << lane()) - 1);
            const bool is_one = (counting >> lane() & 1) != 0 && __popc(before) < most;
            total += sum_of_lanes(is_one ? value_of(i) : 0);
            most -= __popc(counting);
        }
        return total;
    }

    template <class Function>
    __device__ int find(int count, Function is_it) const {
#pragma unroll 1
        for (int first = 0; first < count; first += kLanes) {
            const int i = first + lane();
            const unsigned found = __ballot_sync(kAll, i < count && is_it(i));
            if (found != 0) return first + __ffs(static_cast<int>(found)) - 1;
        }
        return -1;
    }

    template <class Function>
    __device__ int count_first(int count, Function is_it) const {
        int found = 0;
#pragma unroll 1
        for (int first = 0; first < count; first += kLanes) {
            const int i = first + lane();
            const int here = __popc(__ballot_sync(kAll, i < count && is_it(i)));
            found += here;
            if (here < kLanes) break;
        }
        return found;
    }

    template <class Is, class Before>
    __device__ Place find_and_count(int count, Is is_it, Before comes_before) const {
        Place place{-1, 0};
#pragma unroll 1
        for (int first = 0; first < count; first += kLanes) {
            const int i = first + lane();
            const bool is_there = i < count && is_it(i);
            const bool is_before = i < count && comes_before(i);
            const unsigned found = __ballot_sync(kAll, is_there);
            if (found != 0) place.found = first + __ffs(static_cast<int>(found)) - 1;
            place.count += __popc(__ballot_sync(kAll, is_before));
        }
        return place;
    }

    template <class List, class Function>
    __device__ int gather(int count, List list, Function is_it) const {
        int found = 0;
        __syncwarp();
#pragma unroll 1
        for (int first = 0; first < count; first += kLanes) {
            const int i = first + lane();
            const unsigned here = __ballot_sync(kAll, i < count && is_it(i));
            const unsigned before = here & ((1u << lane()) - 1);
            if ((here >> lane() & 1) != 0) list[found + __popc(before)] = i;
            found += __popc(here);
        }
        __syncwarp();
        return found;
    }

    template <class Values>
    __device__ int highest_entry(const Values& values, int first, int count) const {
        int best = first;
        int64_t most = -1;
#pragma unroll 4  // reads in flight at once
        for (int i = first; i < first + count; ++i) {
            const int64_t value = values[i];
            if (value > most) {
                most = value;
                best = i;
            }
        }
        return best;
    }

    template <class A, class B>
    __device__ __noinline__ void move_down(int from, int to, A* a, B* b, A new_a, B new_b) const {
        __syncwarp();
// From the end, so that no entry is written before it was read.
#pragma unroll 1
        for (int chunk = from - 1 - (from - 1 - to) % kLanes; chunk >= to; chunk -= kLanes) {
            const int i = chunk + lane();
            const A own_a = a[i < from ? i : to];
            const B own_b = b[i < from ? i : to];
            __syncwarp();
            if (i < from) {
                a[i + 1] = own_a;
                b[i + 1] = own_b;
            }
            __syncwarp();
        }
        put(a + to, b + to, new_a, new_b);
    }

    template <class A, class B>
    __device__ __noinline__ void move_up(int from, int to, A* a, B* b, A new_a, B new_b) const {
        __syncwarp();
#pragma unroll 1
        for (int chunk = from + 1; chunk <= to; chunk += kLanes) {
            const int i = chunk + lane();
            const A own_a = a[i <= to ? i : from];
            const B own_b = b[i <= to ? i : from];
            __syncwarp();
            if (i <= to) {
                a[i - 1] = own_a;
                b[i - 1] = own_b;
            }
            __syncwarp();
        }
        put(a + to, b + to, new_a, new_b);
    }

    template <class A, class B>
    __device__ __noinline__ void sort(int count, A* a, B* b, A* scratch_a, B* scratch_b) const {
        for_each(count, [&](int i) {
            const A own_a = a[i];
            const B own_b = b[i];
            int place = 0;
#pragma unroll 4  // reads in flight at once, so they hang on no comparison
            for (int j = 0; j < count; ++j) {
                const A other_a = a[j];
                const B other_b = b[j];
                place += static_cast<int>(other_a < own_a) |
                         (static_cast<int>(other_a == own_a) & static_cast<int>(other_b < own_b));
            }
            scratch_a[place] = own_a;
            scratch_b[place] = own_b;
        });
        for_each(count, [&](int i) {
            a[i] = scratch_a[i];
            b[i] = scratch_b[i];
        });
    }

    template <class Function>
    __device__ void take_offers(int count,
                                int takers,
                                const int64_t* now,
                                int64_t* taken,
                                int32_t* taken_id,
                                int64_t* scratch,
                                Function make_offers) const {
        // Narrow: value and inverted id in one word, so that the highest word is the best offer.
        // Else the highest values come first, and then the lowest ids of those.
        auto* const words = reinterpret_cast<unsigned long long*>(scratch);
        const auto word_of = [](int64_t value, int32_t id) {
            return static_cast<unsigned long long>(value) << 32 | ~static_cast<unsigned>(id);
        };
        for_each(takers,
                 [&](int t) { words[t] = narrow ? word_of(taken[t], taken_id[t]) : taken[t]; });
#pragma unroll 1
        for (int pass = 0; pass < (narrow ? 1 : 2); ++pass) {
            for_each(count, [&](int i) {
                make_offers(i, [&](int t, int64_t value, int32_t id) {
                    if (value <= now[t]) return;
                    if (pass == 0) {
                        atomicMax(&words[t], narrow ? word_of(value, id) : value);
                    } else if (static_cast<unsigned long long>(value) == words[t]) {
                        atomicMin(&taken_id[t], id);
                    }
                });
            });
            for_each(takers, [&](int t) {
                if (narrow) {
                    taken[t] = static_cast<int64_t>(words[t] >> 32);
                    taken_id[t] = static_cast<int32_t>(~static_cast<unsigned>(words[t]));
                } else if (static_cast<int64_t>(words[t]) > taken[t]) {
                    taken[t] = static_cast<int64_t>(words[t]);
                    taken_id[t] = INT32_MAX;
                }
            });
        }
    }

    template <class Function>
    __device__ void once(Function function) const {
        __syncwarp();
        if (lane() == 0) function();
        __syncwarp();
    }

  private:
    template <class A, class B>
    __device__ void put(A* a, B* b, A new_a, B new_b) const {
        if (lane() == 0) {
            *a = new_a;
            *b = new_b;
        }
        __syncwarp();
    }

    __device__ __noinline__ static Best best_of_lanes(Best own, bool narrow) {
        const int64_t key = highest(own.key, narrow);
        const unsigned none = 0xffffffffu;
        const unsigned index = own.key == key ? static_cast<unsigned>(own.index) : none;
        // -1, where there is none, is the highest unsigned number too.
        return {static_cast<int>(__reduce_min_sync(kAll, index)), key};
    }

    __device__ static int64_t highest(int64_t value, bool narrow) {
        const auto lower = static_cast<unsigned>(value);
        if (narrow) return __reduce_max_sync(kAll, lower);
        const auto upper = static_cast<int32_t>(value >> 32);
        const int32_t most = __reduce_max_sync(kAll, upper);
        const unsigned rest = __reduce_max_sync(kAll, upper == most ? lower : 0u);
        return static_cast<int64_t>(most) << 32 | rest;
    }

    __device__ __noinline__ static int64_t sum_of_lanes(long long own) {
#pragma unroll 1
        for (int distance = kLanes / 2; distance > 0; distance /= 2) {
            own += __shfl_xor_sync(kAll, own, distance);
        }
        return own;
    }
};

#endif

}  // namespace megatron_ext
