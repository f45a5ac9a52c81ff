// A yardstick of the benchmark: a copy with non-temporal stores. Each byte is read once and written
// once, and the target is not read first, as it is by a plain store; memory bounds it.

#include <cstddef>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/// `to` must be aligned to 16 bytes.
extern "C" __attribute__((visibility("default"))) void fusewise_streaming_copy(void* to,
                                                                               const void* from,
                                                                               std::size_t bytes) {
  std::size_t done = 0;
#if defined(__SSE2__)
  const auto* source = static_cast<const __m128i*>(from);
  auto* target = static_cast<__m128i*>(to);
  for (; done + sizeof(__m128i) <= bytes; done += sizeof(__m128i))
    _mm_stream_si128(target++, _mm_loadu_si128(source++));
  _mm_sfence();
#endif
  std::memcpy(static_cast<char*>(to) + done, static_cast<const char*>(from) + done, bytes - done);
}
