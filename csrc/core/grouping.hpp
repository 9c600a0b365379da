#pragma once
// Rows by index: tokens of an embedding, (token, k) pairs sorted by expert, and their way back.
#include <cstddef>
#include <cstdint>

namespace moeserve {

/// counts[e]: how many of the ids are e; -1 counts nowhere. Throws std::out_of_range for any other id.
void count_ids(const int32_t* ids, size_t num_ids, size_t num_experts, int64_t* counts);

/// As `count_ids`, and order[j]: the pair at place j of the stable order by expert; place[n]: pair n's place, or -1.
/// Returns how many pairs go somewhere.
///
/// ids 1 0 -1 1, 2 experts -> counts 1 2, order 1 0 3, place 1 0 -1 2
size_t group_pairs(const int32_t* ids, size_t num_pairs, size_t num_experts, int64_t* counts, int64_t* order,
                   int64_t* place);

/// to[j] = from[index[j] / divisor] for j in [begin, end), rows of `row_bytes` each.
void copy_rows(const char* from, const int64_t* index, int64_t divisor, size_t row_bytes, size_t begin, size_t end,
               char* to);

}  // namespace moeserve
