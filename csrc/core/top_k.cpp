#include "core/top_k.hpp"

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>

namespace moeserve {
namespace {

/// An integer that is ordered like the score.
uint32_t key_of(float score) {
    if (std::isnan(score)) score = std::numeric_limits<float>::infinity();
    score += 0.0f;  // no -0
    uint32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

}  // namespace

void take_largest(const float* scores, size_t count, size_t top_k, const int64_t* values, int64_t* out) {
    constexpr uint32_t kDigits = 2047;
    uint32_t last = 0, known = 0;  // known bits of the smallest selected key, and a mask of these bits
    size_t equal = top_k;          // how many keys with these bits are selected
    for (int shift : {21, 10, 0}) {
        uint32_t counts[kDigits + 1] = {};
        for (size_t i = 0; i < count; ++i) {
            const uint32_t key = key_of(scores[i]);
            if ((key & known) == last) ++counts[key >> shift & kDigits];
        }
        uint32_t digit = kDigits;
        while (counts[digit] < equal) equal -= counts[digit--];
        last |= digit << shift;
        known |= kDigits << shift;
    }
    for (size_t i = 0; i < count; ++i) {
        const uint32_t key = key_of(scores[i]);
        if (key < last || (key == last && !equal)) continue;
        equal -= key == last;
        *out++ = values[i];
    }
}

}  // namespace moeserve
