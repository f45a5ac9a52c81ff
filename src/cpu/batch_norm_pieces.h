#pragma once

// How BatchNorm cuts images into pieces that fit the caches, and how the kernels see them.

#include <algorithm>
#include <numeric>

#include "common/scratch.h"
#include "cpu/batch_norm_kernels.h"

namespace fusewise::cpu::batch_norm {

using Index = std::int64_t;

constexpr Index kPlaneElements = 4 * 1024;  // NCHW: a piece that fits L1, for it is read twice
constexpr Index kBundle = 64;               // NCHW: most channels of a bundle of small planes
constexpr Index kBundleElements = 1 << 18;  // of all samples, for a bundle is read twice
constexpr Index kRowElements = 64 * 1024;   // channels-last: a piece that fits L2
constexpr Index kPieceRows = 32;            // fewer rows would make partial sums too expensive
constexpr Index kMostPieceRows = 128;       // more would make sums of float32 inexact
constexpr Index kShortRow = 1024;           // channels-last: rows shorter than this are joined
constexpr Index kJoinedRow = 16;            // to a multiple of the widest vector
constexpr Index kStreamBytes = 2 << 20;     // outputs this large bypass the caches

inline Index rounded_up(Index value, Index step) { return (value + step - 1) / step * step; }

/// An image tensor with one stream if it has no such dimension.
struct Images {
  char* data = nullptr;
  Index sizes[5], strides[5];  // S, N, C, H, W; strides in elements

  explicit Images(const TensorView& t) : data(static_cast<char*>(t.data)) {
    for (int d = 0; d < 5; ++d) {
      const int from = d + t.rank - 5;
      sizes[d] = from < 0 ? 1 : t.sizes[from];
      strides[d] = from < 0 ? 0 : t.strides[from];
    }
  }
  Index pixels() const { return sizes[3] * sizes[4]; }
  /// The stride of the pixels as one dimension, or -1. `single`: the answer for a single pixel.
  Index pixel_stride(Index single) const {
    if (sizes[4] == 1) return sizes[3] == 1 ? single : strides[3];
    return sizes[3] == 1 || strides[3] == sizes[4] * strides[4] ? strides[4] : -1;
  }
  /// Whether the kernels can read and write it without a copy.
  bool native(bool planar) const {
    return planar ? pixel_stride(1) == 1 : strides[2] == 1 && pixel_stride(sizes[2]) >= 0;
  }
};

/// Some pixels of some samples, of one channel or a bundle (NCHW) or of all (channels-last, one
/// sample).
struct Piece {
  Index stream, sample, samples, channel, pixel, pixels, channels;
};

/// How all images of a call are cut into pieces: as planes (NCHW), as bundles of small adjacent
/// planes, or as rows of channels (channels-last). It follows from shapes and strides alone, and so
/// does the order of all sums.
struct Geometry {
  Index streams, samples, channels, height, width, pixels;
  bool planar;
  Index joined = 1;                // pixels in one row of the channels-last kernels
  Index bundle, bundles;           // channels of a piece, and pieces that have all channels
  Index group = 1, chunk, chunks;  // samples and pixels of a piece, pieces of a sample
  bool stream = false;             // whether outputs are too large for the caches
  Index pieces;                    // of one bundle

  Geometry(std::initializer_list<const TensorView*> tensors, bool blanked)
      : Geometry(Images(**tensors.begin())) {
    bool dense = true, merges = !planar && !blanked, adjacent = planar;
    for (const TensorView* t : tensors) {
      if (!t->defined()) continue;
      const Images images(*t);
      const bool native = images.native(planar);
      const Index stride = images.pixel_stride(channels);
      dense = dense && (!native || stride == channels);
      merges = merges && native && images.strides[1] == pixels * stride;
      adjacent = adjacent && native && images.strides[2] == pixels;
    }
    if (merges) pixels *= samples, samples = std::min<Index>(samples, 1);
    bundle = !planar ? channels : adjacent ? bundled() : 1;
    bundles = (channels + bundle - 1) / bundle;
    if (planar) {
      chunks = (pixels + kPlaneElements - 1) / kPlaneElements;
      chunk = chunks == 1 ? pixels : rounded_up((pixels + chunks - 1) / chunks, 64);
      const Index most = bundle == 1 ? kPlaneElements / pixels
                                     : std::min(kMostPieceRows, kRowElements / (bundle * pixels));
      if (!blanked) group = std::clamp<Index>(most, 1, std::max<Index>(1, samples));
    } else {
      if (dense && channels % kJoinedRow != 0) joined = kJoinedRow / std::gcd(channels, kJoinedRow);
      if (dense && row() < kShortRow) joined *= (kShortRow + row() - 1) / row();
      chunk = joined * std::clamp(kRowElements / row(), kPieceRows, kMostPieceRows);
    }
    chunks = (pixels + chunk - 1) / chunk;
    pieces = (samples + group - 1) / group * chunks;
    stream = elements() * size_of((*tensors.begin())->dtype) >= kStreamBytes;
  }

  Index row() const { return channels * joined; }
  /// Elements in a stream's arrays of values per channel, as the kernels read them.
  Index width_of_values() const { return planar ? channels : row(); }
  Index elements() const { return streams * samples * channels * pixels; }
  /// An upper bound for the elements of a piece.
  Index piece_elements() const { return group * chunk * bundle; }
  /// An upper bound for the rows of a piece.
  Index piece_rows() const { return planar ? group : chunk; }
  /// Some pixels of one row of an image.
  Piece in_row(Index stream, Index sample, Index channel, Index h, Index w, Index count) const {
    const Index image = height * width, pixel = h * width + w, all = planar ? 1 : channels;
    if (pixels == image) return {stream, sample, 1, channel, pixel, count, all};
    return {stream, 0, 1, channel, sample * image + pixel, count, all};  // the samples are merged
  }
  Piece piece(Index stream, Index channel, Index i) const {
    const Index n = i / chunks * group, p = i % chunks * chunk;
    return {stream,
            n,
            std::min(group, samples - n),
            channel,
            p,
            std::min(chunk, pixels - p),
            std::min(bundle, channels - channel)};
  }
  /// Calls body(shape, offset) for the one or two matrices of a piece. The second one has the
  /// pixels that do not fill a joined row. offset: pixels before the matrix.
  template <typename Body>
  void each_matrix(const Piece& piece, const Body& body) const {
    if (planar) {
      const BatchNormShape shape{piece.samples, piece.pixels, true, stream, piece.channels};
      return body(shape, Index(0));
    }
    const Index rows = piece.pixels / joined, rest = piece.pixels % joined;
    if (rows > 0) body(BatchNormShape{rows, row(), false, stream}, Index(0));
    if (rest > 0) body(BatchNormShape{1, rest * channels, false, stream}, rows * joined);
  }

 private:
  /// How many adjacent planes go into a row: of small ones several, which then fill vectors, and
  /// bytes of bits.
  Index bundled() const {
    Index count = kBundle;
    while (count > 1 &&
           (count * pixels > kBundledRow || count * pixels * samples > kBundleElements)) {
      count /= 2;
    }
    return count * pixels % 8 == 0 ? count : 1;
  }

  // The order of the saved bits follows from x, so x alone decides.
  explicit Geometry(const Images& x)
      : streams(x.sizes[0]),
        samples(x.sizes[1]),
        channels(x.sizes[2]),
        height(x.sizes[3]),
        width(x.sizes[4]),
        pixels(x.pixels()),
        planar(x.strides[2] != 1 || x.sizes[2] == 1) {}
};

/// One image tensor as the kernels see it: the tensor itself, or dense copies of pieces, one for
/// each worker.
template <typename T>
class Image {
 public:
  Image(const Context& context, const Geometry& geometry, const TensorView& t, Index workers)
      : geometry_(geometry),
        images_(t),
        defined_(t.defined()),
        native_(!defined_ || images_.native(geometry.planar)),
        pixel_stride_(images_.pixel_stride(geometry.planar ? 1 : geometry.channels)),
        copies_(context, native_ ? 0 : workers * geometry.piece_elements()) {}

  bool defined() const { return defined_; }

  /// A matrix of the piece.
  Rows<T> rows(Index worker, const Piece& piece, Index offset) const {
    if (!defined_) return {};
    const bool planar = geometry_.planar;
    if (native_) {
      T* from = at(piece, 0) + (piece.pixel + offset) * pixel_stride_;
      return {from, planar ? images_.strides[1] : pixel_stride_ * geometry_.joined};
    }
    return {copy(worker) + offset * geometry_.channels, planar ? piece.pixels : geometry_.row()};
  }
  /// The mean of the first few values of a channel.
  double typical(Index stream, Index channel) const {
    if (geometry_.samples == 0) return 0;
    const Index count = std::min<Index>(16, images_.pixels());
    const T* first = at({stream, 0, 1, channel, 0, 1, 1}, 0);
    double sum = 0;
    for (Index p = 0; p < count; ++p) {
      const Index h = p / geometry_.width, w = p % geometry_.width;
      sum += first[h * images_.strides[3] + w * images_.strides[4]];
    }
    return sum / static_cast<double>(count);
  }
  void gather(Index worker, const Piece& piece) const {
    if (!native_) each(piece, [to = copy(worker)](Index i, const T& value) { to[i] = value; });
  }
  void scatter(Index worker, const Piece& piece) const {
    if (!native_) each(piece, [from = copy(worker)](Index i, T& value) { value = from[i]; });
  }

 private:
  T* copy(Index worker) const { return copies_.data() + worker * geometry_.piece_elements(); }
  /// The first element of the piece's channel, in the sample at this position.
  T* at(const Piece& piece, Index sample) const {
    return reinterpret_cast<T*>(images_.data) + piece.stream * images_.strides[0] +
           (piece.sample + sample) * images_.strides[1] + piece.channel * images_.strides[2];
  }
  /// Calls body(index in the copy, element) for all elements of a piece.
  template <typename Body>
  void each(const Piece& piece, const Body& body) const {
    const Index channels = piece.channels;
    Index i = 0;
    for (Index n = 0; n < piece.samples; ++n) {
      Index h = piece.pixel / geometry_.width, w = piece.pixel % geometry_.width;
      for (Index p = 0; p < piece.pixels; ++p) {
        T* pixel = at(piece, n) + h * images_.strides[3] + w * images_.strides[4];
        for (Index c = 0; c < channels; ++c) body(i++, pixel[c * images_.strides[2]]);
        if (++w == geometry_.width) w = 0, ++h;
      }
    }
  }

  const Geometry& geometry_;
  Images images_;
  bool defined_, native_;
  Index pixel_stride_;
  Scratch<T> copies_;
};

}  // namespace fusewise::cpu::batch_norm
