// Runs the CUDA kernels on the host (cuda_on_host/) against the host stages, on random problems;
// built by test_kernels_on_host.py. Exits with 1 and a line on stderr at a difference.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "megatron_ext/api.h"
#include "megatron_ext/cuda_api.h"
#include "megatron_ext/interleave.h"

using namespace megatron_ext;

namespace {

std::mt19937_64 random_numbers(11);

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "broken: %s\n", what);
    std::exit(1);
}

int64_t pick(int64_t low, int64_t high) {
    const auto choices = static_cast<uint64_t>(high - low) + 1;
    return low + static_cast<int64_t>(random_numbers() % choices);
}

template <class T>
T one_of(std::initializer_list<T> choices) {
    return *(choices.begin() + pick(0, static_cast<int64_t>(choices.size()) - 1));
}

// Memory full of other values than 0, with a margin that must stay as it is.
template <class T>
class Guarded {
  public:
    explicit Guarded(int64_t size) : size_(size), bytes_(size * sizeof(T) + kMargin, kGarbage) {}

    T* data() { return reinterpret_cast<T*>(bytes_.data()); }

    // The values; to be asked when all is written.
    std::vector<T> values() {
        require(std::all_of(bytes_.begin() + size_ * sizeof(T),
                            bytes_.end(),
                            [](char byte) { return byte == kGarbage; }),
                "nothing is written behind the end");
        return std::vector<T>(data(), data() + size_);
    }

  private:
    static constexpr int64_t kMargin = 256;
    static constexpr char kGarbage = 0x55;
    int64_t size_;
    std::vector<char> bytes_;
};

QuotaProblem random_problem() {
    const int64_t ranks = one_of<int64_t>({2, 4, 6, 8, 8, 8, 40, 72});
    int64_t domain = pick(1, 3) == 1 ? pick(1, ranks) : ranks;
    while (ranks % domain != 0) --domain;
    return {ranks,
            ranks * one_of<int64_t>({1, 2, 3, 8}),
            one_of<int64_t>({1, 1, 2, 3, 8}),
            domain,
            0,
            one_of<int64_t>({1, 1, 1, 7})};
}

Tolerances random_tolerances() {
    if (pick(1, 4) == 1) return {{200'000, 10'000, 0}, 3};
    return {{one_of<int64_t>({0, 0, 10'000, 10'000, 200'000})}, 1};
}

// Of hot and cold experts, and of some ranks that have only cold ones: such loads take the planner
// more than one threshold. Small ones are full of ties.
std::vector<int64_t> random_loads(const QuotaProblem& problem, int64_t batch) {
    const int64_t ranks = problem.num_ranks;
    const int64_t experts = problem.num_experts;
    const int64_t scale =
        one_of<int64_t>({1, 3, 50, 4000, int64_t{1} << 33, INT64_MAX / (ranks * experts)});
    std::vector<int64_t> load(batch * ranks * experts);
    for (int64_t b = 0; b < batch; ++b) {
        const int64_t cold = pick(0, ranks - 1);
        for (int64_t e = 0; e < experts; ++e) {
            const int64_t heat = e * ranks / experts < cold ? 40 : pick(1, 10);
            for (int64_t r = 0; r < ranks; ++r) {
                load[(b * ranks + r) * experts + e] = pick(0, scale) / heat;
            }
        }
    }
    return load;
}

struct SomeLines {
    SomeLines(int64_t experts, int64_t ranks)
        : experts(experts), ranks(ranks), memory(Lines::bytes(experts, ranks)) {}

    Lines lines() { return Lines::in(memory.data(), experts, ranks); }

    // Against the definition.
    void require_equal(const int64_t* shares, const int64_t* ids) {
        memory.values();
        for (int64_t e = 0; e < experts; ++e) {
            int64_t count = 0;
            int32_t pieces = 0;
            const auto lay = [&](int64_t t) {
                const int64_t i = e * ranks + t;
                if (shares[i] == 0) return;
                count += shares[i];
                const int64_t piece = e * ranks + pieces++;
                require(lines().end[piece] == count, "a piece is as long as its share");
                require(lines().instance[piece] == ids[i], "a piece is its instance's");
            };
            const int64_t home = e / (experts / ranks);
            lay(home);
            for (int64_t t = 0; t < ranks; ++t) {
                if (t != home) lay(t);
            }
            require(lines().count[e] == count && lines().num_pieces[e] == pieces, "no more");
            require(lines().stride[e] == (count > 0 ? interleave_stride(count) : 1), "the stride");
        }
    }

    const int64_t experts;
    const int64_t ranks;
    Guarded<char> memory;
};

// What rank `source` does by a plan, and its seal. `split` is that rank's row, and `load` is that
// of `quotas` without what is between its rows.
void share(const SharedQuotas& quotas,
           PlacedInstances placed,
           int64_t source,
           const std::vector<int64_t>& split,
           const std::vector<int64_t>& load) {
    const int64_t ranks = quotas.num_ranks;
    const int64_t experts = quotas.num_experts;
    std::vector<int64_t> ids(experts * ranks);
    number_instances(ranks, experts, placed.num_slots, placed.slots, ids.data());
    const int64_t places = experts / ranks + placed.num_slots;
    std::vector<int64_t> arriving(ranks * places);
    count_arriving(ranks,
                   experts,
                   placed.num_slots,
                   load.data(),
                   quotas.quota,
                   placed.slots + source * placed.num_slots,
                   source,
                   arriving.data());
    std::vector<int64_t> arrivals(ranks + places);
    sum_arriving(ranks, places, arriving.data(), arrivals.data());
    const int64_t num_replicas = ranks * placed.num_slots;
    const SealedPlan plan{
        load.data(), experts, experts, quotas.quota, placed.slots, ranks * experts, num_replicas};
    std::vector<int64_t> seals(ranks * (experts + 1), 9);
    const auto seal_of = [&](int64_t rank) -> int64_t& {
        return seals[rank * (experts + 1) + experts];
    };
    for (int64_t r = 0; r < ranks; ++r) seal_of(r) = 5;
    if (pick(0, 1) == 1) seal_of(pick(0, ranks - 1)) = -6;
    std::vector<int64_t> kept(2 + ranks, 0);
    if (pick(0, 3) == 0) kept[0] = 1;  // one before
    Guarded<int64_t> kept_there(2 + ranks);
    std::copy(kept.begin(), kept.end(), kept_there.data());
    Seals before{seals.data() + experts, experts + 1, ranks, 3, kept.data()};
    const int64_t seal = seal_plan(plan, before);
    before.difference = kept_there.data();

    for (const bool is_sealed : {true, false}) {
        Guarded<int64_t> split_there(experts * ranks), ids_there(experts * ranks), seal_there(1);
        Guarded<int64_t> arriving_there(ranks * places), arrivals_there(ranks + places);
        SomeLines lines(experts, ranks);
        placed.physical_index = ids_there.data();
        SealedPlan plan_there = plan;
        plan_there.load = quotas.load;
        plan_there.load_stride = quotas.load_stride;
        Sealing sealing{plan_there, before, seal_there.data()};
        if (!is_sealed) sealing = {};
        share_plan_cuda(quotas,
                        source,
                        split_there.data(),
                        arriving_there.data(),
                        arrivals_there.data(),
                        placed,
                        lines.lines(),
                        sealing,
                        nullptr);
        require(split_there.values() == split, "the split equals the host's");
        require(ids_there.values() == ids, "the ids equal the host's");
        require(arriving_there.values() == arriving, "what arrives equals the host's");
        require(arrivals_there.values() == arrivals, "the sums of that equal the host's");
        lines.require_equal(split.data(), ids.data());
        if (!is_sealed) continue;
        require(seal_there.values()[0] == seal, "the seal equals the host's");
        require(kept_there.values() == kept, "the same difference is kept");
    }
}

// Of a plan without replicas, an expert a rank.
void share_at_home(int64_t ranks) {
    std::vector<int64_t> load(ranks * ranks, 0), quota(ranks * ranks, 0), split(ranks * ranks, 0);
    for (int64_t e = 0; e < ranks; ++e) {
        load[e] = split[e * ranks + e] = quota[e * ranks + e] = pick(0, 9);  // of rank 0
    }
    share({ranks, ranks, load.data(), ranks, quota.data()}, {nullptr, 0, nullptr}, 0, split, load);
}

void plan_and_split(const QuotaProblem& problem, int64_t batch, const Tolerances& tolerances) {
    const int64_t ranks = problem.num_ranks;
    const int64_t experts = problem.num_experts;
    const std::vector<int64_t> load = random_loads(problem, batch);
    const int64_t plans = batch * tolerances.count;
    std::vector<int64_t> quota(plans * experts * ranks);
    std::vector<int32_t> slots(plans * ranks * problem.num_slots);
    Guarded<int64_t> quota_there(quota.size());
    Guarded<int32_t> slots_there(slots.size());
    // A GPU with less makes the same plans in global memory.
    cuda_on_host::most_shared_bytes = (pick(0, 2) == 0 ? 99 : 227) << 10;
    Guarded<char> workspace(solve_ladder_cuda_bytes(problem, tolerances, batch));
    // In a column more, as of seals that came with the load.
    const int64_t stride = experts + pick(0, 1);
    std::vector<int64_t> rows(batch * ranks * stride, -1);
    for (int64_t i = 0; i < batch * ranks; ++i) {
        std::copy_n(load.data() + i * experts, experts, rows.data() + i * stride);
    }
    const cudaError_t status = solve_ladder_cuda(problem,
                                                 tolerances,
                                                 rows.data(),
                                                 stride,
                                                 batch,
                                                 workspace.data(),
                                                 quota_there.data(),
                                                 slots_there.data(),
                                                 nullptr);
    require(status == cudaSuccess, "the GPU has the memory that a plan takes");
    workspace.values();
    for (int64_t p = 0; p < plans; ++p) {
        QuotaProblem one = problem;
        one.tolerance_ppm = tolerances.ppm[p % tolerances.count];
        solve_quota(one,
                    load.data() + p / tolerances.count * ranks * experts,
                    quota.data() + p * experts * ranks,
                    slots.data() + p * ranks * problem.num_slots);
    }
    require(quota_there.values() == quota, "the quotas equal the host's");
    require(slots_there.values() == slots, "the slots equal the host's");
    if (batch == 0) return;

    const int64_t source = pick(0, ranks - 1);
    std::vector<int64_t> split(experts * ranks);
    split_quota(ranks, experts, load.data(), quota.data(), source, split.data());
    const SharedQuotas quotas{ranks, experts, rows.data(), stride, quota.data()};
    share(quotas, {slots.data(), problem.num_slots, nullptr}, source, split, load);
}

// What the host stage refuses, the kernels leave out.
void check_left_out(const AssignProblem& problem,
                    const bool* map,
                    const std::vector<int64_t>& shares,
                    const std::vector<int32_t>& logical,
                    const std::vector<int32_t>& physical) {
    std::vector<int64_t> taken(shares.size(), 0);
    for (int64_t n = 0; n < problem.num_tokens; ++n) {
        int64_t last = -1;
        bool ended = false;
        for (int64_t i = n * problem.top_k; i < (n + 1) * problem.top_k; ++i) {
            require((logical[i] < 0) == (physical[i] < 0), "both tables end a row together");
            require(logical[i] < 0 || !ended, "a row has no gaps");
            ended = ended || logical[i] < 0;
            if (ended) continue;
            require(logical[i] > last, "a row rises");
            require(map[n * problem.num_experts + logical[i]], "only choices are assigned");
            require(physical[i] / problem.num_ranks == logical[i], "an instance of the expert");
            ++taken[physical[i]];
            last = logical[i];
        }
    }
    for (size_t i = 0; i < taken.size(); ++i) {
        require(taken[i] <= shares[i], "no instance takes more than its share");
    }
}

void route() {
    const int64_t ranks = one_of<int64_t>({1, 2, 4, 40});
    const int64_t experts = ranks * one_of<int64_t>({1, 3, 8});
    const int64_t top_k = pick(1, std::min<int64_t>(experts, 40));
    const AssignProblem problem{pick(0, 1) * pick(0, 2000), experts, ranks, top_k};
    const auto map = std::make_unique<bool[]>(problem.num_tokens * experts);
    const int64_t hot = pick(1, experts);
    for (int64_t n = 0; n < problem.num_tokens; ++n) {
        for (int64_t k = pick(0, top_k); k > 0; --k) map[n * experts + pick(0, hot - 1)] = true;
    }
    std::vector<int64_t> counts(experts);
    count_load(map.get(), problem.num_tokens, experts, counts.data());
    const int64_t tail = pick(-9, 9);
    const int64_t num_tails = pick(0, 1);
    Guarded<int64_t> counts_there(experts + num_tails);
    Guarded<int32_t> token_marks(2 * TokenMarks::num_tiles(problem.num_tokens) * experts);
    const TokenMarks marked_there = TokenMarks::in(token_marks.data(), problem.num_tokens, experts);
    count_load_cuda(map.get(),
                    problem.num_tokens,
                    experts,
                    num_tails == 1 ? &tail : nullptr,
                    marked_there,
                    counts_there.data(),
                    nullptr);
    std::vector<int64_t> expected = counts;
    expected.resize(experts + num_tails, tail);
    require(counts_there.values() == expected, "the counts equal the host's");
    token_marks.values();

    std::vector<int64_t> shares(experts * ranks, 0), ids(experts * ranks);
    for (int64_t i = 0; i < experts * ranks; ++i) ids[i] = i;
    for (int64_t e = 0; e < experts; ++e) {
        for (int64_t left = counts[e]; left > 0;) {
            const int64_t part = pick(1, left);
            shares[e * ranks + pick(0, ranks - 1)] += part;
            left -= part;
        }
    }
    const auto assign_there = [&](const AssignProblem& asked, const Placing& placing = {}) {
        Guarded<int32_t> logical(asked.num_tokens * asked.top_k);
        Guarded<int32_t> physical(asked.num_tokens * asked.top_k);
        SomeLines lines(experts, ranks);
        lay_lines_cuda(ranks, experts, shares.data(), ids.data(), lines.lines(), nullptr);
        lines.require_equal(shares.data(), ids.data());
        assign_cuda(
            asked, marked_there, lines.lines(), logical.data(), physical.data(), placing, nullptr);
        return std::pair{logical.values(), physical.values()};
    };
    std::vector<int32_t> logical(problem.num_tokens * top_k), physical(logical.size());
    require(assign(problem, map.get(), shares.data(), ids.data(), logical.data(), physical.data()),
            "the host assigns all");
    const auto require_equal = [&](const auto& tables) {
        require(tables.first == logical, "the experts equal the host's");
        require(tables.second == physical, "the instances equal the host's");
    };
    require_equal(assign_there(problem));

    const int64_t width = experts * ranks;
    std::vector<uint16_t> probs(problem.num_tokens * experts);
    for (uint16_t& prob : probs) prob = static_cast<uint16_t>(random_numbers());
    std::vector<uint16_t> placed(problem.num_tokens * width);
    const auto marks = std::make_unique<bool[]>(placed.size());
    Guarded<uint16_t> placed_there(placed.size());
    Guarded<bool> marks_there(placed.size());
    copy_choices(reinterpret_cast<const char*>(probs.data()),
                 logical.data(),
                 experts,
                 reinterpret_cast<char*>(placed.data()),
                 physical.data(),
                 width,
                 problem.num_tokens,
                 top_k,
                 sizeof(uint16_t));
    mark_choices(physical.data(), width, problem.num_tokens, top_k, marks.get());
    require_equal(assign_there(
        problem, {probs.data(), placed_there.data(), marks_there.data(), width, sizeof(uint16_t)}));
    require(placed_there.values() == placed, "the placed values equal the host's");
    const std::vector<bool> marked = marks_there.values();
    require(std::equal(marked.begin(), marked.end(), marks.get()), "the marks equal the host's");

    // Too few shares, too many, too short rows.
    for (int64_t& share : shares) share = std::max<int64_t>(0, share + pick(-2, 2));
    const AssignProblem narrow{problem.num_tokens, experts, ranks, pick(1, top_k)};
    Guarded<uint16_t> inside(problem.num_tokens * (width / 2));
    Guarded<bool> marks_inside(problem.num_tokens * (width / 2));
    const auto [some_logical, some_physical] = assign_there(
        narrow, {probs.data(), inside.data(), marks_inside.data(), width / 2, sizeof(uint16_t)});
    check_left_out(narrow, map.get(), shares, some_logical, some_physical);
    inside.values();
    marks_inside.values();

    // And back.
    const auto require_back = [&](const std::vector<int32_t>& from,
                                  int64_t from_width,
                                  const std::vector<int32_t>& to,
                                  int64_t to_width,
                                  int64_t choices,
                                  const std::vector<uint16_t>& expected) {
        Guarded<uint16_t> back(problem.num_tokens * to_width);
        copy_choices_cuda(placed.data(),
                          from.data(),
                          from_width,
                          back.data(),
                          to.data(),
                          to_width,
                          problem.num_tokens,
                          choices,
                          sizeof(uint16_t),
                          nullptr);
        require(back.values() == expected, "the values that come back equal the host's");
    };
    std::vector<uint16_t> back(probs.size());
    copy_choices(reinterpret_cast<const char*>(placed.data()),
                 physical.data(),
                 width,
                 reinterpret_cast<char*>(back.data()),
                 logical.data(),
                 experts,
                 problem.num_tokens,
                 top_k,
                 sizeof(uint16_t));
    require_back(physical, width, logical, experts, top_k, back);
    // Choices of columns that one side does not have are left out, and the rest stays 0.
    for (const auto [from_width, to_width] :
         {std::pair{width / 2, experts}, {width, experts / 2}}) {
        std::vector<uint16_t> some_back(problem.num_tokens * to_width);
        for (int64_t i = 0; i < problem.num_tokens * narrow.top_k; ++i) {
            const int64_t n = i / narrow.top_k, column = some_physical[i], expert = some_logical[i];
            if (column < 0 || column >= from_width || expert < 0 || expert >= to_width) continue;
            some_back[n * to_width + expert] = placed[n * from_width + column];
        }
        require_back(some_physical, from_width, some_logical, to_width, narrow.top_k, some_back);
    }
}

}  // namespace

int main(int, char** arguments) {
    const int rounds = std::atoi(arguments[1]);
    const Tolerances even{{0}, 1}, usual{{10'000}, 1}, ladder{{500'000, 50'000, 0}, 3};
    plan_and_split({1, 4, 2, 1, 0, 1}, 2, even);     // one rank
    plan_and_split({8, 64, 0, 8, 0, 1}, 1, even);    // no slots
    plan_and_split({8, 8, 1, 8, 0, 1}, 0, even);     // no loads
    plan_and_split({8, 8, 1, 1, 0, 1}, 70, even);    // more blocks than are launched at once
    plan_and_split({8, 8, 1, 1, 0, 1}, 25, ladder);  // the same, parted within a load
    plan_and_split({64, 256, 2, 64, 0, 1}, 1, usual);
    share_at_home(600);  // more seals than threads
    for (int i = 0; i < rounds; ++i) {
        const QuotaProblem problem = random_problem();
        const Tolerances tolerances = random_tolerances();
        plan_and_split(problem, problem.num_ranks > 8 ? 1 : pick(1, 3), tolerances);
        route();
    }
    std::printf("%d rounds\n", rounds);
}
