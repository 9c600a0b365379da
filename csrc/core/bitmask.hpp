#pragma once
// Token bitmasks of grammars.
#include <cstddef>
#include <cstdint>

namespace moeserve {

/// Sets x[v] to -inf where bit v % 32 of bits[v / 32] is 0.
void apply_bitmask(float* x, size_t width, const uint32_t* bits);

}  // namespace moeserve
