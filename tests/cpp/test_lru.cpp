// The bounded map that keeps what was used last.

#include <gtest/gtest.h>

#include <string>

#include "common/lru.h"

namespace fusewise {
namespace {

TEST(LruMap, DropsTheLeastRecentlyUsed) {
  LruMap<int, std::string> map(2);
  map.add(1, "one");
  map.add(2, "two");
  ASSERT_NE(map.find(1), nullptr);  // 2 is now the older one
  map.add(3, "three");
  EXPECT_EQ(map.find(2), nullptr);
  ASSERT_NE(map.find(1), nullptr);
  EXPECT_EQ(*map.find(1), "one");
  ASSERT_NE(map.find(3), nullptr);
  EXPECT_EQ(*map.find(3), "three");
}

TEST(LruMap, AnOlderValueStaysAndCountsAsUsed) {
  LruMap<int, int> map(2);
  map.add(1, 10);
  map.add(2, 20);
  EXPECT_EQ(map.add(1, 11), 10);
  map.add(3, 30);
  EXPECT_EQ(map.find(2), nullptr);
  ASSERT_NE(map.find(1), nullptr);
  EXPECT_EQ(*map.find(1), 10);
}

TEST(LruMap, NeverGrowsBeyondItsCapacity) {
  LruMap<int, int> map(16);
  for (int i = 0; i < 10'000; ++i) {
    map.add(i, i);
    ASSERT_LE(map.size(), 16u);
  }
  for (int i = 0; i < 10'000; ++i) EXPECT_EQ(map.find(i) != nullptr, i >= 10'000 - 16) << i;
}

}  // namespace
}  // namespace fusewise
