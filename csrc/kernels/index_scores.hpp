// Scores of the index selector. The lanes of a vector are keys. A dot product is a chain of fused
// multiply-adds over the elements of a head, a score is a chain over heads, both in ascending
// order. So a score depends only on its query and key.
#pragma once

#include "kernels/elements.hpp"
#include "kernels/index_args.hpp"

namespace moeserve::MOESERVE_ISA {

/// `count` keys from `from`. Scratch memory has them transposed, [d, kPiece].
struct ScoresPiece {
    static constexpr size_t kPiece = IndexScoresArgs::kPiece;
    static constexpr int kHeads = kRegisters / 4;  // computed at once
    static constexpr size_t kKeys = 2 * kWidth;    // computed at once

    const IndexScoresArgs& args;
    const size_t from, count;  // keys
    float* columns;

    ScoresPiece(const IndexScoresArgs& args, size_t piece, float* memory)
        : args(args), from(piece * kPiece), count(args.length - from < kPiece ? args.length - from : kPiece),
          columns(memory) {}

    template <class E>
    void take_keys() const {
        for (size_t r = 0; r < kPiece; r += kWidth) {
            const char* rows[kWidth];
            for (size_t j = 0; j < kWidth; ++j) {
                const int64_t slot = args.slots[from + (r + j < count ? r + j : count - 1)];
                rows[j] = static_cast<const char*>(args.keys) + slot * args.dim * E::bytes;
            }
            for (size_t i = 0; i < args.dim; i += kWidth) {
                f32 square[kWidth];
#pragma GCC unroll 16
                for (size_t j = 0; j < kWidth; ++j) square[j] = load_at<E>(rows[j], i, args.dim);
                transpose(square);
#pragma GCC unroll 16
                for (size_t j = 0; j < kWidth; ++j) store(columns + (i + j) * kPiece + r, square[j]);
            }
        }
    }

    /// Adds the scores of some heads for the keys from `keys`.
    template <int heads>
    MOESERVE_INLINE void add_heads(const float* q, const float* weights, const float* keys, f32 (&scores)[2]) const {
        f32 dots[heads][2];
        for (auto& dot : dots) dot[0] = dot[1] = zero();
        for (size_t i = 0; i < args.dim; ++i, keys += kPiece) {
            const f32 front = load(keys), back = load(keys + kWidth);
#pragma GCC unroll 8
            for (int j = 0; j < heads; ++j) {
                const f32 factor = all(q + j * args.dim + i);
                dots[j][0] = fma(factor, front, dots[j][0]);
                dots[j][1] = fma(factor, back, dots[j][1]);
            }
        }
#pragma GCC unroll 8
        for (int j = 0; j < heads; ++j) {
            for (int v = 0; v < 2; ++v) scores[v] = fma(all(weights + j), max(zero(), dots[j][v]), scores[v]);
        }
    }

    void score(size_t query) const {
        const float *q = args.q + query * args.heads * args.dim, *weights = args.weights + query * args.heads;
        char* out = bytes_of(args.scores + query * args.length + from);
        for (size_t r = 0; r < count; r += kKeys) {
            f32 scores[2] = {zero(), zero()};
            size_t j = 0;
            for (; j + kHeads <= args.heads; j += kHeads) {
                add_heads<kHeads>(q + j * args.dim, weights + j, columns + r, scores);
            }
            for (; j < args.heads; ++j) add_heads<1>(q + j * args.dim, weights + j, columns + r, scores);
            for (int v = 0; v < 2; ++v) store_at<Float32>(out, r + v * kWidth, count, scores[v]);
        }
    }
};

/// Computes pieces of IndexScoresArgs.
inline void index_scores(void* call, size_t begin, size_t end, int worker) {
    const auto& args = *static_cast<const IndexScoresArgs*>(call);
    float* memory = args.scratch + worker * args.scratch_floats();
    for (size_t p = begin; p < end; ++p) {
        const ScoresPiece piece(args, p, memory);
        switch (args.type) {
            case Type::fp32: piece.take_keys<Float32>(); break;
            case Type::bf16: piece.take_keys<BFloat16>(); break;
            default: piece.take_keys<Float16>();
        }
        for (size_t query = 0; query < args.queries; ++query) piece.score(query);
    }
}

}  // namespace moeserve::MOESERVE_ISA
