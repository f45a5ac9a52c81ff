// Build information of this library, for bug reports. Compiled once per device.

#include <torch/csrc/stable/library.h>

#include <string>

#ifdef FUSEWISE_CUDA_VERSION
#include "cuda/conv/convolution.h"
#endif
#include "fusewise/version.h"

namespace fusewise::binding {
namespace {

std::string build_info() {
#ifdef FUSEWISE_CUDA_VERSION
  return std::string("cuda\t" FUSEWISE_CUDA_VERSION "\narchitectures\t" FUSEWISE_CUDA_ARCHITECTURES
                     "\nconvolutions\t") +
         (cuda::has_cudnn() ? "cuDNN" : "torch");
#else
  return "fusewise\t" FUSEWISE_VERSION "\ncompiler\tg++ " __VERSION__;
#endif
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusewise, CompositeExplicitAutograd, m) {
#ifdef FUSEWISE_CUDA_VERSION
  m.impl("_cuda_build_info", TORCH_BOX(&build_info));
#else
  m.impl("_build_info", TORCH_BOX(&build_info));
#endif
}

}  // namespace fusewise::binding
