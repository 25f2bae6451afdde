// Instructions that CUDA C++ has no plain name for: bulk copies between global and shared memory,
// flags that other GPUs see, and the clock. The file has nothing but PTX, so that a test on the
// host can replace it by other functions.
//
// A bulk copy is asynchronous and made by a unit of its own (TMA). Addresses and sizes are
// multiples of 16. The end of a load completes a phase of a barrier in shared memory. The end of
// stores is known by groups, to the thread that issued them.
#pragma once

#include <cstdint>

namespace megatron_ext {

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// So many threads of a block wait for each other: whole warps, and always the same ones.
template <int kThreads>
__device__ inline void sync_some() {
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// Make `barrier` ready for phases of so many `barrier_expect` or `barrier_arrive` each.
__device__ inline void barrier_init(uint64_t* barrier, uint32_t arrivals = 1) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
    // The bulk copies must see it, too.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Let the phase complete when `bytes` have been loaded.
__device__ inline void barrier_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}

// Take part in the phase. What this thread did or saw before is visible behind a wait for it.
__device__ inline void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

// Whether a phase is complete, as `barrier_wait` but without waiting.
__device__ inline bool barrier_is_past(uint64_t* barrier, uint32_t phase) {
    uint32_t complete;
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
        "selp.u32 %0, 1, 0, complete;\n"
        "}"
        : "=r"(complete)
        : "r"(shared_address(barrier)), "r"(phase % 2)
        : "memory");
    return complete != 0;
}

// Wait until a phase is complete, from 0 on; what was loaded is visible then. A barrier knows
// whether a phase is odd, so nobody may wait for one when the second behind it may be complete.
__device__ inline void barrier_wait(uint64_t* barrier, uint32_t phase) {
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
        "@!complete bra again;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(phase % 2)
        : "memory");
}

// Start a copy from global memory, of any GPU, into shared memory.
__device__ inline void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(shared_address(to)),
        "l"(__cvta_generic_to_global(from)),
        "r"(bytes),
        "r"(shared_address(barrier))
        : "memory");
}

// Start a copy from shared memory to global memory, of any GPU.
__device__ inline void bulk_store(void* to, const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(to)),
                 "r"(shared_address(from)),
                 "r"(bytes)
                 : "memory");
}

// Put the stores since the last commit into one group.
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until at most the last `kPending` groups have not read their shared memory.
template <int kPending>
__device__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Wait until at most the last `kPending` groups have not been written where they go; this thread
// sees the others.
template <int kPending = 0>
__device__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Order bulk copies that this thread starts behind what it has seen so far. An acquired flag alone
// orders plain loads and stores only.
__device__ inline void fence_bulk() { asm volatile("fence.proxy.async;" ::: "memory"); }

// What the value is, and nothing of what was written before it.
__device__ inline uint64_t load_relaxed(const uint64_t* flag) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];"
                 : "=l"(value)
                 : "l"(__cvta_generic_to_global(flag))
                 : "memory");
    return value;
}

__device__ inline uint64_t load_acquire(const uint64_t* flag) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
                 : "=l"(value)
                 : "l"(__cvta_generic_to_global(flag))
                 : "memory");
    return value;
}

// Behind the same thread's `fence_system`, as good as a release: one fence for many flags.
__device__ inline void store_relaxed(uint64_t* flag, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(flag)),
                 "l"(value)
                 : "memory");
}

__device__ inline void store_release(uint64_t* flag, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(flag)),
                 "l"(value)
                 : "memory");
}

// All that this thread has done or seen, for all GPUs and the host, before what it does next.
__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ inline uint64_t now_ns() {
    uint64_t time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

// Leave the memory system to others for a moment.
__device__ inline void pause() { asm volatile("nanosleep.u32 40;"); }

}  // namespace megatron_ext
