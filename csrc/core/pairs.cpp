#include "core/pairs.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace moeserve {

void check_ids(const int32_t* ids, size_t num_pairs, uint32_t num_experts) {
    for (size_t n = 0; n < num_pairs; ++n) {
        // As unsigned, -1 + 1 is 0 and everything below -1 is huge.
        if (static_cast<uint32_t>(ids[n]) + 1u > num_experts) {
            throw std::out_of_range("pair " + std::to_string(n) + " has expert id " + std::to_string(ids[n]) +
                                    "; ids run from -1 to " + std::to_string(int64_t{num_experts} - 1));
        }
    }
}

void sort_pairs(const int32_t* ids, size_t num_pairs, uint32_t num_experts, uint32_t* first, uint32_t* order) {
    std::fill(first, first + num_experts + 1, 0u);
    for (size_t n = 0; n < num_pairs; ++n) {
        if (ids[n] >= 0) ++first[ids[n]];
    }
    uint32_t total = 0;
    for (uint32_t expert = 0; expert <= num_experts; ++expert) {
        total += first[expert];
        first[expert] = total;  // one past the expert's last pair
    }
    for (size_t n = num_pairs; n-- > 0;) {
        if (ids[n] >= 0) order[--first[ids[n]]] = static_cast<uint32_t>(n);
    }
}

}  // namespace moeserve
