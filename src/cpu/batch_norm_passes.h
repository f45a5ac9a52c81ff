#pragma once

// The two directions of BatchNorm on the CPU: distributes channels or pieces of samples over
// threads. NCHW: a thread takes a channel through statistics and normalisation, so that the second
// read of x (and of dy in backward) hits the caches. Channels-last: two loops over all pieces, the
// second in reverse order. Bound by memory bandwidth.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "cpu/batch_norm_bits.h"
#include "fusewise/batch_norm.h"

namespace fusewise::cpu::batch_norm {

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

  /// The values of a stream, to be written. `repeat` must follow.
  A* of_stream(Index stream) const { return values_.data() + stream * geometry_.width_of_values(); }
  void repeat(Index stream, Index first, Index channels) const {
    const A* from = of_stream(stream) + first;
    A *to = of_stream(stream) + first, *end = of_stream(stream + 1);
    while ((to += geometry_.channels) < end) std::copy_n(from, channels, to);
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
    std::memset(static_cast<void*>(rows.data + row * rows.stride), 0,
                shape.columns * shape.channels * sizeof(T));
  }
}

template <typename T>
Rows<const T> readable(Rows<T> rows) {
  return {rows.data, rows.stride};
}

/// The number of values of a channel, and two values about them: a column of a [3, C] tensor.
template <typename A>
class Group {
 public:
  Group(const TensorView& t, Index channels, Index stream, Index channel)
      : at_(static_cast<A*>(t.data) + 3 * stream * channels + channel), channels_(channels) {}

  void load(double& count, double& first, double& second) const {
    count = at_[0], first = at_[channels_], second = at_[2 * channels_];
  }
  void store(double count, double first, double second) const {
    at_[0] = static_cast<A>(count);
    at_[channels_] = static_cast<A>(first);
    at_[2 * channels_] = static_cast<A>(second);
  }

 private:
  A* at_;
  Index channels_;
};

// Forward. ---------------------------------------------------------------------------------------

/// `statistics` of x may be wanted too. Without y, nothing else is computed.
template <typename T, typename W>
class Forward {
  using A = AccumulatorOf<T>;

 public:
  Forward(const Context& context, const BatchNormActForward& call,
          const BatchNormKernels<T>& kernels, const BatchNormKernels<W>& weights,
          const TensorView& statistics = {})
      : call_(call),
        statistics_(statistics),
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
    if (call.training) count_call();
    plan_.run(*this);
    if (!call.training) return;
    running_mean_.store();
    running_var_.store();
  }

  bool is_blanked(const Piece& piece) const { return blanked_(piece); }

  /// The sum of x - base, and of the squares of x - mean.
  void reduce(Index worker, const Piece& piece, Sums part) const {
    x_.gather(worker, piece);
    const Index size = piece.channels, width = geometry_.width_of_values();
    std::fill_n(part.first, size, 0.0);
    std::fill_n(part.second, size, 0.0);
    const Index first = piece.stream * geometry_.channels + piece.channel;
    double count = 0;
    geometry_.each_matrix(piece, [&](const BatchNormShape& shape, Index offset) {
      A *pivots = sums_.data() + worker * 3 * width, *sums = pivots + width,
        *squares = sums + width;
      kernels_.moments(shape, readable(x_.rows(worker, piece, offset)), pivots, sums, squares);
      const Index columns = shape.planar ? shape.channels : shape.columns;
      const auto values =
          static_cast<double>(shape.planar ? shape.rows * shape.columns : shape.rows);
      const double per_value = 1 / values;
      for (Index i = 0; i < columns; i += size) {
        add(count, part, values, size, [&](Index c) {
          const double pivot = pivots[i + c] - base(first + c), sum = sums[i + c];
          const double rest = squares[i + c] - sum * sum * per_value;
          return Moments{pivot * values + sum, rest < 0 ? 0 : rest};
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
    const double own = blanked_.values(stream), per_value = 1 / own;
    A *means = mean_.of_stream(stream), *scales = scale_.of_stream(stream),
      *shifts = shift_.of_stream(stream);
    for (Index i = 0; i < channels; ++i) {
      const Index c = first + i, at = stream * geometry_.channels + c;
      double count = own, mean = 0, variance = 0;
      if (count > 0) {
        mean = base(at) + sums.first[i] * per_value;
        variance = sums.second[i] * per_value;
      }
      if (statistics_.defined()) {
        Group<A>(statistics_, geometry_.channels, stream, c).store(count, mean, variance);
      }

      if (call_.group.defined() && own_) {
        Group<A>(call_.group, geometry_.channels, stream, c).load(count, mean, variance);
      } else if (!own_) {
        mean = running_mean_[at], variance = running_var_[at];
      }
      if (call_.training && running_mean_.defined() && count > 1) {
        const double factor = call_.momentum < 0 ? 1.0 / counter(stream) : call_.momentum;
        running_mean_[at] = static_cast<A>((1 - factor) * running_mean_[at] + factor * mean);
        running_var_[at] = static_cast<A>((1 - factor) * running_var_[at] +
                                          factor * (variance * count / (count - 1)));
      }
      const auto inverse = static_cast<A>(1 / std::sqrt(variance + call_.eps));
      means[c] = static_cast<A>(mean);
      scales[c] = inverse * weight_.get(at, 1);
      shifts[c] = bias_.get(at, 0);
      if (call_.mean.defined()) {
        static_cast<A*>(call_.mean.data)[at] = static_cast<A>(mean);
        static_cast<A*>(call_.inverse_deviation.data)[at] = inverse;
      }
    }
    for (const auto* values : {&mean_, &scale_, &shift_}) values->repeat(stream, first, channels);
  }

  void apply(Index worker, const Piece& piece) const {
    if (!y_.defined()) return;
    const bool blank = blanked_(piece);
    if (!blank) x_.gather(worker, piece), residual_.gather(worker, piece);
    geometry_.each_matrix(piece, [&](const BatchNormShape& shape, Index offset) {
      const Rows<T> y = y_.rows(worker, piece, offset);
      if (blank) return set_zero(shape, y);
      kernels_.normalize(shape, inputs(worker, piece, offset), y, bits_.rows(worker, shape));
      bits_.put(worker, shape, piece, offset);
    });
    y_.scatter(worker, piece);
  }

  /// For callers that do not want y itself: act(v) of a piece in dense memory.
  void normalize(Index worker, const Piece& piece, T* to) const {
    x_.gather(worker, piece);
    geometry_.each_matrix(piece, [&](BatchNormShape shape, Index offset) {
      shape.stream = false;
      kernels_.normalize(shape, inputs(worker, piece, offset),
                         {to + offset * geometry_.channels, shape.columns}, {});
    });
  }
  const Geometry& geometry() const { return geometry_; }
  int workers() const { return plan_.workers; }

 private:
  /// Of a stream, or the one of all.
  Index& counter(Index stream) const {
    const TensorView& tracked = call_.num_batches_tracked;
    return static_cast<Index*>(tracked.data)[tracked.rank == 1 ? stream : 0];
  }
  void count_call() const {
    const TensorView& tracked = call_.num_batches_tracked;
    if (!tracked.defined()) return;
    if (tracked.rank == 0) return void(++counter(0));
    for (Index s = 0; s < geometry_.streams; ++s) {
      double count = blanked_.values(s), mean, variance;
      if (call_.group.defined()) {
        Group<A>(call_.group, geometry_.channels, s, 0).load(count, mean, variance);
      }
      if (count > 1) ++counter(s);
    }
  }
  Normalization<T> inputs(Index worker, const Piece& piece, Index offset) const {
    return {readable(x_.rows(worker, piece, offset)),
            readable(residual_.rows(worker, piece, offset)),
            mean_.of(piece),
            scale_.of(piece),
            shift_.of(piece),
            call_.activation};
  }
  /// A value near those of the channel: float64 sums of x itself would lose digits. For the other
  /// types, float64 has enough.
  double base(Index channel) const {
    if constexpr (sizeof(T) == 8) return bases_.data()[channel];
    return 0;
  }

  struct Moments {
    double sum, squares;  // squares of the deviations from the mean
  };
  /// Chan's formula. part(c): the moments of `values` more values of channel c.
  template <typename Part>
  static void add(double count, Sums into, double values, Index channels, const Part& part) {
    // Products are exact where quotients round, so equal means contribute nothing.
    const double weight = count > 0 ? 1 / (count * values * (count + values)) : 0;
    for (Index c = 0; c < channels; ++c) {
      const Moments more = part(c);
      const double delta = more.sum * count - into.first[c] * values;
      into.first[c] += more.sum;
      into.second[c] += more.squares + delta * delta * weight;
    }
  }

  const BatchNormActForward& call_;
  const TensorView& statistics_;
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
};

// Backward. --------------------------------------------------------------------------------------

/// Dy: where dy comes from, an Image or something that looks like one with values of type A.
/// `more`: what it needs.
template <typename T, typename W, typename Dy = Image<T>>
class Backward {
  using A = AccumulatorOf<T>;

 public:
  template <typename... More>
  Backward(const Context& context, const BatchNormActBackward& call,
           const BatchNormKernels<T>& kernels, const BatchNormKernels<W>& weights,
           const More&... more)
      : call_(call),
        kernels_(kernels),
        geometry_({&call.x, &call.dy, &call.residual, &call.dx, &call.dresidual},
                  call.blanked.defined()),
        plan_(context, geometry_, wants_sums(call)),
        dy_(context, geometry_, call.dy, plan_.workers, typename Dy::Source{more, kernels}...),
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
      A *means = mean_.of_stream(s), *scales = scale_.of_stream(s), *shifts = shift_.of_stream(s);
      for (Index c = 0; c < geometry_.channels; ++c) {
        const Index at = s * geometry_.channels + c;
        means[c] = value(call.mean, at);
        scales[c] = value(call.inverse_deviation, at) * weight_.get(at, 1);
        shifts[c] = bias_.get(at, 0);
      }
      for (const auto* values : {&mean_, &scale_, &shift_}) {
        values->repeat(s, 0, geometry_.channels);
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
    const Index size = piece.channels, width = geometry_.width_of_values();
    std::fill_n(part.first, size, 0.0);
    std::fill_n(part.second, size, 0.0);
    geometry_.each_matrix(piece, [&](const BatchNormShape& shape, Index offset) {
      A *sums = sums_.data() + worker * 2 * width, *products = sums + width;
      kernels_.gradient_sums(shape, inputs(worker, shape, piece, offset), sums, products);
      const Index columns = shape.planar ? shape.channels : shape.columns;
      double *first = part.first, *second = part.second;
      for (Index i = 0; i < columns; i += size) {
        for (Index c = 0; c < size; ++c) first[c] += sums[i + c];
        for (Index c = 0; c < size; ++c) second[c] += products[i + c];
      }
    });
  }

  void merge(double, Sums into, double, Sums part, Index channels) const {
    for (Index c = 0; c < channels; ++c) into.first[c] += part.first[c];
    for (Index c = 0; c < channels; ++c) into.second[c] += part.second[c];
  }

  void finish(Index stream, Index first, Index channels, Sums sums) const {
    const double own = blanked_.values(stream);
    A *slopes = slope_.of_stream(stream), *offsets = offset_.of_stream(stream);
    for (Index i = 0; i < channels; ++i) {
      const Index c = first + i, at = stream * geometry_.channels + c;
      const double inverse = value(call_.inverse_deviation, at);
      double count = own, dbias = sums.first[i];
      double dweight = sums.second[i] * inverse;
      if (dweight_.defined()) dweight_[at] = static_cast<A>(dweight);
      if (dbias_.defined()) dbias_[at] = static_cast<A>(dbias);
      if (call_.dgroup.defined()) {
        Group<A>(call_.dgroup, geometry_.channels, stream, c).store(count, dbias, dweight);
      }
      if (call_.group.defined()) {
        Group<A>(call_.group, geometry_.channels, stream, c).load(count, dbias, dweight);
      }
      const double scale = -inverse * weight_.get(at, 1) / count;
      slopes[c] = static_cast<A>(scale * inverse * dweight);
      offsets[c] = static_cast<A>(scale * dbias);
    }
    for (const auto* values : {&slope_, &offset_}) values->repeat(stream, first, channels);
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
    return call.dweight.defined() || call.dbias.defined() || call.dgroup.defined() || for_dx;
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
    ActivationGradient<T> in{
        .forward = {readable(x_.rows(worker, piece, offset)),
                    readable(residual_.rows(worker, piece, offset)), mean_.of(piece),
                    scale_.of(piece), shift_.of(piece), call_.activation},
        .dy = {},
        .wide_dy = {},
        .bits = readable(bits_.rows(worker, shape))};
    if constexpr (std::is_same_v<Dy, Image<T>>) {
      in.dy = readable(dy_.rows(worker, piece, offset));
    } else {
      in.wide_dy = readable(dy_.rows(worker, piece, offset));
    }
    return in;
  }

  const BatchNormActBackward& call_;
  const BatchNormKernels<T>& kernels_;
  const Geometry geometry_;
  const Plan plan_;
  const Dy dy_;
  const Image<T> x_, residual_, dx_, dresidual_;
  const Bits bits_;
  const Blanked blanked_;
  const Parameters<W> weight_, bias_, dweight_, dbias_;
  const Coefficients<A> mean_, scale_, shift_, slope_, offset_;
  const Scratch<A> sums_;
};

// Types. -----------------------------------------------------------------------------------------

template <template <typename, typename> class Operation, typename Call, typename... More>
void run(const BatchNormKernelSet& kernels, const Context& context, const Call& call, DType weights,
         const More&... more) {
  const bool same = weights == call.x.dtype;
  switch (call.x.dtype) {
    case DType::f32:
      Operation<float, float>(context, call, kernels.f32, kernels.f32, more...);
      return;
    case DType::f64:
      Operation<double, double>(context, call, kernels.f64, kernels.f64, more...);
      return;
    case DType::f16:
      if (same)
        Operation<F16, F16>(context, call, kernels.f16, kernels.f16, more...);
      else
        Operation<F16, float>(context, call, kernels.f16, kernels.f32, more...);
      return;
    case DType::bf16:
      if (same)
        Operation<BF16, BF16>(context, call, kernels.bf16, kernels.bf16, more...);
      else
        Operation<BF16, float>(context, call, kernels.bf16, kernels.f32, more...);
      return;
    case DType::u8:
    case DType::b8:
    case DType::i64:
      return;
  }
}

/// The type of the first tensor that is present. If none is, the type does not matter.
inline DType type_of(std::initializer_list<const TensorView*> parameters) {
  for (const TensorView* t : parameters) {
    if (t->defined()) return t->dtype;
  }
  return DType::f32;
}

}  // namespace fusewise::cpu::batch_norm
