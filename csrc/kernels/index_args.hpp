// The arguments of the index selector's kernel. moeserve/ops/selected.py is the specification.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeserve {

enum class Type : int;

/// A piece is kPiece keys, for all queries.
struct IndexScoresArgs {
    static constexpr size_t kPiece = 32;

    Type type;  // of keys; everything else is fp32
    size_t queries, heads, dim;
    const float* q;        // [M, J, d]
    const float* weights;  // [M, J]
    const void* keys;      // rows of the cache, d elements each
    const int64_t* slots;  // [L]: cache rows of the context's keys
    size_t length;         // L
    float* scores;         // [M, L]
    float* scratch;        // scratch_floats() per worker

    [[gnu::always_inline]] size_t pieces() const { return (length + kPiece - 1) / kPiece; }
    /// Scratch floats for the transposed keys.
    [[gnu::always_inline]] size_t scratch_floats() const { return (dim + 15) / 16 * 16 * kPiece; }
};

}  // namespace moeserve
