// Cycles of an instruction. The rules are in machine.h.
#include <algorithm>

#include "machine.h"

namespace ptx {

// Latencies of Hopper. Reads: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU
// Architecture via Microbenchmarking" (2024): 29 cycles in shared memory, 263 in L2. Others are
// from the instructions that the assembler makes: 4 to 5 cycles for an integer instruction that
// another one waits for, 12 for a predicate, 25 for shuffles and reductions.
struct Warp::Cost {
    int64_t latency = 5;
    int64_t issue = 2;
    bool is_free = false;  // a name for a register, or a place that the assembler knows
    bool ends_block = false;
};

int64_t Warp::load_latency(const Instruction& in, Frame& frame, int lane) {
    constexpr int64_t kShared = 29;
    constexpr int64_t kLocal = 35;
    constexpr int64_t kGlobal = 300;
    constexpr int64_t kGeneric = 2;  // to find out which of them it is
    if (in.space == "shared"_w) return kShared;
    if (in.space == "local"_w) return kLocal;
    const uint8_t* const place = address(in, in.operands[1], frame, lane);
    const auto is_in = [&](const std::vector<uint8_t>& memory) {
        return place >= memory.data() && place < memory.data() + memory.size();
    };
    return is_in(block_.shared_) ? kShared + kGeneric
           : is_in(stacks_)      ? kLocal + kGeneric
                                 : kGlobal;
}

Warp::Cost Warp::cost_of(const Instruction& in, Frame& frame, int lane) {
    const bool is_wide = in.type.bits == 64;
    constexpr Cost kFree{0, 0, true};
    switch (in.op) {
        case "mov"_w:
        case "cvt"_w:
        case "cvta"_w:
            return kFree;
        case "ld"_w:
            return in.space == "param"_w ? kFree : Cost{load_latency(in, frame, lane)};
        case "st"_w:
            return in.space == "param"_w ? kFree : Cost{};
        case "atom"_w:
            return {70};
        case "redux"_w:
            return {26};
        case "shfl"_w:
            return {25};
        case "vote"_w:
            return {14};
        case "popc"_w:
        case "clz"_w:
            return {12};
        case "div"_w:
        case "rem"_w:
            return is_wide ? Cost{300, 200} : Cost{80, 40};
        case "bra"_w:
            return {0, in.predicate >= 0 ? 6 : 8, false, !in.is_short};
        case "call"_w:
        case "ret"_w:
            return {0, 20, false, true};
        case "syncwarp"_w:
            return {0, 8, false, true};
        case "setp"_w:
            return is_wide ? Cost{16, 4} : Cost{12};
        case "add"_w:
        case "sub"_w:
        case "min"_w:
        case "max"_w:
        case "selp"_w:
            return is_wide ? Cost{9, 4} : Cost{};
        default:
            return {};
    }
}

namespace {

template <class Found>
void for_each_register(const Operand& operand, Found found) {
    if (operand.kind == Operand::kRegister) found(operand.place);
    for (const Operand& each : operand.vector) for_each_register(each, found);
}

// The first operand is what is written, but of stores.
template <class Found>
void for_each_written(const Instruction& in, Found found) {
    if (in.op != "st"_w && !in.operands.empty()) for_each_register(in.operands[0], found);
}

int64_t ready_since(const Instruction& in, const Frame& frame) {
    int64_t since = in.predicate >= 0 ? frame.ready[in.predicate] : 0;
    if (in.guard >= 0) since = std::max(since, frame.ready[in.guard]);
    for (size_t i = in.op == "st"_w ? 0 : 1; i < in.operands.size(); ++i) {
        const auto wait = [&](int number) { since = std::max(since, frame.ready[number]); };
        for_each_register(in.operands[i], wait);
    }
    return since;
}

// What the instructions behind it write, or leave as it is, is known when the predicate is.
void delay_short_branch(const Instruction& in, Frame& frame) {
    const int64_t known = frame.ready[in.predicate];
    const auto& code = frame.function->code;
    for (const Instruction* each = &in + 1; each != code.data() + in.target; ++each) {
        for_each_written(
            *each, [&](int number) { frame.ready[number] = std::max(frame.ready[number], known); });
    }
}

}  // namespace

void Warp::spend(const Instruction& in, Frame& frame, int lane) {
    const Cost cost = cost_of(in, frame, lane);
    if (in.is_short) delay_short_branch(in, frame);
    int64_t start = ready_since(in, frame);
    const int64_t before = now_;
    if (!cost.is_free) {
        start = std::max(start, now_);
        const bool reads = in.op == "ld"_w || in.op == "atom"_w;
        const bool writes = in.op == "st"_w || in.op == "atom"_w;
        if (in.op == "syncwarp"_w) start = std::max({start, last_store_, last_load_});
        if (reads) start = std::max(start, last_store_);
        if (reads) last_load_ = std::max(last_load_, start);
        if (writes) start = std::max(start, last_load_);
        if (writes) last_store_ = std::max(last_store_, start);
        now_ = (cost.ends_block ? start : now_) + cost.issue;
    }
    for_each_written(in, [&](int number) { frame.ready[number] = start + cost.latency; });
    spent_[in.source] += now_ - before;
}

}  // namespace ptx
