// A copy past the caches, for memory that another process reads next: a plain copy first fetches what it overwrites. By several threads,
// since one core waits for its own stores long before memory is busy. GNU C++.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

void copy_alone(char* to, const char* from, int64_t num_bytes) {
#if defined(__AVX512F__)
    constexpr int64_t kLine = 64, kAtOnce = 4;
    const int64_t head = std::min<int64_t>(num_bytes, -reinterpret_cast<intptr_t>(to) & (kLine - 1));
    std::memcpy(to, from, head);
    to += head, from += head, num_bytes -= head;
    for (; num_bytes >= kAtOnce * kLine; to += kAtOnce * kLine, from += kAtOnce * kLine, num_bytes -= kAtOnce * kLine) {
        __m512i lines[kAtOnce];
        for (int64_t i = 0; i < kAtOnce; i++) lines[i] = _mm512_loadu_si512(from + i * kLine);
        for (int64_t i = 0; i < kAtOnce; i++) _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i * kLine), lines[i]);
    }
    _mm_sfence();
#endif
    std::memcpy(to, from, num_bytes);
}

// A copy that is under way, taken by pieces: whoever has time takes the next, so a helper that gets no core holds up nobody.
struct Job {
    char* to;
    const char* from;
    int64_t num_bytes;
    std::atomic<int64_t> next{0};

    void work() {
        constexpr int64_t kPieceBytes = 128 << 10;
        for (int64_t at; (at = next.fetch_add(kPieceBytes, std::memory_order_relaxed)) < num_bytes;)
            copy_alone(to + at, from + at, std::min(kPieceBytes, num_bytes - at));
    }
};

// Threads that sleep until there is a job. They end with the process, so this is never destroyed.
class Helpers {
public:
    void copy(char* to, const char* from, int64_t num_bytes, int num_helpers) {
        std::unique_lock ours(turn_, std::try_to_lock);
        if (!ours) return copy_alone(to, from, num_bytes);  // they help another thread
        start(num_helpers);
        Job job{to, from, num_bytes};
        {
            std::lock_guard lock(mutex_);
            job_ = &job, num_wanted_ = num_helpers;
        }
        wake_.notify_all();
        job.work();
        std::unique_lock lock(mutex_);
        job_ = nullptr;
        left_.wait(lock, [this] { return num_inside_ == 0; });
    }

private:
    void start(int num_helpers) {
        try {
            for (; num_started_ < num_helpers; num_started_++) std::thread(&Helpers::help, this).detach();
        } catch (const std::system_error&) {
            // No more threads to be had: those that there are do it.
        }
    }

    void help() {
        std::unique_lock lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return job_ != nullptr && num_wanted_ > 0; });
            Job* job = job_;
            num_wanted_--, num_inside_++;
            lock.unlock();
            job->work();
            lock.lock();
            if (--num_inside_ == 0) left_.notify_one();
        }
    }

    std::mutex turn_, mutex_;
    std::condition_variable wake_, left_;
    Job* job_ = nullptr;
    int num_started_ = 0, num_wanted_ = 0, num_inside_ = 0;
};

}  // namespace

// ``num_threads``: this one and those that help it, which are started when they are first wanted.
extern "C" void pdd_copy(char* to, const char* from, int64_t num_bytes, int num_threads) {
    static Helpers* helpers = new Helpers;
    if (num_threads > 1)
        helpers->copy(to, from, num_bytes, num_threads - 1);
    else
        copy_alone(to, from, num_bytes);
}
