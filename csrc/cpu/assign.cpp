// Stage 3, host build: an instance for every assignment, and routing over instances.

#include <algorithm>
#include <cstring>
#include <vector>

#include "megatron_ext/api.h"
#include "megatron_ext/interleave.h"

namespace megatron_ext {
namespace {

// An expert's instances on a line, and the next assignment's place on it.
struct Line {
    int64_t count = 0;
    int64_t stride = 0;
    int64_t place = 0;
    int64_t first_piece = 0;  // of this expert in the list of all pieces
    int64_t left = 0;         // assignments still to come
};

struct Piece {
    int64_t end;
    int32_t physical;
};

}  // namespace

bool assign(const AssignProblem& problem,
            const bool* routing_map,
            const int64_t* source_quota,
            const int64_t* physical_index,
            int32_t* logical,
            int32_t* physical) {
    const int64_t experts = problem.num_experts;
    const int64_t ranks = problem.num_ranks;
    std::vector<Line> lines(experts);
    std::vector<Piece> pieces;
    bool fits = true;
    for (int64_t e = 0; e < experts && fits; ++e) {
        Line& line = lines[e];
        line.first_piece = static_cast<int64_t>(pieces.size());
        const auto lay = [&](int64_t t) {
            const int64_t share = source_quota[e * ranks + t];
            if (share == 0) return;
            const int64_t id = physical_index[e * ranks + t];
            // A token chooses an expert once.
            fits = fits && share > 0 && share <= problem.num_tokens - line.count && id >= 0 &&
                   id <= INT32_MAX;
            if (!fits) return;
            line.count += share;
            pieces.push_back({line.count, static_cast<int32_t>(id)});
        };
        const int64_t home = e / (experts / ranks);
        lay(home);
        for (int64_t t = 0; t < ranks; ++t) {
            if (t != home) lay(t);
        }
        line.left = line.count;
        if (line.count > 0) line.stride = interleave_stride(line.count);
    }
    if (!fits) return false;

    for (int64_t n = 0; n < problem.num_tokens; ++n) {
        const bool* choices = routing_map + n * experts;
        int32_t* token_logical = logical + n * problem.top_k;
        int32_t* token_physical = physical + n * problem.top_k;
        int64_t k = 0;
        for (int64_t e = 0; e < experts; ++e) {
            // Most experts are not chosen: look at eight at a time.
            uint64_t eight = 0;
            if (e % 8 == 0 && e + 8 <= experts) {
                std::memcpy(&eight, choices + e, sizeof(eight));
                if (eight == 0) {
                    e += 7;
                    continue;
                }
            }
            if (!choices[e]) continue;
            Line& line = lines[e];
            if (k == problem.top_k || line.left == 0) return false;
            const Piece* piece = pieces.data() + line.first_piece;
            while (piece->end <= line.place) ++piece;
            token_logical[k] = static_cast<int32_t>(e);
            token_physical[k] = piece->physical;
            ++k;
            --line.left;
            // j * stride mod count, one step on.
            line.place += line.stride;
            if (line.place >= line.count) line.place -= line.count;
        }
        std::fill(token_logical + k, token_logical + problem.top_k, -1);
        std::fill(token_physical + k, token_physical + problem.top_k, -1);
    }
    return std::all_of(lines.begin(), lines.end(), [](const Line& line) { return line.left == 0; });
}

bool copy_choices(const char* from,
                  const int32_t* from_index,
                  int64_t from_width,
                  char* to,
                  const int32_t* to_index,
                  int64_t to_width,
                  int64_t num_tokens,
                  int64_t top_k,
                  int64_t element_size) {
    std::fill_n(to, num_tokens * to_width * element_size, char{0});
    // The copy moves bits, and reads no number.
    const auto copy = [&](auto element) {
        const auto* source = reinterpret_cast<const decltype(element)*>(from);
        auto* target = reinterpret_cast<decltype(element)*>(to);
        for (int64_t n = 0; n < num_tokens; ++n) {
            for (int64_t i = n * top_k; i < (n + 1) * top_k && to_index[i] >= 0; ++i) {
                if (from_index[i] < 0 || from_index[i] >= from_width || to_index[i] >= to_width) {
                    return false;
                }
                target[n * to_width + to_index[i]] = source[n * from_width + from_index[i]];
            }
        }
        return true;
    };
    switch (element_size) {
        case 2:
            return copy(uint16_t{});
        case 4:
            return copy(uint32_t{});
        default:
            return copy(uint64_t{});
    }
}

void mark_choices(
    const int32_t* index, int64_t width, int64_t num_tokens, int64_t top_k, bool* map) {
    std::fill_n(map, num_tokens * width, false);
    for (int64_t n = 0; n < num_tokens; ++n) {
        for (int64_t i = n * top_k; i < (n + 1) * top_k && index[i] >= 0; ++i) {
            map[n * width + index[i]] = true;
        }
    }
}

}  // namespace megatron_ext
