// Loops over XLA's own thread pool, for kernels that it calls.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace pdd {

// Runs part(i) for i in [0, parts), in any order, on the calling thread and those of the pool that are free soon enough. Returns when all are
// done. A part must not be empty of work: taking one costs an atomic operation.
template <class Part>
void parallel(xla::ffi::ThreadPool& pool, long parts, const Part& part) {
  struct Shared {
    std::atomic<long> next{0}, done{0};
  };
  const long helpers = std::min<long>(pool.num_threads(), parts) - 1;
  if (helpers <= 0) {
    for (long i = 0; i < parts; ++i) part(i);
    return;
  }
  // A helper that comes late finds nothing to take and never looks at `part`, which is gone by then.
  const auto shared = std::make_shared<Shared>();
  const auto work = [shared, parts, part = &part] {
    for (long i; (i = shared->next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
      (*part)(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (long i = 0; i < helpers; ++i) pool.Schedule(std::function<void()>(work));
  work();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < parts; ++spins)
    if (spins > 1000) std::this_thread::yield();
}

}  // namespace pdd
