// Select the largest of many scores.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeserve {

/// Writes values[i] of the `top_k` largest scores[i] to out, in ascending order of i. Ties go to
/// the earliest; NaN counts as infinity. There are `count` scores, at least top_k.
void take_largest(const float* scores, size_t count, size_t top_k, const int64_t* values, int64_t* out);

}  // namespace moeserve
