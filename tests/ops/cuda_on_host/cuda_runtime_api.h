// CUDA's kernels on the host, for tests: runs a .cu file's threads as coroutines of one thread.
//
// Stands in for the toolkit's header of this name. Only what the kernels use is there. A thread
// runs until it waits for its warp, its block or another block, so what must not depend on the
// order of threads is tested by taking them in another order every time: a kernel that lacks a
// barrier then gives other results than the host, or its lanes wait for others that never come,
// which ends the program with a line on stderr. test_kernels_on_host.py writes the launches as
// calls of `launch`.
//
// A launch on the null stream runs at once, block after block. Launches on other streams are kept
// until `run_streams`, which runs the streams side by side: blocks of launches that wait for each
// other take turns.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#define __CUDACC__
#define __host__
#define __device__
#define __global__
// All in one place, which belongs to one block at a time.
#define __shared__ static __attribute__((section("shared_memory")))
#define __launch_bounds__(...)
#define __grid_constant__
#define __noinline__

extern "C" {
extern char __start_shared_memory[] __attribute__((weak));
extern char __stop_shared_memory[] __attribute__((weak));
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(16) float4 {
    float x, y, z, w;
};

namespace cuda_on_host {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 64 << 10;

enum class State { kReady, kAtWarp, kAtExchange, kAtSome, kAtBlock, kSpinning, kDone };

struct Thread {
    ucontext_t start;
    jmp_buf resume;
    bool started = false;
    State state = State::kReady;
    dim3 idx;
    int warp = 0;
    int lane = 0;
    unsigned phase = 0;          // of its warp's exchanges
    bool is_fenced = false;      // since it last met other threads
    const void* seen = nullptr;  // a flag that it has looked at, but not acquired
    // The last acquired flag that it knows of, and the last that bulk copies are ordered behind.
    uint64_t acquired = 0, ordered = 0;
    // The last that a lane of its warp had acquired when they showed each other something. That
    // orders nothing of memory.
    uint64_t shown = 0;
    std::unique_ptr<char[]> stack{new char[kStackBytes]};
};

// What lanes show each other. Twice, because a lane can be one exchange ahead of the slowest.
struct Exchange {
    int64_t value[2][kLanes];
};

struct Launch {
    dim3 grid, block;
    size_t dynamic_bytes;
    std::function<void()> body;
    uint64_t num_blocks() const { return uint64_t{grid.x} * grid.y * grid.z; }
};

struct Block {
    const Launch* launch;
    dim3 idx;
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<std::vector<Thread*>> warps;
    std::vector<Exchange> exchanges;  // one a warp
    std::vector<char> shared;         // while another block has the shared memory, and
    std::vector<char> dynamic;        // as much of the dynamic memory as its launch asked for
    int naps = 0;                     // so often others come first
    size_t some = 0;                  // threads that wait for each other in kAtSome
};

inline std::mt19937_64 random(1);
inline std::vector<std::unique_ptr<Thread>> idle_threads;
inline Block* block = nullptr;
inline Thread* current = nullptr;
inline jmp_buf scheduler;
inline std::map<cudaStream_t, std::deque<Launch>> streams;

// Shared memory of a size that a launch says: of all kernels, as one block runs at a time.
alignas(128) inline char dynamic_memory[227 << 10];

// So often threads have waited since one did something that others can wait for.
inline uint64_t idle_waits = 0;
constexpr uint64_t kMostIdleWaits = 1 << 20;

// For ptx.cuh: what it still has to do for a block that has ended.
inline std::function<void()> at_block_end = [] {};

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

// Called by a thread.
inline void wait(State state) {
    if (state != State::kSpinning) {
        if (current->seen != nullptr)
            fail("a thread goes on behind a flag that it has not acquired");
        current->is_fenced = false;
        idle_waits = 0;
    } else if (++idle_waits == kMostIdleWaits) {
        fail("threads wait for others that never come");
    }
    current->state = state;
    if (_setjmp(current->resume) == 0) _longjmp(scheduler, 1);
}

// Called by all lanes of a warp: the value of lane `source`.
template <class T>
T exchange(T value, int source) {
    int64_t (&values)[kLanes] = block->exchanges[current->warp].value[current->phase++ % 2];
    values[current->lane] = static_cast<int64_t>(value);
    wait(State::kAtExchange);
    return static_cast<T>(values[source]);
}

inline void run_body() {
    block->launch->body();
    idle_waits = 0;
    current->state = State::kDone;
    _longjmp(scheduler, 1);
}

// A function of its own, so that nothing else lives over the jumps.
[[gnu::noinline]] inline void run_until_it_waits(Thread* thread) {
    current = thread;
    if (_setjmp(scheduler) != 0) return;
    if (thread->started) _longjmp(thread->resume, 1);
    thread->started = true;
    setcontext(&thread->start);
}

// Make all of `group` ready again if they all wait for `state`. Each knows then what any knew, but
// for an exchange, in which each only hears of it.
template <class Group>
bool release(const Group& group, State state) {
    for (const auto& thread : group) {
        if (thread->state != state) return false;
    }
    uint64_t acquired = 0, ordered = 0;
    for (const auto& thread : group) {
        acquired = std::max(acquired, thread->acquired);
        ordered = std::max(ordered, thread->ordered);
    }
    for (const auto& thread : group) {
        thread->state = State::kReady;
        thread->shown = std::max(thread->shown, acquired);
        if (state == State::kAtExchange) continue;
        thread->acquired = acquired;
        thread->ordered = ordered;
    }
    return true;
}

// The same of as many threads of a block as wait for each other.
inline bool release_some() {
    std::vector<Thread*> there;
    for (const auto& thread : block->threads) {
        if (thread->state == State::kAtSome) there.push_back(thread.get());
    }
    return !there.empty() && there.size() == block->some && release(there, State::kAtSome);
}

inline std::unique_ptr<Block> start_block(const Launch& launch, uint64_t b) {
    auto started = std::make_unique<Block>();
    started->launch = &launch;
    started->idx = {static_cast<unsigned>(b % launch.grid.x),
                    static_cast<unsigned>(b / launch.grid.x % launch.grid.y),
                    static_cast<unsigned>(b / launch.grid.x / launch.grid.y)};
    const dim3 size = launch.block;
    const unsigned count = size.x * size.y * size.z;
    started->exchanges.resize((count + kLanes - 1) / kLanes);
    started->warps.resize(started->exchanges.size());
    for (unsigned i = 0; i < count; ++i) {
        if (idle_threads.empty()) idle_threads.push_back(std::make_unique<Thread>());
        started->threads.push_back(std::move(idle_threads.back()));
        idle_threads.pop_back();
        Thread& thread = *started->threads.back();
        thread.started = false;
        thread.state = State::kReady;
        thread.phase = 0;
        thread.is_fenced = false;
        thread.acquired = thread.ordered = thread.shown = 0;
        thread.idx = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
        thread.warp = static_cast<int>(i) / kLanes;
        thread.lane = static_cast<int>(i) % kLanes;
        started->warps[thread.warp].push_back(&thread);
        getcontext(&thread.start);
        thread.start.uc_stack = {thread.stack.get(), 0, kStackBytes};
        makecontext(&thread.start, run_body, 0);
    }
    return started;
}

// Run `block` until it is done, which is told, or some of its threads spin.
inline bool run_block() {
    std::vector<int> order(block->warps.size());
    std::iota(order.begin(), order.end(), 0);
    for (const auto& thread : block->threads) {
        if (thread->state == State::kSpinning) thread->state = State::kReady;
    }
    while (true) {
        bool ran = false;
        std::shuffle(order.begin(), order.end(), random);
        for (const int w : order) {
            std::vector<Thread*>& warp = block->warps[w];
            std::shuffle(warp.begin(), warp.end(), random);
            for (Thread* thread : warp) {
                if (thread->state != State::kReady) continue;
                run_until_it_waits(thread);
                ran = true;
                // Others' blocks may come before the rest of this one.
                if (thread->state == State::kSpinning && random() % 4 == 0) return false;
            }
            release(warp, State::kAtWarp) || release(warp, State::kAtExchange);
        }
        if (release_some() || release(block->threads, State::kAtBlock) || ran) continue;
        bool done = true;
        for (const auto& thread : block->threads) {
            if (thread->state == State::kSpinning) return false;
            done = done && thread->state == State::kDone;
        }
        if (!done) fail("threads wait for others that never come");
        at_block_end();
        for (auto& thread : block->threads) idle_threads.push_back(std::move(thread));
        return true;
    }
}

// Run all launches on streams to their end, those of a stream one after the other.
inline void run_streams() {
    struct Running {
        Launch launch;
        std::deque<Launch>* stream;
        uint64_t next_block = 0;
        int resident;  // at most so many blocks at a time, as on a GPU that is busy otherwise
        std::list<std::unique_ptr<Block>> blocks;
    };
    std::list<Running> running;
    const size_t static_bytes = __stop_shared_memory - __start_shared_memory;
    const Block* owner = nullptr;  // of the shared memory
    while (true) {
        for (auto& [stream, launches] : streams) {
            const bool busy = std::any_of(running.begin(), running.end(), [&](const Running& each) {
                return each.stream == &launches;
            });
            if (busy || launches.empty()) continue;
            running.push_back({std::move(launches.front()), &launches, 0, 1, {}});
            running.back().resident = 1 + static_cast<int>(random() % 3);
            launches.pop_front();
        }
        if (running.empty()) return;
        auto chosen = std::next(running.begin(), static_cast<long>(random() % running.size()));
        while (chosen->next_block < chosen->launch.num_blocks() &&
               static_cast<int>(chosen->blocks.size()) < chosen->resident) {
            chosen->blocks.push_back(start_block(chosen->launch, chosen->next_block++));
            chosen->blocks.back()->shared.assign(static_bytes, '\xff');  // NaN
            chosen->blocks.back()->dynamic.assign(chosen->launch.dynamic_bytes, '\xff');
        }
        auto next =
            std::next(chosen->blocks.begin(), static_cast<long>(random() % chosen->blocks.size()));
        block = next->get();
        if (block->naps > 0) {
            --block->naps;
            continue;
        }
        if (block != owner) {
            // `owner` may be gone, and then nobody needs what it left.
            for (Running& each : running) {
                for (const auto& other : each.blocks) {
                    if (other.get() != owner) continue;
                    other->shared.assign(__start_shared_memory, __stop_shared_memory);
                    std::copy_n(dynamic_memory, other->dynamic.size(), other->dynamic.begin());
                }
            }
            std::copy(block->shared.begin(), block->shared.end(), __start_shared_memory);
            std::copy(block->dynamic.begin(), block->dynamic.end(), dynamic_memory);
            owner = block;
        }
        if (run_block()) {
            owner = nullptr;
            chosen->blocks.erase(next);
        } else if (random() % 8 == 0) {
            // Long enough for others to do all that they may do meanwhile.
            block->naps = static_cast<int>(random() % 100);
        }
        if (chosen->blocks.empty() && chosen->next_block == chosen->launch.num_blocks()) {
            running.erase(chosen);
        }
    }
}

template <class Kernel>
void launch(dim3 grid, dim3 block_size, size_t dynamic_bytes, cudaStream_t stream, Kernel kernel) {
    Launch launch{grid, block_size, dynamic_bytes, kernel};
    if (stream != nullptr) {
        streams[stream].push_back(std::move(launch));
        return;
    }
    for (uint64_t b = 0; b < launch.num_blocks(); ++b) {
        const std::unique_ptr<Block> started = start_block(launch, b);
        block = started.get();
        while (!run_block()) {
        }
    }
}

}  // namespace cuda_on_host

#define threadIdx (cuda_on_host::current->idx)
#define blockIdx (cuda_on_host::block->idx)
#define gridDim (cuda_on_host::block->launch->grid)
#define blockDim (cuda_on_host::block->launch->block)

inline void __syncthreads() { cuda_on_host::wait(cuda_on_host::State::kAtBlock); }
inline void __syncwarp() { cuda_on_host::wait(cuda_on_host::State::kAtWarp); }
inline void __threadfence() {}

template <class T>
T __shfl_sync(unsigned, T value, int source) {
    return cuda_on_host::exchange(value, source);
}

template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
    const int lane = cuda_on_host::current->lane;
    return cuda_on_host::exchange(value, lane < distance ? lane : lane - distance);
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int distance) {
    return cuda_on_host::exchange(value, cuda_on_host::current->lane ^ distance);
}

inline unsigned __ballot_sync(unsigned, bool predicate) {
    unsigned ballot = predicate ? 1u << cuda_on_host::current->lane : 0;
    for (int distance = 1; distance < cuda_on_host::kLanes; distance *= 2) {
        ballot |= __shfl_xor_sync(0, ballot, distance);
    }
    return ballot;
}

// Of what all lanes give, by an operation of two.
template <class T, class Function>
T reduce(T value, Function both) {
    for (int distance = 1; distance < cuda_on_host::kLanes; distance *= 2) {
        value = both(value, __shfl_xor_sync(0, value, distance));
    }
    return value;
}

template <class T>
T __reduce_max_sync(unsigned, T value) {
    return reduce(value, [](T a, T b) { return std::max(a, b); });
}

template <class T>
T __reduce_add_sync(unsigned, T value) {
    return reduce(value, [](T a, T b) { return a + b; });
}

template <class T>
T __reduce_min_sync(unsigned, T value) {
    return reduce(value, [](T a, T b) { return std::min(a, b); });
}

inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned bits) {
    return static_cast<unsigned>((uint64_t{high} << 32 | low) << (bits & 31) >> 32);
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline float __uint_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <class T>
T atomicAdd(T* address, T value) {
    const T before = *address;
    *address += value;
    return before;
}

template <class T>
T atomicMax(T* address, T value) {
    const T before = *address;
    *address = std::max(before, value);
    return before;
}

template <class T>
T atomicMin(T* address, T value) {
    const T before = *address;
    *address = std::min(before, value);
    return before;
}

template <class T>
T atomicExch(T* address, T value) {
    const T before = *address;
    *address = value;
    return before;
}

inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
    std::memset(memory, value, bytes);
    return cudaSuccess;
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin };

namespace cuda_on_host {
inline int most_shared_bytes = sizeof dynamic_memory;  // of a block
}

inline cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
    *value = cuda_on_host::most_shared_bytes;
    return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int bytes) {
    return bytes <= cuda_on_host::most_shared_bytes ? cudaSuccess : cudaErrorInvalidValue;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
