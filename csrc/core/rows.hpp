#pragma once
// Copy rows of bytes.
#include <cstddef>
#include <cstdint>

namespace moeserve {

/// Copies from[index[j]] to to[j] for j < count; rows have `row_bytes` bytes each. Returns one past
/// the last byte written.
std::byte* gather_rows(std::byte* to, const std::byte* from, const uint32_t* index, size_t count, size_t row_bytes);

/// Copies `count` contiguous rows to rows that begin `pitch` bytes apart.
void spread_rows(std::byte* to, size_t pitch, const std::byte* from, size_t count, size_t row_bytes);

}  // namespace moeserve
