// CRC32C by carry-less multiplication, 256 bytes at a time: the message is folded onto its own last bytes, which leave the same remainder
// (Gopal and others, Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction, Intel 2009). What is left is divided by the
// processor's own instruction, which alone is bound by its latency. GNU C++; needs AVX-512 with VPCLMULQDQ, and says whether it has it.

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__VPCLMULQDQ__) && defined(__SSE4_2__)
#include <immintrin.h>

namespace {

constexpr uint32_t kCastagnoli = 0x1EDC6F41;  // without x^32, the highest power first
constexpr int64_t kLanes = 4;
constexpr int64_t kLaneBytes = 64;

// x^n modulo the polynomial, as a factor of a reflected product: bits in the other order, one place up.
constexpr uint64_t power(int n) {
    uint32_t rest = 1;
    for (int i = 0; i < n; i++) rest = (rest << 1) ^ ((rest >> 31) ? kCastagnoli : 0);
    uint64_t reflected = 0;
    for (int i = 0; i < 32; i++) reflected |= static_cast<uint64_t>(rest >> i & 1) << (31 - i);
    return reflected << 1;
}

// What moves 128 bits over ``Bits`` bits: the low half is 64 bits farther from the end, products are reflected and so 32 places short.
template <int Bits>
__m512i factors() {
    constexpr uint64_t low = power(Bits + 32), high = power(Bits - 32);
    return _mm512_set_epi64(high, low, high, low, high, low, high, low);
}

inline __m512i folded(__m512i lane, __m512i by, __m512i onto) {
    constexpr int kXor = 0x96;
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lane, by, 0x00), _mm512_clmulepi64_epi128(lane, by, 0x11), onto, kXor);
}

}  // namespace

extern "C" int pdd_crc32c_folds() { return 1; }

// The checksum of ``num_bytes`` at ``data`` behind a message whose checksum is ``value``.
extern "C" uint32_t pdd_crc32c(const unsigned char* data, int64_t num_bytes, uint32_t value) {
    constexpr int64_t kStep = kLanes * kLaneBytes;
    uint64_t crc = static_cast<uint32_t>(~value);
    if (num_bytes >= 2 * kStep) {
        const __m512i far = factors<8 * kStep>(), near = factors<8 * kLaneBytes>();
        __m512i lanes[kLanes];
        for (int64_t i = 0; i < kLanes; i++) lanes[i] = _mm512_loadu_si512(data + i * kLaneBytes);
        lanes[0] = _mm512_xor_si512(lanes[0], _mm512_zextsi128_si512(_mm_cvtsi64_si128(static_cast<int64_t>(crc))));
        for (data += kStep, num_bytes -= kStep; num_bytes >= kStep; data += kStep, num_bytes -= kStep)
            for (int64_t i = 0; i < kLanes; i++) lanes[i] = folded(lanes[i], far, _mm512_loadu_si512(data + i * kLaneBytes));
        for (int64_t i = 1; i < kLanes; i++) lanes[i] = folded(lanes[i - 1], near, lanes[i]);
        uint64_t words[kLaneBytes / 8];
        _mm512_storeu_si512(words, lanes[kLanes - 1]);
        crc = 0;
        for (uint64_t word : words) crc = _mm_crc32_u64(crc, word);
    }
    for (; num_bytes >= 8; data += 8, num_bytes -= 8) {
        uint64_t word;
        std::memcpy(&word, data, sizeof word);
        crc = _mm_crc32_u64(crc, word);
    }
    for (; num_bytes; data++, num_bytes--) crc = _mm_crc32_u8(static_cast<uint32_t>(crc), *data);
    return ~static_cast<uint32_t>(crc);
}

#else

extern "C" int pdd_crc32c_folds() { return 0; }

#endif
