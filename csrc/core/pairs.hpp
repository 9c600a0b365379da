#pragma once
// Where (token, k) pairs go: sorted by physical expert, stably, so that rows of one expert keep the order of
// tokens.
#include <cstddef>
#include <cstdint>

namespace moeserve {

/// Checks that every id is -1 (goes nowhere) or one of `num_experts`. Throws std::out_of_range naming the first that is not.
void check_ids(const int32_t* ids, size_t num_pairs, uint32_t num_experts);

/// first[e]: how many pairs go to experts before e, so that first[num_experts] counts those that go anywhere.
/// order[j]: the pair at place j. ids must have passed `check_ids`.
///
/// ids 1 0 -1 1, 2 experts -> first 0 1 3, order 1 0 3
void sort_pairs(const int32_t* ids, size_t num_pairs, uint32_t num_experts, uint32_t* first, uint32_t* order);

}  // namespace moeserve
