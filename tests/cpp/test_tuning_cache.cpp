// The file of measured choices: what is written is read again, damage is told, and many processes
// may use it at once.

#include "common/tuning_cache.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <vector>

namespace fusewise {
namespace {

namespace fs = std::filesystem;

class TuningCacheFile : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "fusewise-tuning-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    path_ = folder_ / "deep" / "products";
  }
  void TearDown() override { fs::remove_all(folder_); }

  TuningCache file() const { return TuningCache(path_); }
  std::string text() const {
    std::stringstream all;
    all << std::ifstream(path_).rdbuf();
    return all.str();
  }
  void write(const std::string& text) const {
    fs::create_directories(path_.parent_path());
    std::ofstream(path_, std::ios::trunc) << text;
  }
  /// Files beside the one that is meant to be there and its lock.
  int litter() const {
    int count = 0;
    for (const auto& entry : fs::directory_iterator(path_.parent_path())) {
      count += entry.path() != path_ && entry.path() != path_.string() + ".lock";
    }
    return count;
  }
  void expect_damaged(const std::string& text, const std::string& what) {
    SCOPED_TRACE(what);
    write(text);
    std::string problem;
    EXPECT_TRUE(file().read(problem).empty());
    EXPECT_NE(problem.find(path_.string()), std::string::npos) << problem;
    EXPECT_NE(problem.find(what), std::string::npos) << problem;
    EXPECT_TRUE(file().add({{"fresh", "1"}}));
    problem.clear();
    EXPECT_EQ(file().read(problem), (TuningCache::Entries{{"fresh", "1"}}));
    EXPECT_EQ(problem, "");
  }

  fs::path folder_, path_;
};

TEST_F(TuningCacheFile, WhatIsWrittenIsRead) {
  std::string problem;
  EXPECT_TRUE(file().read(problem).empty());
  EXPECT_EQ(problem, "") << "a file that is not there is no problem";
  EXPECT_TRUE(file().add({{"NVIDIA H200|132|1 2 3", "a b c"}}));
  EXPECT_TRUE(file().add({{"empty", ""}, {"another", "7"}}));
  const TuningCache::Entries expected{
      {"NVIDIA H200|132|1 2 3", "a b c"}, {"empty", ""}, {"another", "7"}};
  EXPECT_EQ(file().read(problem), expected);
  EXPECT_EQ(problem, "");
  EXPECT_EQ(litter(), 0);
}

TEST_F(TuningCacheFile, TheNewerEntryReplacesTheOlder) {
  EXPECT_TRUE(file().add({{"key", "first"}, {"other", "1"}}));
  EXPECT_TRUE(file().add({{"key", "second"}}));
  std::string problem;
  EXPECT_EQ(file().read(problem), (TuningCache::Entries{{"other", "1"}, {"key", "second"}}));
}

TEST_F(TuningCacheFile, TheOldestMakeRoom) {
  constexpr std::size_t kMost = TuningCache::kMostEntries;
  TuningCache::Entries entries;
  for (std::size_t i = 0; i < kMost; ++i) entries.emplace_back("key " + std::to_string(i), "1");
  EXPECT_TRUE(file().add(entries));
  EXPECT_TRUE(file().add({{"key 1", "2"}, {"new", "3"}}));
  std::string problem;
  const TuningCache::Entries found = file().read(problem);
  ASSERT_EQ(found.size(), kMost);
  EXPECT_EQ(found.front().first, "key 2");
  EXPECT_EQ(found[kMost - 2], (TuningCache::Entry{"key 1", "2"}));
  EXPECT_EQ(found.back(), (TuningCache::Entry{"new", "3"}));
}

TEST_F(TuningCacheFile, DamageIsToldAndReplaced) {
  file().add({{"one", "1"}});
  file().add({{"two", "2"}});
  const std::string good = text();
  const std::size_t second = good.find("two");
  expect_damaged("", "not a tuning cache");
  expect_damaged("something else\n", "not a tuning cache");
  expect_damaged(std::string("\0\x01\xff", 3), "not a tuning cache");
  expect_damaged("fusewise choices 2" + good.substr(good.find('\n')), "not a tuning cache");
  std::string bad = good;
  bad[second] = 'T';
  expect_damaged(bad, "line 3 is damaged");
  bad = good;
  bad[bad.size() - 2] = bad[bad.size() - 2] == '0' ? '1' : '0';
  expect_damaged(bad, "line 3 is damaged");
  expect_damaged(good.substr(0, second + 5), "line 3 is damaged");
  expect_damaged(good + "\n", "line 4 is damaged");
  expect_damaged(good + "no tabs at all\n", "line 4 is damaged");
  expect_damaged(good + "one\ttab\n", "line 4 is damaged");
  expect_damaged(good + std::string(17 << 20, 'x'), "too large");
}

TEST_F(TuningCacheFile, AnythingCutOffIsToldOrRight) {
  file().add({{"one", "1"}});
  file().add({{"two", "2"}});
  const std::string good = text();
  for (std::size_t length = 0; length <= good.size(); ++length) {
    write(good.substr(0, length));
    std::string problem;
    for (const auto& [key, value] : file().read(problem)) {
      EXPECT_EQ(value, key == "one" ? "1" : "2") << length;
    }
  }
}

TEST_F(TuningCacheFile, AFolderInItsPlace) {
  fs::create_directories(path_);
  std::string problem;
  EXPECT_TRUE(file().read(problem).empty());
  EXPECT_FALSE(file().add({{"key", "1"}}));
  EXPECT_EQ(litter(), 0);
}

TEST_F(TuningCacheFile, AFileInTheFoldersPlace) {
  std::ofstream(folder_ / "deep") << "in the way";
  std::string problem;
  EXPECT_TRUE(file().read(problem).empty());
  EXPECT_FALSE(file().add({{"key", "1"}}));
}

TEST_F(TuningCacheFile, AFolderThatMayNotBeWritten) {
  if (geteuid() == 0) GTEST_SKIP() << "root may write everywhere";
  file().add({{"key", "1"}});
  fs::permissions(path_.parent_path(), fs::perms::owner_read | fs::perms::owner_exec);
  EXPECT_FALSE(file().add({{"other", "2"}}));
  std::string problem;
  EXPECT_EQ(file().read(problem).size(), 1u);
  fs::permissions(path_.parent_path(), fs::perms::owner_all);
}

TEST_F(TuningCacheFile, NoFileAtAll) {
  const TuningCache none{fs::path()};
  std::string problem;
  EXPECT_TRUE(none.read(problem).empty());
  EXPECT_FALSE(none.add({{"key", "1"}}));
  EXPECT_EQ(problem, "");
}

class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) before_ = old, was_set_ = true;
    value != nullptr ? setenv(name, value, 1) : unsetenv(name);
  }
  ~Variable() { was_set_ ? setenv(name_, before_.c_str(), 1) : unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::string before_;
  bool was_set_ = false;
};

TEST(ChoicesFolder, IsTheUsersCache) {
  {
    const Variable cache("XDG_CACHE_HOME", "/somewhere/cache"), home("HOME", "/home/user");
    EXPECT_EQ(TuningCache::in_cache_folder("products"), "/somewhere/cache/fusewise/products");
  }
  for (const char* no_folder : {static_cast<const char*>(nullptr), "", "relative"}) {
    const Variable cache("XDG_CACHE_HOME", no_folder), home("HOME", "/home/user");
    EXPECT_EQ(TuningCache::in_cache_folder("products"), "/home/user/.cache/fusewise/products");
  }
  const Variable cache("XDG_CACHE_HOME", nullptr), home("HOME", nullptr);
  EXPECT_TRUE(TuningCache::in_cache_folder("products").empty());
}

TEST_F(TuningCacheFile, ManyProcessesAtOnce) {
  constexpr int kWriters = 4, kReaders = 2, kEntries = 40;
  std::vector<pid_t> children;
  for (int child = 0; child < kWriters + kReaders; ++child) {
    const pid_t pid = fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      bool right = true;
      std::size_t seen = 0;
      for (int i = 0; i < kEntries; ++i) {
        if (child < kWriters) {
          right = right && file().add({{std::to_string(child) + " " + std::to_string(i), "value"}});
        }
        // Whoever looks sees a whole file, and never fewer entries than before.
        std::string problem;
        const std::size_t now = file().read(problem).size();
        right = right && problem.empty() && now >= seen;
        seen = now;
      }
      _exit(right ? 0 : 1);
    }
    children.push_back(pid);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  std::string problem;
  EXPECT_EQ(file().read(problem).size(), static_cast<std::size_t>(kWriters * kEntries));
  EXPECT_EQ(litter(), 0);
}

}  // namespace
}  // namespace fusewise
