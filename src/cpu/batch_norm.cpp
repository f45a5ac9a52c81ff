// BatchNorm + activation on the CPU: distributes channels or pieces of samples over threads.
// NCHW: a thread takes a channel through statistics and normalisation, so that the second read of x
// (and of dy in backward) hits the caches. Channels-last: two loops over all pieces, the second in
// reverse order. Bound by memory bandwidth.

#include "fusewise/batch_norm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>

#include "common/implementation.h"
#include "common/operators.h"
#include "common/scratch.h"
#include "cpu/batch_norm_kernels.h"
#include "cpu/instruction_sets.h"
#include "cpu/threads.h"

namespace fusewise::cpu {
namespace {

using Index = std::int64_t;

constexpr Index kPlaneElements = 4 * 1024;  // NCHW: a piece that fits L1, for it is read twice
constexpr Index kRowElements = 16 * 1024;   // channels-last: a piece that fits L2
constexpr Index kPieceRows = 32;            // fewer rows would make partial sums too expensive
constexpr Index kShortRow = 128;            // channels-last: rows shorter than this are joined
constexpr Index kJoinedRow = 16;            // to a multiple of the widest vector
constexpr Index kChannelTile = 64;          // channels whose partial sums are combined together
constexpr Index kChannelRange = 8;          // NCHW: whole bytes of bits, for any number of pixels
constexpr Index kStreamBytes = 16 << 20;    // outputs this large bypass the caches
constexpr Index kWorthThreads = 16 * 1024;  // fewer elements run on one thread

Index rounded_up(Index value, Index step) { return (value + step - 1) / step * step; }

// Images and their pieces. -----------------------------------------------------------------------

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

/// Some pixels of some samples, of one channel (NCHW) or of all (channels-last, one sample).
struct Piece {
  Index stream, sample, samples, channel, pixel, pixels;
};

/// How all images of a call are cut into pieces: as planes (NCHW) or as rows of channels
/// (channels-last). It follows from shapes and strides alone, and so does the order of all sums.
struct Geometry {
  Index streams, samples, channels, height, width, pixels;
  bool planar;
  Index joined = 1;                // pixels in one row of the channels-last kernels
  Index group = 1, chunk, chunks;  // samples and pixels of a piece, pieces of a sample
  bool stream = false;             // whether outputs are too large for the caches
  Index pieces;                    // of one channel (NCHW) or of one stream

  Geometry(std::initializer_list<const TensorView*> tensors, bool blanked)
      : Geometry(Images(**tensors.begin())) {
    bool dense = true, merges = !planar && !blanked;
    for (const TensorView* t : tensors) {
      if (!t->defined()) continue;
      const Images images(*t);
      const bool native = images.native(planar);
      const Index stride = images.pixel_stride(channels);
      dense = dense && (!native || stride == channels);
      merges = merges && native && images.strides[1] == pixels * stride;
    }
    if (merges) pixels *= samples, samples = std::min<Index>(samples, 1);
    if (planar) {
      chunks = (pixels + kPlaneElements - 1) / kPlaneElements;
      chunk = chunks == 1 ? pixels : rounded_up((pixels + chunks - 1) / chunks, 64);
      if (!blanked)
        group = std::clamp<Index>(kPlaneElements / pixels, 1, std::max<Index>(1, samples));
    } else {
      if (dense && channels % kJoinedRow != 0) joined = kJoinedRow / std::gcd(channels, kJoinedRow);
      if (dense && row() < kShortRow) joined *= (kShortRow + row() - 1) / row();
      chunk = joined * std::max(kPieceRows, kRowElements / row());
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
  Index piece_elements() const { return planar ? group * chunk : chunk * channels; }
  /// An upper bound for the rows of a piece.
  Index piece_rows() const { return planar ? group : chunk; }
  /// Rows of channels-last pieces belong to all channels at once.
  Index channels_of_piece() const { return planar ? 1 : channels; }

  Piece piece(Index stream, Index channel, Index i) const {
    const Index n = i / chunks * group, p = i % chunks * chunk;
    return {stream, n, std::min(group, samples - n), channel, p, std::min(chunk, pixels - p)};
  }
  /// Calls body(shape, offset) for the one or two matrices of a piece. The second one has the
  /// pixels that do not fill a joined row. offset: pixels before the matrix.
  template <typename Body>
  void each_matrix(const Piece& piece, const Body& body) const {
    if (planar) return body(BatchNormShape{piece.samples, piece.pixels, true, stream}, Index(0));
    const Index rows = piece.pixels / joined, rest = piece.pixels % joined;
    if (rows > 0) body(BatchNormShape{rows, row(), false, stream}, Index(0));
    if (rest > 0) body(BatchNormShape{1, rest * channels, false, stream}, rows * joined);
  }

 private:
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
    const T* first = at({stream, 0, 1, channel, 0, 1}, 0);
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
    const Index channels = geometry_.channels_of_piece();
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

// Distribution of work. --------------------------------------------------------------------------

/// Two sums for each of some channels.
struct Sums {
  double *first, *second;
};

/// Takes all pieces through `reduce` and `apply`, with `finish` between them.
/// Operation: reduce(worker, piece, sums), merge(count, sums, count of part, part, channels),
/// finish(stream, channel, channels, sums), apply(worker, piece), is_blanked(piece).
class Plan {
 public:
  const int workers;

  Plan(const Context& context, const Geometry& geometry, bool reduces)
      : workers(geometry.elements() < kWorthThreads ? 1 : threads(context)),
        context_(context),
        geometry_(geometry),
        reduces_(reduces),
        by_channel_(geometry.planar && is_even(geometry.streams * geometry.channels, workers)),
        units_(geometry.planar ? geometry.streams * geometry.channels : geometry.streams),
        size_(geometry.channels_of_piece()),
        parts_(context, reduces && !by_channel_ ? 2 * size_ * units_ * geometry.pieces : 0),
        totals_(context, 2 * geometry.streams * geometry.channels) {}

  template <typename Operation>
  void run(const Operation& operation) const {
    const Geometry& g = geometry_;
    if (by_channel_) {
      const Index ranges = (units_ + kChannelRange - 1) / kChannelRange;
      each(ranges, [&](Index worker, Index begin, Index end) {
        const Index last = std::min(units_, end * kChannelRange);
        for (Index unit = begin * kChannelRange; unit < last; ++unit) {
          const Sums total = totals(unit);
          double first, second;
          const Sums part{&first, &second};
          combine(operation, unit, 1, total, [&](const Piece& piece, Index) {
            operation.reduce(worker, piece, part);
            return part;
          });
          operation.finish(unit / g.channels, unit % g.channels, 1, total);
          for (Index i = g.pieces - 1; i >= 0; --i) operation.apply(worker, piece(unit, i));
        }
      });
      return;
    }
    if (reduces_) {
      each(units_ * g.pieces, [&](Index worker, Index begin, Index end) {
        for (Index i = begin; i < end; ++i) {
          const Piece at = piece(i / g.pieces, i % g.pieces);
          if (!operation.is_blanked(at)) operation.reduce(worker, at, part(i));
        }
      });
    }
    const Index tiles = (size_ + kChannelTile - 1) / kChannelTile;
    each(units_ * tiles, [&](Index, Index begin, Index end) {
      for (Index i = begin; i < end; ++i) {
        const Index unit = i / tiles, c = i % tiles * kChannelTile;
        const Index count = std::min(kChannelTile, size_ - c);
        const Sums total = totals(unit * size_ + c);
        combine(operation, unit, count, total, [&](const Piece&, Index k) {
          const Sums sums = part(unit * g.pieces + k);
          return Sums{sums.first + c, sums.second + c};
        });
        const Index channel = unit * size_ + c;
        operation.finish(channel / g.channels, channel % g.channels, count, total);
      }
    });
    // In reverse order: what was read last is still in the nearest cache.
    each(units_ * g.pieces, [&](Index worker, Index begin, Index end) {
      for (Index i = end - 1; i >= begin; --i) {
        operation.apply(worker, piece(i / g.pieces, i % g.pieces));
      }
    });
  }

  /// Whether two workers may write bits of the same byte.
  bool shares_bytes() const {
    const Geometry& g = geometry_;
    const bool aligned = by_channel_ || (!g.planar && g.row() % 8 == 0);
    return workers > 1 && (!aligned || g.channels * g.pixels % 8 != 0);
  }

 private:
  /// Whether ranges of channels keep all workers busy.
  static bool is_even(Index channels, int workers) {
    const Index ranges = (channels + kChannelRange - 1) / kChannelRange;
    return ranges % workers == 0 || ranges >= 4 * workers;
  }
  /// Calls work(worker, begin, end). A worker has the same range for the same count.
  template <typename Work>
  void each(Index count, const Work& work) const {
    parallel_for(context_, count > 0 ? workers : 0, [&](Index begin, Index end) {
      for (Index w = begin; w < end; ++w) {
        work(w, count * w / workers, count * (w + 1) / workers);
      }
    });
  }
  template <typename Operation, typename Part>
  void combine(const Operation& operation, Index unit, Index channels, Sums total,
               const Part& part) const {
    std::fill_n(total.first, channels, 0.0);
    std::fill_n(total.second, channels, 0.0);
    if (!reduces_) return;
    double count = 0;
    for (Index i = 0; i < geometry_.pieces; ++i) {
      const Piece at = piece(unit, i);
      if (operation.is_blanked(at)) continue;
      const auto values = static_cast<double>(at.samples * at.pixels);
      operation.merge(count, total, values, part(at, i), channels);
      count += values;
    }
  }
  Piece piece(Index unit, Index i) const {
    if (!geometry_.planar) return geometry_.piece(unit, 0, i);
    return geometry_.piece(unit / geometry_.channels, unit % geometry_.channels, i);
  }
  Sums part(Index i) const {
    double* from = parts_.data() + 2 * size_ * i;
    return {from, from + size_};
  }
  Sums totals(Index channel) const {
    return {totals_.data() + channel,
            totals_.data() + geometry_.streams * geometry_.channels + channel};
  }

  const Context& context_;
  const Geometry& geometry_;
  const bool reduces_, by_channel_;
  const Index units_, size_;
  Scratch<double> parts_, totals_;
};

// The bits that forward saves. -------------------------------------------------------------------

std::uint64_t load_word(const std::uint8_t* from) {
  std::uint64_t word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}
void store_word(std::uint8_t* to, std::uint64_t word) { std::memcpy(to, &word, sizeof(word)); }

/// Sets bits [bit, bit + count) of `to`, which are 0, to those of `from`. `shared`: other threads
/// may write the other bits of the first and the last byte at the same time.
void put_bits(std::uint8_t* to, Index bit, const std::uint8_t* from, Index count, bool shared) {
  const int shift = static_cast<int>(bit % 8);
  to += bit / 8;
  const auto set = [&](Index i, unsigned bits) {
    if (shared)
      __atomic_fetch_or(to + i, static_cast<std::uint8_t>(bits), __ATOMIC_RELAXED);
    else
      to[i] |= static_cast<std::uint8_t>(bits);
  };
  const Index whole = count / 8;
  const unsigned rest = count % 8 == 0 ? 0 : from[whole] & ((1u << count % 8) - 1);
  if (shift == 0) {
    std::memcpy(to, from, whole);
    if (rest != 0) set(whole, rest);
    return;
  }
  if (whole > 0) set(0, unsigned(from[0]) << shift);
  Index i = 1;
  for (; i + 8 <= whole; i += 8) {
    store_word(to + i, load_word(from + i) << shift | from[i - 1] >> (8 - shift));
  }
  for (; i < whole; ++i) {
    to[i] = static_cast<std::uint8_t>(from[i] << shift | from[i - 1] >> (8 - shift));
  }
  const unsigned last = rest << shift | (whole > 0 ? from[whole - 1] >> (8 - shift) : 0);
  if ((last & 0xff) != 0) set(whole, last);
  if (last >> 8 != 0) set(whole + 1, last >> 8);
}

/// Bits [0, count) of `to` become bits [bit, bit + count) of `from`.
void get_bits(std::uint8_t* to, const std::uint8_t* from, Index bit, Index count) {
  const int shift = static_cast<int>(bit % 8);
  from += bit / 8;
  const Index bytes = (count + 7) / 8, last = (shift + count - 1) / 8;
  if (shift == 0) return void(std::memcpy(to, from, bytes));
  Index i = 0;
  for (; i + 8 <= last; i += 8) {
    store_word(to + i, load_word(from + i) >> shift | std::uint64_t(from[i + 8]) << (64 - shift));
  }
  for (; i < bytes; ++i) {
    const unsigned next = i + 1 <= last ? from[i + 1] : 0;
    to[i] = static_cast<std::uint8_t>(from[i] >> shift | next << (8 - shift));
  }
}

/// The bits of one matrix at a time, with rows that start at a byte.
class Bits {
 public:
  Bits(const Context& context, const Geometry& geometry, const TensorView& t, const Plan& plan)
      : geometry_(geometry),
        shared_(plan.shares_bytes()),
        all_(static_cast<std::uint8_t*>(t.data)),
        bytes_(t.defined()
                   ? rounded_up(geometry.piece_elements() / 8 + geometry.piece_rows() + 8, 64)
                   : 0),
        own_(context, plan.workers * bytes_) {}

  Rows<std::uint8_t> rows(Index worker, const BatchNormShape& shape) const {
    if (bytes_ == 0) return {};
    return {own_.data() + worker * bytes_, (shape.columns + 7) / 8};
  }
  void put(Index worker, const BatchNormShape& shape, const Piece& piece, Index offset) const {
    each(worker, shape, piece, offset, [&](std::uint8_t* row, Index bit, Index count) {
      put_bits(all_, bit, row, count, shared_);
    });
  }
  void get(Index worker, const BatchNormShape& shape, const Piece& piece, Index offset) const {
    each(worker, shape, piece, offset,
         [&](std::uint8_t* row, Index bit, Index count) { get_bits(row, all_, bit, count); });
  }

 private:
  template <typename Body>
  void each(Index worker, const BatchNormShape& shape, const Piece& piece, Index offset,
            const Body& body) const {
    if (bytes_ == 0) return;
    const auto [data, stride] = rows(worker, shape);
    const Geometry& g = geometry_;
    const Index sample = piece.stream * g.samples + piece.sample;
    if (g.planar) {
      const Index first = (sample * g.channels + piece.channel) * g.pixels + piece.pixel;
      for (Index row = 0; row < shape.rows; ++row) {
        body(data + row * stride, first + row * g.channels * g.pixels, shape.columns);
      }
      return;
    }
    const Index first = (sample * g.pixels + piece.pixel + offset) * g.channels;
    if (shape.columns % 8 == 0) return body(data, first, shape.rows * shape.columns);
    for (Index row = 0; row < shape.rows; ++row) {
      body(data + row * stride, first + row * shape.columns, shape.columns);
    }
  }

  const Geometry& geometry_;
  const bool shared_;
  std::uint8_t* all_;
  Index bytes_;
  Scratch<std::uint8_t> own_;
};

// Values per channel. ----------------------------------------------------------------------------

/// Weights, biases, running statistics or gradients in the type of sums.
template <typename W, typename A = AccumulatorOf<W>>
class Parameters {
 public:
  Parameters(const Context& context, const BatchNormKernels<W>& kernels, const TensorView& t,
             bool load = true)
      : kernels_(kernels), view_(t), values_(context, t.defined() ? t.numel() : 0) {
    if (t.defined() && load) {
      kernels.widen(static_cast<const W*>(t.data), t.numel(), values_.data());
    }
  }
  bool defined() const { return view_.defined(); }
  A& operator[](Index i) const { return values_.data()[i]; }
  A get(Index i, A absent) const { return defined() ? values_.data()[i] : absent; }
  /// Writes the values into the tensor.
  void store() const {
    if (defined()) kernels_.narrow(values_.data(), view_.numel(), static_cast<W*>(view_.data));
  }

 private:
  const BatchNormKernels<W>& kernels_;
  const TensorView& view_;
  Scratch<A> values_;
};

/// Values per channel as the kernels read them: repeated for every pixel of a joined row.
template <typename A>
class Coefficients {
 public:
  Coefficients(const Context& context, const Geometry& geometry)
      : geometry_(geometry), values_(context, geometry.streams * geometry.width_of_values()) {}

  void set(Index stream, Index channel, A value) const {
    const Index width = geometry_.width_of_values();
    A* to = values_.data() + stream * width;
    for (Index i = channel; i < width; i += geometry_.channels) to[i] = value;
  }
  const A* of(const Piece& piece) const {
    return values_.data() + piece.stream * geometry_.width_of_values() + piece.channel;
  }

 private:
  const Geometry& geometry_;
  Scratch<A> values_;
};

/// Which samples are blanked, and how many values remain in each stream.
class Blanked {
 public:
  Blanked(const Geometry& geometry, const TensorView& t)
      : geometry_(geometry), flags_(static_cast<const bool*>(t.data)) {}

  bool operator()(const Piece& piece) const {
    return flags_ != nullptr && flags_[piece.stream * geometry_.samples + piece.sample];
  }
  double values(Index stream) const {
    Index samples = geometry_.samples;
    for (Index n = 0; flags_ != nullptr && n < geometry_.samples; ++n) {
      samples -= flags_[stream * geometry_.samples + n];
    }
    return static_cast<double>(samples * geometry_.pixels);
  }

 private:
  const Geometry& geometry_;
  const bool* flags_;
};

template <typename T>
void set_zero(const BatchNormShape& shape, Rows<T> rows) {
  if (rows.data == nullptr) return;
  for (Index row = 0; row < shape.rows; ++row) {
    std::memset(static_cast<void*>(rows.data + row * rows.stride), 0, shape.columns * sizeof(T));
  }
}

template <typename T>
Rows<const T> readable(Rows<T> rows) {
  return {rows.data, rows.stride};
}

/// Number, and the two other values, of a channel in a `group` tensor.
template <typename A>
struct Group {
  A count, first, second;
  Group(const TensorView& t, Index channels, Index stream, Index channel) {
    const A* from = static_cast<const A*>(t.data) + 3 * stream * channels + channel;
    count = from[0], first = from[channels], second = from[2 * channels];
  }
};

// Forward. ---------------------------------------------------------------------------------------

template <typename T, typename W>
class Forward {
  using A = AccumulatorOf<T>;

 public:
  Forward(const Context& context, const BatchNormActForward& call,
          const BatchNormKernels<T>& kernels, const BatchNormKernels<W>& weights)
      : call_(call),
        kernels_(kernels),
        geometry_({&call.x, &call.residual, &call.y}, call.blanked.defined()),
        own_(call.training || !call.running_mean.defined()),
        plan_(context, geometry_, own_ && !call.group.defined()),
        x_(context, geometry_, call.x, plan_.workers),
        residual_(context, geometry_, call.residual, plan_.workers),
        y_(context, geometry_, call.y, plan_.workers),
        bits_(context, geometry_, call.passes, plan_),
        blanked_(geometry_, call.blanked),
        weight_(context, weights, call.weight),
        bias_(context, weights, call.bias),
        running_mean_(context, weights, call.running_mean),
        running_var_(context, weights, call.running_var),
        mean_(context, geometry_),
        scale_(context, geometry_),
        shift_(context, geometry_),
        sums_(context, plan_.workers * 3 * geometry_.width_of_values()),
        bases_(context, sizeof(T) < 8 ? 0 : geometry_.streams * geometry_.channels) {
    if constexpr (sizeof(T) == 8) {
      for (Index i = 0; i < geometry_.streams * geometry_.channels; ++i) {
        const double base = x_.typical(i / geometry_.channels, i % geometry_.channels);
        bases_.data()[i] = base - base == 0 ? base : 0;
      }
    }
    const Index bytes = call.passes.defined() ? call.passes.numel() : 0;
    std::fill_n(static_cast<std::uint8_t*>(call.passes.data), bytes, std::uint8_t(0));
    auto* counter = static_cast<Index*>(call.num_batches_tracked.data);
    if (call.training && counter != nullptr) ++*counter;
    factor_ =
        call.momentum < 0 && call.training && counter != nullptr ? 1.0 / *counter : call.momentum;
    plan_.run(*this);
    if (!call.training) return;
    running_mean_.store();
    running_var_.store();
  }

  bool is_blanked(const Piece& piece) const { return blanked_(piece); }

  /// The sum of x - base, and of the squares of x - mean.
  void reduce(Index worker, const Piece& piece, Sums part) const {
    x_.gather(worker, piece);
    const Index size = geometry_.channels_of_piece(), width = geometry_.width_of_values();
    std::fill_n(part.first, size, 0.0);
    std::fill_n(part.second, size, 0.0);
    const Index first = piece.stream * geometry_.channels + piece.channel;
    double count = 0;
    geometry_.each_matrix(piece, [&](const BatchNormShape& shape, Index offset) {
      A *pivots = sums_.data() + worker * 3 * width, *sums = pivots + width,
        *squares = sums + width;
      kernels_.moments(shape, readable(x_.rows(worker, piece, offset)), pivots, sums, squares);
      const Index columns = shape.planar ? 1 : shape.columns;
      const auto values =
          static_cast<double>(shape.planar ? shape.rows * shape.columns : shape.rows);
      const double per_value = 1 / values;
      for (Index i = 0; i < columns; i += size) {
        add(count, part, values, size, [&](Index c) {
          const double pivot = pivots[i + c] - base(first + c), sum = sums[i + c];
          const double rest = squares[i + c] - sum * sum * per_value;
          // An infinite mean stays infinite, although the sum of x - pivot is NaN then.
          return Moments{pivot * values + (pivot - pivot == 0 ? sum : 0), rest < 0 ? 0 : rest};
        });
        count += values;
      }
    });
  }

  void merge(double count, Sums into, double values, Sums part, Index channels) const {
    add(count, into, values, channels,
        [&](Index c) { return Moments{part.first[c], part.second[c]}; });
  }

  void finish(Index stream, Index first, Index channels, Sums sums) const {
    const double own = blanked_.values(stream);
    for (Index i = 0; i < channels; ++i) {
      const Index c = first + i, at = stream * geometry_.channels + c;
      double count = own, mean = 0, variance = 0;
      if (count > 0) mean = base(at) + sums.first[i] / count, variance = sums.second[i] / count;

      if (call_.group.defined() && own_) {
        const Group<A> group(call_.group, geometry_.channels, stream, c);
        count = group.count, mean = group.first, variance = group.second;
      } else if (!own_) {
        mean = running_mean_[at], variance = running_var_[at];
      }
      if (call_.training && running_mean_.defined() && count > 1) {
        running_mean_[at] = static_cast<A>((1 - factor_) * running_mean_[at] + factor_ * mean);
        running_var_[at] = static_cast<A>((1 - factor_) * running_var_[at] +
                                          factor_ * (variance * count / (count - 1)));
      }
      const auto inverse = static_cast<A>(1 / std::sqrt(variance + call_.eps));
      mean_.set(stream, c, static_cast<A>(mean));
      scale_.set(stream, c, inverse * weight_.get(at, 1));
      shift_.set(stream, c, bias_.get(at, 0));
      if (call_.mean.defined()) {
        static_cast<A*>(call_.mean.data)[at] = static_cast<A>(mean);
        static_cast<A*>(call_.inverse_deviation.data)[at] = inverse;
      }
    }
  }

  void apply(Index worker, const Piece& piece) const {
    const bool blank = blanked_(piece);
    if (!blank) x_.gather(worker, piece), residual_.gather(worker, piece);
    geometry_.each_matrix(piece, [&](const BatchNormShape& shape, Index offset) {
      const Rows<T> y = y_.rows(worker, piece, offset);
      if (blank) return set_zero(shape, y);
      const Normalization<T> in{readable(x_.rows(worker, piece, offset)),
                                readable(residual_.rows(worker, piece, offset)),
                                mean_.of(piece),
                                scale_.of(piece),
                                shift_.of(piece),
                                call_.activation};
      kernels_.normalize(shape, in, y, bits_.rows(worker, shape));
      bits_.put(worker, shape, piece, offset);
    });
    y_.scatter(worker, piece);
  }

 private:
  /// A value near those of the channel: float64 sums of x itself would lose digits. For the other
  /// types, float64 has enough.
  double base(Index channel) const { return bases_.data() == nullptr ? 0 : bases_.data()[channel]; }

  struct Moments {
    double sum, squares;  // squares of the deviations from the mean
  };
  /// Chan's formula. part(c): the moments of `values` more values of channel c.
  template <typename Part>
  static void add(double count, Sums into, double values, Index channels, const Part& part) {
    const double per_value = 1 / values, per_count = count > 0 ? 1 / count : 0;
    const double weight = count * values / (count + values);
    for (Index c = 0; c < channels; ++c) {
      const Moments more = part(c);
      const double delta = more.sum * per_value - into.first[c] * per_count;
      into.first[c] += more.sum;
      into.second[c] += more.squares + delta * delta * weight;
    }
  }

  const BatchNormActForward& call_;
  const BatchNormKernels<T>& kernels_;
  const Geometry geometry_;
  const bool own_;  // whether the statistics are those of this call
  const Plan plan_;
  const Image<T> x_, residual_, y_;
  const Bits bits_;
  const Blanked blanked_;
  const Parameters<W> weight_, bias_, running_mean_, running_var_;
  const Coefficients<A> mean_, scale_, shift_;
  const Scratch<A> sums_;
  const Scratch<double> bases_;
  double factor_ = 0;
};

// Backward. --------------------------------------------------------------------------------------

template <typename T, typename W>
class Backward {
  using A = AccumulatorOf<T>;

 public:
  Backward(const Context& context, const BatchNormActBackward& call,
           const BatchNormKernels<T>& kernels, const BatchNormKernels<W>& weights)
      : call_(call),
        kernels_(kernels),
        geometry_({&call.x, &call.dy, &call.residual, &call.dx, &call.dresidual},
                  call.blanked.defined()),
        plan_(context, geometry_, wants_sums(call)),
        dy_(context, geometry_, call.dy, plan_.workers),
        x_(context, geometry_, call.x, plan_.workers),
        residual_(context, geometry_, call.residual, plan_.workers),
        dx_(context, geometry_, call.dx, plan_.workers),
        dresidual_(context, geometry_, call.dresidual, plan_.workers),
        bits_(context, geometry_, call.passes, plan_),
        blanked_(geometry_, call.blanked),
        weight_(context, weights, call.weight),
        bias_(context, weights, call.bias),
        dweight_(context, weights, call.dweight, false),
        dbias_(context, weights, call.dbias, false),
        mean_(context, geometry_),
        scale_(context, geometry_),
        shift_(context, geometry_),
        slope_(context, geometry_),
        offset_(context, geometry_),
        sums_(context, plan_.workers * 2 * geometry_.width_of_values()) {
    // Both passes need them.
    for (Index s = 0; s < geometry_.streams; ++s) {
      for (Index c = 0; c < geometry_.channels; ++c) {
        const Index at = s * geometry_.channels + c;
        mean_.set(s, c, value(call.mean, at));
        scale_.set(s, c, value(call.inverse_deviation, at) * weight_.get(at, 1));
        shift_.set(s, c, bias_.get(at, 0));
      }
    }
    plan_.run(*this);
    dweight_.store();
    dbias_.store();
  }

  bool is_blanked(const Piece& piece) const { return blanked_(piece); }

  /// The sums of dv and of dv * (x - mean).
  void reduce(Index worker, const Piece& piece, Sums part) const {
    gather(worker, piece);
    const Index size = geometry_.channels_of_piece(), width = geometry_.width_of_values();
    std::fill_n(part.first, size, 0.0);
    std::fill_n(part.second, size, 0.0);
    geometry_.each_matrix(piece, [&](const BatchNormShape& shape, Index offset) {
      A *sums = sums_.data() + worker * 2 * width, *products = sums + width;
      kernels_.gradient_sums(shape, inputs(worker, shape, piece, offset), sums, products);
      const Index columns = shape.planar ? 1 : shape.columns;
      for (Index i = 0; i < columns; i += size) {
        for (Index c = 0; c < size; ++c) {
          part.first[c] += sums[i + c];
          part.second[c] += products[i + c];
        }
      }
    });
  }

  void merge(double, Sums into, double, Sums part, Index channels) const {
    for (Index c = 0; c < channels; ++c) {
      into.first[c] += part.first[c];
      into.second[c] += part.second[c];
    }
  }

  void finish(Index stream, Index first, Index channels, Sums sums) const {
    for (Index i = 0; i < channels; ++i) {
      const Index c = first + i, at = stream * geometry_.channels + c;
      const double inverse = value(call_.inverse_deviation, at);
      double count = blanked_.values(stream), dbias = sums.first[i];
      double dweight = sums.second[i] * inverse;
      if (dweight_.defined()) dweight_[at] = static_cast<A>(dweight);
      if (dbias_.defined()) dbias_[at] = static_cast<A>(dbias);
      if (call_.group.defined()) {
        const Group<A> group(call_.group, geometry_.channels, stream, c);
        count = group.count, dbias = group.first, dweight = group.second;
      }
      const double scale = inverse * weight_.get(at, 1);
      slope_.set(stream, c, static_cast<A>(-scale * inverse * dweight / count));
      offset_.set(stream, c, static_cast<A>(-scale * dbias / count));
    }
  }

  void apply(Index worker, const Piece& piece) const {
    if (!dx_.defined() && !dresidual_.defined()) return;
    const bool blank = blanked_(piece);
    if (!blank) gather(worker, piece);
    geometry_.each_matrix(piece, [&](const BatchNormShape& shape, Index offset) {
      const Rows<T> dx = dx_.rows(worker, piece, offset);
      const Rows<T> dresidual = dresidual_.rows(worker, piece, offset);
      if (blank) return set_zero(shape, dx), set_zero(shape, dresidual);
      const bool centred = call_.training && dx_.defined();
      kernels_.differentiate(shape, inputs(worker, shape, piece, offset),
                             centred ? slope_.of(piece) : nullptr, offset_.of(piece), dx,
                             dresidual);
    });
    dx_.scatter(worker, piece);
    dresidual_.scatter(worker, piece);
  }

 private:
  static bool wants_sums(const BatchNormActBackward& call) {
    const bool for_dx = call.dx.defined() && call.training && !call.group.defined();
    return call.dweight.defined() || call.dbias.defined() || for_dx;
  }
  static A value(const TensorView& t, Index i) { return static_cast<const A*>(t.data)[i]; }

  void gather(Index worker, const Piece& piece) const {
    dy_.gather(worker, piece);
    x_.gather(worker, piece);
    residual_.gather(worker, piece);
  }
  ActivationGradient<T> inputs(Index worker, const BatchNormShape& shape, const Piece& piece,
                               Index offset) const {
    bits_.get(worker, shape, piece, offset);
    return {
        {readable(x_.rows(worker, piece, offset)), readable(residual_.rows(worker, piece, offset)),
         mean_.of(piece), scale_.of(piece), shift_.of(piece), call_.activation},
        readable(dy_.rows(worker, piece, offset)),
        readable(bits_.rows(worker, shape))};
  }

  const BatchNormActBackward& call_;
  const BatchNormKernels<T>& kernels_;
  const Geometry geometry_;
  const Plan plan_;
  const Image<T> dy_, x_, residual_, dx_, dresidual_;
  const Bits bits_;
  const Blanked blanked_;
  const Parameters<W> weight_, bias_, dweight_, dbias_;
  const Coefficients<A> mean_, scale_, shift_, slope_, offset_;
  const Scratch<A> sums_;
};

// The list of implementations. -------------------------------------------------------------------

template <template <typename, typename> class Operation, typename Call>
void run(const BatchNormKernelSet& kernels, const Context& context, const Call& call,
         DType weights) {
  const bool same = weights == call.x.dtype;
  switch (call.x.dtype) {
    case DType::f32:
      Operation<float, float>(context, call, kernels.f32, kernels.f32);
      return;
    case DType::f64:
      Operation<double, double>(context, call, kernels.f64, kernels.f64);
      return;
    case DType::f16:
      if (same)
        Operation<F16, F16>(context, call, kernels.f16, kernels.f16);
      else
        Operation<F16, float>(context, call, kernels.f16, kernels.f32);
      return;
    case DType::bf16:
      if (same)
        Operation<BF16, BF16>(context, call, kernels.bf16, kernels.bf16);
      else
        Operation<BF16, float>(context, call, kernels.bf16, kernels.f32);
      return;
    case DType::u8:
    case DType::b8:
    case DType::i64:
      return;
  }
}

/// The type of the first tensor that is present. If none is, the type does not matter.
DType type_of(std::initializer_list<const TensorView*> parameters) {
  for (const TensorView* t : parameters) {
    if (t->defined()) return t->dtype;
  }
  return DType::f32;
}

template <const BatchNormKernelSet& kKernels>
void forward(const Context& context, const BatchNormActForward& call) {
  const DType weights = type_of({&call.weight, &call.bias, &call.running_mean});
  run<Forward>(kKernels, context, call, weights);
}

template <const BatchNormKernelSet& kKernels>
void backward(const Context& context, const BatchNormActBackward& call) {
  const DType weights = type_of({&call.weight, &call.bias, &call.dweight, &call.dbias});
  run<Backward>(kKernels, context, call, weights);
}

constexpr Implementation<BatchNormActForward> kForward[] = {
    {"avx512", needs_avx512, forward<avx512::batch_norm_kernels>},
    {"avx2", needs_avx2, forward<avx2::batch_norm_kernels>},
    {"portable", needs_nothing, forward<portable::batch_norm_kernels>},
};

constexpr Implementation<BatchNormActBackward> kBackward[] = {
    {"avx512", needs_avx512, backward<avx512::batch_norm_kernels>},
    {"avx2", needs_avx2, backward<avx2::batch_norm_kernels>},
    {"portable", needs_nothing, backward<portable::batch_norm_kernels>},
};

}  // namespace

Implementations<BatchNormActForward> batch_norm_act_forward() { return kForward; }
Implementations<BatchNormActBackward> batch_norm_act_backward() { return kBackward; }

}  // namespace fusewise::cpu
