// Which instance takes the j-th of an expert's local assignments.
//
// The instances' shares lie on one line, in instance order. Assignment j goes to position
// `j * stride mod count` of the line. The stride has no factor in common with the count, so every
// position is met once and the shares are exact. It is near the golden section of the count, so
// assignments that follow each other fall far apart, and no instance gets one run of consecutive
// tokens.
#pragma once

#include <cstdint>

#include "megatron_ext/warp.h"

namespace megatron_ext {

MEGATRON_EXT_HOST_DEVICE inline uint32_t common_factor(uint32_t a, uint32_t b) {
    while (b != 0) {
        const uint32_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

// The stride for `count` assignments, 1 <= count < 2^31. Shares without tokens may add up to more;
// their result means nothing, but must not take long.
MEGATRON_EXT_HOST_DEVICE inline int64_t interleave_stride(int64_t count) {
    if (count > INT32_MAX) return 1;
    int64_t stride = count * 618'034 / 1'000'000;
    // Divided as 32-bit numbers, which on a GPU takes a fraction of the time.
    const auto coprime = [&] {
        return common_factor(static_cast<uint32_t>(count), static_cast<uint32_t>(stride)) == 1;
    };
    while (stride > 1 && !coprime()) --stride;
    return stride > 1 ? stride : 1;
}

// The position on the line of assignment j of `count`, 0 <= j < count.
MEGATRON_EXT_HOST_DEVICE inline int64_t interleaved_place(int64_t j,
                                                          int64_t count,
                                                          int64_t stride) {
    return j * stride % count;
}

}  // namespace megatron_ext
