// The time that a wait has lasted, as far as the waiting thread has run.
//
// A machine that is paused and continued, or a debugger, stops a wait together with all that it
// waits for. By the clock on the wall that may be hours. So time passes in ticks, from one look at
// the clock to the next, and a tick counts as `kLongestTickNs` at most.
#pragma once

#include <cstdint>

#include "megatron_ext/host_device.h"

namespace megatron_ext {

// Far longer than a busy machine keeps a polling thread from running.
constexpr uint64_t kLongestTickNs = 100'000'000;

struct LivedTime {
    uint64_t last_look_ns;
    uint64_t passed_ns = 0;

    // Time that has passed since the first look.
    MEGATRON_EXT_HOST_DEVICE uint64_t at(uint64_t now_ns) {
        const uint64_t tick = now_ns - last_look_ns;
        passed_ns += tick < kLongestTickNs ? tick : kLongestTickNs;
        last_look_ns = now_ns;
        return passed_ns;
    }
};

}  // namespace megatron_ext
