// The .safetensors reader: what the format allows, what it forbids, and files made to break it.

#include "fusewise/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "fusewise/error.h"
#include "message_of.h"

namespace fusewise {
namespace {

using testing::message_of;

std::vector<std::byte> file_of(const std::string& header, std::size_t data_bytes,
                               std::int64_t told = -1) {
  const std::uint64_t length = told >= 0 ? told : header.size();
  std::vector<std::byte> bytes(8 + header.size() + data_bytes);
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<std::byte>(length >> 8 * i);
  std::memcpy(bytes.data() + 8, header.data(), header.size());
  for (std::size_t i = 0; i < data_bytes; ++i) {
    bytes[8 + header.size() + i] = static_cast<std::byte>(i + 1);
  }
  return bytes;
}

constexpr char kGood[] =
    R"({"__metadata__":{"model":"test"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
    R"("b":{"dtype":"F16","shape":[3],"data_offsets":[24,30]},)"
    R"("c":{"dtype":"F64","shape":[],"data_offsets":[30,38]},)"
    R"("d":{"dtype":"I64","shape":[0,5],"data_offsets":[38,38]}}  )";

TEST(Safetensors, ReadsWhatTheFormatAllows) {
  const Safetensors file(file_of(kGood, 38));
  EXPECT_EQ(file.names(), (std::vector<std::string>{"a", "b", "c", "d"}));
  EXPECT_EQ(file.metadata().at("model"), "test");
  EXPECT_TRUE(file.contains("b"));
  EXPECT_FALSE(file.contains("e"));
  const TensorView a = file.at("a"), c = file.at("c");
  EXPECT_EQ(a.shape(), "[2, 3]");
  EXPECT_EQ(a.strides[0], 3);
  EXPECT_EQ(a.dtype, DType::f32);
  EXPECT_EQ(static_cast<std::uint8_t*>(a.data)[0], 1);
  EXPECT_EQ(static_cast<std::uint8_t*>(a.data)[23], 24);
  // Byte 30 of the data is not a place for a float64; the view's is.
  EXPECT_EQ(c.rank, 0);
  EXPECT_EQ(static_cast<std::uint8_t*>(c.data)[0], 31);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(c.data) % alignof(double), 0u);
}

TEST(Safetensors, TextsMayHaveEscapes) {
  const Safetensors file(file_of(R"({"\u0061\n\"\\\u00e9\ud83d\ude00":{"dtype":"F32","shape":[0],)"
                                 R"("data_offsets":[0,0]}})",
                                 0));
  EXPECT_EQ(file.names(), std::vector<std::string>{"a\n\"\\\u00e9\U0001F600"});
  EXPECT_TRUE(Safetensors(file_of("{}", 0)).names().empty());
}

void expect_error(const std::vector<std::byte>& bytes, const std::string& part) {
  const std::string message = message_of([&] { const Safetensors file(bytes); });
  EXPECT_NE(message.find(part), std::string::npos) << message << "\n  lacks: " << part;
}

std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"a":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

TEST(SafetensorsErrors, SaysWhatIsWrong) {
  expect_error({}, "too short for a .safetensors file: 0 bytes");
  expect_error(std::vector<std::byte>(7), "too short");
  expect_error(file_of("{}", 0, 3), "the file says that its header has 3 bytes, but only 2 follow");
  expect_error(file_of("{}", 0, 1'000'000'000'000), "the format allows at most 100000000");
  expect_error(file_of("", 0), "expected '{' at byte 0, its end");
  expect_error(file_of("[]", 0), "expected '{'");
  expect_error(file_of("{} x", 0), "unexpected text after its end, at byte 3");
  expect_error(file_of("{\"a", 0), "ends inside a string");
  expect_error(file_of("{\"a\\", 0), "ends inside a string");
  expect_error(file_of("{\"a\n\"", 0), "a control character");
  expect_error(file_of("{\"\\x\":", 0), "an unknown escape");
  expect_error(file_of("{\"\\u12g4\":", 0), "four hex digits");
  expect_error(file_of("{\"\\ud800x\":", 0), "half of a surrogate pair");
  expect_error(file_of("{\"\\udc00\":", 0), "half of a surrogate pair");
  expect_error(file_of(R"({"a":1})", 0), "expected '{'");
  expect_error(file_of(R"({"__metadata__":{"a":1}})", 0), "expected '\"'");
  expect_error(file_of(one("F32", "[1]", "[0,4]") + "}", 4), "unexpected text after its end");
}

TEST(SafetensorsErrors, HoldsTensorsAgainstTheData) {
  expect_error(file_of(one("F32", "[1]", "[0,4]"), 3), "do not lie in the 3 bytes of data");
  expect_error(file_of(one("F32", "[1]", "[4,0]"), 8), "do not lie in the 8 bytes of data");
  expect_error(file_of(one("F32", "[2]", "[0,4]"), 4), "its shape needs 8 bytes");
  expect_error(file_of(one("F32", "[1]", "[0]"), 4), "expected two data_offsets, got 1");
  expect_error(file_of(one("F32", "[1]", "[0,4,8]"), 8), "expected two data_offsets");
  expect_error(file_of(one("F32", "[1]", "[-1,4]"), 4), "expected a whole number");
  expect_error(file_of(one("F32", "[1]", "[0.5,4]"), 4), "expected ']'");
  expect_error(file_of(one("F32", "[01]", "[0,4]"), 4), "leading zero");
  expect_error(file_of(one("F32", "[99999999999999999999]", "[0,4]"), 4), "too large");
  expect_error(file_of(one("F32", "[4611686018427387904,4]", "[0,0]"), 0), "too many elements");
  // 2^63 - 1 and one more; the second would be a negative size.
  EXPECT_EQ(Safetensors(file_of(one("U8", "[0,9223372036854775807]", "[0,0]"), 0)).names().size(),
            1u);
  expect_error(file_of(one("U8", "[0,9223372036854775808]", "[0,0]"), 0), "too large");
  expect_error(file_of(one("U8", "[0,9223372036854775809]", "[0,0]"), 0), "too large");
  for (const char* shape : {"[0,4611686018427387904,4]", "[4611686018427387904,4,0]"}) {
    expect_error(file_of(one("F32", shape, "[0,0]"), 0), "too many elements");
  }
  expect_error(file_of(one("F32", "[1,1,1,1,1,1,1]", "[0,4]"), 4), "at most 6 dimensions");
  expect_error(file_of(one("F33", "[1]", "[0,4]"), 4), "unknown dtype 'F33'");
  expect_error(file_of(one("F32", "[1]", "[0,4]"), 5), "the tensors cover 4 of 5 bytes");
  expect_error(file_of(one("F32", "[1]", "[1,5]"), 5), "expected 0; gaps and overlaps");
  expect_error(file_of(R"({"a":{"dtype":"F32","shape":[1]}})", 0), "expected two data_offsets");
  expect_error(file_of(R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4), "has no shape");
  expect_error(file_of(R"({"a":{"shape":[1],"data_offsets":[0,4]}})", 4), "unknown dtype ''");
  expect_error(file_of(R"({"a":{"dtype":"F32","more":1}})", 4), "unknown field 'more'");
  const std::string a = R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  expect_error(file_of("{" + a + "," + a + "}", 4), "'a' appears twice");
  expect_error(file_of("{" + a + R"(,"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4),
               "gaps and overlaps");
}

TEST(Safetensors, ReadsManyNames) {
  // Megabytes of names, of tensors and of metadata: comparing each with every other takes minutes.
  constexpr int kNames = 400'000;
  std::string metadata = "{\"__metadata__\":{", tensors = "{";
  for (int i = 0; i < kNames; ++i) {
    const std::string name = (i == 0 ? "\"" : ",\"") + std::to_string(i);
    metadata += name + "\":\"\"";
    if (i % 8 == 0) tensors += name + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  }
  EXPECT_EQ(Safetensors(file_of(metadata + "}}", 0)).metadata().size(), kNames);
  EXPECT_EQ(Safetensors(file_of(tensors + "}", 0)).names().size(), kNames / 8);
}

TEST(SafetensorsErrors, AsksForWhatIsThere) {
  const Safetensors file(file_of(kGood, 38));
  EXPECT_THROW(file.at("e"), Error);
  try {
    file.at("d");
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "'d': expected dtype F32, F64, F16 or BF16, got I64");
  }
}

TEST(SafetensorsErrors, FilesThatCannotBeRead) {
  for (const std::string path : {"/nowhere/weights.safetensors", "/", "/dev/zero"}) {
    try {
      const Safetensors file(path);
      FAIL() << path;
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()).find(path + ": is not a file"), 0u) << error.what();
    }
  }
  const auto path = std::filesystem::temp_directory_path() / "fusewise_truncated.safetensors";
  const std::vector<std::byte> bytes = file_of(kGood, 37);
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<int>(bytes.size()));
  try {
    const Safetensors file(path.string());
    FAIL();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.find(path.string()), 0u);
    EXPECT_NE(message.find("do not lie in the 37 bytes of data"), std::string::npos) << message;
  }
  std::filesystem::remove(path);
}

/// Reads every element that a file claims to have: a sanitizer sees what lies outside.
std::uint64_t touch(const Safetensors& file) {
  std::uint64_t sum = 0;
  for (const std::string& name : file.names()) {
    TensorView view;
    try {
      view = file.at(name);
    } catch (const Error&) {
      continue;
    }
    const auto* bytes = static_cast<const std::uint8_t*>(view.data);
    for (std::int64_t i = 0; i < view.numel() * size_of(view.dtype); ++i) sum += bytes[i];
  }
  return sum;
}

TEST(SafetensorsErrors, EveryPrefixIsRefused) {
  const std::vector<std::byte> good = file_of(kGood, 38);
  for (std::size_t length = 0; length < good.size(); ++length) {
    EXPECT_THROW(Safetensors(std::span(good).first(length)), Error) << length;
  }
}

TEST(SafetensorsErrors, MutationsAreReadOrRefused) {
  const std::vector<std::byte> good = file_of(kGood, 38);
  std::mt19937 engine(20261115);
  const auto below = [&](std::size_t n) { return engine() % n; };
  constexpr char kPieces[] = "{}[]\",:0123456789.-\\u eF";
  int read = 0, refused = 0;
  std::uint64_t sum = 0;
  for (int i = 0; i < 100'000; ++i) {
    std::vector<std::byte> bytes = good;
    for (std::size_t change = 1 + below(4); change > 0 && !bytes.empty(); --change) {
      const std::size_t place = below(bytes.size());
      const auto piece = static_cast<std::byte>(kPieces[below(sizeof(kPieces) - 1)]);
      switch (below(6)) {
        case 0:
          bytes[place] = static_cast<std::byte>(engine());
          break;
        case 1:
          bytes[place] = piece;
          break;
        case 2:
          bytes.insert(bytes.begin() + place, piece);
          break;
        case 3:
          bytes.erase(bytes.begin() + place);
          break;
        case 4:
          bytes.resize(place + 1);
          break;
        case 5:
          bytes[below(std::min<std::size_t>(8, bytes.size()))] = static_cast<std::byte>(engine());
          break;
      }
    }
    try {
      sum += touch(Safetensors(bytes));
      ++read;
    } catch (const Error&) {
      ++refused;
    }
  }
  // Both happen: harmless changes of data and names, and all the others.
  EXPECT_GT(read, 1000);
  EXPECT_GT(refused, 10'000);
  EXPECT_GT(sum, 0u);
}

TEST(SafetensorsErrors, WeightsAreNamedAsInTheFile) {
  const auto header = [](const std::string& decoder_shape) {
    std::string text = "{";
    int place = 0;
    for (const auto& [weight, name, state, expected] : kAutoencoderWeights) {
      const bool matrix = std::string(name).ends_with("weight") &&
                          std::string(name).find("norm") == std::string::npos;
      const bool basis = std::string(name) == "basis";
      std::string shape = matrix || basis ? "[1,1]" : "[1]";
      int bytes = 4;
      if (std::string(name) == "decoder_weight") {
        shape = decoder_shape;
        bytes = decoder_shape == "[1,1]" ? 4 : 8;
      }
      text += std::string(place > 0 ? "," : "") + "\"" + state + R"(":{"dtype":"F32","shape":)" +
              shape + R"(,"data_offsets":[)" + std::to_string(place) + "," +
              std::to_string(place + bytes) + "]}";
      place += bytes;
    }
    return file_of(text + "}", place);
  };
  const Safetensors good(header("[1,1]"));
  EXPECT_EQ(autoencoder_sizes(autoencoder_weights(good)).n_mels, 1);
  const Safetensors bad(header("[1,2]"));
  try {
    autoencoder_weights(bad);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "'slice_decoder.0.weight': expected [1, 1], got [1, 2]");
  }
  try {
    autoencoder_weights(Safetensors(file_of("{}", 0)));
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "'slice_encoder.0.weight': is not in the file");
  }
}

}  // namespace
}  // namespace fusewise
