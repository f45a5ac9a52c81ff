#pragma once

// Choices that were measured once and outlive the process: a text file of keys and values.

#include <filesystem>
#include <map>
#include <string>

namespace fusewise {

/// Several processes may use one file at once: a reader sees a whole one, old or new, and no writer
/// loses what another has added. Keys and values hold neither tabs nor line ends.
class ChoiceFile {
 public:
  using Entries = std::map<std::string, std::string>;

  /// An empty path stands for no file at all: nothing is read, nothing kept.
  explicit ChoiceFile(std::filesystem::path path) : path_(std::move(path)) {}

  /// `fusewise/<name>` in the user's cache folder: XDG_CACHE_HOME, or .cache in HOME. Empty where
  /// neither is set.
  static std::filesystem::path in_cache_folder(const char* name);

  /// What the file has; nothing where there is none. A damaged one gives nothing at all, and
  /// `problem` says what is wrong with it.
  Entries read(std::string& problem) const;

  /// Adds an entry; one of the same key that is there already stays. A damaged file is replaced.
  /// Returns false where the file cannot be written: then the choice lives as long as the process.
  bool add(const std::string& key, const std::string& value) const;

 private:
  std::filesystem::path path_;
};

}  // namespace fusewise
