// Runs what compiles copies in a push on the host (cuda_on_host/), for plans from stdin. Built by
// test_kernels_on_host.py, which makes the plans and knows what must come out.
//
// A plan is a line: R, S, mains a rank, relay threshold, ranks of a domain, then the expert in each
// slot. For each rank a line comes back: the number of rows; of each row where it is relayed from
// (rank and slot), the main, the number of destinations, then their ranks and slots; then rank and
// slot of each used place.

#include <cstdio>
#include <iostream>
#include <vector>

#include "compile_copies.cuh"
#include "cuda_runtime_api.h"

using namespace megatron_ext;

namespace {

void print(const PeerPlace& place) {
    std::printf(" %d %d", static_cast<int>(place.rank), static_cast<int>(place.slot));
}

void print(const PeerCopies& copies, int64_t num_slots) {
    std::printf("%d", static_cast<int>(*copies.num_rows));
    for (int64_t i = 0; i < *copies.num_rows; ++i) {
        const PeerCopy& row = copies.rows[i];
        print(row.relayed);
        print(PeerPlace{row.main_idx, row.num_destinations});
        for (int64_t d = 0; d < row.num_destinations; ++d) {
            print(copies.destinations[row.first_destination + d]);
        }
    }
    for (int64_t slot = 0; slot < num_slots; ++slot) print(copies.used[slot]);
    std::printf("\n");
}

}  // namespace

int main() {
    CopyProblem problem{};
    while (std::cin >> problem.num_ranks >> problem.num_slots >> problem.mains_per_rank >>
           problem.relay_threshold >> problem.num_peers) {
        std::vector<int32_t> slots(problem.num_ranks * problem.num_slots);
        for (int32_t& expert : slots) std::cin >> expert;
        for (problem.rank = 0; problem.rank < problem.num_ranks; ++problem.rank) {
            problem.first_peer = problem.rank / problem.num_peers * problem.num_peers;
            // Garbage, and what no kernel may touch behind it.
            const auto bytes = PeerCopies::bytes(problem.num_ranks, problem.num_slots);
            std::vector<int64_t> memory(bytes / 8 + 1, -7);
            const auto copies = PeerCopies::in(memory.data(), problem.num_ranks, problem.num_slots);
            cuda_on_host::launch(1, compiling::kLanes, 0, nullptr, [&] {
                __shared__ compiling::Scratch scratch;
                compiling::Compiler(problem, slots.data(), copies, scratch).run();
            });
            if (memory.back() != -7) cuda_on_host::fail("memory behind the copies is written");
            print(copies, problem.num_slots);
        }
    }
}
