#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fusewise/autoencoder.h"
#include "fusewise/tensor.h"

namespace fusewise {

/// The tensors of a .safetensors file, copied into memory that this object owns. Every length and
/// offset is checked against the file before it is used. A file that violates the format is an
/// Error that says how.
///
/// The format: 8 bytes, little-endian, the length of a header; the header, a JSON object of
/// {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}}, with an optional
/// "__metadata__" of strings; then the data, which the tensors cover without gaps or overlaps.
class Safetensors {
 public:
  /// Reads a whole file.
  explicit Safetensors(const std::string& path);
  /// From memory, which is copied.
  explicit Safetensors(std::span<const std::byte> file);

  /// Dense, on the CPU, aligned, and valid as long as this object. Throws Error if there is no
  /// tensor of that name, or if its type is not float32, float64, float16 or bfloat16.
  TensorView at(std::string_view name) const;
  bool contains(std::string_view name) const;
  /// All names, sorted.
  std::vector<std::string> names() const;
  /// The strings of "__metadata__".
  const std::map<std::string, std::string, std::less<>>& metadata() const { return metadata_; }

 private:
  struct Entry {
    std::string dtype;
    std::vector<std::int64_t> shape;
    std::size_t offset = 0;  // in data_
  };

  void read(std::span<const std::byte> file);

  std::map<std::string, Entry, std::less<>> entries_;
  std::map<std::string, std::string, std::less<>> metadata_;
  std::vector<std::max_align_t> data_;
};

/// The autoencoder's weights by their names in a state dict. Throws Error that names a tensor that
/// is missing or does not fit. `file` must outlive the weights.
AutoencoderWeights autoencoder_weights(const Safetensors& file);

}  // namespace fusewise
