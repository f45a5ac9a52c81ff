// The CPU loops: every index once, whoever runs them.

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cpu/threads.h"

namespace {

/// Allocations of the whole program that still succeed; negative: all.
std::atomic<int> allocations_left{-1};

}  // namespace

void* operator new(std::size_t bytes) {
  void* memory = allocations_left == 0 ? nullptr : std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  return memory;
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return std::malloc(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace fusewise::cpu {
namespace {

/// How often each index of [0, count) was visited.
std::vector<int> visits(const Context& context, std::int64_t count) {
  std::vector<int> result(count);
  parallel_for(context, count, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) ++result[i];
  });
  return result;
}

TEST(Threads, AsManyAsTheProcessMayUse) {
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  EXPECT_EQ(threads(Context{}), CPU_COUNT(&set));
}

TEST(Threads, EveryIndexOnce) {
  for (const int count : {0, 1, 2, 3, 7, 1000}) {
    EXPECT_EQ(visits({}, count), std::vector<int>(count, 1)) << count;
  }
}

TEST(Threads, ManyLoopsInARow) {
  for (int i = 0; i < 2000; ++i) ASSERT_EQ(visits({}, 64), std::vector<int>(64, 1)) << i;
}

TEST(Threads, SleepingThreadsWakeUp) {
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    ASSERT_EQ(visits({}, 64), std::vector<int>(64, 1)) << i;
  }
}

TEST(Threads, ALoopInsideALoopRunsInline) {
  std::atomic<int> inner{0};
  parallel_for(Context{}, 8, [&](std::int64_t begin, std::int64_t end) {
    EXPECT_EQ(threads(Context{}), 1);
    const std::thread::id here = std::this_thread::get_id();
    for (std::int64_t i = begin; i < end; ++i) {
      parallel_for(Context{}, 10, [&](std::int64_t inner_begin, std::int64_t inner_end) {
        EXPECT_EQ(std::this_thread::get_id(), here);
        inner += static_cast<int>(inner_end - inner_begin);
      });
    }
  });
  EXPECT_EQ(inner, 80);
}

TEST(Threads, SeveralCallersAtOnce) {
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&] {
      for (int i = 0; i < 500; ++i) wrong += visits({}, 37) != std::vector<int>(37, 1);
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Threads, WhatABodyThrowsArrives) {
  for (int i = 0; i < 50; ++i) {
    std::atomic<int> done{0};
    const auto loop = [&] {
      parallel_for(Context{}, 16, [&](std::int64_t begin, std::int64_t end) {
        done += static_cast<int>(end - begin);
        if (begin == 0) throw std::runtime_error("the first range");
      });
    };
    EXPECT_THROW(loop(), std::runtime_error);
    EXPECT_EQ(done, 16);
  }
  EXPECT_EQ(visits({}, 64), std::vector<int>(64, 1));
}

/// Runs a test in a child that has no threads yet and is ended if it hangs.
void in_fresh_process(bool (*test)()) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    _exit(test() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_FALSE(WIFSIGNALED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(Threads, AForkedChildHasThreadsOfItsOwn) {
  ASSERT_EQ(visits({}, 64), std::vector<int>(64, 1));
  in_fresh_process([] { return visits({}, 64) == std::vector<int>(64, 1) && threads({}) >= 1; });
  EXPECT_EQ(visits({}, 64), std::vector<int>(64, 1));
}

TEST(Threads, ACallWithoutMemoryForThemIsNotTheLast) {
  in_fresh_process([] {
    bool failed = false;
    allocations_left = 0;
    try {
      threads({});
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    allocations_left = -1;
    return failed && visits({}, 64) == std::vector<int>(64, 1);
  });
}

TEST(Threads, ThoseThatCannotBeStartedAreNotCounted) {
  in_fresh_process([] {
    allocations_left = 1;  // for the pool, not for a thread
    const int found = threads({});
    allocations_left = -1;
    return found == 1 && visits({}, 64) == std::vector<int>(64, 1);
  });
}

TEST(Threads, TheContextsExecutorIsUsed) {
  struct Backwards : Executor {
    int calls = 0;
    int threads() const override { return 3; }
    void parallel_for(std::int64_t count, Body body, void* state) override {
      ++calls;
      for (std::int64_t i = count; i > 0; --i) body(i - 1, i, state);
    }
  } executor;
  Context context;
  context.executor = &executor;
  EXPECT_EQ(threads(context), 3);
  EXPECT_EQ(visits(context, 10), std::vector<int>(10, 1));
  EXPECT_EQ(executor.calls, 1);
}

}  // namespace
}  // namespace fusewise::cpu
