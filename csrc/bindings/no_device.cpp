// The ops for CUDA tensors in a library without the CUDA part: an error that says so.

#include <torch/library.h>

namespace {

void no_cuda_part(const c10::OperatorHandle& op, torch::jit::Stack*) {
    TORCH_CHECK(false,
                op.schema().name(),
                ": megatron_ext was built without its CUDA part: install the CUDA toolkit (nvcc) "
                "and a Torch with CUDA, then build again");
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_ext, CUDA, m) {
    for (const char* name : {"count_load",
                             "solve_quota",
                             "solve_ladder",
                             "share_plan",
                             "share_and_seal",
                             "assign",
                             "reroute",
                             "place_back",
                             "set_aside"}) {
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&no_cuda_part>());
    }
}
