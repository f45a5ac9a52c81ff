#pragma once

// The autoencoder's kernels: every launcher takes calls that the list in selection.h lets it take,
// with memory that is dense but for the rows of x.

#include "cuda/autoencoder/plans.h"

namespace fusewise::cuda::autoencoder {

// ---- forward

/// few_rows.cu: one to four rows a block, which reads the parameters as they are.
void run_few_rows(const Context& context, const AutoencoderForwardArguments& call);

/// many_rows.cu: 16 rows a warp, the packed weights in shared memory. `warps`: of a block; chosen
/// where it is 0.
void run_many_rows(const Context& context, const AutoencoderForwardArguments& call, int warps);
void run_many_rows(const Context& context, const AutoencoderForwardArguments& call);

/// forward.cu: the warps of a block share 16 rows.
void run_block16(const Context& context, const AutoencoderForwardArguments& call, int warps);
void run_block16(const Context& context, const AutoencoderForwardArguments& call);

/// general.cu: GEMMs of the vendor's library, for any sizes and types.
void run_general(const Context& context, const AutoencoderForwardArguments& call);

// ---- backward: each recomputes what forward did not keep, and goes back through it

/// backward_wgmma.cu: 64 rows a warpgroup.
void run_wgmma(const Context& context, const AutoencoderBackwardArguments& call);

/// backward_block16.cu: 16 rows a block; four warps share a frame.
void run_block16(const Context& context, const AutoencoderBackwardArguments& call);

/// backward.cu: 16 rows a warp.
void run_warps(const Context& context, const AutoencoderBackwardArguments& call,
               const BackwardPlan& plan);
void run_warps(const Context& context, const AutoencoderBackwardArguments& call);

void run_general(const Context& context, const AutoencoderBackwardArguments& call);

}  // namespace fusewise::cuda::autoencoder
