// The experts that a rank holds replicas of, in a lane's registers: at most kMost, two in a word.
#pragma once

#include <cstdint>

namespace megatron_ext {

template <int kMost>
class HeldExperts;

#ifdef __CUDACC__

template <int kMost>
class HeldExperts {
  public:
    // The first `held` of these; all are below 2^15.
    __device__ void load(const int32_t* expert, int held) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            const uint32_t even = 2 * w < held ? expert[2 * w] : kNone;
            const uint32_t odd = 2 * w + 1 < held ? expert[2 * w + 1] : kNone;
            words_[w] = kMarks | odd << 16 | even;
        }
    }

    // One more, if `is_held`. Plain shifts: a compiler puts the intrinsic behind a branch.
    __device__ void add(int expert, bool is_held) {
        uint32_t next = kMarks >> 16 | static_cast<uint32_t>(expert);
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            const uint32_t word = words_[w];
            words_[w] = is_held ? word << 16 | next : word;
            next = word >> 16;
        }
    }

    // The same of another lane. All lanes ask together.
    __device__ HeldExperts of_lane(int lane) const {
        HeldExperts other;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            other.words_[w] = __shfl_sync(0xffffffffu, words_[w], lane);
        }
        return other;
    }

    __device__ bool has(int expert) const {
        // The half that is the expert's loses its mark where 1 is taken away.
        uint32_t marks = kMarks;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            marks &= (words_[w] ^ static_cast<uint32_t>(expert) * 0x10001u) - 0x10001u;
        }
        return marks != kMarks;
    }

  private:
    static constexpr int kWords = (kMost + 1) / 2;
    static constexpr uint32_t kMarks = 0x80008000u;  // of each half, above the expert
    static constexpr uint32_t kNone = 0x7fff;
    uint32_t words_[kWords];
};

#endif

}  // namespace megatron_ext
