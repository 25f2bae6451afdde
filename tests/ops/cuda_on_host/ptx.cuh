// csrc/cuda/ptx.cuh on the host: bulk copies that are made as late, or as early, as is allowed.
//
// A load happens when it is issued or when somebody waits for its barrier; with others, in any
// order. A store reads its shared memory when its thread waits for that, and reaches its
// destination when its thread waits for that. So what is read, overwritten or told to others too
// early shows as other bytes. What the hardware forbids ends the program: wrong alignment, a block
// that ends before its copies, a barrier used twice in a phase, or waited for when two more phases
// are complete, a bulk copy that no fence orders behind an acquired flag, a relaxed store that no
// fence orders behind what other threads did, a flag that is looked at and not acquired, a bulk
// copy behind a flag of which the lanes of a warp have only told each other: votes and shuffles
// order nothing.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "cuda_runtime_api.h"

namespace cuda_on_host {

struct BulkLoad {
    void* to;
    const void* from;
    uint32_t bytes;
    uint64_t* barrier;
};

struct BulkStore {
    char* to;
    const char* from;
    uint32_t bytes;
    std::vector<char> read;
};
using Group = std::vector<BulkStore>;

// What a barrier's word holds.
struct Barrier {
    int32_t missing_bytes;
    uint8_t arrivals;  // of a phase
    uint8_t missing;   // of this one
    uint16_t phase;
};

struct Copies {
    std::vector<BulkLoad> loads;
    std::map<Thread*, Group> open;  // not committed yet
    std::map<Thread*, std::vector<Group>> groups;
    struct Known {
        uint64_t acquired, ordered;
    };
    std::map<uint64_t*, Known> known;  // by who arrived at a barrier, as Thread has it
};
inline std::map<Block*, Copies> copies;
inline uint64_t num_acquired = 0;
inline uint64_t clock_ns = 0;

inline Barrier& as_barrier(uint64_t* word) { return *reinterpret_cast<Barrier*>(word); }

inline void arrive(Barrier& barrier) {
    if (barrier.missing == 0) fail("a barrier is used twice in a phase");
    --barrier.missing;
}

inline void end_phase_if_complete(Barrier& barrier) {
    if (barrier.missing != 0 || barrier.missing_bytes != 0) return;
    barrier.missing = barrier.arrivals;
    ++barrier.phase;
    idle_waits = 0;
}

inline void check_bulk(const void* to, const void* from, uint32_t bytes) {
    if (current->ordered < current->acquired) {
        fail("no fence between an acquired flag and a bulk copy");
    }
    if (current->acquired < current->shown) {
        fail("no barrier between a flag that another lane has acquired and a bulk copy");
    }
    const auto odd = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes;
    if (odd % 16 != 0 || bytes == 0) fail("a bulk copy must be of multiples of 16 bytes");
}

inline void do_load(std::vector<BulkLoad>& loads, size_t i) {
    const BulkLoad load = loads[i];
    loads.erase(loads.begin() + static_cast<long>(i));
    std::memcpy(load.to, load.from, load.bytes);
    Barrier& barrier = as_barrier(load.barrier);
    barrier.missing_bytes -= static_cast<int32_t>(load.bytes);
    end_phase_if_complete(barrier);
}

// Let all but this thread's last `pending` groups read; write them if `complete`.
inline void end_stores(size_t pending, bool complete) {
    std::vector<Group>& groups = copies[block].groups[current];
    if (groups.size() <= pending) return;
    const auto end = groups.end() - static_cast<long>(pending);
    for (auto group = groups.begin(); group != end; ++group) {
        std::shuffle(group->begin(), group->end(), random);
        for (BulkStore& store : *group) {
            if (store.read.empty()) store.read.assign(store.from, store.from + store.bytes);
            if (complete) std::memcpy(store.to, store.read.data(), store.bytes);
        }
    }
    if (complete) groups.erase(groups.begin(), end);
}

inline void check_ended() {
    const auto found = copies.find(block);
    if (found == copies.end()) return;
    for (const auto& [thread, group] : found->second.open) {
        if (!group.empty()) fail("a block ended with bulk stores that were not committed");
    }
    for (const auto& [thread, groups] : found->second.groups) {
        if (!groups.empty()) fail("a block ended before its bulk stores");
    }
    if (!found->second.loads.empty()) fail("a block ended before its bulk loads");
    copies.erase(found);
}

inline void let_others_run() {
    if (random() % 4 == 0) wait(State::kSpinning);
}

// Now and then, others of its block go on long before this thread does.
inline void let_others_come_first(uint64_t times) {
    if (random() % times != 0) return;
    for (auto naps = random() % 128; naps > 0; --naps) wait(State::kSpinning);
}

}  // namespace cuda_on_host

namespace megatron_ext {

template <int kThreads>
void sync_some() {
    cuda_on_host::block->some = kThreads;
    cuda_on_host::wait(cuda_on_host::State::kAtSome);
}

inline void barrier_init(uint64_t* barrier, uint32_t arrivals = 1) {
    const auto count = static_cast<uint8_t>(arrivals);
    cuda_on_host::as_barrier(barrier) = {0, count, count, 0};
    cuda_on_host::at_block_end = cuda_on_host::check_ended;
}

inline void barrier_expect(uint64_t* barrier, uint32_t bytes) {
    cuda_on_host::Barrier& expecting = cuda_on_host::as_barrier(barrier);
    cuda_on_host::arrive(expecting);
    expecting.missing_bytes += static_cast<int32_t>(bytes);
}

inline void barrier_arrive(uint64_t* barrier) {
    cuda_on_host::let_others_run();
    cuda_on_host::Barrier& arriving = cuda_on_host::as_barrier(barrier);
    const cuda_on_host::Thread& thread = *cuda_on_host::current;
    auto& known = cuda_on_host::copies[cuda_on_host::block].known[barrier];
    known.acquired = std::max(known.acquired, thread.acquired);
    known.ordered = std::max(known.ordered, thread.ordered);
    cuda_on_host::arrive(arriving);
    cuda_on_host::end_phase_if_complete(arriving);
    cuda_on_host::let_others_run();
}

inline bool barrier_is_past(uint64_t* barrier, uint32_t phase) {
    cuda_on_host::let_others_run();
    const auto ended = static_cast<uint16_t>(cuda_on_host::as_barrier(barrier).phase - phase);
    if (ended == 0) return false;
    if (ended > 1) cuda_on_host::fail("a barrier has gone on by two phases before a look");
    const auto known = cuda_on_host::copies[cuda_on_host::block].known[barrier];
    cuda_on_host::Thread& thread = *cuda_on_host::current;
    thread.acquired = std::max(thread.acquired, known.acquired);
    thread.ordered = std::max(thread.ordered, known.ordered);
    thread.is_fenced = false;  // An earlier fence orders nothing of who arrived.
    return true;
}

inline void barrier_wait(uint64_t* barrier, uint32_t phase) {
    while (!barrier_is_past(barrier, phase)) {
        auto& loads = cuda_on_host::copies[cuda_on_host::block].loads;
        if (loads.empty()) {
            cuda_on_host::wait(cuda_on_host::State::kSpinning);
        } else {
            cuda_on_host::do_load(loads, cuda_on_host::random() % loads.size());
        }
    }
    cuda_on_host::let_others_come_first(4096);
}

inline void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
    cuda_on_host::check_bulk(to, from, bytes);
    auto& copies = cuda_on_host::copies[cuda_on_host::block];
    copies.loads.push_back({to, from, bytes, barrier});
    if (cuda_on_host::random() % 2 == 0) {
        cuda_on_host::do_load(copies.loads, copies.loads.size() - 1);
    }
}

inline void bulk_store(void* to, const void* from, uint32_t bytes) {
    cuda_on_host::check_bulk(to, from, bytes);
    cuda_on_host::copies[cuda_on_host::block].open[cuda_on_host::current].push_back(
        {static_cast<char*>(to), static_cast<const char*>(from), bytes, {}});
}

inline void bulk_commit() {
    auto& copies = cuda_on_host::copies[cuda_on_host::block];
    cuda_on_host::Group& open = copies.open[cuda_on_host::current];
    copies.groups[cuda_on_host::current].push_back(std::exchange(open, {}));
}

template <int kPending>
void bulk_wait_read() {
    cuda_on_host::end_stores(kPending, false);
}

template <int kPending = 0>
void bulk_wait() {
    cuda_on_host::end_stores(kPending, true);
}

inline void fence_bulk() { cuda_on_host::current->ordered = cuda_on_host::current->acquired; }

inline uint64_t load_relaxed(const uint64_t* flag) {
    cuda_on_host::let_others_run();
    cuda_on_host::current->seen = flag;
    return *flag;
}

inline uint64_t load_acquire(const uint64_t* flag) {
    cuda_on_host::let_others_run();
    if (cuda_on_host::current->seen == flag) cuda_on_host::current->seen = nullptr;
    cuda_on_host::current->acquired = ++cuda_on_host::num_acquired;
    return *flag;
}

inline void store_release(uint64_t* flag, uint64_t value) {
    cuda_on_host::let_others_run();
    *flag = value;
    cuda_on_host::idle_waits = 0;
    cuda_on_host::let_others_run();
    cuda_on_host::let_others_come_first(64);
}

inline void store_relaxed(uint64_t* flag, uint64_t value) {
    if (!cuda_on_host::current->is_fenced) cuda_on_host::fail("no fence before a relaxed store");
    store_release(flag, value);
}

inline void fence_system() { cuda_on_host::current->is_fenced = true; }

// Only who asks makes time pass, so a wait that is too long ends by its time limit.
inline uint64_t now_ns() { return cuda_on_host::clock_ns += 1000; }

inline void pause() { cuda_on_host::wait(cuda_on_host::State::kSpinning); }

}  // namespace megatron_ext
