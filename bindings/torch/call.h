#pragma once

// Converts torch tensors to the core's views and back. The only place that knows both sides.

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "common/description.h"
#include "fusewise/context.h"
#include "fusewise/error.h"
#include "fusewise/implementation.h"
#include "fusewise/tensor.h"
#include "tensor.h"

namespace fusewise::binding {

/// Throws Error that names the argument if the tensor is not of a floating type.
void check_floating(const char* name, const Tensor& tensor);
/// Throws Error that names the argument if the tensor has another type.
void check_dtype(const char* name, const Tensor& tensor, DType dtype);

/// Throws Error that names the argument if the tensor is on a device that the core does not
/// support.
Device device_of(const char* name, const Tensor& tensor);
std::int32_t torch_dtype(DType dtype);
std::int64_t bytes_of(const Tensor& tensor);

/// Throws Error that names the argument if the core does not support this kind of tensor.
TensorView view_of(const char* name, const Tensor& tensor);
TensorView view_of(const char* name, const std::optional<Tensor>& tensor);

/// A view as a tensor that does not own its memory.
Tensor tensor_of(const TensorView& view);

/// Points `view` at a tensor [..., K] as the matrix [M, K]. Returns false if the leading dimensions
/// cannot be merged into one. A scalar stays a scalar. Throws as view_of does, but takes any number
/// of dimensions.
bool join_leading(const char* name, const Tensor& tensor, TensorView& view);

/// Points `view` at a tensor, with `leading` as above. If the tensor does not have the required
/// layout, points it at a dense copy and returns the copy.
std::optional<Tensor> point_at(TensorView& view, const char* name, const Tensor& tensor,
                               Layout layout, bool leading);

/// The tensor itself if it is dense, otherwise a dense copy. Throws OutOfMemory.
Tensor dense(const Tensor& tensor);
std::optional<Tensor> dense(const std::optional<Tensor>& tensor);

/// Uninitialised, row-major, on the device of `like`. Throws OutOfMemory.
Tensor new_dense(const Tensor& like, DType dtype, std::span<const std::int64_t> sizes);
Tensor new_dense(const Tensor& like, DType dtype, std::initializer_list<std::int64_t> sizes);
/// The same with the leading sizes of `like`, followed by `last`.
Tensor new_with_last(const Tensor& like, DType dtype, std::int64_t last);
/// Uninitialised, with the sizes, strides and type of a view. Throws OutOfMemory.
Tensor new_strided(const Tensor& like, const TensorView& view);
/// Whether an image [..., C, H, W] is channels-last.
bool has_adjacent_channels(const Tensor& image);
/// The view of an image [..., C, H, W] with other strides: dense in the order ..., H, W, C.
TensorView channels_last(TensorView image);
/// As torch.empty_like, including strides. Throws OutOfMemory.
Tensor new_like(const Tensor& like);

/// Copies values between tensors of one shape.
void copy(const Tensor& from, const Tensor& to);

/// A view, and where its elements go in another type. Neither has gaps in memory, and their strides
/// are equal.
struct CastPair {
  TensorView from, to;
};
/// Casts between float32 and half precision, on CUDA in one launch. All `from` have one type, and
/// all `to`. Defined once for the CPU library and once for the CUDA library.
void cast_all(const Context& context, std::span<const CastPair> pairs);

/// For the _explain operators: one line "name\tchosen\table\treason" per candidate.
std::string to_text(const Candidates& candidates);

/// Torch's current stream, device, allocator and threads, for the duration of one call. Defined
/// once for the CPU library and once for the CUDA library.
class CallContext {
 public:
  explicit CallContext(const Tensor& tensor);
  ~CallContext();
  const Context& get() const { return context_; }

 private:
  struct State;
  std::unique_ptr<State> state_;
  Context context_;
};

}  // namespace fusewise::binding
