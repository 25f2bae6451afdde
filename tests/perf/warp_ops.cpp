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
// 3. Where an array is has to be found out first, and again after a barrier, a vote, a write or a
//    call: by a read of local memory where the tries lie in shared memory, with one more where the
//    place depends on the number of slots; by two where they lie in global memory. A function that
//    keeps `at` finds out once.
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
#include <map>
#include <numeric>
#include <sstream>
#include <string>
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

    // Arrays are asked for; those from `behind` on have a place that depends on the slots.
    void find_arrays(const void* behind) {
        behind_ = static_cast<const char*>(behind);
        if (at_.found == 0) at_.found = at_.unknown + kL1 + (layout.in_shared ? 0 : kGeneric);
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

    void enter(int function) {
        ++depth_;
        stack_[depth_] = static_cast<int8_t>(function);
        parts_[depth_] = functions()[function].is_part ? stack_[depth_] : parts_[depth_ - 1];
        if (depth_ == 0) return;
        spend(kCall + functions()[function].extra, kCalls, kIssueCall);
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
            const bool is_behind = at_.found > 0 && byte >= behind_;
            return {at_.found + (is_behind ? kGeneric : 0), kShared};
        }
        // A domain's: its pointer is in shared memory.
        const bool is_member = functions()[stack_[depth_]].is_member;
        const bool is_own = layout.in_shared && byte >= layout.loads && byte < layout.tries;
        return {at_.unknown + kGeneric + (is_member ? kL1 : 0), is_own ? kGeneric : kL1};
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
    const char* behind_ = nullptr;
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

struct CountedMemory;

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

// As DeviceWarp in warp.h, function by function.
struct CountingWarp {
    using Memory = CountedMemory;

    bool narrow = false;

    template <class Function>
    void for_each(int count, Function function) const {
        begin_synced();
        for (int first = 0; first < count; first += 32) {
            counted.run_lanes(first, count, function);
            counted.spend(kLoop, kLoops, kIssueLoop);
        }
        sync();
    }

    template <class Function>
    Best best(int count, Function key_of) const {
        counted.spend(kBegin, kLoops, kIssueBegin);
        Best best;
        for (int first = 0; first < count; first += 32) {
            counted.run_lanes(first, count, [&](int i) {
                const int64_t key = key_of(i);
                if (key > best.key) best = {i, key};
            });
            counted.spend(kLoop + kCompare, kLoops, 2 * kIssueLoop);
        }
        counted.spend(kOverlapped, kReads, kIssueAccess);  // `narrow`
        counted.spend(kCall, kCalls, kIssueCall);
        counted.spend((narrow ? 2 : 3) * kReduce, kReductions, kIssueReduce);
        return best;
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

    template <class Function>
    int find(int count, Function is_it) const {
        counted.spend(kBegin, kLoops, kIssueBegin);
        int found = -1;
        for (int first = 0; first < count && found < 0; first += 32) {
            counted.run_lanes(first, count, [&](int i) {
                if (is_it(i) && found < 0) found = i;
            });
            vote();
        }
        return found;
    }

    template <class Function>
    int count_first(int count, Function is_it) const {
        counted.spend(kBegin, kLoops, kIssueBegin);
        int found = 0;
        for (int first = 0; first < count; first += 32) {
            int here = 0;
            counted.run_lanes(first, count, [&](int i) { here += is_it(i); });
            vote();
            found += here;
            if (here < 32) break;
        }
        return found;
    }

    template <class Is, class Before>
    Place find_and_count(int count, Is is_it, Before comes_before) const {
        counted.spend(kBegin, kLoops, kIssueBegin);
        Place place{-1, 0};
        for (int first = 0; first < count; first += 32) {
            counted.run_lanes(first, count, [&](int i) {
                if (is_it(i) && place.found < 0) place.found = i;
                place.count += comes_before(i);
            });
            vote();
            counted.spend(kOverlapped, kVotes, kIssueLoop);  // the second, right behind the first
        }
        return place;
    }

    template <class List, class Function>
    int gather(int count, List list, Function is_it) const {
        begin_synced();
        int found = 0;
        for (int first = 0; first < count; first += 32) {
            bool is_one[32] = {};
            counted.run_lanes(first, count, [&](int i) { is_one[i - first] = is_it(i); });
            vote();
            counted.run_lanes(first, count, [&](int i) {
                if (is_one[i - first]) list[found++] = i;
            });
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

    template <class A, class B, class NewA, class NewB>
    void move_down(int from, int to, A a, B b, NewA new_a, NewB new_b) const {
        move(from - to);
        host_.move_down(from, to, a.uncounted(), b.uncounted(), new_a, new_b);
    }

    template <class A, class B, class NewA, class NewB>
    void move_up(int from, int to, A a, B b, NewA new_a, NewB new_b) const {
        move(to - from);
        host_.move_up(from, to, a.uncounted(), b.uncounted(), new_a, new_b);
    }

    template <class A, class B>
    void sort(int count, A a, B b, A scratch_a, B scratch_b) const {
        counted.spend(kCall, kCalls, kIssueCall);
        // Four steps at once.
        for_each(count, [&](int) {
            const int64_t step = read_by_address() + 7 * kOverlapped + 4 * kCompare + kLoop;
            counted.spend((count + 3) / 4 * step, kReads, count * 2 * (kIssueAccess + kIssueLoop));
        });
        for_each(count, [&](int) {
            counted.spend(read_by_address() + kOverlapped, kReads, kIssueAccess);
        });
        host_.sort(
            count, a.uncounted(), b.uncounted(), scratch_a.uncounted(), scratch_b.uncounted());
    }

    template <class Function>
    void take_offers(int count,
                     int takers,
                     Array<int64_t> now,
                     Array<int64_t> taken,
                     Array<int32_t> taken_id,
                     Array<int64_t> scratch,
                     Function make_offers) const {
        std::vector<int64_t> value(taken.uncounted(), taken.uncounted() + takers);
        std::vector<int32_t> id(taken_id.uncounted(), taken_id.uncounted() + takers);
        for_each(takers, [&](int t) { scratch[t] = narrow ? taken[t] + taken_id[t] : taken[t]; });
        for (int pass = 0; pass < (narrow ? 1 : 2); ++pass) {
            begin_synced();
            for (int first = 0; first < count; first += 32) {
                counted.spend(kDivide, kLoops, 2 * kIssueLoop);  // from a replica to its rank
                // Of the n-th offers of the lanes: how many raise what is at each rank.
                std::map<std::pair<int, int>, int> raises;
                counted.run_lanes(first, count, [&](int i) {
                    int nth = 0;
                    make_offers(i, [&](int t, int64_t offered, int32_t offered_id) {
                        ++nth;
                        if (offered <= now[t]) return;
                        int& times = raises[{nth, t}];
                        if (pass > 0) {
                            times = 1;
                            return;
                        }
                        if (offered < value[t] || (offered == value[t] && offered_id > id[t])) {
                            times = std::max(times, 1);
                            return;
                        }
                        ++times;
                        value[t] = offered;
                        id[t] = offered_id;
                    });
                });
                std::map<int, int> most;
                for (const auto& [which, times] : raises) {
                    most[which.first] = std::max(most[which.first], times);
                }
                for (const auto& [nth, times] : most) {
                    // Only the first pass has to know what becomes of it.
                    const int64_t each = counted.layout.in_shared ? kAtomic : kL2;
                    counted.spend(pass > 0 ? kOverlapped : times * each, kAtomics, 6 + 6 * times);
                }
                counted.forget();
                counted.spend(kLoop, kLoops, kIssueLoop);
            }
            sync();
            for_each(takers, [&](int t) {
                taken[t] = value[t];
                taken_id[t] = id[t];
            });
        }
    }

    template <class Function>
    void once(Function function) const {
        begin_synced();
        counted.run_lanes(0, 1, [&](int) { function(); });
        sync();
    }

  private:
    static void sync() {
        counted.spend(kSyncWarp, kLoops, 2);
        counted.forget();
    }

    static void begin_synced() {
        sync();
        counted.spend(kBegin, kLoops, kIssueBegin);
    }

    static void vote() {
        counted.spend(kVote + kLoop, kVotes, 2 * kIssueLoop);
        counted.forget();
    }

    static void sum_lanes() {
        counted.spend(kCall, kCalls, kIssueCall);
        counted.spend(5 * kShuffle, kReductions, 5 * 8);
    }

    static void move(int count) {
        counted.spend(kCall + kSyncWarp + 2 * kOverlapped, kCalls, 5 * kIssueCall);
        for (int first = 0; first < count; first += 32) {
            counted.run_lanes(first, count, [](int) {
                counted.spend(read_by_address() + kOverlapped, kReads, 2 * kIssueAccess);
            });
            counted.spend(kLoop + 2 * kSyncWarp, kLoops, 3 * kIssueLoop);
        }
        counted.forget();
    }

    // What is given to a function that stays one could lie anywhere.
    static int64_t read_by_address() { return counted.layout.in_shared ? kGeneric : kL1; }

    static inline const HostWarp host_{};
};

}  // namespace megatron_ext

#include "megatron_ext/planner/attempt.h"
#include "megatron_ext/planner/search.h"

struct megatron_ext::CountedMemory {
    const TryMemory* placed;

    MEGATRON_EXT_HOST_DEVICE const TryMemory& arrays(const Domain&) const {
        counted.find_arrays(placed->kept.uncounted());
        return *placed;
    }
};

namespace {

using namespace megatron_ext;

// As in solve_quota.cu.
constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kSteps = 4;
constexpr int64_t kMostShared = 220 << 10;

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

// A block that plans one load of one domain: BlockPlanner and solve_quota_kernel.
class CountedBlock {
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
          hottest_first_(load.size()) {
        for (size_t e = 0; e < load.size(); ++e) home_load_[e / mains] += load[e];
        sort_falling(home_load_, busiest_first_);
        sort_falling(expert_load_, hottest_first_);
        total_ = std::accumulate(load.begin(), load.end(), int64_t{0});
        domain_ = {ranks,
                   mains,
                   slots,
                   min_quota,
                   tolerance_ppm == 0,
                   expert_load_.data(),
                   home_load_.data(),
                   busiest_first_.data()};
        // Shared memory, for as many ranks as there is a kernel for, or else global memory.
        const int64_t loads = (8 * ranks * (mains + 1) + 15) / 16 * 16;
        const auto bytes_for = [&](int capacity) {
            return loads + (kWarps + 1) * TryMemory::bytes(capacity, ranks * mains, slots);
        };
        int capacity = ranks;
        for (const int each : {96, 64}) {
            if (ranks > each || bytes_for(each) > kMostShared) continue;
            capacity = each;
            layout_.in_shared = true;
        }
        tries_.resize(bytes_for(capacity));
        layout_.loads = tries_.data();
        layout_.tries = tries_.data() + loads;
        layout_.end = tries_.data() + tries_.size();
        for (int w = 0; w <= kWarps; ++w) {
            memory_[w].lay_out(
                tries_.data() + loads + w * TryMemory::bytes(capacity, ranks * mains, slots),
                capacity,
                ranks * mains,
                slots);
            state_of_[w % kWarps] = w % kWarps;
        }
        best_ = kWarps;
        // The copies of the loads that the tries read.
        auto* const own = reinterpret_cast<int64_t*>(tries_.data());
        std::copy(load.begin(), load.end(), own);
        std::copy(home_load_.begin(), home_load_.end(), own + load.size());
        tried_ = domain_;
        tried_.expert_load = own;
        tried_.home_load = own + load.size();
    }

    void plan() {
        counted.layout = {};
        const int64_t start = count_before();
        counted.layout = layout_;
        warp_.narrow = total_ < INT32_MAX;
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
        const CountingWarp wide{false};
        wide.sum(domain_.ranks, [&](int r) -> int64_t { return domain_.home_load[r]; });
        target_ = target_load(total_, ranks, tolerance_ppm_);
        Phase& before = phases_[0];
        before.cycles = counted.now();
        before.spent.add(counted.spent());
        // Warp by warp.
        int64_t start = target_;
        DomainBound<CountingWarp> bounds(wide, domain_, hottest_first_.data());
        begin_round();
        for (int w = 0; w < kWarps; ++w) {
            counted.restart();
            int64_t bound = target_;
            if (w == 0) bound = larger(bound, bounds.by_receivers());
            for (int k = 1 + w; k <= ranks; k += kWarps) bound = bounds.by_senders(k, bound);
            start = larger(start, bound);
            end_warp(w);
        }
        end_round(before);
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

    bool search(int64_t target, int64_t start) {
        if (domain_.before() <= start || domain_.slots == 0) return false;
        WorkLeft left{work_budget(domain_.ranks, domain_.mains)};
        if (reach(start, left)) return true;
        bool found = false;
        PublishedSearch published(target, domain_.before());
        while (!published.done()) {
            run_next_steps(published, start);
            int node = 0;
            int chosen = -1;
            counted.restart();
            for (int step = 0; step < kSteps && !published.done(); ++step) {
                counted.spend(kShared + 2 * kLoop, kLoops, 2 * kIssueLoop);
                const bool is_reached = verdicts_[node].reached;
                if (is_reached) chosen = node;
                published.narrow(is_reached);
                node = 2 * node + (is_reached ? 1 : 2);
            }
            keep(chosen);
            end_serial(phases_[2]);
            found = found || chosen >= 0;
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

    bool reach(int64_t threshold, WorkLeft& left) {
        const auto run_here = [&](auto is_asked) {
            begin_round();
            for (int w = 0; w < kMethods; ++w) {
                const auto method = static_cast<Method>(w);
                if (!is_asked(method)) continue;
                counted.restart();
                run(w,
                    threshold,
                    method,
                    work_at_start(method, domain_.ranks, domain_.mains),
                    restarts_at_start(method));
                tries_run_.back().is_first = true;
                end_warp(w);
            }
            end_round(phases_[1]);
        };
        const auto verdict_of = [&](Method method) {
            counted.spend(kShared + 3 * kLoop, kLoops, 3 * kIssueLoop);
            return verdicts_[static_cast<int>(method)];
        };
        WorkLeft then = left;  // what the host would have left
        bool decided = false;
        if (domain_.even) {
            run_here([](Method method) { return method == Method::kFill; });
            decided = then.pays_for(verdict_of(Method::kFill));
        }
        if (!decided) {
            run_here(
                [](Method method) { return method != Method::kFill && method != Method::kRefill; });
            if (!then.pays_for(verdict_of(Method::kBestFit))) {
                run_here([](Method method) { return method == Method::kRefill; });
            }
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

    void run_next_steps(const PublishedSearch& published, int64_t start) {
        begin_round();
        for (int w = 0; w < (1 << kSteps) - 1; ++w) {
            counted.restart();
            PublishedSearch own = published;
            int bit = 0;
            while ((w + 1) >> (bit + 1) != 0) ++bit;
            for (--bit; bit >= 0 && !own.done(); --bit) own.narrow(((w + 1) >> bit & 1) == 0);
            verdicts_[w] = {};
            if (!own.done() && own.threshold() >= start) {
                run(w, own.threshold(), Method::kRoomiest, INT32_MAX, 0);
            }
            end_warp(w);
        }
        end_round(phases_[2]);
    }

    void run(int w, int64_t threshold, Method method, int32_t work_limit, int restarts) {
        Attempt<CountingWarp> attempt(tried_, {&memory_[state_of_[w]]}, warp_, work_limit);
        verdicts_[w] = attempt.run(threshold, method, restarts);
        most_work_ = std::max<int64_t>(most_work_, verdicts_[w].work);
        tries_run_.push_back(
            {method, verdicts_[w], counted.now(), counted.issued(), counted.rounds(), false});
    }

    void keep(int warp) {
        counted.spend(2 * kSyncThreads + 2 * kShared, kLoops, 12);
        if (warp >= 0) std::swap(best_, state_of_[warp]);
    }

    void count_write() {
        const int64_t ranks = domain_.ranks;
        counted.restart();
        const int64_t rows = (domain_.experts() + kWarps - 1) / kWarps;
        const int64_t chunks = (ranks + 31) / 32;
        counted.spend(rows * (kDivide + kL1 + kLoop + chunks * (kOverlapped + 2 * kLoop)),
                      kLoops,
                      rows * (30 + chunks * 16));
        counted.spend(2 * kSyncThreads, kLoops, 4);
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
        issued_[w % 4] += counted.issued();
        if (counted.now() <= slowest_cycles_) return;
        slowest_cycles_ = counted.now();
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
    int64_t total_;
    int64_t target_ = 0;
    Domain domain_;  // in global memory
    Domain tried_;   // what the tries see
    std::vector<char> tries_;
    Layout layout_;
    CountingWarp warp_;
    TryMemory memory_[kWarps + 1];
    Verdict verdicts_[kWarps];
    int state_of_[kWarps];
    int best_;
    bool found_ = false;
    Phase phases_[5];
    std::vector<Try> tries_run_;
    Spent slowest_;
    int64_t slowest_cycles_ = 0;
    int64_t most_work_ = 0;
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

void CountedBlock::print() const {
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
    const TryMemory& best = memory_[best_];
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
        CountedBlock block(ranks, experts / ranks, slots, tolerance_ppm, min_quota, load);
        block.plan();
        block.print();
        std::fflush(stdout);
    }
}
