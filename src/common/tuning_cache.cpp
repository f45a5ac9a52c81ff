#include "common/tuning_cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <unordered_set>

namespace fusewise {
namespace {

constexpr char kHeader[] = "fusewise choices 1";
constexpr std::uintmax_t kMostBytes = 16 << 20;

/// FNV-1a: protects against damage, not against malice. Values are validated again where they are
/// used.
std::string checksum(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016" PRIx64, hash);
  return digits;
}

/// Held while one process reads, adds and writes. The lock is a separate file, because the cache
/// file itself is replaced as a whole.
class Lock {
 public:
  explicit Lock(const std::filesystem::path& path)
      : file_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
    // A holder needs only milliseconds. But do not wait for ever: if a process forks while it holds
    // the lock, its child may hold it for as long as it lives.
    for (int i = 0; file_ >= 0 && !held_ && i < 100; ++i) {
      held_ = ::flock(file_, LOCK_EX | LOCK_NB) == 0;
      if (!held_ && errno != EWOULDBLOCK && errno != EINTR) break;  // no locks in this folder
      if (!held_) ::usleep(10'000);
    }
  }
  ~Lock() {
    if (held_) ::flock(file_, LOCK_UN);
    if (file_ >= 0) ::close(file_);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  bool held() const { return held_; }

 private:
  int file_;
  bool held_ = false;
};

/// Both lists. If both have a key, the added entry wins.
TuningCache::Entries merged(TuningCache::Entries entries, const TuningCache::Entries& added) {
  std::unordered_set<std::string> replaced;
  for (const auto& [key, value] : added) replaced.insert(key);
  std::erase_if(entries, [&](const auto& entry) { return replaced.contains(entry.first); });
  entries.insert(entries.end(), added.begin(), added.end());
  if (entries.size() > TuningCache::kMostEntries) {
    entries.erase(entries.begin(), entries.end() - TuningCache::kMostEntries);
  }
  return entries;
}

}  // namespace

std::filesystem::path TuningCache::in_cache_folder(const char* name) {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  std::filesystem::path folder;
  if (cache != nullptr && *cache == '/') {
    folder = cache;
  } else if (home != nullptr && *home == '/') {
    folder = std::filesystem::path(home) / ".cache";
  } else {
    return {};
  }
  return folder / "fusewise" / name;
}

TuningCache::Entries TuningCache::read(std::string& problem) const {
  if (path_.empty()) return {};
  std::error_code error;
  const std::uintmax_t bytes = std::filesystem::file_size(path_, error);
  if (error) return {};  // no such file: nothing was measured yet
  const auto damaged = [&](const std::string& what) {
    problem = path_.string() + ": " + what + "; it is ignored and will be written again";
    return Entries();
  };
  if (bytes > kMostBytes) return damaged("too large");
  std::ifstream file(path_);
  std::string line;
  if (!std::getline(file, line) || line != kHeader) return damaged("not a tuning cache");
  Entries entries;
  for (int number = 2; std::getline(file, line); ++number) {
    const std::size_t last = line.rfind('\t');
    const std::size_t first = line.find('\t');
    if (last == std::string::npos || first == last ||
        checksum(line.substr(0, last)) != line.substr(last + 1)) {
      return damaged("line " + std::to_string(number) + " is damaged");
    }
    entries.emplace_back(line.substr(0, first), line.substr(first + 1, last - first - 1));
  }
  return entries;
}

bool TuningCache::add(const Entries& added) const {
  if (path_.empty()) return false;
  std::error_code error;
  std::filesystem::create_directories(path_.parent_path(), error);
  const Lock lock(path_.string() + ".lock");
  if (!lock.held()) return false;
  std::string ignored;
  const Entries entries = merged(read(ignored), added);

  const std::filesystem::path fresh = path_.string() + "." + std::to_string(::getpid());
  {
    std::ofstream file(fresh, std::ios::trunc);
    file << kHeader << '\n';
    for (const auto& [each, chosen] : entries) {
      const std::string line = each + '\t' + chosen;
      file << line << '\t' << checksum(line) << '\n';
    }
    file.flush();
    if (!file) {
      std::filesystem::remove(fresh, error);
      return false;
    }
  }
  std::filesystem::rename(fresh, path_, error);
  if (!error) return true;
  std::filesystem::remove(fresh, error);
  return false;
}

}  // namespace fusewise
