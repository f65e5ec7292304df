// The sum over the lanes of a vector.
#pragma once

#include "numbers.h"

namespace pdd {

inline float sum_lanes(floats values) {
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

}  // namespace pdd
