#pragma once
// Sort (token, k) pairs by physical expert. The sort is stable, so the rows of an expert stay in
// token order.
#include <cstddef>
#include <cstdint>

namespace moeserve {

/// Checks that every id is -1 (no expert) or below `num_experts`. Throws std::out_of_range that
/// names the first other id.
void check_ids(const int32_t* ids, size_t num_pairs, uint32_t num_experts);

/// Sorts pairs. first[e]: number of pairs of experts before e; first[num_experts]: number of pairs
/// with an expert. order[j]: the pair at place j. ids must have passed `check_ids`.
///
/// ids 1 0 -1 1, 2 experts -> first 0 1 3, order 1 0 3
void sort_pairs(const int32_t* ids, size_t num_pairs, uint32_t num_experts, uint32_t* first, uint32_t* order);

}  // namespace moeserve
