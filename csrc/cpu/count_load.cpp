// Stage 1, host build: the assignments of each expert.

#include <algorithm>
#include <vector>

#include "megatron_ext/api.h"

namespace megatron_ext {

void count_load(const bool* routing_map, int64_t num_tokens, int64_t num_experts, int64_t* counts) {
    // Counted in bytes first, which the compiler adds many at a time; a byte holds 255 tokens.
    constexpr int64_t kTokensPerByte = 255;
    std::vector<uint8_t> partial(num_experts);
    std::fill_n(counts, num_experts, int64_t{0});
    for (int64_t first = 0; first < num_tokens; first += kTokensPerByte) {
        const int64_t last = std::min(first + kTokensPerByte, num_tokens);
        std::fill(partial.begin(), partial.end(), uint8_t{0});
        for (int64_t n = first; n < last; ++n) {
            const bool* choices = routing_map + n * num_experts;
            for (int64_t e = 0; e < num_experts; ++e) partial[e] += choices[e];
        }
        for (int64_t e = 0; e < num_experts; ++e) counts[e] += partial[e];
    }
}

}  // namespace megatron_ext
