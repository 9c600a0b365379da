#pragma once
// Group (token, k) pairs by expert, and copy rows by index (also for embeddings).
#include <cstddef>
#include <cstdint>

namespace moeserve {

/// Sets counts[e] to the number of ids that are e; -1 is ignored. Throws std::out_of_range for any
/// other id.
void count_ids(const int32_t* ids, size_t num_ids, size_t num_experts, int64_t* counts);

/// Counts like `count_ids`, and sorts pairs by expert (stable). order[j]: the pair at place j.
/// place[n]: the place of pair n, -1 if it has no expert. Returns the number of pairs with an
/// expert.
///
/// ids 1 0 -1 1, 2 experts -> counts 1 2, order 1 0 3, place 1 0 -1 2
size_t group_pairs(const int32_t* ids, size_t num_pairs, size_t num_experts, int64_t* counts, int64_t* order,
                   int64_t* place);

/// Copies to[j] = from[index[j] / divisor] for j in [begin, end). Rows have `row_bytes` bytes.
void copy_rows(const char* from, const int64_t* index, int64_t divisor, size_t row_bytes, size_t begin, size_t end,
               char* to);

}  // namespace moeserve
