#pragma once

// Measured choices that outlive the process: a text file of keys and values.

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace fusewise {

/// Several processes may use one file at once. A reader sees a complete file, old or new, and no
/// writer loses another's additions. Keys and values contain no tabs or newlines.
class TuningCache {
 public:
  using Entry = std::pair<std::string, std::string>;
  using Entries = std::vector<Entry>;  ///< oldest first; no key twice
  /// Maximum size of a file. New entries replace the oldest ones.
  static constexpr std::size_t kMostEntries = 4096;

  /// An empty path means no file: nothing is read or written.
  explicit TuningCache(std::filesystem::path path) : path_(std::move(path)) {}

  /// `fusewise/<name>` in the user's cache folder: XDG_CACHE_HOME, or .cache in HOME. Empty if
  /// neither is set.
  static std::filesystem::path in_cache_folder(const char* name);

  /// The entries of the file, or none if there is no file. A damaged file gives no entries, and
  /// `problem` says what is wrong with it.
  Entries read(std::string& problem) const;

  /// Adds entries, no key twice, in one atomic write. Replaces entries with the same key. A damaged
  /// file is rewritten from scratch. Returns false if the file cannot be written, or if others lock
  /// it for more than a second. The choices then last only as long as the process.
  bool add(const Entries& entries) const;

 private:
  std::filesystem::path path_;
};

}  // namespace fusewise
