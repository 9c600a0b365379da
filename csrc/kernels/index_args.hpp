// What the index selector's kernel takes; moeserve/ops/selected.py says what it computes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeserve {

enum class Type : int;

/// Pieces of kPiece keys, each for all queries.
struct IndexScoresArgs {
    static constexpr size_t kPiece = 32;

    Type type;  // of keys; all else is fp32
    size_t queries, heads, dim;
    const float* q;        // [M, J, d]
    const float* weights;  // [M, J]
    const void* keys;      // a cache's rows, d elements each
    const int64_t* slots;  // [L]: rows of the keys in question
    size_t length;         // L
    float* scores;         // [M, L]
    float* scratch;        // scratch_floats() per worker

    [[gnu::always_inline]] size_t pieces() const { return (length + kPiece - 1) / kPiece; }
    /// Of keys by columns.
    [[gnu::always_inline]] size_t scratch_floats() const { return (dim + 15) / 16 * 16 * kPiece; }
};

}  // namespace moeserve
