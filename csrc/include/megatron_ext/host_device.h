// Marks a function that both compilers build, for the host and for the device.
#pragma once

#ifdef __CUDACC__
#define MEGATRON_EXT_HOST_DEVICE __host__ __device__
#else
#define MEGATRON_EXT_HOST_DEVICE
#endif
