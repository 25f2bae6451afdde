// What a program around the kernels calls (tests/gpu/first_run/stages.cu), with one device, whose
// memory is the host's. Streams run when somebody waits for one.
#pragma once

#include <chrono>
#include <cstdlib>
#include <cstring>

#include "cuda_runtime_api.h"

using cudaEvent_t = std::chrono::steady_clock::time_point*;
constexpr int cudaMemcpyDefault = 0, cudaStreamNonBlocking = 0;

inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceEnablePeerAccess(int, int) { return cudaSuccess; }

template <class T>
cudaError_t cudaMalloc(T** memory, size_t bytes) {
    *memory = static_cast<T*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
    return cudaSuccess;
}

template <class T>
cudaError_t cudaMallocHost(T** memory, size_t bytes) {
    return cudaMalloc(memory, bytes);
}

inline cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
    std::memset(memory, value, bytes);
    return cudaSuccess;
}

inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, int) {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t bytes, int, cudaStream_t stream) {
    cuda_on_host::launch(1, 1, 0, stream, [=] { std::memcpy(to, from, bytes); });
    return cudaSuccess;
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, int) {
    *stream = reinterpret_cast<cudaStream_t>(new char);
    return cudaSuccess;
}

inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
    cuda_on_host::run_streams();
    return cudaSuccess;
}

inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
    *event = new std::chrono::steady_clock::time_point;
    return cudaSuccess;
}

inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    cuda_on_host::launch(1, 1, 0, stream, [=] { *event = std::chrono::steady_clock::now(); });
    return cudaSuccess;
}

inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaStreamSynchronize(nullptr); }

inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t before, cudaEvent_t after) {
    *ms = std::chrono::duration<float, std::milli>(*after - *before).count();
    return cudaSuccess;
}
