// The seal of a plan, host build.

#include <algorithm>

#include "megatron_ext/api.h"
#include "megatron_ext/seal.h"

namespace megatron_ext {

int64_t seal_plan(const SealedPlan& plan, const Seals& before) {
    const auto seal_of = [&](int64_t rank) { return before.each[rank * before.stride]; };
    bool are_equal = true;
    for (int64_t r = 1; r < before.num_ranks; ++r) are_equal &= seal_of(r) == seal_of(0);
    if (!are_equal && before.difference[0] == 0) {
        before.difference[0] = 1;
        before.difference[1] = before.layer;
        for (int64_t r = 0; r < before.num_ranks; ++r) before.difference[2 + r] = seal_of(r);
    }
    return static_cast<int64_t>(plan.sum(0, 1));
}

}  // namespace megatron_ext
