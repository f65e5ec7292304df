// The threads of XLA's pool that work on one call of a kernel, through as many loops as it has.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace pdd {

// team(parts, part) runs part(i) for i in [0, parts), in any order, on the calling thread and on those of the pool that came, and returns when
// all are done. Helpers are asked for once, and between two loops they stay awake: waking a thread takes longer than many a loop. Whoever
// does not come, because the pool has other work, is not waited for.
class Team {
 public:
  explicit Team(xla::ffi::ThreadPool& pool) : shared_(std::make_shared<Shared>()), size_(std::max<long>(1, pool.num_threads())) {
    const auto help = [shared = shared_] {
      for (long idle = 0; shared->ticket.load(std::memory_order_acquire) != kEnd;) wait(shared->work() ? idle = 0 : ++idle);
    };
    for (long helper = 1; helper < size_; ++helper) pool.Schedule(std::function<void()>(help));
  }
  Team(const Team&) = delete;
  ~Team() { shared_->ticket.store(kEnd, std::memory_order_release); }

  // Threads that may work at once.
  long size() const { return size_; }

  template <class Part>
  void operator()(long parts, const Part& part) {
    if (size_ == 1 || parts < 2) {
      for (long i = 0; i < parts; ++i) part(i);
      return;
    }
    shared_->part = [](const void* part, long i) { (*(const Part*)part)(i); };
    shared_->context = &part;
    shared_->parts = parts;
    shared_->done.store(0, std::memory_order_relaxed);
    shared_->ticket.store(++loop_ << 32 | std::uint64_t(parts), std::memory_order_release);
    while (shared_->work()) continue;
    for (long idle = 0; shared_->done.load(std::memory_order_acquire) < parts;) wait(++idle);
  }

 private:
  static constexpr std::uint64_t kEnd = ~std::uint64_t(0);

  // `ticket`: which loop (upper half) and how many of its parts nobody has taken (lower half). A part that was taken keeps its loop, and so
  // all else in here, as it is until it is done; without one, nothing else may be looked at.
  struct Shared {
    std::atomic<std::uint64_t> ticket{0};
    std::atomic<long> done{0};
    void (*part)(const void*, long) = nullptr;
    const void* context = nullptr;
    long parts = 0;

    // Takes a part and runs it, if there is one.
    bool work() {
      std::uint64_t seen = ticket.load(std::memory_order_acquire);
      do {
        if (seen == kEnd || std::uint32_t(seen) == 0) return false;
      } while (!ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel));
      part(context, parts - long(std::uint32_t(seen)));
      done.fetch_add(1, std::memory_order_release);
      return true;
    }
  };

  static void wait(long idle) {
    if (idle > 2000) std::this_thread::yield();
#if defined(__x86_64__)
    else if (idle > 0) __builtin_ia32_pause();
#endif
  }

  std::shared_ptr<Shared> shared_;
  long size_;
  std::uint64_t loop_ = 0;
};

}  // namespace pdd
