// What a plan takes on a GPU, by the PTX of csrc/cuda/solve_quota.cu. Built and run by
// tests/perf/planner_cycles.py, which says how to read the numbers; machine.h has the rules.
//
//   planner_cycles FILE.ptx
//       Standard input, a line for each load: R E S, the tolerance in millionths, min_quota, and
//       the R * E assignments. Output, a line for each: JSON. One NVLink domain.
//   planner_cycles FILE.ptx WARPS WORDS
//       Runs the file's only kernel in one block of so many warps, with the address of so many
//       zeroed words of 64 bits, and prints these words.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <limits>
#include <sstream>

#include "machine.h"
#include "megatron_ext/api.h"

namespace {

using megatron_ext::QuotaProblem;
using megatron_ext::Tolerances;
using ptx::Block;
using ptx::Error;
using ptx::Function;
using ptx::Program;

constexpr int kWarps = 16;  // kWarps of solve_quota.cu, which the kernel's .maxntid says, too
constexpr size_t kWorkspaceBytes = 64 << 20;

template <class T>
std::vector<uint8_t> bytes_of(const T& value) {
    std::vector<uint8_t> bytes(sizeof value);
    std::memcpy(bytes.data(), &value, sizeof value);
    return bytes;
}

Program read_program(const char* path) {
    std::ifstream file(path);
    std::ostringstream text;
    text << file.rdbuf();
    if (!file) throw Error(std::string("cannot read ") + path);
    return ptx::parse(text.str());
}

// As kernel_for() of solve_quota.cu chooses: the least shared memory that the problem fits in, or
// global memory.
const Function& kernel_for(const Program& program, const QuotaProblem& problem) {
    const Function* best = nullptr;
    int ranks_of_best = std::numeric_limits<int>::max();
    for (const auto& [name, function] : program.functions) {
        if (!function.is_entry || name.find("solve_quota_kernel") == std::string::npos) continue;
        const size_t memory = name.find("SharedMemoryILi");
        int ranks = ranks_of_best, experts = 0, slots = 0;
        if (memory != std::string::npos) {
            std::sscanf(&name[memory], "SharedMemoryILi%dELi%dELi%dE", &ranks, &experts, &slots);
            if (problem.num_ranks > ranks || problem.num_experts > experts ||
                problem.num_slots > slots)
                continue;
        }
        if (best != nullptr && ranks >= ranks_of_best) continue;
        best = &function;
        ranks_of_best = ranks;
    }
    if (best == nullptr) throw Error("no kernel named solve_quota_kernel");
    return *best;
}

struct Plan {
    std::vector<int64_t> quota;
    std::vector<int32_t> slots;

    explicit Plan(const QuotaProblem& problem)
        : quota(problem.num_experts * problem.num_ranks, -1),
          slots(problem.num_ranks * problem.num_slots, -2) {}
    bool operator==(const Plan&) const = default;
};

template <class Items, class Print>
void print_list(const char* name, const Items& items, Print print) {
    std::printf(", \"%s\": [", name);
    const char* between = "";
    for (const auto& item : items) {
        std::printf("%s[", between);
        print(item);
        std::printf("]");
        between = ", ";
    }
    std::printf("]");
}

// A line of JSON. Places are [function, file, line].
void print_report(const Program& program, const Block& block, int64_t cycles, bool is_equal) {
    const auto print_place = [&](int source) {
        const ptx::Source& at = program.sources[source];
        const auto file = program.files.find(at.file);
        const char* const path = file != program.files.end() ? file->second.c_str() : "";
        std::printf("[\"%s\", \"%s\", %d]", at.function->name.c_str(), path, at.line);
    };
    std::printf("{\"cycles\": %ld, \"equal\": %s", cycles, is_equal ? "true" : "false");
    print_list("segments", block.segments(), [&](const ptx::Segment& each) {
        std::printf("%ld, %d, ", each.cycles, each.warp);
        print_place(each.source);
    });
    std::vector<int> lines;
    for (size_t i = 0; i < block.spent().size(); ++i) {
        if (block.spent()[i] > 0) lines.push_back(static_cast<int>(i));
    }
    print_list("lines", lines, [&](int source) {
        std::printf("%ld, ", block.spent()[source]);
        print_place(source);
    });
    print_list("tries", block.watched(), [](const ptx::Watched& each) {
        int32_t work;  // what of a Verdict comes last
        std::memcpy(&work, each.returned.data() + each.returned.size() - sizeof work, sizeof work);
        std::printf("%d, %ld", work, each.cycles);
    });
    print_list("races", block.races().found(), [&](const auto& race) {
        const auto& [places, times] = race;
        std::printf("%d, ", times);
        print_place(places.first);
        std::printf(", ");
        print_place(places.second);
    });
    std::printf("}\n");
}

void plan(const Program& program,
          const QuotaProblem& problem,
          const std::vector<int64_t>& load,
          char* workspace) {
    const Tolerances tolerances{{problem.tolerance_ppm}, 1};
    Plan of_host(problem), of_device(problem);
    megatron_ext::solve_ladder(
        problem, tolerances, load.data(), of_host.quota.data(), of_host.slots.data());
    const Function& kernel = kernel_for(program, problem);
    Block block(program, kernel, kWarps);
    const int64_t cycles = block.run({bytes_of(problem),
                                      bytes_of(tolerances),
                                      bytes_of(int64_t{0}),  // the first plan
                                      bytes_of(false),       // again
                                      bytes_of(load.data()),
                                      bytes_of(problem.num_experts),  // from one row to the next
                                      bytes_of(workspace),
                                      bytes_of(of_device.quota.data()),
                                      bytes_of(of_device.slots.data())});
    print_report(program, block, cycles, of_device == of_host);
}

// Calls of BlockPlanner<Warp>::run, which returns a Verdict, or of that what is used.
void watch_tries(Program& program) {
    for (auto& [name, function] : program.functions) {
        function.is_watched = name.find("12BlockPlannerI") != std::string::npos &&
                              name.find("E3runE") != std::string::npos;
    }
}

void plan_all(const Program& program) {
    std::vector<char> workspace(kWorkspaceBytes);
    std::string line;
    while (std::getline(std::cin, line)) {
        std::istringstream words(line);
        QuotaProblem problem{};
        words >> problem.num_ranks >> problem.num_experts >> problem.num_slots >>
            problem.tolerance_ppm >> problem.min_quota;
        problem.nvlink_domain = problem.num_ranks;
        std::vector<int64_t> load(words ? problem.num_ranks * problem.num_experts : 0);
        for (int64_t& each : load) words >> each;
        if (!words)
            throw Error("a line is not R E S, tolerance, min_quota and R * E assignments: " + line);
        plan(program, problem, load, workspace.data());
    }
}

void run_kernel(const Program& program, int warps, int num_words) {
    const auto entry = std::ranges::find_if(program.functions,
                                            [](const auto& each) { return each.second.is_entry; });
    if (entry == program.functions.end()) throw Error("no kernel");
    std::vector<uint64_t> words(num_words);
    Block(program, entry->second, warps).run({bytes_of(words.data())});
    for (const uint64_t word : words) std::printf("%lu\n", word);
}

}  // namespace

int main(int count, char** arguments) {
    try {
        Program program = read_program(arguments[1]);
        if (count > 3) {
            run_kernel(program, std::atoi(arguments[2]), std::atoi(arguments[3]));
        } else {
            watch_tries(program);
            plan_all(program);
        }
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
