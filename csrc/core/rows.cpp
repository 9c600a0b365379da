#include "core/rows.hpp"

#include <cstring>

namespace moeserve {

std::byte* gather_rows(std::byte* to, const std::byte* from, const uint32_t* index, size_t count, size_t row_bytes) {
    for (size_t j = 0; j < count; ++j, to += row_bytes) {
        std::memcpy(to, from + size_t{index[j]} * row_bytes, row_bytes);
    }
    return to;
}

void spread_rows(std::byte* to, size_t pitch, const std::byte* from, size_t count, size_t row_bytes) {
    for (size_t j = 0; j < count; ++j) std::memcpy(to + j * pitch, from + j * row_bytes, row_bytes);
}

}  // namespace moeserve
