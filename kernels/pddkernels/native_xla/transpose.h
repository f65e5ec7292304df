// Sixteen vectors as columns of what they are rows of: tokens beside features, and the other way round.
#pragma once

#include <utility>

#include "numbers.h"

namespace pdd {

// The lanes that kDistance tells apart: those of `a` with it and those of `b` without it change places.
template <int kDistance, std::size_t... kLane>
inline void exchange(floats& a, floats& b, std::index_sequence<kLane...>) {
  const floats low = __builtin_shufflevector(a, b, int(kLane & kDistance ? kLanes + kLane - kDistance : kLane)...);
  b = __builtin_shufflevector(a, b, int(kLane & kDistance ? kLanes + kLane : kLane + kDistance)...);
  a = low;
}

template <int kDistance>
inline void exchange(floats (&values)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if ((i & kDistance) == 0) exchange<kDistance>(values[i], values[i + kDistance], std::make_index_sequence<kLanes>());
}

// Lane j of values[i] becomes lane i of values[j]: 64 shuffles for 256 values.
inline void transpose(floats (&values)[kLanes]) {
  exchange<8>(values);
  exchange<4>(values);
  exchange<2>(values);
  exchange<1>(values);
}

}  // namespace pdd
