// A warp's collectives, once for the host and once for the device, so that an algorithm written on
// them is the same code on both and gives the same bits.
//
// All lanes call every function together with equal arguments, and every lane gets the equal
// result. Functions passed as arguments run once per index, in any order and on any lane: they may
// write only what belongs to their index. All lanes see what they wrote after the call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <type_traits>

#include "megatron_ext/host_device.h"

#ifdef __CUDACC__
// A function that stays one: what runs once a plan finds its code in no cache, so every copy costs.
#define MEGATRON_EXT_ONCE_IN_CODE __host__ __device__ __noinline__
#define MEGATRON_EXT_ROLLED _Pragma("unroll 1")  // a loop that is not written out either
#else
#define MEGATRON_EXT_ONCE_IN_CODE
#define MEGATRON_EXT_ROLLED
#endif

namespace megatron_ext {

// On a device, values of 32 bits lie above an index in one word, so that one instruction reduces
// both. Ranks: keys below 2^(32 - kRankBits). Others, and ids of offers: keys below
// 2^(32 - kIndexBits).
constexpr int kRankBits = 7;
constexpr int kIndexBits = 10;

// The index with the highest key above 0, the lowest of equals; -1 if there is none.
template <class Key>
struct Best {
    int index = -1;
    Key key = 0;
};

// What is offered to an index; none is 0.
template <class Value>
struct Offer {
    Value value = 0;
    int32_t id = 0;
};

// Two offers, each to the other's index.
template <class Value>
struct Exchange {
    int32_t from = 0;
    int32_t to = 0;
    Value forth = 0;  // to `to`
    Value back = 0;   // to `from`
};

// The 32 lanes in a loop. Value: the type of keys and of what is compared, int32 or int64.
template <class Value>
struct HostWarp {
    using Amount = Value;

    template <class Function>
    void for_each(int count, Function function) const {
        for (int i = 0; i < count; ++i) function(i);
    }

    // kMost: at most so many indices; 0 if that is not known.
    template <int kMost = 0, class Function>
    Best<Value> best(int count, Function key_of) const {
        Best<Value> best;
        constexpr int kBlock = 16;  // Most blocks have nothing that is better.
        int first = 0;
        for (; first + kBlock <= count; first += kBlock) {
            Value keys[kBlock];
            Value most = 0;
            for (int i = 0; i < kBlock; ++i) {
                keys[i] = key_of(first + i);
                most = std::max(most, keys[i]);
            }
            if (most <= best.key) continue;
            const auto found = std::find(keys, keys + kBlock, most) - keys;
            best = {first + static_cast<int>(found), most};
        }
        for (int i = first; i < count; ++i) {
            const Value key = key_of(i);
            if (key > best.key) best = {i, key};
        }
        return best;
    }

    // The same of indices that may. Only those with a higher key than found are asked.
    template <class Function, class May>
    Best<Value> best_that_may(int count, Function key_of, May may) const {
        Best<Value> best;
        for (int i = 0; i < count; ++i) {
            const Value key = key_of(i);
            if (key > best.key && may(i)) best = {i, key};
        }
        return best;
    }

    // The same of at most 2^kIndexBits indices, and keys below 2^(32 - kIndexBits) in 32 bits.
    template <bool kMostlyOne = false, class Function>
    Best<Value> best_of_few(int count, Function key_of) const {
        return best(count, key_of);
    }

    template <class Function>
    int64_t sum(int count, Function value_of) const {
        int64_t total = 0;
        for (int i = 0; i < count; ++i) total += value_of(i);
        return total;
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

    // Move the entry at `place` to the front; those before it make room.
    void move_to_front(int place, int32_t* list) const {
        std::rotate(list, list + place, list + place + 1);
    }

    // On a device up to three more are copied: arrays have place for whole fours.
    void copy(int count, const Value* values, Value* copies) const {
        std::copy(values, values + count, copies);
    }

    // found(i, place): of each index, its place by rising keys, which are from 0 to `most`; of
    // equals the lower index comes first. `keys` and `order` are scratch, for as many as `count`.
    template <int kMost = 0, class KeyOf, class Found>
    void place_rising(
        int count, KeyOf key_of, Value most, Value* keys, int32_t* order, Found found) const {
        for (int i = 0; i < count; ++i) keys[i] = key_of(i);
        // Mostly many at the end have the highest key, and stay where they are.
        for (; count > 0 && keys[count - 1] == most; --count) found(count - 1, count - 1);
        std::iota(order, order + count, 0);
        std::sort(order, order + count, [&](int32_t i, int32_t j) {
            return keys[i] < keys[j] || (keys[i] == keys[j] && i < j);
        });
        for (int place = 0; place < count; ++place) found(order[place], place);
    }

    // Run by one lane.
    template <class Function>
    void once(Function function) const {
        function();
    }

    // Other lanes may add to the same one.
    void add(Value& sum, Value more) const { sum += more; }
};

#ifdef __CUDACC__

// Words that one instruction reads from shared memory.
struct alignas(16) FourWords {
    uint32_t each[4];
};

struct DeviceWarp {
    static constexpr unsigned kAll = 0xffffffffu;
    static constexpr int kLanes = 32;

    // Of unsigned numbers: that is one instruction.
    __device__ static int lane() { return static_cast<int>(threadIdx.x % kLanes); }
    __device__ static int warp() { return static_cast<int>(threadIdx.x / kLanes); }
};

// Ranks by lanes, several a lane, and words of a number above an inverted rank: the highest word is
// of the highest number, and of equals of the lowest rank. Of no number there is no word: 0.
struct RankLanes : DeviceWarp {
    static constexpr int kMostRank = (1 << kRankBits) - 1;

    __device__ static int rank_of(int k) { return lane() + k * kLanes; }
    __device__ static int lane_of(int rank) {
        return static_cast<int>(static_cast<unsigned>(rank) % kLanes);
    }

    __device__ static uint32_t lower(uint32_t a, uint32_t b) { return a < b ? a : b; }
    __device__ static uint32_t higher(uint32_t a, uint32_t b) { return a > b ? a : b; }

    __device__ static uint32_t word_of(int32_t number, int rank) {
        return number > 0 ? static_cast<uint32_t>(number) << kRankBits | (kMostRank - rank) : 0;
    }
    __device__ static int rank_in(uint32_t word) {
        return kMostRank - static_cast<int>(word & kMostRank);
    }
    __device__ static int32_t number_in(uint32_t word) {
        return static_cast<int32_t>(word >> kRankBits);
    }
};

// One lane a thread. As HostWarp, function by function, and some more. Where an index is a rank's,
// kMost says how many ranks arrays have place for.
template <class Value>
struct DeviceLanes : RankLanes {
    using Amount = Value;

    template <class Function>
    __device__ void for_each(int count, Function function) const {
        __syncwarp();  // What other lanes still read must not change under them.
#pragma unroll 1
        for (int i = lane(); i < count; i += kLanes) function(i);
        __syncwarp();
    }

    // kMost: arrays have so many entries; keys are asked for all of them.
    template <int kMost = 0, class Function>
    __device__ Best<Value> best(int count, Function key_of) const {
        if constexpr (kFitsWord<kMost>) {
            uint32_t word = 0;
#pragma unroll
            for (int first = 0; first < kMost; first += kLanes) {
                const int i = first + lane();
                const Value key = key_of(i);
                word = higher(word, i < count ? word_of(key, i) : 0);
            }
            word = __reduce_max_sync(kAll, word);
            return {word > 0 ? rank_in(word) : -1, number_in(word)};
        } else {
            Best<Value> best;
#pragma unroll 1
            for (int i = lane(); i < count; i += kLanes) {
                const Value key = key_of(i);
                if (key > best.key) best = {i, key};
            }
            return best_of_lanes(best);
        }
    }

    // kMostlyOne: whether the first round, of one index a lane, is written out before a loop.
    template <bool kMostlyOne = false, class Function>
    __device__ Best<Value> best_of_few(int count, Function key_of) const {
        if constexpr (kNarrow) {
            constexpr int kLast = (1 << kIndexBits) - 1;
            const auto own_word = [&](int i) -> uint32_t {
                const Value key = key_of(i);
                return key > 0 ? static_cast<uint32_t>(key) << kIndexBits | (kLast - i) : 0;
            };
            int i = lane();
            uint32_t word = 0;
            if constexpr (kMostlyOne) {
                word = i < count ? own_word(i) : 0;
                i += kLanes;
            }
#pragma unroll 1
            for (; i < count; i += kLanes) {
                const uint32_t own = own_word(i);
                word = own > word ? own : word;
            }
            word = __reduce_max_sync(kAll, word);
            if (word == 0) return {};
            return {kLast - static_cast<int>(word & kLast), static_cast<Value>(word >> kIndexBits)};
        } else {
            return best(count, key_of);
        }
    }

    // Of values above 0: the higher one of the pair that is `whole` or more with the least left
    // over, which is below `whole`. Of such pairs the one whose higher value is the lowest; the
    // first of equals, for the higher and for the lower one. Each lane looks for the partners of
    // its own values.
    __device__ __noinline__ Best<Value> closest_pair(int count,
                                                     const Value* values,
                                                     Value whole) const {
        Value least_over = whole;
        Value own_value = kHighest;
        int higher = 0;
#pragma unroll 1
        for (int i = lane(); i < count; i += kLanes) {
            const Value own = values[i];
            if (own == 0) continue;
            Value lower = kHighest;
#pragma unroll 4  // reads in flight at once
            for (int j = 0; j < count; ++j) {
                const Value value = values[j];
                const bool is_before = value < own || (value == own && j < i);
                if (is_before && value > 0 && value >= whole - own && value < lower) lower = value;
            }
            if (lower == kHighest) continue;
            const Value over = own - (whole - lower);
            if (over < least_over || (over < whole && over == least_over && own < own_value)) {
                least_over = over;
                own_value = own;
                higher = i;
            }
        }
        const Value least_of_all = lowest(least_over);
        if (least_of_all == whole) return {};
        const bool is_least = least_over == least_of_all;
        const Value lowest_value = lowest(is_least ? own_value : kHighest);
        const bool is_it = is_least && own_value == lowest_value;
        const unsigned first =
            __reduce_min_sync(kAll, is_it ? static_cast<unsigned>(higher) : kAll);
        return {static_cast<int>(first), lowest_value};
    }

    template <class Function>
    __device__ int64_t sum(int count, Function value_of) const {
        long long total = 0;
#pragma unroll 1
        for (int i = lane(); i < count; i += kLanes) total += value_of(i);
        return sum_of_lanes(total);
    }

    // The sum over the first `most` indices that count, of values that are not negative; anything
    // from `enough` on if it is that much.
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

    // The indices that it is true for, rising, to `list`; returns how many.
    template <class List, class Function>
    __device__ int gather(int count, List list, Function is_it) const {
        constexpr int kAtOnce = 4;
        int found = 0;
        __syncwarp();
#pragma unroll 1
        for (int first = lane(); first - lane() < count; first += kAtOnce * kLanes) {
            bool is[kAtOnce];
#pragma unroll  // all reads come before the first vote
            for (int k = 0; k < kAtOnce; ++k) {
                const int i = first + k * kLanes;
                is[k] = i < count && is_it(i);
            }
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                const unsigned here = __ballot_sync(kAll, is[k]);
                const unsigned before = here & ((1u << lane()) - 1);
                if (is[k]) list[found + __popc(before)] = first + k * kLanes;
                found += __popc(here);
            }
        }
        __syncwarp();
        return found;
    }

    template <class Values>
    __device__ int highest_entry(const Values& values, int first, int count) const {
        int best = first;
        Value most = -1;
#pragma unroll 4  // reads in flight at once
        for (int i = first; i < first + count; ++i) {
            const Value value = values[i];
            if (value > most) {
                most = value;
                best = i;
            }
        }
        return best;
    }

    __device__ __noinline__ void move_to_front(int place, int32_t* list) const {
        const int32_t moved = list[place];
        __syncwarp();
// From the end, so that no entry is written before it was read.
#pragma unroll 1
        for (int chunk = (place - 1) / kLanes * kLanes; chunk >= 0; chunk -= kLanes) {
            const int i = chunk + lane();
            const int32_t own = list[i < place ? i : 0];
            __syncwarp();
            if (i < place) list[i + 1] = own;
            __syncwarp();
        }
        if (lane() == 0) list[0] = moved;
        __syncwarp();
    }

    __device__ void copy(int count, const Value* values, Value* copies) const {
        if constexpr (kNarrow) {
            const auto* const from = reinterpret_cast<const FourWords*>(values);
            auto* const to = reinterpret_cast<FourWords*>(copies);
            for_each((count + 3) / 4, [&](int i) { to[i] = from[i]; });
        } else {
            for_each(count, [&](int i) { copies[i] = values[i]; });
        }
    }

    template <int kMost = 0, class KeyOf, class Found>
    __device__ void place_rising(
        int count, KeyOf key_of, Value most, Value* keys, int32_t*, Found found) const {
        __syncwarp();
        if constexpr (kFitsWord<kMost>) {
            constexpr int kEach = kMost / kLanes;
            constexpr int kAtOnce = 16;
            auto* const words = reinterpret_cast<uint32_t*>(keys);
            uint32_t own[kEach];
            int place[kEach] = {};
            int last = 0;  // of those with less than the highest key, counted from 1
#pragma unroll
            for (int k = 0; k < kEach; ++k) {
                const int i = rank_of(k);
                const Value key = key_of(i < count ? i : 0);
                const unsigned less = __ballot_sync(kAll, i < count && key < most);
                own[k] = i < count ? static_cast<uint32_t>(key) << kRankBits | i : kAll;
                words[i] = own[k];
                last = less != 0 ? (k + 1) * kLanes - __clz(less) : last;
            }
            __syncwarp();
#pragma unroll 1
            for (int first = 0; first < last; first += kAtOnce) {
#pragma unroll
                for (int j = 0; j < kAtOnce; j += 4) {
                    const auto four = *reinterpret_cast<const FourWords*>(words + first + j);
#pragma unroll
                    for (int k = 0; k < 4 * kEach; ++k)
                        place[k / 4] += four.each[k % 4] < own[k / 4];
                }
            }
#pragma unroll
            for (int k = 0; k < kEach; ++k) {
                const int i = rank_of(k);
                if (i < count) found(i, i < last ? place[k] : i);
            }
        } else {
            for_each(count, [&](int i) { keys[i] = key_of(i); });
            const auto last = static_cast<int>(
                best(count, [&](int i) -> Value { return keys[i] < most ? i + 1 : 0; }).key);
            for_each(count, [&](int i) {
                const Value own = keys[i];
                int place = i < last ? 0 : i;
#pragma unroll 4  // reads in flight at once, so they hang on no comparison
                for (int j = 0; i < last && j < last; ++j) {
                    const Value other = keys[j];
                    place += static_cast<int>(other < own) |
                             (static_cast<int>(other == own) & static_cast<int>(j < i));
                }
                found(i, place);
            });
        }
        __syncwarp();
    }

    // Take the best offers to each t below `takers`: one is first_offer(t), and two are those of
    // each i below `count`, exchange_of(i), with the ids 2i (forth) and 2i + 1 (back). Where the
    // highest is above value[t], it takes its place, and id[t] becomes the lowest id that it came
    // with. Returns whether there is such a t. `scratch` and `words` are as large as `value`, and
    // ids below 2^kIndexBits.
    template <class FirstOffer, class ExchangeOf>
    __device__ bool take_offers(int takers,
                                FirstOffer first_offer,
                                int count,
                                ExchangeOf exchange_of,
                                Value* value,
                                int32_t* id,
                                Value* scratch,
                                int64_t* words64) const {
        bool changed = false;
        // The highest values come first, and then the lowest ids of those.
        auto* const words = reinterpret_cast<unsigned long long*>(words64);
        auto* const ids = reinterpret_cast<unsigned long long*>(scratch);
        constexpr unsigned long long kNone = INT64_MAX;
        const auto offer_all = [&](auto offer) {
            for_each(count, [&](int i) {
                const Exchange<Value> each = exchange_of(i);
                offer(each.to, each.forth, 2 * i);
                offer(each.from, each.back, 2 * i + 1);
            });
        };
        for_each(takers, [&](int t) { words[t] = first_offer(t).value; });
        offer_all([&](int t, Value offered, int) {
            atomicMax(&words[t], static_cast<unsigned long long>(offered));
        });
        for_each(takers, [&](int t) {
            const Offer<Value> first = first_offer(t);
            const bool is_best = static_cast<unsigned long long>(first.value) == words[t];
            ids[t] = is_best ? static_cast<unsigned long long>(first.id) : kNone;
        });
        offer_all([&](int t, Value offered, int offered_id) {
            if (offered > 0 && static_cast<unsigned long long>(offered) == words[t]) {
                atomicMin(&ids[t], static_cast<unsigned long long>(offered_id));
            }
        });
        for_each(takers, [&](int t) {
            const auto offered = static_cast<Value>(words[t]);
            if (offered <= value[t]) return;
            value[t] = offered;
            id[t] = static_cast<int32_t>(ids[t]);
            changed = true;
        });
        return __ballot_sync(kAll, changed) != 0;
    }

    template <class Function>
    __device__ void once(Function function) const {
        __syncwarp();
        if (lane() == 0) function();
        __syncwarp();
    }

    __device__ void add(Value& sum, Value more) const {
        // Of 64 bits there is one for unsigned numbers only; the sum is the same.
        using Unsigned = std::conditional_t<kNarrow, unsigned, unsigned long long>;
        atomicAdd(reinterpret_cast<Unsigned*>(&sum), static_cast<Unsigned>(more));
    }

  private:
    static constexpr bool kNarrow = sizeof(Value) == 4;
    static constexpr Value kHighest = std::numeric_limits<Value>::max();

    template <int kMost>
    static constexpr bool kFitsWord = kNarrow && kMost > 0 && kMost <= kMostRank + 1;

    __device__ __noinline__ static Best<Value> best_of_lanes(Best<Value> own) {
        const Value key = highest(own.key);
        const unsigned index = own.key == key ? static_cast<unsigned>(own.index) : kAll;
        // -1, where there is none, is the highest unsigned number too.
        return {static_cast<int>(__reduce_min_sync(kAll, index)), key};
    }

    __device__ static Value highest(Value value) {
        if constexpr (kNarrow) {
            return __reduce_max_sync(kAll, value);
        } else {
            const auto upper = static_cast<int32_t>(value >> 32);
            const int32_t most = __reduce_max_sync(kAll, upper);
            const unsigned rest =
                __reduce_max_sync(kAll, upper == most ? static_cast<unsigned>(value) : 0u);
            return static_cast<Value>(most) << 32 | rest;
        }
    }

    __device__ static Value lowest(Value value) { return -highest(-value); }

    __device__ static int64_t sum_of_lanes(long long own) {
        if constexpr (kNarrow) {
            return __reduce_add_sync(kAll, static_cast<int>(own));
        } else {
            return sum_by_shuffles(own);
        }
    }

    __device__ __noinline__ static int64_t sum_by_shuffles(long long own) {
#pragma unroll 1
        for (int distance = kLanes / 2; distance > 0; distance /= 2) {
            own += __shfl_xor_sync(kAll, own, distance);
        }
        return own;
    }
};

#endif

}  // namespace megatron_ext
