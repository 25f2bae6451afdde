// Words of the host into device memory, as arguments of launches.
//
// 1. Copies the words.
// 2. One block, one thread a word.
// 3. A kernel and not a copy: an asynchronous copy reads pinned memory of the host later, and again
//    at each replay of a captured graph, so the memory must live that long. Arguments are copied
//    at the call of the launch.
// 4. Needs no synchronization but the stream's.
// 5. Deterministic.
// 6. Reads 8 bytes a word: a launch, 2 to 3 us, for each 480 words.

#include <algorithm>
#include <cstring>

#include "megatron_ext/cuda_api.h"

namespace megatron_ext {
namespace {

constexpr int kWords = 480;  // all arguments together have at most 4096 bytes

struct Words {
    int64_t each[kWords];
};

__global__ void __launch_bounds__(kWords)
    write_kernel(const __grid_constant__ Words words, int count, int64_t* to) {
    const int i = static_cast<int>(threadIdx.x);
    if (i < count) to[i] = words.each[i];
}

}  // namespace

cudaError_t write_words_cuda(const int64_t* words,
                             int64_t count,
                             int64_t* to,
                             cudaStream_t stream) {
    for (int64_t first = 0; first < count; first += kWords) {
        Words some{};
        const int size = static_cast<int>(std::min<int64_t>(kWords, count - first));
        std::memcpy(some.each, words + first, size * sizeof(int64_t));
        write_kernel<<<1, kWords, 0, stream>>>(some, size, to + first);
    }
    return cudaGetLastError();
}

}  // namespace megatron_ext
