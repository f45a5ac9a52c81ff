// For libFuzzer: any bytes at all as a .safetensors file. `make test-sanitize` runs it for a
// minute.

#include "fusewise/safetensors.h"

#include <cstdint>
#include <span>

#include "fusewise/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const fusewise::Safetensors file(std::as_bytes(std::span(data, size)));
    volatile std::uint8_t seen = 0;
    for (const std::string& name : file.names()) {
      try {
        const fusewise::TensorView view = file.at(name);
        for (const std::int64_t size : view.sizes) {
          if (size < 0) __builtin_trap();
        }
        const auto* bytes = static_cast<const std::uint8_t*>(view.data);
        const std::int64_t count = view.numel() * fusewise::size_of(view.dtype);
        for (std::int64_t i = 0; i < count; ++i) seen = bytes[i];
      } catch (const fusewise::Error&) {  // of a type that has no view
      }
    }
  } catch (const fusewise::Error&) {
  }
  return 0;
}
