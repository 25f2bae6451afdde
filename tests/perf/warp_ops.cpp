// What the device would do for a plan, counted: the planner (csrc/include/megatron_ext/planner) on
// a third warp, beside HostWarp and DeviceWarp, that runs the 32 lanes in a loop and adds up
// cycles. Built and run by warp_ops.py, which says how to read the numbers.
//
// Input, a line for each load: R E S, the tolerance in millionths, min_quota, and the E loads of
// the experts. Output, a line for each: JSON, with the plan.
//
// What is counted follows what nvcc 13 makes of the planner for sm_90a:
//
// 1. A warp's collective runs its lanes 32 indices at a time, which take as long as the slowest.
// 2. A read waits for the reads before it, as its address or its branch comes from them, unless its
//    index has been used before: then the address was known, and it overlaps. After a barrier, a
//    vote or a write all values are read anew. A write waits for nothing but its address.
// 3. Where an array is has to be found out first. In shared memory that hangs on nothing but the
//    thread's number, which a function asks for once. In global memory it takes a read, again after
//    a barrier, a vote, a write or a call.
// 4. A round of a block's warps takes as long as its slowest warp, or as the instructions of the
//    four warps of a scheduler if that is more.
//
// Not counted: what a launch takes, code that is in no cache, lanes that part ways, conflicts of
// shared memory's banks, spills, and integer divisions but for those that are named below.

#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <limits>
#include <map>
#include <numeric>
#include <sstream>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "megatron_ext/warp.h"

// Functions that stay functions on the device tell when they are called, and others do not: see
// __cyg_profile_func_enter.
#undef MEGATRON_EXT_HOST_DEVICE
#undef MEGATRON_EXT_ONCE_IN_CODE
#define MEGATRON_EXT_HOST_DEVICE __attribute__((no_instrument_function))
#define MEGATRON_EXT_ONCE_IN_CODE __attribute__((noinline))

namespace {

// Cycles. H100: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via
// Microbenchmarking" (2024): chains of reads take 29 in shared memory, 41 in L1, 263 in L2. The
// rest is from the instructions of the compiled kernel, at 4 to 5 cycles for an integer instruction
// that another one waits for, and 20 to 35 for shuffles, votes and reductions.
constexpr int64_t kShared = 29;
constexpr int64_t kGeneric = 29 + 5;           // shared memory by an address that could be anywhere
constexpr int64_t kL1 = 41;                    // global or local memory
constexpr int64_t kL2 = 263;                   // what another kernel has just written
constexpr int64_t kOverlapped = 4;             // a read that nothing waits for
constexpr int64_t kThread = 30;                // the thread's number, and an address from it
constexpr int64_t kCall = 20;                  // of a function that stays one, and back
constexpr int64_t kSyncWarp = 8;               // __syncwarp of lanes that are together
constexpr int64_t kSyncThreads = 22 + 2 * 16;  // of 16 warps
constexpr int64_t kBegin = 40;                 // a collective's lane number, and the bound's load
constexpr int64_t kLoop = 14;                  // a rolled loop's step: count, compare, branch
constexpr int64_t kCompare = 12;               // of 64 bits, and three selects
constexpr int64_t kReduce = 35 + 8;            // __reduce_*_sync, and out of the uniform register
constexpr int64_t kVote = 20 + 8;              // __ballot_sync, and a count or a test of it
constexpr int64_t kShuffle = 24 + 16;          // two shuffles for 64 bits, an addition, a branch
constexpr int64_t kAtomic = kShared + 60;  // of 64 bits in shared memory: read, compare and swap
constexpr int64_t kDivide = 40;            // 32 bits by what is not constant
constexpr int64_t kDivideWide = 300;       // share_of's, of 128 bits

// Instructions, for the issue limit.
constexpr int64_t kIssueAccess = 6;
constexpr int64_t kIssueLoop = 6;
constexpr int64_t kIssueCall = 6;
constexpr int64_t kIssueBegin = 10;
constexpr int64_t kIssueReduce = 14;

enum Kind { kReads, kWrites, kReductions, kVotes, kAtomics, kCalls, kLoops, kKinds };
const char* const kKindNames[] = {
    "reads", "writes", "reductions", "votes", "atomics", "calls", "loops"};

constexpr int kMostFunctions = 64;

struct Spending {
    int8_t function;
    int8_t part;
    int8_t kind;
    int64_t cycles;
};

// What is spent, and where: by function, by part (the innermost function that is more than a look
// at something), by kind.
struct Spent {
    int64_t function[kMostFunctions] = {};
    int64_t part[kMostFunctions] = {};
    int64_t kind[kKinds] = {};

    void add(const Spending& each) {
        function[each.function] += each.cycles;
        part[each.part] += each.cycles;
        kind[each.kind] += each.cycles;
    }

    void add(const Spent& other) {
        for (int i = 0; i < kMostFunctions; ++i) {
            function[i] += other.function[i];
            part[i] += other.part[i];
        }
        for (int i = 0; i < kKinds; ++i) kind[i] += other.kind[i];
    }
};

struct Function {
    std::string name;
    bool is_part;
    bool is_member;  // has its domain in a reference that has to be read first
    int64_t extra;   // cycles that no other rule counts
};

std::vector<Function>& functions() {
    static std::vector<Function> functions{{"kernel", true, true, 0}};
    return functions;
}

// The name without templates, arguments and namespace: Moves::add.
std::string plain_name(const char* symbol) {
    char* const demangled = abi::__cxa_demangle(symbol, nullptr, nullptr, nullptr);
    std::string name;
    int depth = 0;
    for (const char* c = demangled; c != nullptr && *c != 0; ++c) {
        if (*c == '<') ++depth;
        if (depth == 0 && *c == '(') break;
        if (depth == 0 && *c == ' ') {
            name.clear();  // what it returns
        } else if (depth == 0) {
            name += *c;
        }
        if (*c == '>') --depth;
    }
    std::free(demangled);
    const std::string ours = "megatron_ext::";
    return name.rfind(ours, 0) == 0 ? name.substr(ours.size()) : name;
}

int id_of(void* address) {
    static std::unordered_map<void*, int> ids;
    const auto [found, is_new] = ids.try_emplace(address, static_cast<int>(functions().size()));
    if (!is_new) return found->second;
    Dl_info info{};
    if (dladdr(address, &info) == 0 || info.dli_sname == nullptr ||
        functions().size() == kMostFunctions) {
        std::fprintf(stderr, "a function without a name, or too many of them\n");
        std::exit(1);
    }
    const std::string name = plain_name(info.dli_sname);
    // The same of another kernel.
    for (size_t id = 0; id < functions().size(); ++id) {
        if (functions()[id].name == name) return found->second = static_cast<int>(id);
    }
    const std::string last = name.substr(name.rfind(':') + 1);
    bool is_part = true;
    for (const char* each : {"slot_of",
                             "keeps_most",
                             "main_for",
                             "host_for",
                             "drop_if_empty",
                             "step_to",
                             "whole_replicas_only",
                             "slot_that_grows",
                             "share_of"}) {
        is_part = is_part && last != each;
    }
    const int64_t extra = last == "threshold" ? 2 * kDivide : last == "share_of" ? kDivideWide : 0;
    functions().push_back({name, is_part, name.find("::") != std::string::npos, extra});
    return found->second;
}

// Where a kernel's memory is.
struct Layout {
    const char* loads = nullptr;  // the domain's own, before the tries
    const char* tries = nullptr;
    const char* end = nullptr;
    bool in_shared = false;
};

// Time of one warp, or within a collective of one lane.
class Clock {
  public:
    Layout layout;

    Clock() { enter(0); }

    int64_t now() const { return at_.now; }
    int64_t issued() const { return at_.issued; }
    int64_t rounds() const { return rounds_; }
    const Spent& spent() const { return spent_; }

    // A warp, at 0.
    void restart() {
        at_ = {};
        rounds_ = 0;
        spent_ = {};
    }

    void spend(int64_t cycles, Kind kind, int64_t instructions) {
        at_.now += cycles;
        at_.issued += instructions;
        const Spending each{stack_[depth_], parts_[depth_], static_cast<int8_t>(kind), cycles};
        if (in_lane_) {
            log_.push_back(each);
        } else {
            spent_.add(each);
        }
    }

    // Arrays are asked for.
    void find_arrays() {
        if (at_.found == 0) at_.found = at_.unknown + kShared + kCompare;
    }

    void read(const void* address, int64_t index) {
        if (std::find(at_.read, at_.read + kRemembered, address) != at_.read + kRemembered) {
            return;  // in a register
        }
        at_.read[at_.next_read++ % kRemembered] = address;
        const Place place = place_of(address);
        const int64_t done = std::max(known_since(index), place.found) + place.latency;
        spend(std::max(done - at_.now, kOverlapped), kReads, kIssueAccess);
    }

    void write(const void* address) {
        const int64_t waits = std::max<int64_t>(place_of(address).found - at_.now, 0);
        spend(waits + kOverlapped, kWrites, kIssueAccess);
        wrote_ = true;
        forget();
    }

    // Reads at this index hang on nothing that came after `since`.
    void know(int64_t index, int64_t since) {
        const unsigned place = at_.indices++ % kRemembered;
        at_.index[place] = index;
        at_.known[place] = since;
    }

    // The thread's number is waited for, if it was not yet.
    void know_lane() {
        const int64_t waits = std::max<int64_t>(at_.entered + kThread - at_.now, 0);
        spend(waits, kLoops, kIssueLoop);
    }

    // Run what the device does not.
    template <class Function>
    void pause(Function function) {
        const State state = at_;
        const Spent spent = spent_;
        const bool wrote = wrote_;
        function();
        at_ = state;
        spent_ = spent;
        wrote_ = wrote;
    }

    // Memory is read anew from now on.
    void forget() {
        std::fill_n(at_.read, kRemembered, nullptr);
        lose_arrays();
    }

    // Up to 32 indices from `first` on, one a lane; takes the time of the slowest lane.
    template <class Lane>
    void run_lanes(int first, int count, Lane lane) {
        ++rounds_;
        const State start = at_;
        int64_t now = at_.now;
        int64_t issued = at_.issued;
        wrote_ = false;
        in_lane_ = true;
        slowest_.clear();
        for (int i = first; i < std::min(first + 32, count); ++i) {
            at_ = start;
            log_.clear();
            remember(i);
            lane(i);
            issued = std::max(issued, at_.issued);
            if (at_.now <= now) continue;
            now = at_.now;
            std::swap(log_, slowest_);
        }
        in_lane_ = false;
        for (const Spending& each : slowest_) spent_.add(each);
        at_ = start;
        at_.now = now;
        at_.issued = issued;
        if (wrote_) forget();
    }

    // As run_lanes, but all indices at the same time, so many to a lane one behind the other: they
    // wait for the same reads, and add their instructions.
    template <class Lane>
    void run_side_by_side(int count, Lane lane) {
        const State start = at_;
        const Spent spent = spent_;
        State slowest = start;
        Spent of_slowest = spent_;
        int64_t more = 0;  // instructions of the others
        bool wrote = false;
        for (int first = 0; first < count; first += 32) {
            at_ = start;
            spent_ = spent;
            run_lanes(first, count, lane);
            wrote = wrote || wrote_;
            more += at_.issued - start.issued;
            if (first > 0 && at_.now <= slowest.now) continue;
            slowest = at_;
            of_slowest = spent_;
        }
        more -= slowest.issued - start.issued;
        at_ = slowest;
        spent_ = of_slowest;
        if (wrote) forget();
        spend(more, kLoops, more);
    }

    void enter(int function) {
        ++depth_;
        stack_[depth_] = static_cast<int8_t>(function);
        parts_[depth_] = functions()[function].is_part ? stack_[depth_] : parts_[depth_ - 1];
        if (depth_ == 0) return;
        spend(kCall + functions()[function].extra, kCalls, kIssueCall);
        at_.entered = at_.now;
        lose_arrays();
    }

    void leave() {
        --depth_;
        lose_arrays();
    }

  private:
    static constexpr int kRemembered = 8;

    struct State {
        int64_t now = 0;
        int64_t issued = 0;
        int64_t unknown = 0;                 // since when nobody knows where arrays are
        int64_t found = 0;                   // when it is known; 0 if nobody has asked
        int64_t entered = 0;                 // the function called last
        const void* read[kRemembered] = {};  // since memory has changed
        int64_t index[kRemembered];          // used last
        int64_t known[kRemembered];          // when it was used first
        unsigned next_read = 0;
        unsigned indices = 0;
    };

    void lose_arrays() {
        at_.unknown = at_.now;
        at_.found = 0;
    }

    struct Place {
        int64_t found;  // when the array is
        int64_t latency;
    };

    Place place_of(const void* address) const {
        const auto* byte = static_cast<const char*>(address);
        if (byte >= layout.tries && byte < layout.end) {
            if (!layout.in_shared) return {at_.found, kL1};
            return {at_.entered + kThread, kShared};
        }
        const bool is_own = layout.in_shared && byte >= layout.loads && byte < layout.tries;
        if (is_own) return {0, kShared};
        // A domain's: its pointer is in shared memory.
        const bool is_member = functions()[stack_[depth_]].is_member;
        return {at_.unknown + kGeneric + (is_member ? kL1 : 0), kL1};
    }

    int64_t known_since(int64_t index) {
        for (unsigned i = 0; i < std::min<unsigned>(at_.indices, kRemembered); ++i) {
            if (at_.index[i] == index) return at_.known[i];
        }
        remember(index);
        return at_.now;
    }

    void remember(int64_t index) { know(index, at_.now); }

    State at_;
    int64_t rounds_ = 0;
    Spent spent_;
    int8_t stack_[32];
    int8_t parts_[32];
    int depth_ = -1;
    bool in_lane_ = false;
    std::vector<Spending> log_;
    std::vector<Spending> slowest_;
    bool wrote_ = false;
};

Clock counted;

}  // namespace

// GCC calls these where a function that is not marked begins and ends (-finstrument-functions).
extern "C" {
MEGATRON_EXT_HOST_DEVICE void __cyg_profile_func_enter(void* function, void*) {
    counted.enter(id_of(function));
}
MEGATRON_EXT_HOST_DEVICE void __cyg_profile_func_exit(void*, void*) { counted.leave(); }
}

#define MEGATRON_EXT_COUNTED
namespace megatron_ext {

template <class Amount, int kMostRanks>
struct CountedMemory;
template <class Amount>
class FlatHosts;
class FlatGiven;
template <class Amount>
class FlatPaths;

// In the place of a reference to an entry. Beware of `is_there ? array[i] : 0`, whose type is that
// of the 0.
template <class T>
class Entry {
  public:
    Entry(T* place, int64_t index) : place_(place), index_(index) {}
    Entry(const Entry&) = default;

    operator T() const {
        counted.read(place_, index_);
        return *place_;
    }

    const Entry& operator=(T value) const {
        counted.write(place_);
        *place_ = value;
        return *this;
    }

    const Entry& operator=(const Entry& other) const { return *this = static_cast<T>(other); }
    const Entry& operator+=(T value) const { return *this = *this + value; }
    const Entry& operator-=(T value) const { return *this = *this - value; }
    const Entry& operator++() const { return *this += 1; }
    const Entry& operator--() const { return *this -= 1; }

  private:
    T* place_;
    int64_t index_;
};

template <class T>
class Array {
  public:
    Array() = default;
    Array(T* first) : first_(first) {}

    Entry<T> operator[](int64_t index) const { return {first_ + index, index}; }

    T* uncounted() const { return first_; }

  private:
    T* first_ = nullptr;
};

// As DeviceLanes in warp.h, function by function. kMostRanks: for how many ranks there is shared
// memory, or 0.
template <class Value, int kMostRanks>
struct CountingWarp {
    using Amount = Value;
    using Memory = CountedMemory<Value, kMostRanks>;
    using Hosts = FlatHosts<Value>;
    using Given = FlatGiven;
    using Paths = FlatPaths<Value>;
    static constexpr bool kNarrow = sizeof(Value) == 4;

    template <class Function>
    void for_each(int count, Function function) const {
        sync();
        counted.spend(kBegin, kLoops, kIssueBegin);
        for (int first = 0; first < count; first += 32) {
            counted.run_lanes(first, count, function);
            counted.spend(kLoop, kLoops, kIssueLoop);
        }
        sync();
    }

    template <int kMost = 0, class Function>
    Best<Value> best(int count, Function key_of) const {
        Best<Value> best;
        const auto look = [&](int i) {
            const Value key = key_of(i);
            if (key > best.key) best = {i, key};
        };
        if constexpr (kFitsWord<kMost>) {
            counted.know_lane();
            counted.run_side_by_side(count, look);
            reduce_words(kMost / 32);
            return best;
        }
        counted.spend(kBegin, kLoops, kIssueBegin);
        for (int first = 0; first < count; first += 32) {
            counted.run_lanes(first, count, look);
            counted.spend(kLoop + kCompare, kLoops, 2 * kIssueLoop);
        }
        counted.spend(kCall, kCalls, kIssueCall);
        counted.spend((kNarrow ? 2 : 3) * kReduce, kReductions, kIssueReduce);
        return best;
    }

    template <bool kMostlyOne = false, class Function>
    Best<Value> best_of_few(int count, Function key_of) const {
        if constexpr (!kNarrow) return best(count, key_of);
        counted.spend(kBegin, kLoops, kIssueBegin);
        Best<Value> best;
        for (int first = 0; first < count; first += 32) {
            counted.run_lanes(first, count, [&](int i) {
                const Value key = key_of(i);
                if (key > best.key) best = {i, key};
            });
            counted.spend(kLoop + kCompare, kLoops, 2 * kIssueLoop);
        }
        reduce_words(0);
        return best;
    }

    template <int kMost = 0, class Function>
    BestTwo<Value> best_two(int count, Function key_of) const {
        const Best<Value> first = best<kMost>(count, key_of);
        const auto others = [&](int i) -> Value { return i == first.index ? 0 : key_of(i); };
        if constexpr (!kFitsWord<kMost>) return {first, best(count, others)};
        // Words are still there: a choice and a reduction.
        reduce_words(1);
        Best<Value> second;
        counted.pause([&] { second = host_.best(count, others); });
        return {first, second};
    }

    template <int kMost = 0>
    int lowest_from(int count, Array<Value> values, Value least) const {
        return best<kMost>(count,
                           [&](int i) -> Value {
                               const Value value = values[i];
                               return value >= least ? kHighest - value : 0;
                           })
            .index;
    }

    template <int kMost = 0>
    int highest_below(int count, Array<Value> values, Value most) const {
        const int last = count - 1;
        const int from_last = best<kMost>(count, [&](int i) -> Value {
                                  const Value value = values[last - i];
                                  return value < most ? value : 0;
                              }).index;
        return from_last < 0 ? -1 : last - from_last;
    }

    template <int kMost = 0>
    Pair closest_pair(
        int count, Array<Value> values, Value most, Value whole, Array<int64_t>) const {
        Pair pair;
        const auto counts = [&](int i) {
            return values.uncounted()[i] > 0 && values.uncounted()[i] < most;
        };
        for (int i = 0; i < count; ++i) pair.values += counts(i);
        counted.spend(kCall + kThread, kCalls, kIssueCall);
        if constexpr (kFitsWord<kMost>) {
            // Own values, their words to memory; then 16 words at once, of which each takes a
            // difference and a choice for each own value.
            constexpr int kEach = kMost / 32;
            counted.spend(read_by_address() + kEach * (2 * kCompare + kVote + kOverlapped),
                          kVotes,
                          kEach * (kIssueAccess + 3 * kIssueLoop));
            counted.spend(2 * kSyncWarp + kOverlapped, kLoops, 8);
            const int64_t batches = (pair.values + 15) / 16;
            const int64_t batch = read_by_address() + 3 * kOverlapped + 16 * 2 * kEach;
            counted.spend(batches * (batch + kLoop), kReads, batches * (4 + 32 * kEach));
            counted.spend(
                kEach * 3 * kCompare + 2 * kReduce, kReductions, 2 * kIssueReduce + kEach * 12);
        } else {
            const int64_t passes = (count + 31) / 32;
            const int64_t batch = read_by_address() + 4 * (kOverlapped + 2 * kCompare) + kLoop;
            const int64_t batches = (count + 3) / 4;
            counted.spend(passes * (kL1 + batches * batch), kReads, passes * batches * 60);
            counted.spend(kCall + 5 * kShuffle + 7 * kReduce, kReductions, 8 * kIssueReduce);
        }
        counted.spend(kShuffle, kReductions, kIssueLoop);
        counted.forget();
        Value least_over = whole;
        for (int i = 0; i < count; ++i) {
            const Value higher = values.uncounted()[i];
            if (!counts(i)) continue;
            int lower = -1;
            for (int j = 0; j < count; ++j) {
                const Value value = values.uncounted()[j];
                if (value <= 0 || value < whole - higher) continue;
                if (value > higher || (value == higher && j >= i)) continue;
                if (lower < 0 || value < values.uncounted()[lower]) lower = j;
            }
            if (lower < 0) continue;
            const Value over = higher - (whole - values.uncounted()[lower]);
            if (over > least_over || over >= whole) continue;
            if (over == least_over && higher >= values.uncounted()[pair.higher]) continue;
            least_over = over;
            pair.higher = i;
            pair.lower = lower;
        }
        return pair;
    }

    template <class Function>
    int64_t sum(int count, Function value_of) const {
        counted.spend(kBegin, kLoops, kIssueBegin);
        int64_t total = 0;
        for (int first = 0; first < count; first += 32) {
            counted.run_lanes(first, count, [&](int i) { total += value_of(i); });
            counted.spend(kLoop, kLoops, kIssueLoop);
        }
        sum_lanes();
        return total;
    }

    template <class Counts, class Function>
    int64_t sum_first(
        int count, int64_t most, int64_t enough, Counts counts, Function value_of) const {
        counted.spend(kBegin, kLoops, kIssueBegin);
        int64_t total = 0;
        for (int first = 0; first < count && most > 0 && total < enough; first += 32) {
            bool counts_of[32];
            counted.run_lanes(first, count, [&](int i) { counts_of[i - first] = counts(i); });
            vote();
            counted.run_lanes(first, count, [&](int i) {
                if (!counts_of[i - first] || most == 0) return;
                total += value_of(i);
                --most;
            });
            counted.spend(kLoop, kLoops, 2 * kIssueLoop);
            sum_lanes();
        }
        return total;
    }

    // Four reads of a lane in flight, then their votes.
    template <class List, class Function>
    int gather(int count, List list, Function is_it) const {
        sync();
        counted.spend(kBegin, kLoops, kIssueBegin);
        int found = 0;
        for (int first = 0; first < count; first += 128) {
            const int last = std::min(count, first + 128);
            std::vector<int> those;
            counted.run_side_by_side(last - first, [&](int i) {
                if (is_it(first + i)) those.push_back(first + i);
            });
            counted.spend((last - first + 31) / 32 * kVote + kLoop, kVotes, 4 * 2 * kIssueLoop);
            counted.forget();
            for (const int i : those) list.uncounted()[found++] = i;
            counted.spend(4 * kOverlapped, kWrites, 4 * kIssueAccess);
        }
        sync();
        return found;
    }

    // Four reads in flight, then their comparisons.
    template <class Values>
    int highest_entry(const Values& values, int first, int count) const {
        int best = first;
        int64_t most = -1;
        int64_t begun = 0;
        for (int i = first; i < first + count; ++i) {
            if ((i - first) % 4 == 0) {
                counted.spend(kLoop, kLoops, kIssueLoop);
                begun = counted.now();
            }
            counted.know(i, begun);
            const int64_t value = values[i];
            counted.spend(kCompare, kLoops, kIssueLoop);
            if (value <= most) continue;
            most = value;
            best = i;
        }
        return best;
    }

    void move_to_front(int place, Array<int32_t> list) const {
        counted.spend(kCall + kSyncWarp + 2 * kOverlapped, kCalls, 5 * kIssueCall);
        for (int first = 0; first < place; first += 32) {
            counted.run_lanes(first, place, [](int) {
                counted.spend(read_by_address() + kOverlapped, kReads, 2 * kIssueAccess);
            });
            counted.spend(kLoop + 2 * kSyncWarp, kLoops, 3 * kIssueLoop);
        }
        counted.forget();
        host_.move_to_front(place, list.uncounted());
    }

    template <int kMost = 0>
    void sort_rising(int count, Array<Value> keys, Array<int32_t> order) const {
        counted.spend(kCall, kCalls, kIssueCall);
        // Eight steps at once: words, or two comparisons each.
        const int64_t each = kFitsWord<kMost> ? 3 : 2 * kCompare;
        const int64_t batch = read_by_address() + 7 * kOverlapped + 8 * each + kLoop;
        const int64_t batches = (count + 7) / 8;
        for_each(count, [&](int) {
            counted.spend(read_by_address() + kCompare, kReads, kIssueAccess);
            counted.spend(batches * batch, kReads, count * (1 + each));
        });
        host_.sort_rising(count, keys.uncounted(), order.uncounted());
    }

    template <int kMost = 0, class FirstOffer, class ExchangeOf>
    bool take_offers(int takers,
                     FirstOffer first_offer,
                     int count,
                     ExchangeOf exchange_of,
                     Array<Value> value,
                     Array<int32_t> id,
                     Array<Value> scratch,
                     Array<int64_t> words) const {
        const auto offer_first = [&](int t) {
            const Offer<Value> first = first_offer(t);
            words[t] = first.value;
        };
        // How many of the lanes' offers go to the index with most of them.
        const auto at_once = [&](int first, int last) {
            std::map<int, int> times;
            int most = 0;
            for (int i = first; i < std::min(last, count); ++i) {
                const Exchange<Value> each = exchange_of(i);
                if (each.forth > 0) most = std::max(most, ++times[each.to]);
                if (each.back > 0) most = std::max(most, ++times[each.from]);
            }
            return most;
        };
        if constexpr (kFitsWord<kMost>) {
            counted.know_lane();
            counted.run_side_by_side(takers, offer_first);
            counted.spend(2 * kSyncWarp + kMost / 32 * kCompare, kLoops, 4 * kIssueLoop);
            counted.forget();
            for (int first = 0; first < count; first += 128) {
                const int last = std::min(count, first + 128);
                counted.run_side_by_side(last - first, [&](int i) { exchange_of(first + i); });
                // One instruction each, which nothing waits for.
                int most = 0;
                counted.pause([&] { most = at_once(first, last); });
                counted.spend(8 * 2 * kOverlapped + most * kOverlapped + kLoop, kAtomics, 8 * 8);
            }
            counted.forget();
            counted.spend(2 * kSyncWarp, kLoops, 4);
            counted.run_side_by_side(takers, [&](int t) {
                const int64_t offered = words[t];
                value[t] = static_cast<Value>(value[t] + 0 * offered);
                id[t] = id[t];
                counted.spend(kCompare, kLoops, kIssueLoop);
            });
        } else {
            for (int pass = 0; pass < 2; ++pass) {
                for_each(takers, offer_first);
                sync();
                counted.spend(kBegin, kLoops, kIssueBegin);
                for (int first = 0; first < count; first += 32) {
                    counted.run_lanes(first, count, [&](int i) { exchange_of(i); });
                    int most = 0;
                    counted.pause([&] { most = at_once(first, first + 32); });
                    counted.spend(
                        (pass == 0 ? 1 : 2) * most * kL2 + kLoop, kAtomics, 2 * kIssueAccess);
                }
                sync();
            }
            for_each(takers, [&](int t) {
                const int64_t offered = words[t];
                value[t] = static_cast<Value>(value[t] + 0 * offered);
                id[t] = id[t];
            });
        }
        vote();
        bool changed = false;
        counted.pause([&] {
            for (int t = 0; t < takers; ++t) {
                const Offer<Value> first = first_offer(t);
                const bool is_more = first.value > value[t];
                scratch[t] = is_more ? first.value : static_cast<Value>(value[t]);
                if (is_more) id[t] = first.id;
            }
            const auto offer = [&](int t, Value offered, int32_t offered_id) {
                if (offered <= value[t] || offered < scratch[t]) return;
                if (offered == scratch[t] && offered_id > id[t]) return;
                scratch[t] = offered;
                id[t] = offered_id;
            };
            for (int i = 0; i < count; ++i) {
                const Exchange<Value> each = exchange_of(i);
                offer(each.to, each.forth, 2 * i);
                offer(each.from, each.back, 2 * i + 1);
            }
            for (int t = 0; t < takers; ++t) {
                changed = changed || scratch[t] > value[t];
                value[t] = scratch[t];
            }
        });
        return changed;
    }

    template <class Function>
    void once(Function function) const {
        sync();
        counted.know_lane();
        counted.spend(kCompare, kLoops, kIssueLoop);
        counted.run_lanes(0, 1, [&](int) { function(); });
        sync();
    }

  private:
    static void sync() {
        counted.spend(kSyncWarp, kLoops, 2);
        counted.forget();
    }

    static void vote() {
        counted.spend(kVote + kLoop, kVotes, 2 * kIssueLoop);
        counted.forget();
    }

    static void sum_lanes() {
        counted.spend(kCall, kCalls, kIssueCall);
        if (kNarrow) {
            counted.spend(kReduce, kReductions, kIssueReduce);
        } else {
            counted.spend(5 * kShuffle, kReductions, 5 * 8);
        }
    }

    // Of so many values a lane, each made one word with its index; and taken apart again.
    static void reduce_words(int words) {
        counted.spend(words * kCompare + kCompare, kLoops, (words + 1) * kIssueLoop);
        counted.spend(kReduce, kReductions, kIssueReduce);
    }

    // What is given to a function that stays one could lie anywhere.
    static int64_t read_by_address() { return counted.layout.in_shared ? kGeneric : kL1; }

    template <int kMost>
    static constexpr bool kFitsWord = kNarrow && kMost > 0 && kMost <= (1 << kRankBits);
    static constexpr Value kHighest = std::numeric_limits<Value>::max();
    static inline const HostWarp<Value> host_{};
};

}  // namespace megatron_ext

#include "megatron_ext/planner/attempt.h"
#include "megatron_ext/planner/search.h"

template <class Amount, int kMostRanks>
struct megatron_ext::CountedMemory {
    static constexpr int kRanks = kMostRanks;
    const Domain<Amount>* of;
    const TryMemory<Amount>* placed;

    MEGATRON_EXT_HOST_DEVICE const Domain<Amount>& domain() const { return *of; }
    MEGATRON_EXT_HOST_DEVICE static bool is_stopped() {
        counted.spend(kShared + kVote, kVotes, kIssueAccess + kIssueLoop);
        return false;
    }
    MEGATRON_EXT_HOST_DEVICE const TryMemory<Amount>& arrays() const {
        counted.find_arrays();
        return *placed;
    }
};

namespace {

using namespace megatron_ext;

// As in solve_quota.cu.
constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kSteps = 4;
constexpr int kStepsBeside = 3;
constexpr int kBest = kWarps;
constexpr int64_t kLastStep = 1500;  // cycles: of handing over, the longest

const char* const kMethodNames[] = {
    "BestFit", "PairFit", "Rising", "Remainder", "RemainderRising", "Refill", "Roomiest", "Fill"};

struct Try {
    Method method;
    Verdict verdict;
    int64_t cycles;
    int64_t issued;
    int64_t rounds;
    bool is_first;  // at the threshold asked for
};

struct Phase {
    int64_t cycles = 0;
    int rounds = 0;       // of the block's warps
    int issue_bound = 0;  // of those, how many took as long as their instructions
    int64_t work = 0;     // Verdict.work of the try with the most, of each round
    Spent spent;          // of the slowest warp of each
};

// Of a kernel in shared memory.
struct Most {
    int ranks;
    int experts;
    int slots;
};
constexpr Most kSharedMemories[] = {{32, 1024, 8}, {64, 512, 4}, {96, 576, 4}};
constexpr int64_t kMostShared = 226 << 10;  // Hopper's, without what the kernel declares

// With sizes, loads and ranks in order before the tries.
int64_t shared_bytes(const Most& most) {
    return 32 + 4 * (most.experts + 2 * most.ranks) +
           (kWarps + 1) * TryMemory<int32_t>::bytes(most.ranks, most.experts, most.slots);
}

// A block that plans one load of one domain: BlockPlanner and solve_quota_kernel. Amount and
// kMostRanks as of CountingWarp.
template <class Amount, int kMostRanks>
class CountedBlock {
    using Warp = CountingWarp<Amount, kMostRanks>;

  public:
    CountedBlock(int ranks,
                 int mains,
                 int slots,
                 int64_t tolerance_ppm,
                 int64_t min_quota,
                 const std::vector<int64_t>& load)
        : tolerance_ppm_(tolerance_ppm),
          expert_load_(load),
          home_load_(ranks),
          busiest_first_(ranks),
          hottest_first_(load.size()),
          busier_(load.size()) {
        for (size_t e = 0; e < load.size(); ++e) home_load_[e / mains] += load[e];
        sort_falling(home_load_, busiest_first_);
        sort_falling(expert_load_, hottest_first_);
        std::vector<int32_t> place(home_load_.size());
        for (size_t i = 0; i < place.size(); ++i)
            place[busiest_first_[i]] = static_cast<int32_t>(i);
        for (size_t i = 0; i < load.size(); ++i) busier_[i] = place[hottest_first_[i] / mains];
        total_ = std::accumulate(load.begin(), load.end(), int64_t{0});
        domain_ = {ranks,
                   mains,
                   slots,
                   Domain<Amount>::per_slot_of(slots),
                   min_quota,
                   tolerance_ppm == 0,
                   expert_load_.data(),
                   home_load_.data(),
                   busiest_first_.data()};
        const int capacity = kMostRanks > 0 ? kMostRanks : ranks;
        // Loads of experts and of ranks, and ranks in order.
        const int64_t loads = (sizeof(Amount) * ranks * (mains + 1) + 4 * ranks + 15) / 16 * 16;
        const int64_t each = TryMemory<Amount>::bytes(capacity, ranks * mains, slots);
        tries_.resize(loads + (kWarps + 1) * each);
        layout_.in_shared = kMostRanks > 0;
        layout_.loads = tries_.data();
        layout_.tries = tries_.data() + loads;
        layout_.end = tries_.data() + tries_.size();
        for (int w = 0; w <= kWarps; ++w) {
            memory_[w].lay_out(tries_.data() + loads + w * each, capacity, ranks * mains, slots);
        }
        // The copies of the loads that the tries read.
        auto* const own = reinterpret_cast<Amount*>(tries_.data());
        std::copy(load.begin(), load.end(), own);
        std::copy(home_load_.begin(), home_load_.end(), own + load.size());
        tried_ = {ranks,
                  mains,
                  slots,
                  domain_.per_slot,
                  static_cast<Amount>(min_quota),
                  domain_.even,
                  own,
                  own + load.size(),
                  reinterpret_cast<int32_t*>(own + load.size() + ranks)};
        std::copy(busiest_first_.begin(),
                  busiest_first_.end(),
                  reinterpret_cast<int32_t*>(own + load.size() + ranks));
    }

    void plan() {
        counted.layout = {};
        const int64_t start = count_before();
        counted.layout = layout_;
        found_ = search(target_, start);
        count_write();
    }

    void print() const;

  private:
    static void sort_falling(const std::vector<int64_t>& value, std::vector<int32_t>& order) {
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(), [&](int a, int b) {
            return comes_first(value[a], a, value[b], b);
        });
    }

    // Sums, orders and bounds; returns where the search starts.
    int64_t count_before() {
        const int64_t ranks = domain_.ranks;
        const int64_t experts = domain_.experts();
        counted.restart();
        // Columns: 16 reads in flight; a multiprocessor gets 64 bytes a cycle from L2.
        const int64_t batches = (ranks + 15) / 16 * ((experts + kThreads - 1) / kThreads);
        counted.spend(std::max(batches * (kL2 + 16 * kOverlapped), ranks * experts * 8 / 64),
                      kReads,
                      ranks * 6);
        counted.spend(domain_.mains * (kL1 + kLoop), kReads, domain_.mains * 8);
        // sort_falling: 8 reads in flight, and then 8 comparisons.
        constexpr int64_t kEach = 2 * 5;
        for (const int64_t count : {experts, ranks}) {
            int64_t parts = 32;
            while (parts > 1 && parts * count > kThreads) parts /= 2;
            const int64_t rounds = (count * parts + kThreads - 1) / kThreads;
            const int64_t steps = (count + 8 * parts - 1) / (8 * parts) * rounds;
            counted.spend(steps * (kL1 + kLoop + 8 * kEach), kReads, steps * 8 * 9);
            for (int64_t part = 1; part < parts; part *= 2) {
                counted.spend(rounds * kShuffle, kReductions, rounds * 8);
            }
        }
        counted.spend(4 * kSyncThreads, kLoops, 8);
        const CountingWarp<int64_t, 0> wide;
        wide.sum(domain_.ranks, [&](int r) -> int64_t { return domain_.home_load[r]; });
        target_ = target_load(total_, ranks, tolerance_ppm_);
        Phase& before = phases_[0];
        before.cycles = counted.now();
        before.spent.add(counted.spent());
        const int64_t start = total_ <= INT32_MAX / ranks
                                  ? count_bounds(CountingWarp<int32_t, 0>{})
                                  : count_bounds(CountingWarp<int64_t, 0>{});
        // The bounds of 16 warps, and the loads to shared memory.
        counted.restart();
        counted.spend(2 * kSyncThreads + kWarps * (kOverlapped + kLoop) +
                          (experts + kThreads - 1) / kThreads * 2 * kL1,
                      kLoops,
                      kWarps * kIssueLoop);
        // In global memory also where the arrays of the tries lie.
        if (!layout_.in_shared) counted.spend(300, kLoops, 100);
        end_serial(before);
        return start;
    }

    // Warp by warp.
    template <class TheWarp>
    int64_t count_bounds(TheWarp warp) {
        int64_t start = target_;
        DomainBound<TheWarp, int64_t> bounds(warp, domain_, hottest_first_.data(), busier_.data());
        begin_round();
        for (int w = 0; w < kWarps; ++w) {
            counted.restart();
            int64_t bound = target_;
            if (w == 0) bound = larger(bound, bounds.by_receivers());
            for (int k = 1 + w; k <= domain_.ranks; k += kWarps)
                bound = bounds.by_senders(k, bound);
            start = larger(start, bound);
            end_warp(w);
        }
        end_round(phases_[0]);
        return start;
    }

    bool search(int64_t target, int64_t start) {
        if (domain_.before() <= start || domain_.slots == 0) return false;
        WorkLeft left{work_budget(domain_.ranks, domain_.mains)};
        PublishedSearch published(target, domain_.before());
        if (reach(start, left, published)) return true;
        bool found = false;
        int steps = kStepsBeside;  // that have run
        while (!published.done()) {
            if (steps == 0) {
                steps = kSteps;
                begin_round();
                run_next_steps(published, start, steps);
                end_round(phases_[2]);
            }
            int node = 0;
            int chosen = -1;
            counted.restart();
            for (int step = 0; step < steps && !published.done(); ++step) {
                counted.spend(kShared + 2 * kLoop, kLoops, 2 * kIssueLoop);
                const bool is_reached = verdicts_[kWarps - 1 - node].reached;
                if (is_reached) chosen = kWarps - 1 - node;
                published.narrow(is_reached);
                node = 2 * node + (is_reached ? 1 : 2);
            }
            keep(chosen);
            end_serial(phases_[2]);
            found = found || chosen >= 0;
            steps = 0;
        }
        ThresholdSearch search(start, published.reached(), tolerance_ppm_);
        while (!search.done() && left.rounds > 0) {
            begin_round();
            for (int w = 0; w < kWarps; ++w) {
                counted.restart();
                verdicts_[w] = {};
                if (!search.nothing_to_do(w / 2)) {
                    const Method method = method_of_probe(w);
                    run(w, search.threshold(w / 2), method, left.rounds, restarts_of_probe(method));
                }
                end_warp(w);
            }
            end_round(phases_[3]);
            int chosen = -1;
            counted.restart();
            found |= search.try_round(
                left,
                [&](int p, Method m) {
                    counted.spend(kShared + 3 * kLoop, kLoops, 3 * kIssueLoop);
                    return verdicts_[warp_of_probe(p, m)];
                },
                [&](int p, Method m) { chosen = warp_of_probe(p, m); });
            keep(chosen);
            end_serial(phases_[3]);
        }
        return found;
    }

    bool reach(int64_t threshold, WorkLeft& left, const PublishedSearch& beside) {
        const auto run_here = [&](Method method) {
            const int w = static_cast<int>(method);
            counted.restart();
            run(w,
                threshold,
                method,
                work_at_start(method, domain_.ranks, domain_.mains),
                restarts_at_start(method));
            tries_run_.back().is_first = true;
            return verdicts_[w];
        };
        const auto verdict_of = [&](Method method) {
            counted.spend(kShared + 3 * kLoop, kLoops, 3 * kIssueLoop);
            return verdicts_[static_cast<int>(method)];
        };
        WorkLeft then = left;  // what the host would have left
        bool decided = false;
        if (domain_.even) {
            begin_round();
            run_here(Method::kFill);
            end_warp(static_cast<int>(Method::kFill));
            end_round(phases_[1]);
            decided = then.pays_for(verdict_of(Method::kFill));
        }
        if (!decided) {
            begin_round();
            stopped_ = INT64_MAX;
            for (int w = 0; w < kMethods; ++w) {
                const auto method = static_cast<Method>(w);
                if (method == Method::kFill || method == Method::kRefill) continue;
                const Verdict verdict = run_here(method);
                if (method == Method::kBestFit && then.pays_for(verdict)) stopped_ = counted.now();
                end_warp(w);
            }
            run_here(Method::kRefill);
            end_warp(static_cast<int>(Method::kRefill));
            run_next_steps(beside, threshold, kStepsBeside);
            end_round(phases_[1]);
            stopped_ = INT64_MAX;
        }
        int chosen = -1;
        counted.restart();
        const bool reached = choose_at_start(domain_.even, left, verdict_of, [&](Method method) {
            chosen = static_cast<int>(method);
        });
        keep(chosen);
        end_serial(phases_[1]);
        return reached;
    }

    static Method method_of_probe(int warp) {
        return warp % 2 == 0 ? Method::kRefill : Method::kBestFit;
    }

    static int warp_of_probe(int probe, Method method) {
        return 2 * probe + (method == Method::kRefill ? 0 : 1);
    }

    // Within a round.
    void run_next_steps(const PublishedSearch& published, int64_t start, int steps) {
        for (int way = 1; way < 1 << steps; ++way) {
            const int w = kWarps - way;
            counted.restart();
            PublishedSearch own = published;
            int bit = 0;
            while (way >> (bit + 1) != 0) ++bit;
            for (--bit; bit >= 0 && !own.done(); --bit) own.narrow((way >> bit & 1) == 0);
            verdicts_[w] = {};
            if (!own.done() && own.threshold() >= start) {
                run(w, own.threshold(), Method::kRoomiest, INT32_MAX, 0);
            }
            end_warp(w);
        }
    }

    void run(int w, int64_t threshold, Method method, int32_t work_limit, int restarts) {
        const bool may_stop = method == Method::kRefill || w >= kMethods;
        Attempt<Warp> attempt({&tried_, &memory_[w]}, work_limit, may_stop);
        verdicts_[w] = attempt.run(static_cast<Amount>(threshold), method, restarts);
        most_work_ = std::max<int64_t>(most_work_, verdicts_[w].work);
        tries_run_.push_back(
            {method, verdicts_[w], counted.now(), counted.issued(), counted.rounds(), false});
        may_stop_ = may_stop;
    }

    void keep(int warp) {
        counted.spend(kSyncThreads, kLoops, 6);
        if (warp < 0) return;
        const int64_t replicas = (domain_.ranks * domain_.slots + kThreads - 1) / kThreads;
        counted.spend(replicas * (kShared + 3 * kOverlapped + kLoop) + kShared + kOverlapped,
                      kReads,
                      (replicas * 4 + 2) * kIssueAccess);
        counted.spend(kSyncThreads, kLoops, 6);
        for (int i = 0; i < domain_.ranks * domain_.slots; ++i) {
            memory_[kBest].expert.uncounted()[i] = memory_[warp].expert.uncounted()[i];
            memory_[kBest].amount.uncounted()[i] = memory_[warp].amount.uncounted()[i];
        }
        for (int r = 0; r < domain_.ranks; ++r) {
            memory_[kBest].held.uncounted()[r] = memory_[warp].held.uncounted()[r];
        }
    }

    void count_write() {
        const int64_t ranks = domain_.ranks;
        counted.restart();
        // Eight stores at once; then a main each.
        const int64_t stores = (domain_.experts() * ranks + kThreads - 1) / kThreads;
        counted.spend((stores + 7) / 8 * (8 * kOverlapped + kLoop), kWrites, stores * 3);
        const int64_t mains = (domain_.experts() + kThreads - 1) / kThreads;
        counted.spend(mains * (kL1 + kDivide + kOverlapped + kLoop), kReads, mains * 20);
        counted.spend(3 * kSyncThreads, kLoops, 6);
        if (found_) {
            const int64_t replica = kShared + 2 * kOverlapped + 3 * kLoop;
            counted.spend(2 * kShared + domain_.slots * replica, kReads, domain_.slots * 30);
            counted.spend(kL2, kAtomics, 1);
        }
        end_serial(phases_[4]);
    }

    void begin_round() {
        slowest_ = {};
        slowest_cycles_ = 0;
        most_work_ = 0;
        std::fill_n(issued_, 4, 0);
    }

    void end_warp(int w) {
        // A try that is stopped takes one more step.
        const int64_t whole = counted.now();
        const bool is_stopped = may_stop_ && whole > stopped_;
        const int64_t cycles = is_stopped ? std::min(whole, stopped_ + kLastStep) : whole;
        issued_[w % 4] += whole > 0 ? counted.issued() * cycles / whole : 0;
        if (cycles <= slowest_cycles_) return;
        slowest_cycles_ = cycles;
        slowest_ = counted.spent();
    }

    void end_round(Phase& phase) {
        const int64_t instructions = *std::max_element(issued_, issued_ + 4);
        phase.cycles += std::max(slowest_cycles_, instructions) + kSyncThreads;
        phase.work += most_work_;
        ++phase.rounds;
        phase.issue_bound += instructions > slowest_cycles_;
        phase.spent.add(slowest_);
    }

    // What all warps do alike.
    void end_serial(Phase& phase) {
        phase.cycles += counted.now();
        phase.spent.add(counted.spent());
    }

    const int64_t tolerance_ppm_;
    std::vector<int64_t> expert_load_;
    std::vector<int64_t> home_load_;
    std::vector<int32_t> busiest_first_;
    std::vector<int32_t> hottest_first_;
    std::vector<int32_t> busier_;
    int64_t total_;
    int64_t target_ = 0;
    Domain<int64_t> domain_;  // in global memory
    Domain<Amount> tried_;    // what the tries see
    std::vector<char> tries_;
    Layout layout_;
    TryMemory<Amount> memory_[kWarps + 1];
    Verdict verdicts_[kWarps];
    bool found_ = false;
    Phase phases_[5];
    std::vector<Try> tries_run_;
    Spent slowest_;
    int64_t slowest_cycles_ = 0;
    int64_t most_work_ = 0;
    int64_t stopped_ = INT64_MAX;  // when tries are stopped that may be
    bool may_stop_ = false;        // the try that ran last
    int64_t issued_[4];
};

const char* const kPhaseNames[] = {"before", "first", "published", "thresholds", "write"};

void print_spent(const char* name, const Spent& spent) {
    const auto list = [&](const char* what, const int64_t* values, int count, auto name_of) {
        std::printf("\"%s\": {", what);
        bool any = false;
        for (int i = 0; i < count; ++i) {
            if (values[i] == 0) continue;
            std::printf("%s\"%s\": %lld", any ? ", " : "", name_of(i), (long long)values[i]);
            any = true;
        }
        std::printf("}");
    };
    const int count = static_cast<int>(functions().size());
    const auto function_name = [](int i) { return functions()[i].name.c_str(); };
    std::printf("\"%s\": {", name);
    list("functions", spent.function, count, function_name);
    std::printf(", ");
    list("parts", spent.part, count, function_name);
    std::printf(", ");
    list("kinds", spent.kind, kKinds, [](int i) { return kKindNames[i]; });
    std::printf("}");
}

template <class Amount, int kMostRanks>
void CountedBlock<Amount, kMostRanks>::print() const {
    std::printf("{\"in_shared\": %s, \"budget\": %d, \"phases\": {",
                layout_.in_shared ? "true" : "false",
                work_budget(domain_.ranks, domain_.mains));
    for (int p = 0; p < 5; ++p) {
        const Phase& phase = phases_[p];
        std::printf(
            "%s\"%s\": {\"cycles\": %lld, \"rounds\": %d, \"work\": %lld, \"issue_bound\": %d, ",
            p > 0 ? ", " : "",
            kPhaseNames[p],
            (long long)phase.cycles,
            phase.rounds,
            (long long)phase.work,
            phase.issue_bound);
        print_spent("spent", phase.spent);
        std::printf("}");
    }
    std::printf("}, \"tries\": [");
    for (size_t i = 0; i < tries_run_.size(); ++i) {
        const Try& each = tries_run_[i];
        std::printf("%s[\"%s\", %d, %d, %d, %lld, %lld, %lld]",
                    i > 0 ? ", " : "",
                    kMethodNames[static_cast<int>(each.method)],
                    each.is_first,
                    each.verdict.reached,
                    each.verdict.work,
                    (long long)each.rounds,
                    (long long)each.cycles,
                    (long long)each.issued);
    }
    std::printf("], \"replicas\": [");
    const TryMemory<Amount>& best = memory_[kBest];
    bool any = false;
    for (int r = 0; found_ && r < domain_.ranks; ++r) {
        const int held = best.held.uncounted()[r];
        for (int k = r * domain_.slots; k < r * domain_.slots + held; ++k) {
            std::printf("%s[%d, %d, %d, %lld]",
                        any ? ", " : "",
                        r,
                        k - r * domain_.slots,
                        best.expert.uncounted()[k],
                        (long long)best.amount.uncounted()[k]);
            any = true;
        }
    }
    std::printf("]}\n");
}

}  // namespace

int main() {
    for (const Most& most : kSharedMemories) {
        if (shared_bytes(most) <= kMostShared) continue;
        std::fprintf(stderr, "tries of %d ranks do not fit in shared memory\n", most.ranks);
        return 1;
    }
    std::string line;
    while (std::getline(std::cin, line)) {
        std::istringstream words(line);
        int ranks, experts, slots;
        int64_t tolerance_ppm, min_quota;
        words >> ranks >> experts >> slots >> tolerance_ppm >> min_quota;
        std::vector<int64_t> load(words ? experts : 0);
        for (int64_t& each : load) words >> each;
        if (!words) {
            std::fprintf(stderr, "a line is not R E S, tolerance, min_quota and E loads\n");
            return 1;
        }
        const int mains = experts / ranks;
        const auto plan = [&](auto amount, auto capacity) {
            CountedBlock<decltype(amount), decltype(capacity)::value> block(
                ranks, mains, slots, tolerance_ppm, min_quota, load);
            block.plan();
            block.print();
        };
        int64_t before = 0;  // of the busiest rank
        for (int r = 0; r < ranks; ++r) {
            const auto first = load.begin() + r * mains;
            before = std::max(before, std::accumulate(first, first + mains, int64_t{0}));
        }
        using std::integral_constant;
        if (!is_narrow(before, min_quota)) {
            plan(int64_t{0}, integral_constant<int, 0>{});
        } else {
            const auto fits = [&](const Most& most) {
                return ranks <= most.ranks && experts <= most.experts && slots <= most.slots;
            };
            if (fits(kSharedMemories[0])) {
                plan(int32_t{0}, integral_constant<int, kSharedMemories[0].ranks>{});
            } else if (fits(kSharedMemories[1])) {
                plan(int32_t{0}, integral_constant<int, kSharedMemories[1].ranks>{});
            } else if (fits(kSharedMemories[2])) {
                plan(int32_t{0}, integral_constant<int, kSharedMemories[2].ranks>{});
            } else {
                plan(int32_t{0}, integral_constant<int, 0>{});
            }
        }
        std::fflush(stdout);
    }
}
