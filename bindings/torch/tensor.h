#pragma once

// One of torch's tensors, as an argument or a result of an operator.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>
#include <span>

namespace fusewise::binding {

/// Used instead of torch::stable::Tensor, which allocates a reference counter for each tensor.
class Tensor {
 public:
  /// No tensor.
  Tensor() = default;
  /// Takes over the handle.
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  explicit Tensor(const torch::stable::Tensor& tensor) : handle_(copy_of(tensor.get())) {}
  /// Another handle of the same tensor.
  Tensor(const Tensor& other) : handle_(copy_of(other.get())) {}
  Tensor(Tensor&& other) noexcept = default;
  Tensor& operator=(Tensor other) noexcept {
    handle_ = std::move(other.handle_);
    return *this;
  }

  AtenTensorHandle get() const { return handle_.get(); }
  AtenTensorHandle release() { return handle_.release(); }
  /// The same tensor for the functions of torch::stable.
  torch::stable::Tensor stable() const { return torch::stable::Tensor(copy_of(get())); }

  std::int64_t dim() const { return ask<std::int64_t>(aoti_torch_get_dim); }
  std::int64_t numel() const { return ask<std::int64_t>(aoti_torch_get_numel); }
  std::span<const std::int64_t> sizes() const {
    return std::span(ask<std::int64_t*>(aoti_torch_get_sizes), dim());
  }
  std::span<const std::int64_t> strides() const {
    return std::span(ask<std::int64_t*>(aoti_torch_get_strides), dim());
  }
  bool is_contiguous() const { return ask<bool>(aoti_torch_is_contiguous); }
  /// As in torch's C interface: aoti_torch_dtype_float32() and so on.
  std::int32_t dtype() const { return ask<std::int32_t>(aoti_torch_get_dtype); }
  std::int64_t element_size() const { return aoti_torch_dtype_element_size(dtype()); }
  bool is_cpu() const { return device_type() == aoti_torch_device_type_cpu(); }
  bool is_cuda() const { return device_type() == aoti_torch_device_type_cuda(); }
  std::int32_t device_index() const { return ask<std::int32_t>(aoti_torch_get_device_index); }
  std::int64_t storage_bytes() const { return ask<std::int64_t>(aoti_torch_get_storage_size); }
  const void* const_data_ptr() const { return ask<const void*>(torch_get_const_data_ptr); }
  void* mutable_data_ptr() const { return ask<void*>(torch_get_mutable_data_ptr); }

 private:
  struct Delete {
    void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
  };

  static AtenTensorHandle copy_of(AtenTensorHandle handle) {
    AtenTensorHandle copy = nullptr;
    if (handle != nullptr) TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &copy));
    return copy;
  }
  template <typename Value, typename Getter>
  Value ask(Getter getter) const {
    Value value{};
    TORCH_ERROR_CODE_CHECK(getter(get(), &value));
    return value;
  }
  std::int32_t device_type() const { return ask<std::int32_t>(aoti_torch_get_device_type); }

  std::unique_ptr<AtenTensorOpaque, Delete> handle_;
};

}  // namespace fusewise::binding

namespace torch::stable::detail {

template <>
struct ToImpl<fusewise::binding::Tensor> {
  static fusewise::binding::Tensor call(StableIValue value, std::uint64_t, bool) {
    return fusewise::binding::Tensor(to<AtenTensorHandle>(value));
  }
};

template <>
struct FromImpl<fusewise::binding::Tensor> {
  static StableIValue call(const fusewise::binding::Tensor& value, std::uint64_t, bool) {
    return torch::stable::detail::from(fusewise::binding::Tensor(value).release());
  }
};

}  // namespace torch::stable::detail
