// The largest of many scores.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeserve {

/// out[n] = values[i] for the `top_k` largest scores[i], in ascending order of i; of equal ones the earliest. NaN counts as
/// infinity. There are `count` scores, not fewer than top_k.
void take_largest(const float* scores, size_t count, size_t top_k, const int64_t* values, int64_t* out);

}  // namespace moeserve
