// The stages as functions on raw pointers, without Torch. The callers in bindings/ do the checks.
//
// Legend: R ranks of the EP group, E logical experts, M = E / R main experts per rank (the main of
// expert e lives on rank e / M), S slots per rank, N local tokens. Arrays are dense and row-major.
// "Instance order" of an expert: its home rank first, then the other ranks ascending.
#pragma once

#include <cstdint>

namespace megatron_ext {

struct QuotaProblem {
    int64_t num_ranks;      // R
    int64_t num_experts;    // E, a multiple of R
    int64_t num_slots;      // S
    int64_t nvlink_domain;  // ranks per NVLink domain, divides R
    int64_t tolerance_ppm;  // allowed excess over the mean rank load, in millionths of the mean
    int64_t min_quota;      // fewest assignments a replica may carry, >= 1
};

// Choose replicas and quotas.
//   load   [R, E] assignments, >= 0; their sum fits int64
//   quota  [E, R] out, every entry written
//   slots  [R, S] out, every entry written: logical expert or -1, filled from slot 0
// Deterministic; equals reference.solve_quota bit by bit.
void solve_quota(const QuotaProblem& problem, const int64_t* load, int64_t* quota, int32_t* slots);

// The same by UltraEP's Algorithm 1, to compare with; equals reference.solve_paper bit by bit.
void solve_paper(const QuotaProblem& problem, const int64_t* load, int64_t* quota, int32_t* slots);

// Assignments that the busiest rank has at least in every legal plan; load as above.
int64_t lower_bound(const QuotaProblem& problem, const int64_t* load);

// Share every quota among the source ranks; one source's rows.
//   load   [R, E], quota [E, R]: equal row and column sums per expert
//   split  [E, R] out, every entry written: assignments of `source_rank` that rank t computes
// Deterministic; equals reference.split_quota bit by bit.
void split_quota(int64_t num_ranks,
                 int64_t num_experts,
                 const int64_t* load,
                 const int64_t* quota,
                 int64_t source_rank,
                 int64_t* split);

// Count the assignments of each expert.
//   routing_map  [N, E], true where the token goes to the expert
//   counts       [E] out, every entry written
void count_load(const bool* routing_map, int64_t num_tokens, int64_t num_experts, int64_t* counts);

}  // namespace megatron_ext
