// The stages as functions on raw pointers, without Torch. The callers in bindings/ do the checks.
//
// Legend: R ranks of the EP group, E logical experts, M = E / R main experts per rank (the main of
// expert e lives on rank e / M), S slots per rank, N local tokens. Arrays are dense and row-major.
// "Instance order" of an expert: its home rank first, then the other ranks ascending.
#pragma once

#include <cstdint>

#include "megatron_ext/seal.h"

namespace megatron_ext {

// What planners hold. Tries count their work, their memory and the places of slots in 32 bits;
// sums over ranks of loads that are cut (planner/search.h) stay in 64.
constexpr int64_t kMaxRanks = 1 << 12;
constexpr int64_t kMaxExperts = 1 << 20;
constexpr int64_t kMaxReplicas = 1 << 20;  // R * S; besides, D * S * S is below 2^31
constexpr int64_t kMaxTolerancePpm = 1'000'000'000'000;

struct QuotaProblem {
    int64_t num_ranks;      // R
    int64_t num_experts;    // E, a multiple of R
    int64_t num_slots;      // S
    int64_t nvlink_domain;  // D, ranks per NVLink domain, divides R
    int64_t tolerance_ppm;  // allowed excess over the mean rank load, in millionths of the mean
    int64_t min_quota;      // fewest assignments a replica may carry, >= 1
};

// Choose replicas and quotas.
//   load   [R, E] assignments, >= 0; their sum fits int64
//   quota  [E, R] out, every entry written
//   slots  [R, S] out, every entry written: logical expert or -1, filled from slot 0
// Deterministic; equals tests/reference/search.py bit by bit.
void solve_quota(const QuotaProblem& problem, const int64_t* load, int64_t* quota, int32_t* slots);

// Tolerances to plan one load with, from loose to tight; each takes the place of `tolerance_ppm`.
struct Tolerances {
    static constexpr int kMost = 16;
    int64_t ppm[kMost];
    int64_t count;  // T, from 1 to kMost
};

// solve_quota() for each tolerance.
//   quota  [T, E, R] out, slots [T, R, S] out
void solve_ladder(const QuotaProblem& problem,
                  const Tolerances& tolerances,
                  const int64_t* load,
                  int64_t* quota,
                  int32_t* slots);

// Picoseconds of sending an expert's weights, of a token's way there and back, and of computing an
// assignment; >= 0.
struct LayerCosts {
    int64_t expert;
    int64_t token;
    int64_t assignment;
};

// The plan of solve_ladder(), or of no balancing, with which the modelled time of the layer is
// least; the earlier of equally fast ones. Tolerances are tried by the rule of
// megatron_ext/balance/strategies/fastest.py, so not always all of them. Times that leave int64
// count as its largest. load, quota and slots as of solve_quota().
void solve_fastest(const QuotaProblem& problem,
                   const Tolerances& tolerances,
                   const LayerCosts& costs,
                   const int64_t* load,
                   int64_t* quota,
                   int32_t* slots);

// Replicas and quotas by UltraEP's Algorithm 1, to compare with; equals
// tests/reference/paper.py bit by bit.
void solve_paper(const QuotaProblem& problem, const int64_t* load, int64_t* quota, int32_t* slots);

// The same as UltraEP's authors ship it. Its search gives no replica less than `search_min_quota`;
// problem.min_quota is for its first three tests.
void solve_shipped(const QuotaProblem& problem,
                   int64_t search_min_quota,
                   const int64_t* load,
                   int64_t* quota,
                   int32_t* slots);

// Assignments that the busiest rank has at least in every legal plan; load as above.
int64_t lower_bound(const QuotaProblem& problem, const int64_t* load);

// Share every quota among the source ranks; one source's rows.
//   load   [R, E], quota [E, R]: equal row and column sums per expert
//   split  [E, R] out, every entry written: assignments of `source_rank` that rank t computes
// Deterministic; equals tests/reference/reroute.py bit by bit.
void split_quota(int64_t num_ranks,
                 int64_t num_experts,
                 const int64_t* load,
                 const int64_t* quota,
                 int64_t source_rank,
                 int64_t* split);

// Number the instances of a plan.
//   slots           [R, S] logical expert in each slot, or any number that is none
//   physical_index  [E, R] out: physical id of the instance on rank t, or -1
void number_instances(int64_t num_ranks,
                      int64_t num_experts,
                      int64_t num_slots,
                      const int32_t* slots,
                      int64_t* physical_index);

// Count what comes to the instances of one rank: their columns of the split.
//   load, quota  as of split_quota()
//   slots        [S] logical expert in each slot of `rank`, or any number that is none
//   arriving     [R, M + S] out: assignments of each source rank that the rank's mains, then its
//                slots, take
void count_arriving(int64_t num_ranks,
                    int64_t num_experts,
                    int64_t num_slots,
                    const int64_t* load,
                    const int64_t* quota,
                    const int32_t* slots,
                    int64_t rank,
                    int64_t* arriving);

// Sum what comes to a rank.
//   arriving  [R, M + S], as of count_arriving()
//   arrivals  [R + (M + S)] out: assignments of each source rank, and of each main, then each slot
void sum_arriving(int64_t num_ranks, int64_t places, const int64_t* arriving, int64_t* arrivals);

// Count the assignments of each expert.
//   routing_map  [N, E], true where the token goes to the expert
//   counts       [E] out, every entry written
void count_load(const bool* routing_map, int64_t num_tokens, int64_t num_experts, int64_t* counts);

// Seal a load and its plan, and compare the ranks' seals of the plan before: if they differ, and no
// difference is kept yet, keep it.
int64_t seal_plan(const SealedPlan& plan, const Seals& before);

struct AssignProblem {
    int64_t num_tokens;   // N
    int64_t num_experts;  // E, a multiple of R
    int64_t num_ranks;    // R
    int64_t top_k;        // K, most choices of a token
};

// Give every assignment of this rank an instance, so that each takes exactly its share. The j-th
// assignment of an expert goes to the position on the line of its instances by interleave.h.
//   routing_map     [N, E], true where the token goes to the expert
//   source_quota    [E, R] assignments of this rank that the instance on rank t takes
//   physical_index  [E, R] physical id of the instance on rank t; read where source_quota is not 0
//   logical         [N, K] out, every entry written: the token's experts, rising, then -1
//   physical        [N, K] out, every entry written: the instances that take them, then -1
// Returns false, with nothing useful written, if a token has more than K choices, the column sums
// of routing_map are not the row sums of source_quota, or a physical id that is read is none.
// Deterministic; equals tests/reference/reroute.py.
bool assign(const AssignProblem& problem,
            const bool* routing_map,
            const int64_t* source_quota,
            const int64_t* physical_index,
            int32_t* logical,
            int32_t* physical);

// Copy to[n, to_index[n, k]] = from[n, from_index[n, k]]; everything else in `to` becomes 0.
//   from [N, from_width], to [N, to_width] elements of 2, 4 or 8 bytes
//   from_index, to_index [N, K], a row's entries different; -1 from where the row ends
// Returns false, with nothing useful written, if an index is outside its width.
bool copy_choices(const char* from,
                  const int32_t* from_index,
                  int64_t from_width,
                  char* to,
                  const int32_t* to_index,
                  int64_t to_width,
                  int64_t num_tokens,
                  int64_t top_k,
                  int64_t element_size);

// Set map[n, index[n, k]], and clear the rest.
//   index [N, K] below `width`, or -1 from where the row ends; map [N, width] out
void mark_choices(
    const int32_t* index, int64_t width, int64_t num_tokens, int64_t top_k, bool* map);

}  // namespace megatron_ext
