#pragma once

// The autoencoder's kernels. A launcher may only be called if the list in selection.h accepts the
// call for it. Tensors are dense, except that rows of x may be strided.

#include "cuda/autoencoder/plans.h"

namespace fusewise::cuda::autoencoder {

// ---- forward

/// few_rows.cu: one to four rows per block. Reads the parameters unpacked.
void run_few_rows(const Context& context, const AutoencoderForwardArguments& call);

/// many_rows.cu: 16 rows per warp, packed weights in shared memory. `warps` is per block; 0 means
/// automatic.
void run_many_rows(const Context& context, const AutoencoderForwardArguments& call, int warps);
void run_many_rows(const Context& context, const AutoencoderForwardArguments& call);

/// forward.cu: the warps of a block share 16 rows.
void run_block16(const Context& context, const AutoencoderForwardArguments& call, int warps);
void run_block16(const Context& context, const AutoencoderForwardArguments& call);

/// any_size.cu: one to four rows per block, for any sizes. Reads the parameters unpacked.
void run_any_size(const Context& context, const AutoencoderForwardArguments& call);

/// general.cu: GEMMs of the vendor's library, for any sizes and types.
void run_general(const Context& context, const AutoencoderForwardArguments& call);

// ---- backward: each recomputes what forward did not save, then computes the gradients

/// backward_wgmma.cu: 64 rows per warpgroup.
void run_wgmma(const Context& context, const AutoencoderBackwardArguments& call);

/// backward_block16.cu: 16 rows per block; four warps share a frame.
void run_block16(const Context& context, const AutoencoderBackwardArguments& call);

/// backward.cu: 16 rows per warp.
void run_warps(const Context& context, const AutoencoderBackwardArguments& call,
               const BackwardPlan& plan);
void run_warps(const Context& context, const AutoencoderBackwardArguments& call);

void run_general(const Context& context, const AutoencoderBackwardArguments& call);

}  // namespace fusewise::cuda::autoencoder
