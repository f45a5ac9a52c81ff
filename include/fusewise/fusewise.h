#pragma once

/// Umbrella header.
#include "fusewise/activation.h"         // IWYU pragma: export
#include "fusewise/autoencoder.h"        // IWYU pragma: export
#include "fusewise/batch_norm.h"         // IWYU pragma: export
#include "fusewise/batch_norm_excite.h"  // IWYU pragma: export
#include "fusewise/context.h"            // IWYU pragma: export
#include "fusewise/error.h"              // IWYU pragma: export
#include "fusewise/implementation.h"     // IWYU pragma: export
#include "fusewise/li_conv.h"            // IWYU pragma: export
#include "fusewise/linear_act.h"         // IWYU pragma: export
#include "fusewise/mlp.h"                // IWYU pragma: export
#include "fusewise/safetensors.h"        // IWYU pragma: export
#include "fusewise/squeeze_excite.h"     // IWYU pragma: export
#include "fusewise/tensor.h"             // IWYU pragma: export
#include "fusewise/version.h"            // IWYU pragma: export
