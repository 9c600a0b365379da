// For tests of recurrent layers' kernels: the tiles of one request.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/recurrence_args.hpp"

namespace moeserve {

constexpr size_t kPerBlock = 2;

/// The tiles of `count` tokens from `start` on, in blocks 1, 2, ... or, with `kept` false, in the null block.
inline std::vector<StateTile> tiles_of(size_t start, size_t count, bool kept) {
    std::vector<StateTile> tiles;
    for (size_t token = 0; token < count;) {
        const size_t tile = (start + token) / kStateTile, first = (start + token) % kStateTile;
        const size_t some = std::min(kStateTile - first, count - token);
        const auto block = [&](size_t n) { return kept ? int64_t(1 + n / kPerBlock) : 0; };
        tiles.push_back({token, some, first, block(tile), int64_t(tile % kPerBlock), tile ? block(tile - 1) : -1,
                         tile ? int64_t((tile - 1) % kPerBlock) : -1});
        token += some;
    }
    return tiles;
}

}  // namespace moeserve
