// A copy past the caches, for memory that another process reads next: a plain copy first fetches what it overwrites. GNU C++.

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

extern "C" void pdd_copy(char* to, const char* from, int64_t num_bytes) {
#if defined(__AVX512F__)
    // Fetched so far ahead: the processor's own fetching ends with every page of 4 KiB. For what lies in a cache it makes no difference.
    constexpr int64_t kLine = 64, kAtOnce = 4, kAhead = 2 << 10;
    const int64_t head = std::min<int64_t>(num_bytes, -reinterpret_cast<intptr_t>(to) & (kLine - 1));
    std::memcpy(to, from, head);
    to += head, from += head, num_bytes -= head;
    for (; num_bytes >= kAtOnce * kLine; to += kAtOnce * kLine, from += kAtOnce * kLine, num_bytes -= kAtOnce * kLine) {
        for (int64_t i = 0; i < kAtOnce; i++) __builtin_prefetch(from + kAhead + i * kLine);
        __m512i lines[kAtOnce];
        for (int64_t i = 0; i < kAtOnce; i++) lines[i] = _mm512_loadu_si512(from + i * kLine);
        for (int64_t i = 0; i < kAtOnce; i++) _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i * kLine), lines[i]);
    }
    _mm_sfence();
#endif
    std::memcpy(to, from, num_bytes);
}
