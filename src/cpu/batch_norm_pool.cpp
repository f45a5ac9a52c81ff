// BatchNorm + activation + max-pool on the CPU. Forward normalises rows into a ring of three per
// thread and pools them there, so that act(v) never leaves the caches. Backward is BatchNorm's,
// with a dy that is gathered from the pool's dy and choices. Bound by memory bandwidth.

#include "common/batch_norm.h"
#include "common/implementation.h"
#include "common/operators.h"
#include "cpu/batch_norm_passes.h"
#include "cpu/instruction_sets.h"

namespace fusewise::cpu {
namespace {

using namespace batch_norm;

PoolShape shape_of(const Geometry& g) {
  return {g.width, (g.width + 1) / 2, g.planar ? 1 : g.channels, g.planar};
}
Index scratch_of(const PoolShape& shape) { return shape.planar ? 5 * shape.width + 16 : 0; }

/// The rows of a pool's output: of planes (NCHW), or of all channels (channels-last).
struct OutputRows {
  Index streams, samples, channels, height, width, planes;

  OutputRows(const Geometry& g, Index samples)
      : streams(g.streams),
        samples(samples),
        channels(g.channels),
        height((g.height + 1) / 2),
        width((g.width + 1) / 2),
        planes(g.planar ? g.channels : 1) {}

  Index count() const { return streams * samples * planes * height; }
  Index values() const { return width * channels / planes; }  // of a row

  struct Place {
    Index stream, sample, channel, h;
  };
  Place place(Index row) const {
    const Index plane = row / height, image = plane / planes;
    return {image / samples, image % samples, plane % planes, row % height};
  }
  Index row(Index stream, Index sample, Index channel, Index h) const {
    return ((stream * samples + sample) * planes + channel) * height + h;
  }
};

/// A tensor of the output's shape, by rows.
template <typename T>
class OutputImage {
 public:
  OutputImage(const OutputRows& rows, const TensorView& t) : rows_(rows), images_(t) {
    const bool planar = rows.planes > 1 || rows.channels == 1;
    native_ = planar ? images_.strides[4] == 1 || rows.width == 1
                     : images_.strides[2] == 1 &&
                           (images_.strides[4] == rows.channels || rows.width == 1);
  }
  /// Null if a row is not in adjacent memory.
  T* row(const OutputRows::Place& p) const { return native_ ? at(p) : nullptr; }
  void copy_from(const OutputRows::Place& p, const T* from) const {
    each(p, [&](T& value, Index i) { value = from[i]; });
  }
  void copy_to(const OutputRows::Place& p, T* to) const {
    each(p, [&](const T& value, Index i) { to[i] = value; });
  }

 private:
  T* at(const OutputRows::Place& p) const {
    const Index* strides = images_.strides;
    return reinterpret_cast<T*>(images_.data) + p.stream * strides[0] + p.sample * strides[1] +
           p.channel * strides[2] + p.h * strides[3];
  }
  template <typename Body>
  void each(const OutputRows::Place& p, const Body& body) const {
    const Index channels = rows_.channels / rows_.planes;
    T* const first = at(p);
    for (Index w = 0, i = 0; w < rows_.width; ++w) {
      for (Index c = 0; c < channels; ++c, ++i) {
        body(first[w * images_.strides[4] + c * images_.strides[2]], i);
      }
    }
  }

  const OutputRows& rows_;
  const Images images_;
  bool native_;
};

// Forward. ---------------------------------------------------------------------------------------

template <typename T, typename W>
class PoolForward {
  using A = AccumulatorOf<T>;

 public:
  PoolForward(const Context& context, const BatchNormActForward& norm,
              const BatchNormKernels<T>& kernels, const BatchNormKernels<W>& weights,
              const BatchNormActPoolForward& call)
      : norm_(context, norm, kernels, weights),
        geometry_(norm_.geometry()),
        kernels_(kernels),
        shape_(shape_of(geometry_)),
        rows_(geometry_, Images(call.x).sizes[1]),
        y_(rows_, call.y),
        blanked_(static_cast<const bool*>(call.blanked.data)),
        choices_(static_cast<std::uint8_t*>(call.choices.data)) {
    const Index input = geometry_.width * shape_.channels, values = rows_.values();
    const Index workers = norm_.workers(), count = rows_.count();
    const Scratch<T> memory(context, workers * (3 * input + values));
    const Scratch<A> sums(context, workers * scratch_of(shape_));
    const Scratch<std::uint8_t> unwanted(context, choices_ == nullptr ? workers * values : 0);
    parallel_for(context, count > 0 ? workers : 0, [&](Index begin, Index end) {
      for (Index w = begin; w < end; ++w) {
        T* const ring = memory.data() + w * (3 * input + values);
        std::uint8_t* const choices = choices_ == nullptr ? unwanted.data() + w * values : nullptr;
        pool(w, count * w / workers, count * (w + 1) / workers, ring, ring + 3 * input,
             sums.data() + w * scratch_of(shape_), choices);
      }
    });
  }

 private:
  /// Output rows [begin, end).
  void pool(Index worker, Index begin, Index end, T* ring, T* own, A* scratch,
            std::uint8_t* unwanted) const {
    const Index input = geometry_.width * shape_.channels, values = rows_.values();
    Index ready = -1;  // the last row in the ring, of the plane of the previous output row
    for (Index i = begin; i < end; ++i) {
      const OutputRows::Place p = rows_.place(i);
      T* const direct = y_.row(p);
      T* const y = direct != nullptr ? direct : own;
      std::uint8_t* const choices = unwanted != nullptr ? unwanted : choices_ + i * values;
      if (p.h == 0) ready = -1;
      if (blanked_ != nullptr && blanked_[p.stream * rows_.samples + p.sample]) {
        std::memset(static_cast<void*>(y), 0, values * sizeof(T));
        std::memset(choices, 0, values);
      } else {
        const T* rows[3];
        for (Index r = 0; r < 3; ++r) {
          const Index h = 2 * p.h - 1 + r;
          const bool inside = h >= 0 && h < geometry_.height;
          rows[r] = inside ? ring + h % 3 * input : nullptr;
          if (inside && h > ready) normalize(worker, p, h, ring + h % 3 * input), ready = h;
        }
        kernels_.pool(shape_, rows, scratch, y, choices);
      }
      if (direct == nullptr) y_.copy_from(p, own);
    }
  }
  void normalize(Index worker, const OutputRows::Place& p, Index h, T* to) const {
    const Index most = geometry_.chunk;
    for (Index w = 0; w < geometry_.width; w += most) {
      const Index count = std::min(most, geometry_.width - w);
      norm_.normalize(worker, geometry_.in_row(p.stream, p.sample, p.channel, h, w, count),
                      to + w * shape_.channels);
    }
  }

  const Forward<T, W> norm_;
  const Geometry& geometry_;
  const BatchNormKernels<T>& kernels_;
  const PoolShape shape_;
  const OutputRows rows_;
  const OutputImage<T> y_;
  const bool* blanked_;
  std::uint8_t* choices_;
};

// Backward. --------------------------------------------------------------------------------------

/// The gradient of act(v), by pieces, as Backward reads dy. It stays in the type of sums.
template <typename T>
class Unpooled {
  using A = AccumulatorOf<T>;

 public:
  struct Source {
    const BatchNormActPoolBackward& call;
    const BatchNormKernels<T>& kernels;
  };

  Unpooled(const Context& context, const Geometry& geometry, const TensorView&, Index workers,
           const Source& source)
      : geometry_(geometry),
        kernels_(source.kernels),
        shape_(shape_of(geometry)),
        rows_(geometry, Images(source.call.x).sizes[1]),
        dy_(rows_, source.call.dy),
        choices_(static_cast<const std::uint8_t*>(source.call.choices.data)),
        pieces_(context, workers * geometry.piece_elements()),
        scratch_(context, workers * scratch_of(shape_)),
        copies_(context, workers * 2 * rows_.values()) {}

  void gather(Index worker, const Piece& piece) const {
    A* to = pieces_.data() + worker * geometry_.piece_elements();
    const Index image = geometry_.height * geometry_.width, planes = planes_of(piece);
    for (Index plane = 0; plane < piece.samples * planes; ++plane) {
      for (Index pixel = piece.pixel, end = piece.pixel + piece.pixels; pixel < end;) {
        // Samples may be merged: then the pixels of all of them have one number.
        const Index sample = piece.sample + plane / planes + pixel / image;
        const Index h = pixel % image / geometry_.width, w = pixel % geometry_.width;
        const Index count = std::min(geometry_.width - w, end - pixel);
        unpool(worker, {piece.stream, sample, piece.channel + plane % planes, h}, w, count, to);
        to += count * shape_.channels;
        pixel += count;
      }
    }
  }
  Rows<A> rows(Index worker, const Piece& piece, Index offset) const {
    return {pieces_.data() + worker * geometry_.piece_elements() + offset * geometry_.channels,
            geometry_.planar ? piece.pixels * piece.channels : geometry_.row()};
  }

 private:
  /// In a row of a piece.
  Index planes_of(const Piece& piece) const { return geometry_.planar ? piece.channels : 1; }
  /// Pixels of row p.h of the input.
  void unpool(Index worker, OutputRows::Place p, Index w, Index count, A* to) const {
    PoolReaders<T> readers;
    const auto add = [&](Index h, int row) {
      if (h >= rows_.height) return;
      p.h = h;
      const T* dy = dy_.row(p);
      if (dy == nullptr) {
        T* const copy = copies_.data() + (2 * worker + readers.count) * rows_.values();
        dy_.copy_to(p, copy);
        dy = copy;
      }
      readers.dy[readers.count] = dy;
      readers.choices[readers.count] =
          choices_ + rows_.row(p.stream, p.sample, p.channel, h) * rows_.values();
      readers.row[readers.count++] = row;
    };
    const Index h = p.h;
    add(h / 2, 1 + static_cast<int>(h % 2));
    if (h % 2 == 1) add(h / 2 + 1, 0);
    kernels_.unpool(shape_, readers, w, count, scratch_.data() + worker * scratch_of(shape_), to);
  }

  const Geometry& geometry_;
  const BatchNormKernels<T>& kernels_;
  const PoolShape shape_;
  const OutputRows rows_;
  const OutputImage<T> dy_;
  const std::uint8_t* choices_;
  const Scratch<A> pieces_, scratch_;
  const Scratch<T> copies_;
};

template <typename T, typename W>
using PoolBackward = Backward<T, W, Unpooled<T>>;

// The list of implementations. -------------------------------------------------------------------

template <const BatchNormKernelSet& kKernels>
void forward(const Context& context, const BatchNormActPoolForward& call) {
  const DType weights = type_of({&call.weight, &call.bias, &call.running_mean});
  run<PoolForward>(kKernels, context, without_pool(call), weights, call);
}

template <const BatchNormKernelSet& kKernels>
void backward(const Context& context, const BatchNormActPoolBackward& call) {
  const DType weights = type_of({&call.weight, &call.bias, &call.dweight, &call.dbias});
  run<PoolBackward>(kKernels, context, without_pool(call), weights, call);
}

constexpr Implementation<BatchNormActPoolForward> kForward[] = {
    {"avx512", needs_avx512, forward<avx512::batch_norm_kernels>},
    {"avx2", needs_avx2, forward<avx2::batch_norm_kernels>},
    {"portable", needs_nothing, forward<portable::batch_norm_kernels>},
};

constexpr Implementation<BatchNormActPoolBackward> kBackward[] = {
    {"avx512", needs_avx512, backward<avx512::batch_norm_kernels>},
    {"avx2", needs_avx2, backward<avx2::batch_norm_kernels>},
    {"portable", needs_nothing, backward<portable::batch_norm_kernels>},
};

}  // namespace

Implementations<BatchNormActPoolForward> batch_norm_act_pool_forward() { return kForward; }
Implementations<BatchNormActPoolBackward> batch_norm_act_pool_backward() { return kBackward; }

}  // namespace fusewise::cpu
