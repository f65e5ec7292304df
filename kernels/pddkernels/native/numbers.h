// Number formats, vectors of sixteen and the exponential that all native kernels share. Plain GNU C++: no intrinsics, any processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace pdd {

struct bfloat16 {
  std::uint16_t bits;
};

enum Format : int { kFloat32 = 0, kBfloat16 = 1 };

// Below this many values a parallel region costs more than it saves.
constexpr long kMaxHeadDim = 512;
constexpr long kMaxGroupValues = 1 << 14;  // query heads of one KV head times their dim
constexpr long kParallelValues = 1 << 15;

inline float widen(float x) { return x; }
inline float widen(bfloat16 x) {
  std::uint32_t bits = std::uint32_t(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// To nearest, ties to even; NaN stays NaN.
template <class T>
T narrow(float x);
template <>
inline float narrow<float>(float x) {
  return x;
}
template <>
inline bfloat16 narrow<bfloat16>(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {std::uint16_t(x == x ? rounded : (bits >> 16) | 0x40)};
}

using floats = float __attribute__((vector_size(64)));
using shorts = std::uint16_t __attribute__((vector_size(32)));
using words = std::uint32_t __attribute__((vector_size(64)));
constexpr int kLanes = 16;

inline floats load(const float* from) {
  floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}
inline floats load(const bfloat16* from) {
  shorts halves;
  std::memcpy(&halves, from, sizeof halves);
  return (floats)(__builtin_convertvector(halves, words) << 16);
}
inline void store(float* to, floats values) { std::memcpy(to, &values, sizeof values); }
inline void store(bfloat16* to, floats values) {
  const words bits = (words)values, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const shorts halves = __builtin_convertvector(values == values ? rounded : bits >> 16 | 0x40, shorts);
  std::memcpy(to, &halves, sizeof halves);
}

inline float total(floats values) {
  using halves = float __attribute__((vector_size(32)));
  using quarters = float __attribute__((vector_size(16)));
  halves a, b;
  std::memcpy(&a, &values, sizeof a);
  std::memcpy(&b, (const char*)&values + sizeof a, sizeof b);
  a += b;
  quarters c, d;
  std::memcpy(&c, &a, sizeof c);
  std::memcpy(&d, (const char*)&a + sizeof c, sizeof d);
  c += d;
  return (c[0] + c[2]) + (c[1] + c[3]);
}

// Lane i of the result is the sum of the lanes of values[i]: sixteen sums for 60 instructions.
inline floats totals(const floats (&values)[kLanes]) {
  floats a[8], b[4], c[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const floats x = values[2 * i], y = values[2 * i + 1];
    a[i] = __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const floats x = a[2 * i], y = a[2 * i + 1];
    b[i] = __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const floats x = b[2 * i], y = b[2 * i + 1];
    c[i] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           __builtin_shufflevector(x, y, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  return __builtin_shufflevector(c[0], c[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         __builtin_shufflevector(c[0], c[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

// exp to 2 units in the last place (coefficients: Cephes expf). Clamped to normal float32, so exp(-inf) is 1e-38; NaN stays NaN.
// Free of branches and of calls, so loops over it become vector code.
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  float n = std::floor(x * 1.44269504f + 0.5f);
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  float y = p * r * r + r + 1.0f;
  std::int32_t bits = (std::int32_t(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return y * power;
}

}  // namespace pdd
