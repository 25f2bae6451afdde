// CUDA's kernels on the host, for tests: runs a .cu file's threads as coroutines of one thread.
//
// Stands in for the toolkit's header of this name. Only what the kernels use is there. A thread
// runs until it waits for its warp or its block, so what must not depend on the order of threads is
// tested by taking them in another order every time: a kernel that lacks a barrier then gives other
// results than the host, or its lanes wait for others that never come, which ends the program with
// a line on stderr. test_kernels_on_host.py writes the launches as calls of `launch`.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#define __CUDACC__
#define __host__
#define __device__
#define __global__
#define __shared__ static  // blocks run one after the other
#define __launch_bounds__(...)

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace cuda_on_host {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 64 << 10;

enum class State { kReady, kAtWarp, kAtBlock, kDone };

struct Thread {
    ucontext_t start;
    jmp_buf resume;
    bool started = false;
    State state = State::kReady;
    dim3 idx;
    int warp = 0;
    int lane = 0;
    unsigned phase = 0;  // of its warp's exchanges
    std::vector<char> stack = std::vector<char>(kStackBytes);
};

// What lanes show each other. Twice, because a lane can be one exchange ahead of the slowest.
struct Exchange {
    int64_t value[2][kLanes];
};

inline std::mt19937_64 random(1);
inline std::vector<Thread> threads;
inline std::vector<Exchange> exchanges;  // one a warp
inline Thread* current = nullptr;
inline jmp_buf scheduler;
inline std::function<void()> body;

// Called by a thread.
inline void wait(State state) {
    current->state = state;
    if (_setjmp(current->resume) == 0) _longjmp(scheduler, 1);
}

// Called by all lanes of a warp: the value of lane `source`.
template <class T>
T exchange(T value, int source) {
    int64_t (&values)[kLanes] = exchanges[current->warp].value[current->phase++ % 2];
    values[current->lane] = static_cast<int64_t>(value);
    wait(State::kAtWarp);
    return static_cast<T>(values[source]);
}

inline void run_body() {
    body();
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

// Make all of `group` ready again if they all wait for `state`.
template <class Group>
bool release(const Group& group, State state) {
    for (const Thread* thread : group) {
        if (thread->state != state) return false;
    }
    for (Thread* thread : group) thread->state = State::kReady;
    return true;
}

inline void run_block() {
    std::vector<std::vector<Thread*>> warps(exchanges.size());
    std::vector<Thread*> all;
    for (Thread& thread : threads) {
        thread.started = false;
        thread.state = State::kReady;
        warps[thread.warp].push_back(&thread);
        all.push_back(&thread);
    }
    std::vector<int> order(warps.size());
    std::iota(order.begin(), order.end(), 0);
    while (true) {
        bool ran = false;
        std::shuffle(order.begin(), order.end(), random);
        for (const int w : order) {
            std::shuffle(warps[w].begin(), warps[w].end(), random);
            for (Thread* thread : warps[w]) {
                if (thread->state != State::kReady) continue;
                run_until_it_waits(thread);
                ran = true;
            }
            release(warps[w], State::kAtWarp);
        }
        if (release(all, State::kAtBlock)) continue;
        if (ran) continue;
        for (const Thread* thread : all) {
            if (thread->state == State::kDone) continue;
            std::fprintf(stderr, "threads wait for others that never come\n");
            std::exit(1);
        }
        return;
    }
}

inline dim3 block_idx;
inline dim3 grid_dim;

template <class Kernel>
void launch(dim3 grid, dim3 block, size_t, cudaStream_t, Kernel kernel) {
    const unsigned count = block.x * block.y * block.z;
    body = kernel;
    grid_dim = grid;
    threads.resize(count);
    exchanges.resize((count + kLanes - 1) / kLanes);
    for (unsigned i = 0; i < count; ++i) {
        Thread& thread = threads[i];
        thread.idx = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
        thread.warp = static_cast<int>(i) / kLanes;
        thread.lane = static_cast<int>(i) % kLanes;
    }
    const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
    for (uint64_t b = 0; b < blocks; ++b) {
        block_idx = {static_cast<unsigned>(b % grid.x),
                     static_cast<unsigned>(b / grid.x % grid.y),
                     static_cast<unsigned>(b / grid.x / grid.y)};
        for (Thread& thread : threads) {
            getcontext(&thread.start);
            thread.start.uc_stack = {thread.stack.data(), 0, kStackBytes};
            makecontext(&thread.start, run_body, 0);
        }
        run_block();
    }
}

}  // namespace cuda_on_host

#define threadIdx (cuda_on_host::current->idx)
#define blockIdx (cuda_on_host::block_idx)
#define gridDim (cuda_on_host::grid_dim)

inline void __syncthreads() { cuda_on_host::wait(cuda_on_host::State::kAtBlock); }
inline void __syncwarp() { cuda_on_host::wait(cuda_on_host::State::kAtWarp); }

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

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

template <class T>
T atomicAdd(T* address, T value) {
    const T before = *address;
    *address += value;
    return before;
}

inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
    std::memset(memory, value, bytes);
    return cudaSuccess;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
