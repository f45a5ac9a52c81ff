#include "cpu/threads.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

namespace fusewise::cpu {
namespace {

// Long enough to bridge the gap between two loops of one call, too short to be visible as load.
constexpr std::chrono::microseconds kSpin{20};

thread_local bool inside_body = false;

/// One parallel loop. It is on the stack of the thread that called it.
struct Loop {
  Executor::Body body;
  void* state;
  std::int64_t count;
  std::int64_t parts;
  std::atomic<std::int64_t> next{0};  // the first part that no thread has taken
  std::atomic<std::int64_t> left;     // parts that are not done
  std::int64_t helpers = 0;           // workers that hold a pointer to this loop
  std::exception_ptr error;
  Loop* following = nullptr;

  Loop(Executor::Body body, void* state, std::int64_t count, std::int64_t parts)
      : body(body), state(state), count(count), parts(parts), left(parts) {}
};

template <typename Condition>
bool spin_until(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (condition()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  } while (std::chrono::steady_clock::now() < end);
  return condition();
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

class Pool {
 public:
  Pool() : pid_(getpid()) {
    // Never joined: the pool lives as long as the process, and its threads sleep when idle.
    try {
      for (const int cores = usable_cores(); size_ < cores; ++size_) {
        std::thread([this] { work(); }).detach();
      }
    } catch (const std::exception&) {
      // Continue with fewer threads than cores. The exception must not leave this constructor: the
      // threads that did start hold a pointer to the pool.
    }
  }

  int size() const { return size_; }
  bool ours() const { return pid_ == getpid(); }

  void run(std::int64_t count, Executor::Body body, void* state) {
    Loop loop(body, state, count, std::min<std::int64_t>(count, size_));
    {
      const std::lock_guard lock(mutex_);
      loop.following = loops_;
      loops_ = &loop;
      announced_.fetch_add(1, std::memory_order_release);
    }
    if (sleeping_.load() > 0) wake_.notify_all();
    help(loop);
    const auto done = [&] { return loop.left.load(std::memory_order_acquire) == 0; };
    spin_until(done);
    std::unique_lock lock(mutex_);
    remove(loop);
    done_.wait(lock, [&] { return done() && loop.helpers == 0; });
    if (loop.error) std::rethrow_exception(loop.error);
  }

 private:
  void help(Loop& loop) {
    inside_body = true;
    for (;;) {
      const std::int64_t part = loop.next.fetch_add(1);
      if (part >= loop.parts) break;
      try {
        loop.body(loop.count * part / loop.parts, loop.count * (part + 1) / loop.parts, loop.state);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        if (!loop.error) loop.error = std::current_exception();
      }
      loop.left.fetch_sub(1, std::memory_order_release);
    }
    inside_body = false;
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      Loop* loop = loops_;
      while (loop != nullptr && loop->next.load() >= loop->parts) loop = loop->following;
      if (loop == nullptr) {
        const std::int64_t seen = announced_.load();
        const auto news = [&] { return announced_.load(std::memory_order_acquire) != seen; };
        lock.unlock();
        const bool found = spin_until(news);
        lock.lock();
        if (found) continue;
        sleeping_.fetch_add(1);
        wake_.wait(lock, news);
        sleeping_.fetch_sub(1);
        continue;
      }
      ++loop->helpers;
      lock.unlock();
      help(*loop);
      lock.lock();
      if (--loop->helpers == 0) done_.notify_all();
    }
  }

  void remove(Loop& loop) {
    Loop** link = &loops_;
    while (*link != &loop) link = &(*link)->following;
    *link = loop.following;
  }

  int size_ = 1;  // threads that take part in a loop, including the caller's
  const pid_t pid_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  Loop* loops_ = nullptr;  // newest first
  std::atomic<std::int64_t> announced_{0};
  std::atomic<int> sleeping_{0};
};

/// The process's pool. A forked child has none of its parent's threads and creates its own pool.
/// The parent's object is abandoned, because its mutex may have been locked at the fork.
Pool& pool() {
  static std::atomic<Pool*> current{nullptr};
  for (;;) {
    Pool* seen = current.load();
    if (seen != nullptr && seen->ours()) return *seen;
    static std::atomic<pid_t> maker{0};
    pid_t before = maker.load();
    if (before != getpid() && maker.compare_exchange_strong(before, getpid())) {
      try {
        current.store(new Pool);
      } catch (...) {
        maker.store(0);  // the next call tries again
        throw;
      }
    } else {
      std::this_thread::yield();  // another thread of this process is creating it
    }
  }
}

}  // namespace

int threads(const Context& context) {
  if (context.executor != nullptr) return std::max(1, context.executor->threads());
  return inside_body ? 1 : pool().size();
}

void parallel_for(const Context& context, std::int64_t count, Executor::Body body, void* state) {
  if (count <= 0) return;
  if (count == 1 || inside_body) return body(0, count, state);
  if (context.executor != nullptr) return context.executor->parallel_for(count, body, state);
  if (pool().size() == 1) return body(0, count, state);
  pool().run(count, body, state);
}

}  // namespace fusewise::cpu
