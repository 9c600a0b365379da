#include "core/bitmask.hpp"

#include <algorithm>
#include <limits>

namespace moeserve {

void apply_bitmask(float* x, size_t width, const uint32_t* bits) {
    constexpr float banned = -std::numeric_limits<float>::infinity();
    for (size_t first = 0; first < width; first += 32) {
        const uint32_t word = bits[first / 32];
        const size_t count = std::min<size_t>(32, width - first);
        if (word == ~0u) continue;
        if (word == 0) {
            std::fill_n(x + first, count, banned);
            continue;
        }
        for (size_t i = 0; i < count; ++i) x[first + i] = word >> i & 1 ? x[first + i] : banned;
    }
}

}  // namespace moeserve
