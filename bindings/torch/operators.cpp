// The operators of one device. Compiled once for each: FUSEWISE_DEVICE is CPU or CUDA.

#include "common/autoencoder.h"
#include "common/squeeze_excite.h"
#include "operator.h"

STABLE_TORCH_LIBRARY_IMPL(fusewise, FUSEWISE_DEVICE, m) {
  fusewise::binding::implement<fusewise::kAutoencoder>(m);
  fusewise::binding::implement<fusewise::kSqueezeExcite>(m);
}
