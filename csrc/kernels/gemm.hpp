// The innermost tile of matrix products: a few rows against a few blocks of 16 columns of packed weights.
//
// An output is one chain of fused multiply-adds over the inputs in ascending order, from zero, whatever the tile: a row's
// bits depend neither on its company nor on how columns are shared out. (Weights in groups: one such chain per group,
// times its scale added in order.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/dots.hpp"

namespace moeserve::MOESERVE_ISA {

constexpr int kTileRows = kWidth == 8 ? 6 : 12;
constexpr size_t kSumsStride = 4 * kColumns;  // floats between the rows of a tile's results

/// Blocks that a tile of M rows takes at once: about 12 (24) accumulators, and 8 at least where M allows.
constexpr int blocks_at_once(int M) {
    if (kWidth == 8) return M == 1 ? 4 : M <= 3 ? 2 : 1;
    return M <= 6 ? 4 : 2;
}

template <int i>
struct Int {};

/// body(Int<0>), body(Int<1>), ...: a loop unrolled before the compiler decides what lives in registers.
template <int n, class Body>
MOESERVE_INLINE void each(const Body& body) {
    [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) { (body(Int<i>{}), ...); }
    (std::make_integer_sequence<int, n>{});
}
#define MOESERVE_EACH(i, n) each<n>([&]<int i>(Int<i>) __attribute__((always_inline))

/// Element d of a step, for every row and column of the tile.
template <class A, int M, int B, int d>
MOESERVE_INLINE void multiply(const float* a, size_t stride, const uint8_t* w, const uint8_t* head, size_t block_bytes,
                              f32 (&sums)[M][B * kVectors]) {
    constexpr int N = B * kVectors;
    const auto weight = [&](int j) __attribute__((always_inline)) {
        const size_t block = static_cast<size_t>(j / kVectors) * block_bytes;
        return A::template column<d>(w + block, head + block, j % kVectors);
    };
    if constexpr (M >= N) {
        typename A::Vector column[N];
        MOESERVE_EACH(j, N) { column[j] = weight(j); });
        MOESERVE_EACH(m, M) {
            const auto x = A::element(a + m * stride + d);
            MOESERVE_EACH(j, N) { sums[m][j] = A::add(sums[m][j], x, column[j]); });
        });
    } else {
        typename A::Vector x[M];
        MOESERVE_EACH(m, M) { x[m] = A::element(a + m * stride + d); });
        MOESERVE_EACH(j, N) {
            const auto column = weight(j);
            MOESERVE_EACH(m, M) { sums[m][j] = A::add(sums[m][j], x[m], column); });
        });
    }
}

/// c [M, B * 16] = a [M, depth] times B blocks, going on from what is there if there is `more` than the first part.
/// depth, stride: in elements of A. head: the group's scales and zero points, where weights come in groups.
template <class A, int M, int B>
MOESERVE_INLINE void tile(const float* a, size_t stride, const uint8_t* w, const uint8_t* head, size_t block_bytes,
                          size_t depth, float* c, bool more, size_t left) {
    using F = typename A::Format;
    constexpr int N = B * kVectors;
    constexpr size_t kAhead = M <= 6 ? 2048 : 8192;  // bytes; many rows take long over a chunk, and the next is behind it
    f32 sums[M][N];
    MOESERVE_EACH(m, M) {
        MOESERVE_EACH(j, N) { sums[m][j] = more && !F::kGrouped ? load(c + m * kSumsStride + j * kWidth) : zero(); });
    });
    // Behind the end of a block lies one that is being read already: what comes next is B blocks on.
    const uint8_t* const turn = left > kAhead ? w + (left - kAhead) : w;
    for (size_t n = depth / A::kDepth; n; --n) {
        // The hardware's own prefetching stops at pages, and is late for streams that are not read all the time.
        const uint8_t* ahead = w + kAhead + ((F::kCostly || M > 6) && w >= turn ? (B - 1) * block_bytes : 0);
        for (int b = 0; b < B; ++b, ahead += block_bytes) {
            for (size_t line = 0; line < A::kStepBytes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
        }
        MOESERVE_EACH(d, A::kDepth) {
            multiply<A, M, B, d>(a, stride, w, head, block_bytes, sums);
            asm("" : "+r"(w));  // load again what the next input shares: kept, it would push sums out of registers
        });
        a += A::kDepth;
        w += A::kStepBytes;
    }
    MOESERVE_EACH(d, A::kDepth - 1) {
        if (d < depth % A::kDepth) multiply<A, M, B, d>(a, stride, w, head, block_bytes, sums);
    });
    MOESERVE_EACH(m, M) {
        MOESERVE_EACH(j, N) {
            float* sum = c + m * kSumsStride + j * kWidth;
            if constexpr (F::kGrouped) {
                const f32 scale = F::scale(head + (j / kVectors) * block_bytes, j % kVectors);
                sums[m][j] = fma(sums[m][j], scale, more ? load(sum) : zero());
            }
            store(sum, sums[m][j]);
        });
    });
}

/// M rows against any number of blocks.
template <class A, int M>
void tiles(const float* a, size_t stride, const uint8_t* w, const uint8_t* head, size_t block_bytes, size_t blocks,
           size_t depth, float* c, bool more, size_t left) {
    constexpr int B = blocks_at_once(M);
    for (; blocks >= B; blocks -= B, w += B * block_bytes, head += B * block_bytes, c += B * kColumns) {
        tile<A, M, B>(a, stride, w, head, block_bytes, depth, c, more, left);
    }
    if constexpr (B > 1) {
        for (; blocks; --blocks, w += block_bytes, head += block_bytes, c += kColumns) {
            tile<A, M, 1>(a, stride, w, head, block_bytes, depth, c, more, left);
        }
    }
}

/// rows: `most` at most.
template <class A, int most>
MOESERVE_INLINE void tiles_of(size_t rows, const float* a, size_t stride, const uint8_t* w, const uint8_t* head,
                              size_t block_bytes, size_t blocks, size_t depth, float* c, bool more, size_t left) {
    MOESERVE_EACH(m, most) {
        if (rows == m + 1) tiles<A, m + 1>(a, stride, w, head, block_bytes, blocks, depth, c, more, left);
    });
}

}  // namespace moeserve::MOESERVE_ISA
