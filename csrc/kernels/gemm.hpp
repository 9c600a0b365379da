// The innermost tile of matrix products: a few rows of floats against a few blocks of 16 columns of packed weights.
//
// An output is one chain of fused multiply-adds over the inputs in ascending order, from zero, whatever the tile: a row's
// bits depend neither on its company nor on how columns are dealt out. (Weights in groups: one such chain per group,
// times its scale added in order.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/weights.hpp"

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

/// Input d of a step, for every row and column of the tile.
template <class F, int M, int B, int d>
MOESERVE_INLINE void multiply(const float* a, size_t stride, const uint8_t* w, const uint8_t* head, size_t block_bytes,
                              f32 (&sums)[M][B * kVectors]) {
    constexpr int N = B * kVectors;
    const auto weight = [&](int j) __attribute__((always_inline)) {
        const size_t block = static_cast<size_t>(j / kVectors) * block_bytes;
        return F::template get<d>(w + block, head + block, j % kVectors);
    };
    if constexpr (M >= N) {
        f32 column[N];
        MOESERVE_EACH(j, N) { column[j] = weight(j); });
        MOESERVE_EACH(m, M) {
            const f32 x = all(a + m * stride + d);
            MOESERVE_EACH(j, N) { sums[m][j] = fma(x, column[j], sums[m][j]); });
        });
    } else {
        f32 x[M];
        MOESERVE_EACH(m, M) { x[m] = all(a + m * stride + d); });
        MOESERVE_EACH(j, N) {
            const f32 column = weight(j);
            MOESERVE_EACH(m, M) { sums[m][j] = fma(x[m], column, sums[m][j]); });
        });
    }
}

/// c [M, B * 16] = a [M, depth] times B blocks, going on from what is there if there is `more` than the first part.
/// head: the group's scales and zero points, where weights come in groups.
template <class F, int M, int B>
MOESERVE_INLINE void tile(const float* a, size_t stride, const uint8_t* w, const uint8_t* head, size_t block_bytes,
                          size_t depth, float* c, bool more) {
    constexpr int N = B * kVectors;
    f32 sums[M][N];
    MOESERVE_EACH(m, M) {
        MOESERVE_EACH(j, N) { sums[m][j] = more && !F::kGrouped ? load(c + m * kSumsStride + j * kWidth) : zero(); });
    });
    for (size_t n = depth / F::kDepth; n; --n) {
        // The hardware's own prefetching stops at pages and is late for a single stream that is not read all the time.
        if constexpr (B == 1) __builtin_prefetch(w + 4096, 0, 2);
        MOESERVE_EACH(d, F::kDepth) {
            multiply<F, M, B, d>(a, stride, w, head, block_bytes, sums);
            asm("" : "+r"(w));  // load again what the next input shares: kept, it would push sums out of registers
        });
        a += F::kDepth;
        w += F::kStepBytes;
    }
    MOESERVE_EACH(d, F::kDepth - 1) {
        if (d < depth % F::kDepth) multiply<F, M, B, d>(a, stride, w, head, block_bytes, sums);
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
template <class F, int M>
void tiles(const float* a, size_t stride, const uint8_t* w, const uint8_t* head, size_t block_bytes, size_t blocks,
           size_t depth, float* c, bool more) {
    constexpr int B = blocks_at_once(M);
    for (; blocks >= B; blocks -= B, w += B * block_bytes, head += B * block_bytes, c += B * kColumns) {
        tile<F, M, B>(a, stride, w, head, block_bytes, depth, c, more);
    }
    if constexpr (B > 1) {
        for (; blocks; --blocks, w += block_bytes, head += block_bytes, c += kColumns) {
            tile<F, M, 1>(a, stride, w, head, block_bytes, depth, c, more);
        }
    }
}

template <class F>
MOESERVE_INLINE void tiles_of(size_t rows, const float* a, size_t stride, const uint8_t* w, const uint8_t* head,
                              size_t block_bytes, size_t blocks, size_t depth, float* c, bool more) {
    MOESERVE_EACH(m, kTileRows) {
        if (rows == m + 1) tiles<F, m + 1>(a, stride, w, head, block_bytes, blocks, depth, c, more);
    });
}

}  // namespace moeserve::MOESERVE_ISA
