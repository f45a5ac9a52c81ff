// BatchNorm, activation and a max-pool of 3 x 3 values with stride 2 and padding 1, for
// channels-last images: a thread has 16 bytes of channels.
// Memory: forward reads x twice (once in inference) and writes a quarter of it and a byte per
// output. Backward reads x, dy and the choices twice (once if no sums are needed) and writes dx.
// What neighbouring threads read again comes from L1 or L2. Bound by memory bandwidth.
//
// A thread goes down a strip of windows. It issues all loads of a window before it uses the first:
// nothing depends on a branch, because pixels outside of the image are replaced by their neighbours
// inside, which are in the same window and change no maximum.
//
// The kernels after the first pass go through the image in reverse, so that they find in L2 what
// the first pass read last.

#include "cuda/batch_norm/pool.cuh"
#include "cuda/batch_norm/pool_lanes.cuh"
#include "cuda/batch_norm/pool_strips.cuh"

namespace fusewise::cuda {
namespace {

using namespace pool;

template <typename T>
constexpr int kVector = 16 / sizeof(T);

template <typename T>
__device__ __forceinline__ Packed<T> load(const T* from) {
  const uint4 bits = *reinterpret_cast<const uint4*>(from);
  return {bits.x, bits.y, bits.z, bits.w};
}

/// The coefficients of a thread's channels.
template <typename T>
struct Channels {
  float mean[kVector<T>], scale[kVector<T>], shift[kVector<T>];

  __device__ __forceinline__ void set(int k, const Coefficients<float>& from) {
    mean[k] = from.mean;
    scale[k] = from.scale;
    shift[k] = from.shift;
  }
  __device__ __forceinline__ float normalized(int k, float x) const {
    return Coefficients<float>{mean[k], scale[k], shift[k], 0}(x);
  }
};

/// The columns of a window, without those outside of the image.
template <typename T>
struct Columns {
  const T* at[3];  // in row 0
  Index stride, last;

  __device__ __forceinline__ Columns(const Arguments& a, const Strip& p)
      : stride(a.x.h), last(a.height - 1) {
#pragma unroll
    for (int t = 0; t < 3; ++t) {
      const Index w = min(max(2 * p.column - 1 + t, Index{0}), a.width - 1);
      at[t] = a.x.at<const T>({p.s, p.n, p.c, 0, w});
    }
  }
  __device__ __forceinline__ void load(Index h, Packed<T> (&row)[3]) const {
    const Index offset = min(max(h, Index{0}), last) * stride;
#pragma unroll
    for (int t = 0; t < 3; ++t) row[t] = cuda::load(at[t] + offset);
  }
};

// ---- Forward.

/// act(v), as it would be stored.
template <typename T, Kinds kKinds>
struct Activated {
  const Arguments& a;
  const Channels<T>& channels;
  const unsigned low, high;  // relu, relu6 and identity clamp

  __device__ __forceinline__ Activated(const Arguments& a, const Channels<T>& channels)
      : a(a),
        channels(channels),
        low(Lanes<T>::all(a.activation == Activation::relu || a.activation == Activation::relu6
                              ? 0.0f
                              : -INFINITY)),
        high(Lanes<T>::all(a.activation == Activation::relu6 ? 6.0f : INFINITY)) {}

  template <int kCount>
  __device__ __forceinline__ void operator()(Packed<T> (&pixels)[kCount]) const {
#pragma unroll
    for (int t = 0; t < kCount; ++t) {
      float v[kVector<T>];
      pixels[t].unpack(v);
#pragma unroll
      for (int k = 0; k < kVector<T>; ++k) v[k] = channels.normalized(k, v[k]);
      if constexpr (kKinds == Kinds::smooth) activate_all<T, kKinds>(a.activation, v);
      pixels[t].pack(v);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pixels[t].words[i] = Lanes<T>::smaller(Lanes<T>::larger(pixels[t].words[i], low), high);
      }
    }
  }
};

/// The largest values of a window or of a row of it, and which they are. If NaN, that is not known.
template <typename T>
struct Largest {
  unsigned values[4], places[4];

  /// Of three values or rows. The first of equal ones stays.
  template <typename Value, typename Place>
  __device__ __forceinline__ void of_three(Value value, Place place) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = Lanes<T>::larger(Lanes<T>::larger(value(0, i), value(1, i)), value(2, i));
      unsigned found = place(2, i);
      found = select(Lanes<T>::equal(value(1, i), values[i]), place(1, i), found);
      places[i] = select(Lanes<T>::equal(value(0, i), values[i]), place(0, i), found);
    }
  }
  __device__ __forceinline__ bool has_nan() const {
    unsigned found = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) found |= Lanes<T>::is_nan(values[i]);
    return found != 0;
  }
};

/// Of a row of act(v). `first`: the place of its first value inside of the image.
template <typename T>
__device__ __forceinline__ Largest<T> largest_of(const Packed<T> (&row)[3], unsigned first) {
  Largest<T> result;
  result.of_three([&](int t, int i) { return row[t].words[i]; },
                  [&](int t, int) { return t == 0 ? first : Lanes<T>::place(t); });
  return result;
}

/// Puts the last NaN of window i in place of what was found. Rare, so it reads x again.
template <typename T, Kinds kKinds>
__device__ __forceinline__ void take_last_nan(const Arguments& a, const Strip& p, Index i,
                                              const Activated<T, kKinds>& activated,
                                              unsigned (&places)[4]) {
#pragma unroll 1
  for (int place = 0; place < 9; ++place) {
    const Index h = 2 * i - 1 + place / 3, w = 2 * p.column - 1 + place % 3;
    if (h < 0 || h >= a.height || w < 0 || w >= a.width) continue;
    Packed<T> u[1] = {load(a.x.at<const T>({p.s, p.n, p.c, h, w}))};
    activated(u);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      places[k] = select(Lanes<T>::is_nan(u[0].words[k]), Lanes<T>::place(place), places[k]);
    }
  }
}

template <typename T, Kinds kKinds>
__global__ void __launch_bounds__(kThreads, kWideBlocks)
    pool_kernel(const __grid_constant__ Arguments a, const Coefficients<float>* coefficients) {
  wait_for_previous_kernel();
  const Index stride = static_cast<Index>(gridDim.x) * kThreads;
  for (Index item = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; item < a.total;
       item += stride) {
    const Strip p = a.strip(a.total - 1 - item, kVector<T>);
    const bool blank = a.is_blank(p);
    const Columns<T> columns(a, p);
    Packed<T> rows[2][3];
    columns.load(2 * p.begin - 1, rows[0]);
    const Coefficients<float>* const own = coefficients + p.s * a.channels + p.c;
    Channels<T> channels;
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) channels.set(k, own[k]);
    const Activated<T, kKinds> activated(a, channels);
    const unsigned first = Lanes<T>::place(p.column == 0 ? 1 : 0);
    T* y = a.y.at<T>({p.s, p.n, p.c, p.begin, p.column});
    unsigned char* choices = a.choices == nullptr ? nullptr : a.choices_of(p) + p.begin * a.down();
    activated(rows[0]);
    Largest<T> above = largest_of(rows[0], first);
#pragma unroll 1
    for (Index i = p.begin; i < p.end; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) columns.load(2 * i + r, rows[r]);
      activated(rows[0]);
      activated(rows[1]);
      const Largest<T> middle = largest_of(rows[0], first), below = largest_of(rows[1], first);
      const unsigned top = Lanes<T>::place(i == 0 ? 3 : 0);
      Largest<T> window;
      window.of_three(
          [&](int r, int k) {
            return (r == 0 ? above : r == 1 ? middle : below).values[k];
          },
          [&](int r, int k) {
            if (r == 0) return above.places[k] + top;
            return r == 1 ? middle.places[k] + Lanes<T>::place(3)
                          : below.places[k] + Lanes<T>::place(6);
          });
      if (window.has_nan()) take_last_nan(a, p, i, activated, window.places);
      Packed<T> out;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        out.words[k] = blank ? 0 : window.values[k];
        if (blank) window.places[k] = 0;
      }
      out.store(y, false);
      y += a.y.h;
      if (choices != nullptr) {
        Bytes<T> bytes;
        bytes.pack(window.places);
        bytes.store(choices);
        choices += a.down();
      }
      above = below;
    }
  }
}

// ---- Backward.

/// Sums of dv and dv * (x - mean) of the slabs. dv is linear in dy, so the windows are summed as
/// they are, each with the x that it took.
template <typename T, Kinds kKinds>
__global__ void __launch_bounds__(kThreads, kWideBlocks)
    sums_kernel(const __grid_constant__ Arguments a, const BackwardChannels b,
                const GradientParts<float> parts) {
  allow_next_kernel();
  const Slab slab(a, kVector<T>);
  Channels<T> channels;
#pragma unroll
  for (int k = 0; k < kVector<T>; ++k) {
    channels.set(k, saved_coefficients<T>(b, slab.stream * a.channels + slab.channel + k));
  }
  float dv[kVector<T>] = {}, dvx[kVector<T>] = {};
  int count = 0;
#pragma unroll 1
  for (Index item = slab.begin + slab.strand; item < slab.end; item += slab.strands) {
    const Strip p = slab.strip(a, item);
    if (a.is_blank(p)) continue;
    count += a.pixels(p);
    const Columns<T> columns(a, p);
    const T* dy = a.y.at<const T>({p.s, p.n, p.c, p.begin, p.column});
    const unsigned char* choices = a.choices_of(p) + p.begin * a.down();
    Packed<T> rows[3][3];
    columns.load(2 * p.begin - 1, rows[0]);
#pragma unroll 1
    for (Index i = p.begin; i < p.end; ++i) {
#pragma unroll
      for (int r = 1; r < 3; ++r) columns.load(2 * i - 1 + r, rows[r]);
      const Packed<T> gradient = load(dy);
      Bytes<T> bytes;
      bytes.load(choices);
      Packed<T> taken{};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const unsigned places = bytes.places(k);
#pragma unroll
        for (int at = 0; at < 9; ++at) {
          taken.words[k] |=
              rows[at / 3][at % 3].words[k] & Lanes<T>::same_place(places, Lanes<T>::place(at));
        }
      }
      float x[kVector<T>], v[kVector<T>], d[kVector<T>];
      taken.unpack(x);
      gradient.unpack(d);
#pragma unroll
      for (int k = 0; k < kVector<T>; ++k) v[k] = channels.normalized(k, x[k]);
      differentiate_all<T, kKinds>(a.activation, v, d);
#pragma unroll
      for (int k = 0; k < kVector<T>; ++k) {
        dv[k] += d[k];
        dvx[k] += d[k] * (x[k] - channels.mean[k]);
      }
#pragma unroll
      for (int t = 0; t < 3; ++t) rows[0][t] = rows[2][t];
      dy += a.y.h;
      choices += a.down();
    }
  }
  slab.write(a, parts, dv, dvx, count);
}

/// The gradients of two neighbouring windows, and which values they took.
template <typename T>
struct WindowPair {
  Packed<T> dy[2];
  Bytes<T> choices[2];

  /// The second one is absent if `two` is false. Then it has taken nothing.
  __device__ __forceinline__ void load(const Arguments& a, const T* first,
                                       const unsigned char* choice, bool two) {
    dy[0] = cuda::load(first);
    dy[1] = cuda::load(first + (two ? a.y.w : 0));
    choices[0].load(choice);
    choices[1].load(choice + (two ? a.channels : 0));
    if (!two) drop(1);
  }
  __device__ __forceinline__ void drop(int right) {
#pragma unroll
    for (unsigned& word : choices[right].words) word = ~0u;
  }
  /// Adds the gradients of one of them where it took `place`.
  __device__ __forceinline__ void add(int right, int place, float (&d)[kVector<T>]) const {
    Packed<T> own;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      own.words[k] = dy[right].words[k] &
                     Lanes<T>::same_place(choices[right].places(k), Lanes<T>::place(place));
    }
    float values[kVector<T>];
    own.unpack(values);
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) d[k] += values[k];
  }
};

/// Gathers: of the four pixels of x from (2 i, 2 j) on, only four windows can have taken one. So
/// nothing is scattered. A thread keeps the gradients of the windows below for its next pixels.
template <typename T, Kinds kKinds>
__global__ void __launch_bounds__(kThreads, kWideBlocks)
    unpool_kernel(const __grid_constant__ Arguments a, bool training,
                  const Coefficients<float>* coefficients, const Corrections<float>* corrections) {
  wait_for_previous_kernel();
  const Index stride = static_cast<Index>(gridDim.x) * kThreads;
  for (Index item = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; item < a.total;
       item += stride) {
    const Strip p = a.strip(a.total - 1 - item, kVector<T>);
    const bool blank = a.is_blank(p);
    const bool two_windows = p.column + 1 < a.columns.value();
    const T* dy = a.y.at<const T>({p.s, p.n, p.c, p.begin, p.column});
    const unsigned char* choices = a.choices_of(p) + p.begin * a.down();
    WindowPair<T> above, below;
    above.load(a, dy, choices, two_windows);
    Channels<T> channels;
    float offset[kVector<T>], slope[kVector<T>];
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) {
      const Index at = p.s * a.channels + p.c + k;
      channels.set(k, coefficients[at]);
      const Corrections<float> other = training ? corrections[at] : Corrections<float>{};
      offset[k] = other.offset;
      slope[k] = other.slope;
    }
    const bool ends = p.end == a.rows, two_columns = 2 * p.column + 1 < a.width;
    const Place corner{p.s, p.n, p.c, 2 * p.begin, 2 * p.column};
    const T* x = a.x.at<const T>(corner);
    T* dx = a.dx.at<T>(corner);
#pragma unroll 1
    for (int left = static_cast<int>(p.end - p.begin); left > 0; --left) {
      const bool last = ends && left == 1, two_rows = !last || a.height % 2 == 0;
      Packed<T> pixels[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        pixels[q] = load(x + (q / 2 == 1 && two_rows ? a.x.h : 0) +
                         (q % 2 == 1 && two_columns ? a.x.w : 0));
      }
      if (!last) {
        dy += a.y.h;
        choices += a.down();
      }
      below.load(a, dy, choices, two_windows);
      if (last) {
        below.drop(0);
        below.drop(1);
      }
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int row = q / 2, column = q % 2;
        float d[kVector<T>] = {}, v[kVector<T>], values[kVector<T>];
        above.add(0, 4 + 3 * row + column, d);
        if (column == 1) above.add(1, 3 + 3 * row, d);
        if (row == 1) below.add(0, 1 + column, d);
        if (row == 1 && column == 1) below.add(1, 0, d);
        pixels[q].unpack(values);
#pragma unroll
        for (int k = 0; k < kVector<T>; ++k) v[k] = channels.normalized(k, values[k]);
        differentiate_all<T, kKinds>(a.activation, v, d);
#pragma unroll
        for (int k = 0; k < kVector<T>; ++k) {
          if (training) d[k] -= offset[k] + (values[k] - channels.mean[k]) * slope[k];
          values[k] = blank ? 0 : d[k] * channels.scale[k];
        }
        Packed<T> out;
        out.pack(values);
        if ((row == 0 || two_rows) && (column == 0 || two_columns)) {
          out.store(dx + row * a.dx.h + column * a.dx.w, false);
        }
      }
      above = below;
      x += 2 * a.x.h;
      dx += 2 * a.dx.h;
    }
  }
}

/// Why 16 bytes of neighbouring channels cannot be accessed at once, or empty.
std::string declines(std::initializer_list<const TensorView*> images, const TensorView& choices) {
  const TensorView& x = **images.begin();
  if (x.dtype == DType::f64) return "it has no float64 kernels";
  if (!has_adjacent_channels(x)) return "it takes channels-last images";
  const Index width = static_cast<Index>(16 / size_of(x.dtype));
  if (dimension(x, 3) % width != 0) {
    return "the channels of a pixel are not a multiple of 16 bytes";
  }
  for (const TensorView* t : images) {
    if (!t->defined()) continue;
    if (t->strides[t->rank - 3] != 1) return "it takes channels-last images";
    for (int d = 0; d < t->rank; ++d) {
      if (d != t->rank - 3 && t->sizes[d] > 1 && t->strides[d] % width != 0) {
        return "a pixel does not start on a 16-byte boundary";
      }
    }
    if (reinterpret_cast<std::uintptr_t>(t->data) % 16 != 0) {
      return "an image does not start on a 16-byte boundary";
    }
  }
  if (reinterpret_cast<std::uintptr_t>(choices.data) % width != 0) {
    return "the choices do not start on a boundary of as many bytes as 16 bytes have values";
  }
  return {};
}

/// Calls body<T, kKinds>(). The code of the smooth activations is long, and between the loads and
/// stores of the others it would slow them down.
template <typename Call, typename Body>
void dispatch(const Call& call, const Body& body) {
  dispatch_short_dtype(call.x.dtype, [&]<typename T>(T) {
    if (kinds_of(call.activation) == Kinds::smooth) {
      body.template operator()<T, Kinds::smooth>();
    } else {
      body.template operator()<T, Kinds::piecewise>();
    }
  });
}

}  // namespace

std::string pool_channels_last_declines(const Context&, const BatchNormActPoolForward& call) {
  return declines({&call.x, &call.y}, call.choices);
}
std::string pool_channels_last_declines(const Context&, const BatchNormActPoolBackward& call) {
  return declines({&call.x, &call.dy, &call.dx}, call.choices);
}
void pool_channels_last_run(const Context& context, const BatchNormActPoolForward& call) {
  dispatch(call, [&]<typename T, Kinds kKinds>() {
    run<T>(context, call, kVector<T>, pool_kernel<T, kKinds>);
  });
}
void pool_channels_last_run(const Context& context, const BatchNormActPoolBackward& call) {
  dispatch(call, [&]<typename T, Kinds kKinds>() {
    run<T>(context, call, kVector<T>,
           BackwardKernels<T>{sums_kernel<T, kKinds>, unpool_kernel<T, kKinds>});
  });
}

}  // namespace fusewise::cuda
