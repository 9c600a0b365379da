// The innermost tile of GEMMs: a few rows times a few blocks of 16 columns of packed weights.
//
// An output is one chain of fused multiply-adds over the inputs in ascending order, beginning with
// zero, for every shape of the tile. So a row's bits depend neither on other rows nor on the
// partition of columns. (Weights in groups have one such chain per group; its result times the
// group's scale is added in order.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/dots.hpp"

namespace moeserve::MOESERVE_ISA {

constexpr int kTileRows = kWidth == 8 ? 6 : 12;
constexpr size_t kSumsStride = 4 * kColumns;  // floats between the rows of a tile's results

/// The number of blocks that a tile of M rows computes at once: about 12 accumulators (24 with 32
/// registers), and at least 8 if M allows that.
constexpr int blocks_at_once(int M) {
    if (kWidth == 8) return M == 1 ? 4 : M <= 3 ? 2 : 1;
    return M <= 6 ? 4 : 2;
}

/// Calls body(0), body(1), ...: a loop that is unrolled before registers are allocated.
template <int n, class Body>
MOESERVE_INLINE void each(const Body& body) {
    [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) { (body(i), ...); }
    (std::make_integer_sequence<int, n>{});
}
#define MOESERVE_EACH(i, n) each<n>([&](int i) __attribute__((always_inline))

template <int i>
struct Int {};

/// Calls body(Int<0>), body(Int<1>), ..., for bodies that need a constant index. Slow to compile: the compiler instantiates
/// the body once per index.
template <int n, class Body>
MOESERVE_INLINE void each_constant(const Body& body) {
    [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) { (body(Int<i>{}), ...); }
    (std::make_integer_sequence<int, n>{});
}
#define MOESERVE_EACH_CONSTANT(i, n) each_constant<n>([&]<int i>(Int<i>) __attribute__((always_inline))

template <int... i>
using Indices = std::integer_sequence<int, i...>;

/// Multiplies and adds element d of a step, for every row m and column vector j of the tile. Folds over the indices compile in
/// half the time of nested loops, to the same code.
template <class A, int d, int M, int N, int... m, int... j>
MOESERVE_INLINE void multiply(const float* a, size_t stride, const uint8_t* w, const uint8_t* head, size_t block_bytes,
                              f32 (&sums)[M][N], Indices<m...>, Indices<j...>) {
    const auto weight = [&](int vector) __attribute__((always_inline)) {
        const size_t block = static_cast<size_t>(vector / kVectors) * block_bytes;
        return A::template column<d>(w + block, head + block, vector % kVectors);
    };
    if constexpr (M >= N) {
        const typename A::Vector columns[] = {weight(j)...};
        const auto add_row = [&](f32 (&row)[N], typename A::Vector x) __attribute__((always_inline)) {
            ((row[j] = A::add(row[j], x, columns[j])), ...);
        };
        (add_row(sums[m], A::element(a + m * stride + d)), ...);
    } else {
        const typename A::Vector rows[] = {A::element(a + m * stride + d)...};
        const auto add_column = [&](int vector, typename A::Vector column) __attribute__((always_inline)) {
            ((sums[m][vector] = A::add(sums[m][vector], rows[m], column)), ...);
        };
        (add_column(j, weight(j)), ...);
    }
}

/// Computes c [M, B * 16] = a [M, depth] times B blocks. more: add to c instead of overwriting it.
/// depth, stride: in elements of A. head: scales and zero points of the group, if weights have
/// groups.
template <class A, int M, int B>
MOESERVE_INLINE void tile(const float* a, size_t stride, const uint8_t* w, const uint8_t* head, size_t block_bytes,
                          size_t depth, float* c, bool more, size_t left) {
    using F = typename A::Format;
    constexpr int N = B * kVectors;
    constexpr size_t kAhead = M <= 6 ? 2048 : 8192;  // bytes to prefetch; many rows take longer per chunk
    constexpr std::make_integer_sequence<int, M> rows;
    constexpr std::make_integer_sequence<int, N> columns;
    f32 sums[M][N];
    MOESERVE_EACH(m, M) {
        MOESERVE_EACH(j, N) { sums[m][j] = more && !F::kGrouped ? load(c + m * kSumsStride + j * kWidth) : zero(); });
    });
    // After the end of a block comes a block that is being read already, so near the end prefetch B
    // blocks ahead.
    const uint8_t* const turn = left > kAhead ? w + (left - kAhead) : w;
    for (size_t n = depth / A::kDepth; n; --n) {
        // The hardware prefetcher stops at page borders, and is late for streams that are not read
        // continuously.
        const uint8_t* ahead = w + kAhead + ((F::kCostly || M > 6) && w >= turn ? (B - 1) * block_bytes : 0);
        for (int b = 0; b < B; ++b, ahead += block_bytes) {
            for (size_t line = 0; line < A::kStepBytes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
        }
        MOESERVE_EACH_CONSTANT(d, A::kDepth) {
            multiply<A, d>(a, stride, w, head, block_bytes, sums, rows, columns);
            asm("" : "+r"(w));  // forces the next input to load shared data again; keeping it would spill sums
        });
        a += A::kDepth;
        w += A::kStepBytes;
    }
    if constexpr (!F::kCostly) {
        MOESERVE_EACH_CONSTANT(d, A::kDepth - 1) {
            if (d < depth % A::kDepth) multiply<A, d>(a, stride, w, head, block_bytes, sums, rows, columns);
        });
    }
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

/// Multiplies M rows by any number of blocks.
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
    MOESERVE_EACH_CONSTANT(m, most) {
        if (rows == m + 1) tiles<A, m + 1>(a, stride, w, head, block_bytes, blocks, depth, c, more, left);
    });
}

}  // namespace moeserve::MOESERVE_ISA
