// Runs the host stages on many random problems; built with sanitizers by test_sanitizers.py.
// Exits with 1 and a line on stderr when a result is not what every caller relies on.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "megatron_ext/api.h"

using namespace megatron_ext;

namespace {

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "broken: %s\n", what);
    std::exit(1);
}

int64_t pick(std::mt19937_64& random, int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % (static_cast<uint64_t>(high - low) + 1));
}

template <class T>
T one_of(std::mt19937_64& random, std::initializer_list<T> choices) {
    return *(choices.begin() + pick(random, 0, static_cast<int64_t>(choices.size()) - 1));
}

void check_plan(const QuotaProblem& problem,
                const std::vector<int64_t>& load,
                const std::vector<int64_t>& quota,
                const std::vector<int32_t>& slots) {
    const int64_t ranks = problem.num_ranks;
    const int64_t experts = problem.num_experts;
    const int64_t mains = experts / ranks;
    std::vector<int64_t> before(ranks, 0), after(ranks, 0);
    for (int64_t e = 0; e < experts; ++e) {
        int64_t total = 0, served = 0;
        for (int64_t r = 0; r < ranks; ++r) total += load[r * experts + e];
        for (int64_t t = 0; t < ranks; ++t) {
            const int64_t count = quota[e * ranks + t];
            const int32_t* held = slots.data() + t * problem.num_slots;
            const auto copies = std::count(held, held + problem.num_slots, e);
            require(count >= 0, "a quota is not negative");
            require(copies <= (t == e / mains ? 0 : 1), "one instance of an expert on a rank");
            if (copies == 1) {
                require(count >= problem.min_quota, "a replica has min_quota");
                require(t / problem.nvlink_domain == e / mains / problem.nvlink_domain,
                        "a replica stays in its domain");
            } else if (t != e / mains) {
                require(count == 0, "quota only where an instance is");
            }
            served += count;
            after[t] += count;
        }
        require(served == total, "every assignment is computed");
        before[e / mains] += total;
    }
    require(*std::max_element(after.begin(), after.end()) <=
                *std::max_element(before.begin(), before.end()),
            "never worse than no balancing");
    require(*std::max_element(after.begin(), after.end()) >= lower_bound(problem, load.data()),
            "the bound is a bound");
}

void plan_split_assign(std::mt19937_64& random) {
    const int64_t ranks = one_of<int64_t>(random, {1, 2, 3, 4, 6, 8, 16, 33});
    const int64_t mains = one_of<int64_t>(random, {1, 2, 3, 8});
    const int64_t experts = ranks * mains;
    int64_t domain = pick(random, 1, ranks);
    while (ranks % domain != 0) --domain;
    const QuotaProblem problem{
        ranks,
        experts,
        one_of<int64_t>(random, {0, 1, 1, 2, 3, 16}),
        domain,
        one_of<int64_t>(random, {0, 1, 10'000, 3'000'000, kMaxTolerancePpm}),
        one_of<int64_t>(random, {1, 1, 1, 7, 1000, INT64_MAX})};
    // From nothing at all to the largest sums that fit.
    const int64_t scale =
        one_of<int64_t>(random, {0, 1, 3, 50, 1 << 20, INT64_MAX / (ranks * experts)});
    std::vector<int64_t> load(ranks * experts);
    const int64_t silent = pick(random, 0, ranks - 1);  // a rank whose experts get nothing
    const bool flat = pick(random, 0, 9) == 0;          // all entries as large as they may be
    for (int64_t e = 0; e < experts; ++e) {
        const int64_t heat = pick(random, 1, 40);
        for (int64_t r = 0; r < ranks; ++r) {
            const int64_t count = flat ? scale : pick(random, 0, scale) / heat;
            load[r * experts + e] = e / mains == silent && !flat ? 0 : count;
        }
    }

    std::vector<int64_t> quota(experts * ranks);
    std::vector<int32_t> slots(ranks * problem.num_slots);
    solve_paper(problem, load.data(), quota.data(), slots.data());
    check_plan(problem, load, quota, slots);
    const int64_t search_min_quota =
        std::max(problem.min_quota, one_of<int64_t>(random, {1, 7, 1024}));
    solve_shipped(problem, search_min_quota, load.data(), quota.data(), slots.data());
    check_plan(problem, load, quota, slots);
    solve_quota(problem, load.data(), quota.data(), slots.data());
    check_plan(problem, load, quota, slots);

    const Tolerances tolerances{{kMaxTolerancePpm, 300'000, 10'000, 0}, 4};
    const auto cost = [&] { return one_of<int64_t>(random, {0, 1, 1000, INT64_MAX}); };
    solve_fastest(
        problem, tolerances, {cost(), cost(), cost()}, load.data(), quota.data(), slots.data());
    check_plan(problem, load, quota, slots);

    std::vector<int64_t> split(experts * ranks), filled(experts * ranks, 0);
    for (int64_t source = 0; source < ranks; ++source) {
        split_quota(ranks, experts, load.data(), quota.data(), source, split.data());
        for (int64_t e = 0; e < experts; ++e) {
            int64_t row = 0;
            for (int64_t t = 0; t < ranks; ++t) {
                row += split[e * ranks + t];
                filled[e * ranks + t] += split[e * ranks + t];
            }
            require(row == load[source * experts + e], "a row of the split is the load");
        }
    }
    require(filled == quota, "the columns of the split are the quotas");
}

// A third of the ranks is cold, and replicas are large: the longest chains there are.
void plan_for_cold_ranks(std::mt19937_64& random) {
    const int64_t ranks = pick(random, 8, 14);
    const int64_t experts = 3 * ranks;
    std::vector<int64_t> load(ranks * experts, 0);
    int64_t total = 0;
    for (int64_t e = 0; e < experts; ++e) {
        load[e] = e / 3 % 3 == 0 ? 0 : pick(random, 900, 1000);
        total += load[e];
    }
    const int64_t fifth_of_mean = total / ranks / 5;
    const QuotaProblem problem{ranks, experts, 3, ranks, 10'000, fifth_of_mean};
    std::vector<int64_t> quota(experts * ranks);
    std::vector<int32_t> slots(ranks * problem.num_slots);
    solve_quota(problem, load.data(), quota.data(), slots.data());
    check_plan(problem, load, quota, slots);
}

void route(std::mt19937_64& random) {
    const int64_t ranks = one_of<int64_t>(random, {1, 2, 4});
    const int64_t experts = ranks * one_of<int64_t>(random, {1, 3, 8});
    const int64_t top_k = pick(random, 1, experts);
    const AssignProblem problem{pick(random, 0, 300), experts, ranks, top_k};
    const auto map = std::make_unique<bool[]>(problem.num_tokens * experts);
    std::vector<int64_t> counts(experts);
    for (int64_t n = 0; n < problem.num_tokens; ++n) {
        for (int64_t k = pick(random, 0, top_k); k > 0; --k) {
            map[n * experts + pick(random, 0, experts - 1)] = true;
        }
    }
    count_load(map.get(), problem.num_tokens, experts, counts.data());
    for (int64_t e = 0; e < experts; ++e) {
        int64_t count = 0;
        for (int64_t n = 0; n < problem.num_tokens; ++n) count += map[n * experts + e];
        require(counts[e] == count, "the load is counted");
    }
    std::vector<int64_t> shares(experts * ranks, 0), ids(experts * ranks);
    for (int64_t i = 0; i < experts * ranks; ++i) ids[i] = i;
    for (int64_t e = 0; e < experts; ++e) {
        for (int64_t left = counts[e]; left > 0;) {
            const int64_t part = pick(random, 1, left);
            shares[e * ranks + pick(random, 0, ranks - 1)] += part;
            left -= part;
        }
    }
    std::vector<int32_t> logical(problem.num_tokens * top_k), physical(logical.size());
    require(assign(problem, map.get(), shares.data(), ids.data(), logical.data(), physical.data()),
            "shares that fit are filled");
    std::vector<int64_t> taken(experts * ranks, 0);
    for (size_t i = 0; i < physical.size(); ++i) {
        require((physical[i] < 0) == (logical[i] < 0), "rows end together");
        if (physical[i] < 0) continue;
        require(physical[i] / ranks == logical[i], "an instance of the expert chosen");
        ++taken[physical[i]];
    }
    require(taken == shares, "every instance takes its share");

    const int64_t width = experts * ranks;
    std::vector<float> probs(problem.num_tokens * experts), back(probs.size());
    for (size_t i = 0; i < probs.size(); ++i)
        probs[i] = map[i] ? 1.0f + static_cast<float>(i) : 0.0f;
    std::vector<float> placed(problem.num_tokens * width);
    const auto copy = [&](auto& from,
                          auto& from_index,
                          int64_t from_width,
                          auto& to,
                          auto& to_index,
                          int64_t to_width) {
        return copy_choices(reinterpret_cast<const char*>(from.data()),
                            from_index.data(),
                            from_width,
                            reinterpret_cast<char*>(to.data()),
                            to_index.data(),
                            to_width,
                            problem.num_tokens,
                            top_k,
                            sizeof(float));
    };
    require(copy(probs, logical, experts, placed, physical, width), "all indices are inside");
    require(copy(placed, physical, width, back, logical, experts), "all indices are inside");
    require(back == probs, "there and back again");

    const auto marked = std::make_unique<bool[]>(problem.num_tokens * experts);
    std::fill_n(marked.get(), problem.num_tokens * experts, true);
    mark_choices(logical.data(), experts, problem.num_tokens, top_k, marked.get());
    require(std::equal(map.get(), map.get() + problem.num_tokens * experts, marked.get()),
            "the choices are those of the map");
    if (counts[0] > 0) {
        shares[0] += 1;
        require(
            !assign(problem, map.get(), shares.data(), ids.data(), logical.data(), physical.data()),
            "a share that is not filled is noticed");
    }
}

}  // namespace

int main(int, char** arguments) {
    std::mt19937_64 random(7);
    const int rounds = std::atoi(arguments[1]);
    for (int i = 0; i < rounds; ++i) {
        plan_split_assign(random);
        if (i % 4 == 0) plan_for_cold_ranks(random);
        route(random);
    }
    std::printf("%d rounds\n", rounds);
}
