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

// How good an index is: compared by `first`, then by `second`. Not an index at all if `first` <= 0.
struct Score {
    int64_t first = 0;
    int64_t second = 0;

    MEGATRON_EXT_HOST_DEVICE bool above(const Score& other) const {
        return first != other.first ? first > other.first : second > other.second;
    }
};

// The index with the highest score, the lowest of equals; -1 with a first of 0 if there is none.
struct Best {
    int index = -1;
    Score score{0, INT64_MAX};  // not above any index
};

// The 32 lanes in a loop.
struct HostWarp {
    template <class Function>
    void for_each(int count, Function function) const {
        for (int i = 0; i < count; ++i) function(i);
    }

    template <class Function>
    Best best(int count, Function score_of) const {
        Best best;
        for (int i = 0; i < count; ++i) {
            const Score score = score_of(i);
            if (score.above(best.score)) best = {i, score};
        }
        return best;
    }

    template <class Function>
    int64_t sum(int count, Function value_of) const {
        int64_t total = 0;
        for (int i = 0; i < count; ++i) total += value_of(i);
        return total;
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
    static constexpr unsigned kAll = 0xffffffffu;
    static constexpr int kLanes = 32;

    __device__ int lane() const { return static_cast<int>(threadIdx.x) % kLanes; }

    template <class Function>
    __device__ void for_each(int count, Function function) const {
        __syncwarp();  // What other lanes still read must not change under them.
        for (int i = lane(); i < count; i += kLanes) function(i);
        __syncwarp();
    }

    template <class Function>
    __device__ Best best(int count, Function score_of) const {
        Best best;
        for (int i = lane(); i < count; i += kLanes) {
            const Score score = score_of(i);
            if (score.above(best.score)) best = {i, score};
        }
        for (int distance = kLanes / 2; distance > 0; distance /= 2) {
            Best other;
            other.index = __shfl_xor_sync(kAll, best.index, distance);
            other.score.first = __shfl_xor_sync(kAll, best.score.first, distance);
            other.score.second = __shfl_xor_sync(kAll, best.score.second, distance);
            const bool equal = !other.score.above(best.score) && !best.score.above(other.score);
            if (other.score.above(best.score) || (equal && other.index < best.index)) best = other;
        }
        return best;
    }

    template <class Function>
    __device__ int64_t sum(int count, Function value_of) const {
        long long total = 0;
        for (int i = lane(); i < count; i += kLanes) total += value_of(i);
        for (int distance = kLanes / 2; distance > 0; distance /= 2) {
            total += __shfl_xor_sync(kAll, total, distance);
        }
        return total;
    }

    template <class Function>
    __device__ void once(Function function) const {
        __syncwarp();
        if (lane() == 0) function();
        __syncwarp();
    }
};

#endif

}  // namespace megatron_ext
