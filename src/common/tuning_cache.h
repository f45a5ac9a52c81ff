#pragma once

// Choices that were measured once and outlive the process: a text file of keys and values.

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace fusewise {

/// Several processes may use one file at once: a reader sees a whole one, old or new, and no writer
/// loses what another has added. Keys and values hold neither tabs nor line ends.
class TuningCache {
 public:
  using Entry = std::pair<std::string, std::string>;
  using Entries = std::vector<Entry>;  ///< oldest first; no key twice
  /// A file never holds more: the oldest entries make room for new ones.
  static constexpr std::size_t kMostEntries = 4096;

  /// An empty path stands for no file at all: nothing is read, nothing kept.
  explicit TuningCache(std::filesystem::path path) : path_(std::move(path)) {}

  /// `fusewise/<name>` in the user's cache folder: XDG_CACHE_HOME, or .cache in HOME. Empty where
  /// neither is set.
  static std::filesystem::path in_cache_folder(const char* name);

  /// What the file has; nothing where there is none. A damaged one gives nothing at all, and
  /// `problem` says what is wrong with it.
  Entries read(std::string& problem) const;

  /// Adds entries, no key twice, in one atomic write. An entry of the same key in the file is
  /// replaced. A damaged file is written anew. Returns false where the file cannot be written, or
  /// others hold it for more than a second: then the choices live as long as the process.
  bool add(const Entries& entries) const;

 private:
  std::filesystem::path path_;
};

}  // namespace fusewise
