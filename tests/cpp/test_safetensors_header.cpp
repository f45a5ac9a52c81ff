// Names and numbers in a .safetensors header: pairs of surrogates give one character, half of a
// pair is refused wherever it stands, and numbers are spelled as JSON spells them.

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "fusewise/error.h"
#include "fusewise/safetensors.h"

namespace fusewise {
namespace {

/// A file with one empty tensor; name and shape as the header spells them.
std::vector<std::byte> file_named(const std::string& escaped, const std::string& shape = "[0]") {
  const std::string header =
      R"({")" + escaped + R"(":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":[0,0]}})";
  std::vector<std::byte> bytes(8 + header.size());
  bytes[0] = static_cast<std::byte>(header.size());
  std::memcpy(bytes.data() + 8, header.data(), header.size());
  return bytes;
}

TEST(SafetensorsNames, EveryLengthOfUtf8) {
  const std::pair<const char*, const char*> names[] = {
      {R"(\u007f)", "\x7f"},
      {R"(\u0080)", "\xc2\x80"},
      {R"(\u07ff)", "\xdf\xbf"},
      {R"(\u0800)", "\xe0\xa0\x80"},
      {R"(\ud7ff)", "\xed\x9f\xbf"},
      {R"(\ue000)", "\xee\x80\x80"},
      {R"(\uffff)", "\xef\xbf\xbf"},
      {R"(\uABCD)", "\xea\xaf\x8d"},
      {R"(\ud800\udc00)", "\xf0\x90\x80\x80"},
      {R"(\uD83D\uDE00)", "\xf0\x9f\x98\x80"},
      {R"(\udbff\udfff)", "\xf4\x8f\xbf\xbf"},
      {R"(\ud800\udfff)", "\xf0\x90\x8f\xbf"},
      {R"(\udbff\udc00)", "\xf4\x8f\xb0\x80"},
  };
  for (const auto& [escaped, name] : names) {
    EXPECT_EQ(Safetensors(file_named(escaped)).names(), std::vector<std::string>{name}) << escaped;
  }
}

TEST(SafetensorsNames, HalfOfAPairIsRefused) {
  for (const char* escaped :
       {R"(\udc00)", R"(\uDFFF)", R"(\ud800)", R"(\udbff)", R"(\ud800x)", R"(\ud800\n)",
        R"(\ud800\u0041)", R"(\ud800\ud800)", R"(\ud800\udbff)", R"(\ud800\ue000)",
        R"(\udc00\ud800)", R"(\ud83d\ude00\ude00)"}) {
    try {
      const Safetensors file(file_named(escaped));
      ADD_FAILURE() << escaped << " was taken";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("half of a surrogate pair"), std::string::npos)
          << escaped << ": " << error.what();
    }
  }
}

TEST(SafetensorsNumbers, HaveNoLeadingZero) {
  EXPECT_EQ(Safetensors(file_named("a", "[0, 10]")).at("a").shape(), "[0, 10]");
  for (const char* shape : {"[00]", "[0, 01]", "[0, 007]"}) {
    EXPECT_THROW(Safetensors(file_named("a", shape)), Error) << shape;
  }
}

}  // namespace
}  // namespace fusewise
