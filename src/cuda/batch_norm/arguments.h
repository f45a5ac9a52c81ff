#pragma once

// From a call of BatchNorm to what its kernels need.

#include <initializer_list>
#include <string>

#include "fusewise/batch_norm.h"

namespace fusewise::cuda {

/// The number of calls: of all streams in one, or for each stream that of the calls that updated
/// its running statistics.
struct Counter {
  long long* calls;  // may be null
  bool per_stream;
};

/// The per-channel tensors of forward, [S, C] each. Any may be null.
struct ForwardChannels {
  const void *weight, *bias;
  void *running_mean, *running_var;
  Counter counter;
  const void* group;
  void *mean, *inverse;
  void* statistics;  // [S, 3, C]: of x alone
  double momentum, eps;
  bool wide, training;
  long long streams, channels;

  /// What this call advances.
  constexpr Counter advanced() const { return training ? counter : Counter{}; }
  /// Whether the statistics are those of this call's x.
  bool own() const { return group == nullptr && (training || running_mean == nullptr); }
};

struct BackwardChannels {
  const void *weight, *bias;
  const void *mean, *inverse;
  const void* group;
  void *dweight, *dbias;
  void* dgroup;  // [S, 3, C]
  bool wide, training;
  long long streams, channels;
};

/// Which of the kernels a backward call needs.
struct BackwardNeeds {
  bool sums;    ///< dv and dv * (x - mean) over this call's values
  bool images;  ///< dx or dresidual
};

ForwardChannels channels_of(const BatchNormActForward& call);
ForwardChannels channels_of(const BatchNormStatistics& call);
BackwardChannels channels_of(const BatchNormActBackward& call);
BackwardNeeds needs_of(const BatchNormActBackward& call);
/// Whether dv depends on the residual's values. Bits may stand for them.
bool reads_residual(const BatchNormActBackward& call);

/// Whether the bits of `passes` are in the order S, N, H, W, C, not S, N, C, H, W.
bool has_adjacent_channels(const TensorView& x);

/// A size by its place from the end: 4 is N, 3 is C, 2 is H, 1 is W.
inline std::int64_t dimension(const TensorView& t, int from_end) {
  return t.sizes[t.rank - from_end];
}
inline std::int64_t streams_of(const TensorView& x) { return x.rank == 5 ? x.sizes[0] : 1; }

/// Why kernels for dense images with 16-byte accesses cannot take these, as a sentence, or empty if
/// they can. The first one is x; absent ones do not matter.
std::string image_decline(std::initializer_list<const TensorView*> images);
/// The same for kernels in which each vector of 16 bytes has values of one channel, or of one
/// pixel.
std::string dense_decline(std::initializer_list<const TensorView*> images, bool with_bits);
/// The same for kernels that take the channels of `folded_pixels` neighbouring pixels as one row.
std::string folded_decline(std::initializer_list<const TensorView*> images,
                           const TensorView& blanked, bool with_bits);
/// The fewest neighbouring pixels of channels-last images whose channels fill vectors of 16 bytes,
/// and bytes of bits. 0 if a stream, or a sample where some are blanked, has no multiple of them.
std::int64_t folded_pixels(const TensorView& x, const TensorView& blanked, bool with_bits);

}  // namespace fusewise::cuda
