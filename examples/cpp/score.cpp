// Scores rows of log-mel values from a file with the weights of a trained SpectralShapeAutoencoder,
// for a machine with no Python: prints one score a line, higher is stranger.
//
//     score WEIGHTS.safetensors ROWS.f32
//
// WEIGHTS is what the model's save_safetensors wrote; ROWS are little-endian float32 values, row
// after row. Where WEIGHTS names a "mean" and a "deviation" beside the tensors, as those of
// examples/machine_sound do, rows are brought to them: such a model has learned (x - mean) /
// deviation.

#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "fusewise/fusewise.h"

namespace {

std::vector<float> read_floats(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes;
  try {
    file.exceptions(std::ios::failbit | std::ios::badbit);
    bytes.assign(std::istreambuf_iterator<char>(file), {});
  } catch (const std::ios::failure&) {  // as where it is a folder
    throw std::runtime_error(path + ": cannot be read");
  }
  if (bytes.size() % sizeof(float) != 0) {
    throw std::runtime_error(path + ": has " + std::to_string(bytes.size()) +
                             " bytes, which is not a whole number of float32 values");
  }
  std::vector<float> values(bytes.size() / sizeof(float));
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(values.data()));
  return values;
}

/// A number among the texts of the file, or `otherwise`.
float number(const fusewise::Safetensors& file, const char* name, float otherwise) {
  const auto found = file.metadata().find(name);
  if (found == file.metadata().end()) return otherwise;
  std::size_t read = 0;
  float value = 0;
  try {
    value = std::stof(found->second, &read);
  } catch (const std::exception&) {  // read stays 0
  }
  if (read == 0 || read != found->second.size() || !std::isfinite(value)) {
    throw std::runtime_error("the file's " + std::string(name) + " is '" + found->second +
                             "', which is not a number");
  }
  return value;
}

void score(const std::string& weights_path, const std::string& rows_path) {
  using fusewise::DType, fusewise::TensorView;
  const fusewise::Device cpu{};
  const fusewise::Safetensors file(weights_path);
  fusewise::AutoencoderForward call;
  call.weights = fusewise::autoencoder_weights(file);
  const fusewise::AutoencoderSizes sizes = fusewise::autoencoder_sizes(call.weights);

  std::vector<float> rows = read_floats(rows_path);
  const std::int64_t width = sizes.frames * sizes.n_mels;
  const auto values = static_cast<std::int64_t>(rows.size());
  if (values % width != 0) {
    throw std::runtime_error(rows_path + ": has " + std::to_string(values) +
                             " values, which is not a whole number of rows of " +
                             std::to_string(width));
  }
  const float mean = number(file, "mean", 0), deviation = number(file, "deviation", 1);
  if (!(deviation > 0)) throw std::runtime_error(weights_path + ": expected a deviation above 0");
  for (float& each : rows) each = (each - mean) / deviation;

  std::vector<float> scores(values / width);
  call.x = TensorView(rows.data(), DType::f32, cpu, {values / width, width});
  call.score = TensorView(scores.data(), DType::f32, cpu, {values / width});
  fusewise::autoencoder({.device = cpu}, call);
  for (const float each : scores) std::printf("%.9g\n", each);
  if (std::fflush(stdout) != 0) throw std::runtime_error("the scores cannot be written");
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "usage: score WEIGHTS.safetensors ROWS.f32\n");
    return 2;
  }
  try {
    score(arguments[1], arguments[2]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "score: %s\n", error.what());
    return 1;
  }
  return 0;
}
