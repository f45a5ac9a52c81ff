// Chooses a kernel for each call: both lists in the order in which they are tried, the requirements
// of each kernel, and when another one is expected to be faster. All times are from an H200
// (docs/journal/autoencoder.md). On another GPU only their ratios matter.

#include "cuda/autoencoder/selection.h"

#include "common/divide.h"
#include "cuda/autoencoder/gradients.cuh"

namespace fusewise::cuda::autoencoder {
namespace {

using Forward = AutoencoderForwardArguments;
using Backward = AutoencoderBackwardArguments;

std::string text(std::int64_t value) { return std::to_string(value); }

/// The first reason that is not empty. Later ones are not evaluated.
template <auto... kReasons, typename Call>
std::string first_of(const DeviceLimits& limits, const Call& call) {
  std::string found;
  static_cast<void>((... || !(found = kReasons(limits, call)).empty()));
  return found;
}

// ---- requirements of the kernels

template <typename Call>
std::string float64_declines(const DeviceLimits&, const Call& call) {
  if (call.dtype != DType::f64) return {};
  return "it has no float64 kernels";
}

/// n_mels, latent and slice_latent of the default model.
bool has_default_sizes(const AutoencoderSizes& s) {
  return s.n_mels == 16 * DefaultShape::kMels && s.latent == 16 * DefaultShape::kLatents &&
         s.slice_latent == 16 * DefaultShape::kSlices;
}
template <typename Call>
std::string sizes_decline(const DeviceLimits&, const Call& call) {
  const AutoencoderSizes& s = call.sizes;
  if (has_default_sizes(s)) return {};
  return "it is for n_mels 64, latent 32 and slice_latent 64, not " + text(s.n_mels) + ", " +
         text(s.latent) + " and " + text(s.slice_latent);
}
template <typename Call>
std::string frames_decline(const DeviceLimits&, const Call& call) {
  if (call.sizes.frames == 5) return {};
  return "it is for 5 frames, not " + text(call.sizes.frames);
}
/// A tensor whose rows are read or written in vectors. A null address counts as aligned.
struct AlignedRows {
  const char* name;
  const void* address;
  std::int64_t bytes;   ///< row stride
  std::int64_t vector;  ///< bytes
};
std::string alignment_declines(std::initializer_list<AlignedRows> tensors) {
  for (const AlignedRows& t : tensors) {
    const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(t.address));
    if (address % t.vector == 0 && t.bytes % t.vector == 0) continue;
    return std::string(t.name) + "'s rows must start at multiples of " + text(t.vector) +
           " bytes, but the first starts " + text(address % t.vector) +
           " bytes after one and the rows are " + text(t.bytes) + " bytes apart";
  }
  return {};
}
/// few_rows.cu reads four elements of a matrix at a time.
std::string weights_decline(const DeviceLimits&, const Forward& call) {
  const auto& p = call.parameters;
  const AutoencoderSizes& s = call.sizes;
  const std::int64_t bytes = size_of(call.parameter_dtype), vector = 4 * bytes;
  const std::int64_t basis = std::int64_t{s.frames} * s.slice_latent;
  return alignment_declines({{"encoder_weight", p.encoder_weight, s.n_mels * bytes, vector},
                             {"basis", p.basis, basis * bytes, vector},
                             {"mid_weight", p.mid_weight, s.latent * bytes, vector},
                             {"decoder_weight", p.decoder_weight, s.slice_latent * bytes, vector}});
}
/// Rows of data are accessed in vectors of kVector bytes, or of four elements if kVector is 0. Rows
/// of the projection are always accessed in vectors of four floats.
template <int kVector>
std::string rows_decline(const DeviceLimits&, const Forward& call) {
  const std::int64_t bytes = size_of(call.dtype), vector = kVector > 0 ? kVector : 4 * bytes;
  const std::int64_t latent = call.sizes.latent;
  const std::int64_t width = std::int64_t{call.sizes.frames} * call.sizes.n_mels;
  return alignment_declines({{"x", call.x, call.x_stride * bytes, vector},
                             {"y", call.out, width * bytes, vector},
                             {"latent", call.z, latent * bytes, vector},
                             {"projection", call.projection, latent * 4, 16}});
}
template <int kVector>
std::string gradient_rows_decline(const DeviceLimits&, const Backward& call) {
  const std::int64_t bytes = size_of(call.dtype), vector = kVector > 0 ? kVector : 4 * bytes;
  const std::int64_t latent = call.sizes.latent;
  const std::int64_t width = std::int64_t{call.sizes.frames} * call.sizes.n_mels;
  return alignment_declines({{"x", call.x, call.x_stride * bytes, vector},
                             {"dy", call.d_out, width * bytes, vector},
                             {"dx", call.dx, width * bytes, vector},
                             {"dlatent", call.d_z, latent * bytes, vector},
                             {"projection", call.projection, latent * 4, 16}});
}

std::string memory_declines(const DeviceLimits& limits, std::int64_t bytes) {
  if (bytes <= limits.block_shared_memory) return {};
  return "it needs " + text(bytes) + " bytes of shared memory, and a block has " +
         text(limits.block_shared_memory);
}
/// The packing kernel and the kernel that finishes the basis's gradient hold a whole basis vector.
template <typename Call>
std::string basis_declines(const DeviceLimits& limits, const Call& call) {
  return memory_declines(limits, basis_shared_bytes(call.sizes));
}
std::int64_t packed_bytes_of(const Forward& call) {
  return packed_bytes(packed_layout(call.sizes, false), packed_kind(call.dtype, call.tf32));
}
std::string many_rows_memory_declines(const DeviceLimits& limits, const Forward& call) {
  return memory_declines(limits, packed_bytes_of(call));
}
std::string block16_memory_declines(const DeviceLimits& limits, const Forward& call) {
  return memory_declines(limits, packed_bytes_of(call) + exchange_bytes(kMostForwardWarps));
}
std::string backward_memory_declines(const DeviceLimits& limits, const Backward& call) {
  return memory_declines(limits, backward_block16_bytes(call.dtype));
}
std::string warps_memory_declines(const DeviceLimits& limits, const Backward& call) {
  return memory_declines(limits, shared_bytes(call, {4, false}));
}

std::string two_gradients_decline(const DeviceLimits&, const Backward& call) {
  if (call.d_out == nullptr || call.d_score == nullptr) return {};
  return "it takes the gradient of the reconstruction or of the score, not of both";
}
/// Only sm_90a has wgmma instructions.
std::string architecture_declines(const DeviceLimits& limits, const Backward&) {
  if (limits.gpu_capability == 90) return {};
  return "it is built for sm_90a, and this GPU is sm_" + text(limits.gpu_capability);
}
std::string exact_products_decline(const DeviceLimits&, const Backward& call) {
  if (call.dtype != DType::f32 || call.tf32) return {};
  return "it computes float32 in TF32, which is not allowed here";
}
std::string wgmma_call_declines(const DeviceLimits&, const Backward& call) {
  if (call.d_z != nullptr) return "it does not take the latent's gradient";
  if (call.d_out == nullptr && call.d_score == nullptr) return "no output has a gradient";
  if (call.projection == nullptr) return "it needs the projection, which forward did not save";
  if (!wanted_sums(call).any())
    return "it is for gradients of weights, and none that sums over rows is needed";
  return {};
}

// ---- which kernel is faster

std::string few_rows_declines(const DeviceLimits& limits, const Forward& call) {
  return first_of<float64_declines<Forward>, sizes_decline<Forward>, frames_decline<Forward>,
                  weights_decline>(limits, call);
}
std::string many_rows_declines(const DeviceLimits& limits, const Forward& call) {
  return first_of<float64_declines<Forward>, sizes_decline<Forward>, rows_decline<16>,
                  basis_declines<Forward>, many_rows_memory_declines>(limits, call);
}

/// From five rows per SM on, tensor cores are faster.
std::string few_rows_yields(const DeviceLimits& limits, const Forward& call) {
  const std::int64_t most = std::int64_t{4} * limits.multiprocessors;
  if (call.sizes.rows <= most) return {};
  return "tensor cores are faster for more than " + text(most) + " rows";
}

std::string any_size_declines(const DeviceLimits& limits, const Forward& call) {
  if (const std::string reason = float64_declines(limits, call); !reason.empty()) return reason;
  const int rows = any_size_rows(limits.multiprocessors, call.sizes);
  const std::string reason = memory_declines(limits, any_size_row_bytes(call.sizes, rows));
  return reason.empty() ? memory_declines(limits, any_size_bytes(call.sizes, rows)) : reason;
}
/// Every block reads all parameters, so for many rows the GEMMs are faster; in half precision for
/// fewer than in float32, because it does not use the tensor cores (512 rows of bfloat16: 17.6
/// against 19.1 us).
std::string any_size_yields(const DeviceLimits& limits, const Forward& call) {
  const int each = call.dtype == DType::f32 ? 4 : 2;
  const std::int64_t most = std::int64_t{each} * limits.multiprocessors;
  if (call.sizes.rows <= most) return {};
  return "'general' is faster for more than " + text(most) + " rows";
}

std::string forward_block16_declines(const DeviceLimits& limits, const Forward& call) {
  return first_of<float64_declines<Forward>, sizes_decline<Forward>, rows_decline<0>,
                  basis_declines<Forward>, block16_memory_declines>(limits, call);
}

/// One warp per 16 rows, against several warps that share 16 rows. The former is faster in half
/// precision always (600 rows of bfloat16: 9.1 against 9.8 us); in TF32 with more than 16 rows per
/// SM (4096 rows: 13.6 against 15.5, but 2112 rows: 13.2 against 11.3); in float32 with more than
/// 32 rows per SM (4096 rows, which is fewer: 21.2 against 20.3).
std::string many_rows_yields(const DeviceLimits& limits, const Forward& call) {
  if (!forward_block16_declines(limits, call).empty()) return {};
  const int each = call.dtype != DType::f32 ? 0 : call.tf32 ? 16 : 32;
  const std::int64_t most = std::int64_t{each} * limits.multiprocessors;
  if (call.sizes.rows > most) return {};
  return "'block16' is faster for up to " + text(most) + " rows";
}

std::string backward_block16_declines(const DeviceLimits& limits, const Backward& call) {
  return first_of<float64_declines<Backward>, sizes_decline<Backward>, frames_decline<Backward>,
                  two_gradients_decline, gradient_rows_decline<16>, backward_memory_declines>(
      limits, call);
}

/// Both kernels take as long as the SM with the most tiles. Tiles have 128 rows here and 16 in the
/// other kernel. A large tile takes about as long as four small ones, somewhat more for the score,
/// and wgmma has a longer start and end. Fitted to the times of 4096 to 65536 rows, in TF32 and
/// bfloat16.
std::string wgmma_yields(const DeviceLimits& limits, const Backward& call) {
  const auto turns = [&](int tile) {
    return static_cast<double>(
        divide_up(call.sizes.rows, std::int64_t{tile} * limits.multiprocessors));
  };
  const bool of_score = call.d_score != nullptr;
  const double large = of_score ? 4.6 * turns(128) + 1.8 : 4 * turns(128) + 1.5;
  if (large < turns(16)) return {};
  return "'block16' is faster for " + text(call.sizes.rows) +
         " rows: tiles of 16 rows spread over " + text(limits.multiprocessors) +
         " multiprocessors more evenly than tiles of 128";
}

/// A warp works on the frames of its 16 rows one after the other, 'general' on all of them at once.
/// With at most one tile per SM the frames decide. Forward and backward of 1024 rows: in float32, 7
/// frames take 145 us, with 'general' 125; in bfloat16, 9 frames 111 against 107, 7 frames 89
/// against 101.
std::string warps_yields(const DeviceLimits& limits, const Backward& call) {
  const int frames = call.dtype == DType::f32 && !call.tf32 ? 6 : 8;
  const std::int64_t most = std::int64_t{16} * limits.multiprocessors;
  if (call.sizes.frames <= frames || call.sizes.rows > most) return {};
  return "'general' is faster for more than " + text(frames) + " frames and up to " + text(most) +
         " rows";
}

template <typename Call, std::size_t kCount>
const Kernel<Call>& first_taker(const Kernel<Call> (&kernels)[kCount], const DeviceLimits& limits,
                                const Call& call) {
  for (const Kernel<Call>& each : kernels) {
    if (each.declines(limits, call).empty() &&
        (each.yields == nullptr || each.yields(limits, call).empty())) {
      return each;
    }
  }
  return kernels[kCount - 1];
}

template <typename Call>
std::string never_declines(const DeviceLimits&, const Call&) {
  return {};
}

}  // namespace

const Kernel<Forward> kForwardKernels[] = {
    {"few_rows", few_rows_declines, few_rows_yields, run_few_rows},
    {"many_rows", many_rows_declines, many_rows_yields, run_many_rows},
    {"block16", forward_block16_declines, nullptr, run_block16},
    {"any_size", any_size_declines, any_size_yields, run_any_size},
    {"general", never_declines<Forward>, nullptr, run_general},
};

const Kernel<Backward> kBackwardKernels[] = {
    {"wgmma",
     first_of<architecture_declines, backward_block16_declines, exact_products_decline,
              wgmma_call_declines>,
     wgmma_yields, run_wgmma},
    {"block16", backward_block16_declines, nullptr, run_block16},
    {"warps",
     first_of<float64_declines<Backward>, sizes_decline<Backward>, gradient_rows_decline<0>,
              basis_declines<Backward>, warps_memory_declines>,
     warps_yields, run_warps},
    {"general", never_declines<Backward>, nullptr, run_general},
};

const Kernel<Forward>& choose(const DeviceLimits& limits, const Forward& call) {
  return first_taker(kForwardKernels, limits, call);
}
const Kernel<Backward>& choose(const DeviceLimits& limits, const Backward& call) {
  return first_taker(kBackwardKernels, limits, call);
}

// ---- launch plans

int block16_warps(const DeviceLimits& limits, const AutoencoderSizes& sizes) {
  // While there are SMs to spare, every piece of a block's work gets its own warp. On Hopper, two
  // smaller blocks fit on one SM.
  const int pieces = sizes.frames * DefaultShape::kSlices / kChunk;
  const bool spare = divide_up(sizes.rows, 16) <= limits.multiprocessors;
  return std::clamp(spare ? pieces : (pieces + 1) / 2, 1, kMostForwardWarps);
}

BackwardPlan backward_plan(const DeviceLimits& limits, const Backward& call) {
  const auto fits = [&](const BackwardPlan& plan) {
    return shared_bytes(call, plan) <= limits.block_shared_memory;
  };
  // For few rows: four warps, which share the sums, on as many SMs as possible.
  const std::int64_t tiles = divide_up(call.sizes.rows, 16);
  BackwardPlan plan{};
  plan.warps = static_cast<int>(std::clamp<std::int64_t>(
      divide_up(tiles, 4 * limits.multiprocessors) * 4, 4, kMostBackwardWarps));
  // The encoder's sums, to which every frame adds, are held in shared memory, except for the score,
  // whose weights are there too. More shared memory leaves less L1 for the loads (65536 rows in
  // float32: 496 us with the sums held, 478 without).
  plan.holds = call.d_score == nullptr && fits({4, true});
  while (plan.warps > 1 && !fits(plan)) plan.warps /= 2;
  return plan;
}

}  // namespace fusewise::cuda::autoencoder
