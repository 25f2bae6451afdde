// What a CUDA tensor meets in a library without the CUDA part.

#include <torch/library.h>

namespace {

at::Tensor count_load_op(const at::Tensor&) {
    TORCH_CHECK(
        false,
        "megatron_ext was built without its CUDA part: install the CUDA toolkit (nvcc) and a "
        "Torch with CUDA, then build again");
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_ext, CUDA, m) { m.impl("count_load", &count_load_op); }
