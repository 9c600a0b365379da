#include "core/grouping.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/pairs.hpp"

namespace moeserve {

void count_ids(const int32_t* ids, size_t num_ids, size_t num_experts, int64_t* counts) {
    check_ids(ids, num_ids, static_cast<uint32_t>(num_experts));
    std::fill_n(counts, num_experts, int64_t{0});
    for (size_t n = 0; n < num_ids; ++n) {
        if (ids[n] >= 0) ++counts[ids[n]];
    }
}

size_t group_pairs(const int32_t* ids, size_t num_pairs, size_t num_experts, int64_t* counts, int64_t* order,
                   int64_t* place) {
    count_ids(ids, num_pairs, num_experts, counts);
    std::vector<int64_t> next(num_experts);
    int64_t total = 0;
    for (size_t expert = 0; expert < num_experts; ++expert) {
        next[expert] = total;
        total += counts[expert];
    }
    for (size_t n = 0; n < num_pairs; ++n) {
        place[n] = ids[n] < 0 ? -1 : next[ids[n]]++;
        if (place[n] >= 0) order[place[n]] = static_cast<int64_t>(n);
    }
    return static_cast<size_t>(total);
}

void copy_rows(const char* from, const int64_t* index, int64_t divisor, size_t row_bytes, size_t begin, size_t end,
               char* to) {
    for (size_t j = begin; j < end; ++j) {
        std::memcpy(to + j * row_bytes, from + static_cast<size_t>(index[j] / divisor) * row_bytes, row_bytes);
    }
}

}  // namespace moeserve
