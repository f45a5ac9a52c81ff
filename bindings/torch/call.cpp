#include "call.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <string>

#include "common/check.h"
#include "common/scratch.h"
#include "failure.h"

namespace fusewise::binding {
namespace {

using torch::headeronly::ScalarType;

constexpr std::size_t kMostDimensions = 64;  // the limit of torch's own operators

void check_dimensions(std::size_t dimensions) {
  check(dimensions <= kMostDimensions, "x: expected at most ", kMostDimensions, " dimensions, got ",
        dimensions);
}

/// Python's names of the types that the core does not support.
const char* other_dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    default:
      return torch::headeronly::toString(type);
  }
}

std::string dtype_name(const Tensor& tensor) {
  const StableIValue type = torch::stable::detail::from(tensor.dtype());
  return other_dtype_name(torch::stable::detail::to<ScalarType>(type));
}

std::optional<DType> known_dtype(const Tensor& tensor) {
  const std::int32_t type = tensor.dtype();
  for (const DType dtype :
       {DType::f32, DType::bf16, DType::f16, DType::f64, DType::u8, DType::b8, DType::i64}) {
    if (type == torch_dtype(dtype)) return dtype;
  }
  return std::nullopt;
}

DType dtype_of(const char* name, const Tensor& tensor) {
  if (const auto known = known_dtype(tensor)) return *known;
  fail(name, ": expected a floating dtype, got ", dtype_name(tensor));
}

/// Data, dtype and device, without sizes. For a scalar the view is complete.
TensorView kind_of(const char* name, const Tensor& tensor) {
  TensorView view;
  view.dtype = dtype_of(name, tensor);
  view.device = device_of(name, tensor);
  // A view of freed memory still has a pointer.
  check(tensor.storage_bytes() > 0 || tensor.numel() == 0, name,
        ": expected a tensor with memory, got one whose storage was freed; FSDP does so with "
        "parameters outside of the module that runs: wrap the block that holds all layers of the "
        "operator");
  view.data = const_cast<void*>(tensor.const_data_ptr());
  view.rank = 0;
  return view;
}

/// Prepares a new tensor for writing.
Tensor prepared(Tensor tensor) {
  if (tensor.is_cpu()) prefer_large_pages(tensor.mutable_data_ptr(), bytes_of(tensor));
  return tensor;
}

Tensor empty_strided(const Tensor& like, std::int32_t dtype, std::int64_t rank,
                     const std::int64_t* sizes, const std::int64_t* strides) {
  const Device device = device_of("x", like);
  const bool cuda = device.type == DeviceType::cuda;
  AtenTensorHandle handle = nullptr;
  const AOTITorchError status = aoti_torch_empty_strided(
      rank, sizes, strides, dtype,
      cuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu(), device.index, &handle);
  if (status != AOTI_TORCH_SUCCESS) {
    std::int64_t bytes = aoti_torch_dtype_element_size(dtype);
    for (std::int64_t d = 0; d < rank; ++d) {
      check(!__builtin_mul_overflow(bytes, sizes[d], &bytes), "x: a result has too many elements");
    }
    fail_as_torch("a result", device, bytes);
  }
  return prepared(Tensor(handle));
}

bool is_dense_in(const Tensor& tensor, const std::vector<int>& order) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  std::int64_t stride = 1;
  for (int d : order) {
    if (sizes[d] != 1 && strides[d] != stride) return false;
    stride *= sizes[d];
  }
  return true;
}

}  // namespace

std::int32_t torch_dtype(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return aoti_torch_dtype_float64();
    case DType::f16:
      return aoti_torch_dtype_float16();
    case DType::bf16:
      return aoti_torch_dtype_bfloat16();
    case DType::u8:
      return aoti_torch_dtype_uint8();
    case DType::b8:
      return aoti_torch_dtype_bool();
    case DType::i64:
      return aoti_torch_dtype_int64();
    case DType::f32:
      break;
  }
  return aoti_torch_dtype_float32();
}

void check_floating(const char* name, const Tensor& tensor) {
  const DType dtype = dtype_of(name, tensor);
  check(dtype != DType::u8 && dtype != DType::b8 && dtype != DType::i64, name,
        ": expected a floating dtype, got ", dtype);
}

void check_dtype(const char* name, const Tensor& tensor, DType dtype) {
  if (tensor.dtype() == torch_dtype(dtype)) return;
  const auto known = known_dtype(tensor);
  fail(name, ": expected dtype ", dtype, ", got ",
       known.has_value() ? name_of(*known) : dtype_name(tensor));
}

Device device_of(const char* name, const Tensor& tensor) {
  if (tensor.is_cpu()) return {DeviceType::cpu, 0};
  check(tensor.is_cuda(), name, ": expected a CPU or CUDA tensor");
  return {DeviceType::cuda, tensor.device_index()};
}

std::int64_t bytes_of(const Tensor& tensor) { return tensor.numel() * tensor.element_size(); }

bool join_leading(const char* name, const Tensor& tensor, TensorView& view) {
  view = kind_of(name, tensor);
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const int last = static_cast<int>(sizes.size()) - 1;
  if (last < 0) return true;
  view.rank = 2;
  view.sizes[0] = 1;
  view.sizes[1] = sizes[last];
  view.strides[0] = sizes[last];
  view.strides[1] = strides[last];
  bool joined = true;
  for (int d = last - 1; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (view.sizes[0] == 1) view.strides[0] = strides[d];
    joined = joined && strides[d] == view.strides[0] * view.sizes[0];
    view.sizes[0] *= sizes[d];
  }
  return joined || view.numel() == 0;
}

TensorView view_of(const char* name, const Tensor& tensor) {
  TensorView view = kind_of(name, tensor);
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  check(sizes.size() <= TensorView::kMaxRank, name, ": expected at most ", TensorView::kMaxRank,
        " dimensions, got ", sizes.size());
  view.rank = static_cast<int>(sizes.size());
  for (int d = 0; d < view.rank; ++d) {
    view.sizes[d] = sizes[d];
    view.strides[d] = strides[d];
  }
  return view;
}

TensorView view_of(const char* name, const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? view_of(name, *tensor) : TensorView();
}

Tensor tensor_of(const TensorView& view) {
  const bool cuda = view.device.type == DeviceType::cuda;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
      view.data, view.rank, view.sizes.data(), view.strides.data(), 0, torch_dtype(view.dtype),
      cuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu(), view.device.index,
      &handle));
  return Tensor(handle);
}

std::optional<Tensor> point_at(TensorView& view, const char* name, const Tensor& tensor,
                               Layout layout, bool leading) {
  bool fits = true;
  if (leading) {
    fits = join_leading(name, tensor, view);
  } else {
    view = view_of(name, tensor);
  }
  if (fits && lies_as(layout, view)) return std::nullopt;
  // The checks reject anything that is not a matrix. Without elements any strides are fine.
  const bool is_for_matrices = layout == Layout::rows || layout == Layout::matrix;
  if ((is_for_matrices && view.rank != 2) || view.numel() == 0) return std::nullopt;
  std::optional<Tensor> copy = dense(tensor);
  point_at(view, name, *copy, layout, leading);
  return copy;
}

Tensor dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  return torch_call("a dense copy", device_of("x", tensor), bytes_of(tensor),
                    [&] { return Tensor(torch::stable::contiguous(tensor.stable())); });
}

std::optional<Tensor> dense(const std::optional<Tensor>& tensor) {
  if (!tensor.has_value()) return std::nullopt;
  return dense(*tensor);
}

Tensor new_dense(const Tensor& like, DType dtype, std::span<const std::int64_t> sizes) {
  check_dimensions(sizes.size());
  std::array<std::int64_t, kMostDimensions> strides;
  const std::size_t rank = sizes.size();
  for (std::size_t d = rank; d-- > 0;) {
    strides[d] = d + 1 == rank ? 1 : strides[d + 1] * std::max<std::int64_t>(sizes[d + 1], 1);
  }
  return empty_strided(like, torch_dtype(dtype), static_cast<std::int64_t>(sizes.size()),
                       sizes.data(), strides.data());
}

Tensor new_dense(const Tensor& like, DType dtype, std::initializer_list<std::int64_t> sizes) {
  return new_dense(like, dtype, std::span(sizes.begin(), sizes.size()));
}

Tensor new_strided(const Tensor& like, const TensorView& view) {
  return empty_strided(like, torch_dtype(view.dtype), view.rank, view.sizes.data(),
                       view.strides.data());
}

bool has_adjacent_channels(const Tensor& image) {
  const auto rank = image.dim();
  return rank >= 4 && image.sizes()[rank - 3] > 1 && image.strides()[rank - 3] == 1;
}

TensorView channels_last(TensorView image) {
  const int r = image.rank;
  std::int64_t stride = 1;
  for (const int d : {r - 3, r - 1, r - 2, r - 4, r - 5}) {
    if (d < 0) break;
    image.strides[d] = stride;
    stride *= std::max<std::int64_t>(image.sizes[d], 1);
  }
  return image;
}

Tensor new_with_last(const Tensor& like, DType dtype, std::int64_t last) {
  const auto leading = like.sizes();
  check_dimensions(leading.size());
  std::array<std::int64_t, kMostDimensions> sizes;
  std::copy(leading.begin(), leading.end(), sizes.begin());
  sizes[leading.size() - 1] = last;
  return new_dense(like, dtype, std::span(sizes.data(), leading.size()));
}

Tensor new_like(const Tensor& like) {
  // Handle the two common layouts directly: a call through the dispatcher costs a microsecond or
  // two.
  const bool channels_last = like.dim() == 4 && is_dense_in(like, {1, 3, 2, 0});
  if (like.numel() > 0 && (like.is_contiguous() || channels_last)) {
    const auto sizes = like.sizes();
    const auto strides = like.strides();
    const DType dtype = dtype_of("x", like);
    return empty_strided(like, torch_dtype(dtype), like.dim(), sizes.data(), strides.data());
  }
  return prepared(torch_call("a result", device_of("x", like), bytes_of(like),
                             [&] { return Tensor(torch::stable::empty_like(like.stable())); }));
}

void copy(const Tensor& from, const Tensor& to) {
  torch::stable::Tensor target = to.stable();
  torch::stable::copy_(target, from.stable());
}

std::string to_text(const Candidates& candidates) {
  std::string text;
  for (const Candidate& candidate : candidates) {
    if (!text.empty()) text += "\n";
    text += candidate.name + "\t" + (candidate.chosen ? "1" : "0") + "\t" +
            (candidate.able ? "1" : "0") + "\t" + candidate.declined;
  }
  return text;
}

}  // namespace fusewise::binding
