#pragma once

// The part of cuDNN's backend interface that we use. The library is the one that the process has
// loaded, torch's for instance, or else one on the loader's path: it is not linked.

#include <cudnn_graph.h>

#include <cstdint>
#include <memory>
#include <span>

namespace fusewise::cuda {

struct Cudnn {
  decltype(&cudnnGetVersion) version;
  decltype(&cudnnGetErrorString) error_string;
  decltype(&cudnnCreate) create;
  decltype(&cudnnSetStream) set_stream;
  decltype(&cudnnBackendCreateDescriptor) create_descriptor;
  decltype(&cudnnBackendDestroyDescriptor) destroy_descriptor;
  decltype(&cudnnBackendFinalize) finalize;
  decltype(&cudnnBackendSetAttribute) set_attribute;
  decltype(&cudnnBackendGetAttribute) get_attribute;
  decltype(&cudnnBackendExecute) execute;

  /// Null if there is no cuDNN 9.
  static const Cudnn* get();
};

/// Throws Error, or OutOfMemory. Only where `Cudnn::get` is not null.
void check_cudnn(cudnnStatus_t status, const char* doing);

/// A backend descriptor. Only where `Cudnn::get` is not null.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(cudnnBackendDescriptorType_t type);

  cudnnBackendDescriptor_t get() const { return held_.get(); }

  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const void* values,
           std::int64_t count = 1);
  void set(cudnnBackendAttributeName_t name, std::int64_t value) {
    set(name, CUDNN_TYPE_INT64, &value);
  }
  void set(cudnnBackendAttributeName_t name, std::span<const std::int64_t> values) {
    set(name, CUDNN_TYPE_INT64, values.data(), static_cast<std::int64_t>(values.size()));
  }
  void set(cudnnBackendAttributeName_t name, float value) { set(name, CUDNN_TYPE_FLOAT, &value); }
  void set(cudnnBackendAttributeName_t name, const Descriptor& other) {
    const cudnnBackendDescriptor_t descriptor = other.get();
    set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, &descriptor);
  }
  /// Returns itself.
  Descriptor&& finalized();

 private:
  struct Destroy {
    void operator()(cudnnBackendDescriptor_t descriptor) const;
  };
  std::unique_ptr<std::remove_pointer_t<cudnnBackendDescriptor_t>, Destroy> held_;
};

}  // namespace fusewise::cuda
