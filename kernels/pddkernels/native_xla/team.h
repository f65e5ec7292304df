// The threads of XLA's pool that work on one call of a kernel, through as many loops as it has.
#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace pdd {

// team(parts, part) runs part(i) for i in [0, parts), in any order, on the calling thread and on those of the pool that came, and returns when
// all are done. Each thread has an even range of the parts for its own and takes others' when that is done: loops over the same tokens find
// them in its core's cache, where fetching from another's costs as much as a product's first pass again. Helpers are asked for once, and between two loops they look out for the next: waking a thread takes longer than many a loop.
// They do so for a fraction of a millisecond and then sleep: others want the cores, threads of this process that answer peers among them, and
// sched_yield tells the kernel little about who should have them. Whoever does not come, because the pool has other work, is not waited for.
class Team {
 public:
  explicit Team(xla::ffi::ThreadPool& pool) : size_(std::max<long>(1, pool.num_threads())), shared_(std::make_shared<Shared>(size_)) {
    const auto help = [shared = shared_](long helper) {
      for (long idle = 0;;) {
        const std::uint64_t seen = shared->ticket.load();
        if (seen == kEnd) return;
        if (shared->work(helper)) {
          idle = 0;
        } else if (++idle < kLooks) {
          look_again();
        } else {
          shared->asleep.fetch_add(1);
          shared->loop.sleep_while(std::uint32_t(seen >> 32));
          shared->asleep.fetch_sub(1);
          idle = 0;
        }
      }
    };
    for (long helper = 1; helper < size_; ++helper) pool.Schedule(std::function<void()>([help, helper] { help(helper); }));
  }
  Team(const Team&) = delete;
  ~Team() { shared_->announce(kEnd); }

  // Threads that may work at once.
  long size() const { return size_; }

  // The part that is as far from the end of its thread's range as `part` is from the beginning.
  long mirrored(long parts, long part) const {
    long thread = 0;
    while (part >= range_start(parts, thread + 1, size_)) ++thread;
    return range_start(parts, thread, size_) + range_start(parts, thread + 1, size_) - 1 - part;
  }

  template <class Part>
  void operator()(long parts, const Part& part) {
    if (size_ == 1 || parts < 2) {
      for (long i = 0; i < parts; ++i) part(i);
      return;
    }
    shared_->part = [](const void* part, long i) { (*(const Part*)part)(i); };
    shared_->context = &part;
    shared_->parts = parts;
    for (long thread = 0; thread < size_; ++thread) shared_->next[thread].part.store(range_start(parts, thread, size_), std::memory_order_relaxed);
    shared_->done.value.store(0, std::memory_order_relaxed);
    shared_->announce(++loop_ << 32 | std::uint64_t(parts));
    while (shared_->work(0)) continue;
    long looks = 0;
    for (std::uint32_t done; (done = shared_->done.value.load()) < std::uint32_t(parts);) {
      if (++looks < kLooks) {
        look_again();
      } else {  // whoever has the last part lost its core
        shared_->awaited.store(true);
        shared_->done.sleep_while(done);
        shared_->awaited.store(false);
      }
    }
  }

 private:
  static constexpr std::uint64_t kEnd = ~std::uint64_t(0);

  // How often to look before sleeping: for a quarter of a millisecond where a look, a pause instruction, takes 30 ns. Threads of a long prompt end
  // their loops so far apart.
  static constexpr long kLooks = 8000;

  static long range_start(long parts, long thread, long size) { return parts * thread / size; }

  static void look_again() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
  }

  // A number that threads sleep by. Whoever changes it wakes them after having done so; what it read before tells whether somebody sleeps.
  struct Word {
    std::atomic<std::uint32_t> value{0};

    // Returns when it is another, or now and then for no reason.
    void sleep_while(std::uint32_t known) {
#if defined(__linux__)
      syscall(SYS_futex, (std::uint32_t*)&value, FUTEX_WAIT_PRIVATE, known, nullptr, nullptr, 0);
#else
      if (value.load() == known) std::this_thread::yield();
#endif
    }
    void wake_all() {
#if defined(__linux__)
      syscall(SYS_futex, (std::uint32_t*)&value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
    }
  };

  // The next part of a thread's range, past its end if there is none.
  struct alignas(64) Next {
    std::atomic<long> part{0};
  };

  // `ticket`: which loop (upper half) and how many of its parts nobody has taken (lower half). A part that was taken keeps its loop, and so
  // all else in here, as it is until it is done; without one, nothing else may be looked at. `loop`: the ticket's upper half, to sleep by.
  struct Shared {
    explicit Shared(long size) : next(size) {}

    std::atomic<std::uint64_t> ticket{0};
    Word loop, done;
    std::atomic<long> asleep{0};
    std::atomic<bool> awaited{false};
    void (*part)(const void*, long) = nullptr;
    const void* context = nullptr;
    long parts = 0;
    std::vector<Next> next;

    void announce(std::uint64_t next) {
      ticket.store(next);
      loop.value.store(std::uint32_t(next >> 32));
      if (asleep.load()) loop.wake_all();
    }

    // Takes a part and runs it, if there is one.
    bool work(long thread) {
      std::uint64_t seen = ticket.load(std::memory_order_acquire);
      do {
        if (seen == kEnd || std::uint32_t(seen) == 0) return false;
      } while (!ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel));
      const long all = parts;
      part(context, claim(thread));
      if (done.value.fetch_add(1) + 1 == std::uint32_t(all) && awaited.load()) done.wake_all();
      return true;
    }

    // There is one for whoever took it off the ticket: no more parts are claimed than were taken.
    long claim(long thread) {
      const long size = long(next.size());
      for (;; thread = (thread + 1) % size) {
        const long found = next[thread].part.fetch_add(1, std::memory_order_relaxed);
        if (found < range_start(parts, thread + 1, size)) return found;
      }
    }
  };

  long size_;
  std::shared_ptr<Shared> shared_;
  std::uint64_t loop_ = 0;
};

}  // namespace pdd
