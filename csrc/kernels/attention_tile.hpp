// The inner loops of attention: keys transposed to [dim][64 positions], products of a few rows, softmax over one tile.
//
// Every sum is one chain of fma, over the head width ascending for a score and over positions ascending for a value,
// whatever the number of rows or columns computed at once.
#pragma once

#include "kernels/attention_plan.hpp"
#include "kernels/elements.hpp"
#include "kernels/math.hpp"

namespace moeserve::MOESERVE_ISA::attention {

/// Rows of floats at a fixed distance.
struct Even {
    const float* start;
    int64_t stride;
    MOESERVE_INLINE f32 operator()(int64_t row, int64_t column) const { return load(start + row * stride + column); }
    MOESERVE_INLINE void fetch_ahead(int64_t, int64_t) const {}
};

/// Rows of a paged cache. While they are read, what the next tile will need is fetched, one head's row per row: no
/// hardware guesses where that lies.
template <class E>
struct Paged {
    const char* const* rows;
    const char* const* ahead;
    MOESERVE_INLINE f32 operator()(int64_t row, int64_t column) const {
        return E::load(rows[row] + column * E::bytes);
    }
    MOESERVE_INLINE void fetch_ahead(int64_t row, int64_t column) const {
        __builtin_prefetch(ahead[row] + column * E::bytes, 0, 2);
    }
};

/// c [R, V vectors] = (fresh ? 0 : c) + a [R, begin..end) times b [begin..end, V vectors from `column`].
template <int R, int V, class B>
MOESERVE_INLINE void product(const float* a, int64_t a_stride, B b, int64_t column, int64_t begin, int64_t end,
                             float* c, int64_t c_stride, bool fresh) {
    f32 acc[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) acc[r][v] = fresh ? zero() : load(c + r * c_stride + column + v * kWidth);
    }
    for (int64_t k = begin; k < end; ++k) {
        f32 right[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) right[v] = b(k, column + v * kWidth);
        for (int v = 0; v < V; v += 32 / kWidth) b.fetch_ahead(k, column + v * kWidth);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const f32 left = all(a + r * a_stride + k);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) acc[r][v] = fma(left, right[v], acc[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(c + r * c_stride + column + v * kWidth, acc[r][v]);
    }
}

constexpr int kStrip = 6;  // rows of a product

/// Vectors per row: enough independent chains, and no more than there are registers for.
constexpr int strip_vectors(int rows) {
    if (kRegisters == 32) return rows <= 2 ? 8 : 4;
    return rows == 1 ? 8 : rows <= 3 ? 4 : 2;
}

/// `product` over the columns from `column` to `columns`, multiples of kWidth.
template <int R, class B>
inline void strip_of(const float* a, int64_t a_stride, B b, int64_t column, int64_t columns, int64_t begin, int64_t end,
                     float* c, int64_t c_stride, bool fresh) {
    constexpr int V = strip_vectors(R);
    for (; column + V * kWidth <= columns; column += V * kWidth)
        product<R, V>(a, a_stride, b, column, begin, end, c, c_stride, fresh);
    for (; column < columns; column += kWidth) product<R, 1>(a, a_stride, b, column, begin, end, c, c_stride, fresh);
}

template <class B>
inline void strip(int64_t rows, const float* a, int64_t a_stride, B b, int64_t column, int64_t columns, int64_t begin,
                  int64_t end, float* c, int64_t c_stride, bool fresh) {
    switch (rows) {
        case 1: return strip_of<1>(a, a_stride, b, column, columns, begin, end, c, c_stride, fresh);
        case 2: return strip_of<2>(a, a_stride, b, column, columns, begin, end, c, c_stride, fresh);
        case 3: return strip_of<3>(a, a_stride, b, column, columns, begin, end, c, c_stride, fresh);
        case 4: return strip_of<4>(a, a_stride, b, column, columns, begin, end, c, c_stride, fresh);
        case 5: return strip_of<5>(a, a_stride, b, column, columns, begin, end, c, c_stride, fresh);
        default: return strip_of<6>(a, a_stride, b, column, columns, begin, end, c, c_stride, fresh);
    }
}

template <class E>
constexpr bool kPairs = false;  // whether two elements are the halves of a word, each the upper half of a float
template <>
constexpr bool kPairs<BFloat16> = true;

/// Keys of positions begin .. end - 1, multiples of kWidth, to out [dim, columns begin .. end - 1].
template <class E>
inline void pack_keys(const Paged<E>& keys, int64_t dim, int64_t begin, int64_t end, float* out, int64_t stride) {
    const char* const* rows = keys.rows;
    for (int64_t j = begin; j < end; j += kWidth) {
        for (int64_t i = 0; i < dim; i += 32)
            for (int r = 0; r < kWidth; ++r) keys.fetch_ahead(j + r, i);
        int64_t i = 0;
        if constexpr (kPairs<E>) {  // two elements travel as one word
            for (; i + 2 * kWidth <= dim; i += 2 * kWidth) {
                f32 square[kWidth];
#pragma GCC unroll 16
                for (int r = 0; r < kWidth; ++r) square[r] = floats(load_words(rows[j + r] + i * 2));
                transpose(square);
#pragma GCC unroll 16
                for (int r = 0; r < kWidth; ++r) {
                    store(out + (i + 2 * r) * stride + j, floats(left<16>(words(square[r]))));
                    store(out + (i + 2 * r + 1) * stride + j, floats(both(words(square[r]), all_words(0xffff0000))));
                }
            }
        }
        for (; i < dim; i += kWidth) {
            f32 square[kWidth];
#pragma GCC unroll 16
            for (int r = 0; r < kWidth; ++r) square[r] = load_at<E>(rows[j + r], i, dim);
            transpose(square);
#pragma GCC unroll 16
            for (int r = 0; r < kWidth; ++r) store(out + (i + r) * stride + j, square[r]);
        }
    }
}

/// Values of positions begin .. end - 1 to out [kTile][padded].
template <class E>
inline void pack_values(const char* const* rows, int64_t dim, int64_t padded, int64_t begin, int64_t end, float* out) {
    for (int64_t j = begin; j < end; ++j) {
        for (int64_t i = 0; i < dim; i += kWidth)
            store(out + j * padded + i, load_at<E>(rows[j], i, dim));
    }
}

/// cap * tanh(x / cap).
MOESERVE_INLINE f32 capped(f32 x, f32 cap) {
    const f32 e = exp(mul(all(2.0f), div(x, cap)));
    return mul(cap, sub(all(1.0f), div(all(2.0f), add(e, all(1.0f)))));
}

MOESERVE_INLINE float exp_one(float x) { return first(exp(all(x))); }

/// What one query row has summed up so far: values [padded] in units of e^-largest, and how much weight they carry.
struct RowSums {
    float* values;
    float* largest;  // -infinity, and weight 0, at first
    float* weight;   // at least 1 once it has seen a score above -infinity
};

MOESERVE_INLINE RowSums row_sums(float* sums, int64_t padded) { return {sums, sums + padded, sums + padded + 1}; }

MOESERVE_INLINE void clear(RowSums s, int64_t padded) {
    for (int64_t i = 0; i < padded; i += kWidth) store(s.values + i, zero());
    *s.largest = -__builtin_inff();
    *s.weight = 0.0f;
}

/// Makes exp(score - largest) of the scores x[begin..end), 0 of others in the same 16, and brings the sums in line.
inline void softmax_tile(float* x, int64_t begin, int64_t end, float soft_cap, RowSums s, int64_t padded) {
    const int64_t from = begin / 16 * 16, to = (end + 15) / 16 * 16;
    if (soft_cap != 0.0f)
        for (int64_t j = from; j < to; j += kWidth) store(x + j, capped(load(x + j), all(soft_cap)));
    for (int64_t j = from; j < begin; ++j) x[j] = -__builtin_inff();
    for (int64_t j = end; j < to; ++j) x[j] = -__builtin_inff();
    f32 highest = load(x + from);
    for (int64_t j = from + kWidth; j < to; j += kWidth) highest = max(highest, load(x + j));
    const float before = *s.largest, in_tile = first(max(all(largest(highest)), all(before)));
    *s.largest = in_tile;
    const f32 base = max(all(in_tile), all(-__FLT_MAX__));  // scores of -infinity alone weigh nothing
    // Sixteen sums, folded in one order, for every width of vectors.
    constexpr int kParts = 16 / kWidth;
    f32 part[kParts];
    for (int i = 0; i < kParts; ++i) part[i] = zero();
    for (int64_t j = from; j < to; j += 16) {
#pragma GCC unroll 2
        for (int i = 0; i < kParts; ++i) {
            const f32 p = exp(sub(load(x + j + i * kWidth), base));
            store(x + j + i * kWidth, p);
            part[i] = add(part[i], p);
        }
    }
    const float weight = sum(kParts == 2 ? add(part[0], part[kParts - 1]) : part[0]);
    if (before == in_tile) {  // the factor is exactly 1
        *s.weight = *s.weight + weight;
        return;
    }
    const float factor = exp_one(before - in_tile);
    *s.weight = *s.weight * factor + weight;
    for (int64_t i = 0; i < padded; i += kWidth) store(s.values + i, mul(load(s.values + i), all(factor)));
}

/// Adds the sums of a later chunk to those of earlier ones. A chunk in which the row has seen nothing is left out.
inline void add_chunk(RowSums total, RowSums chunk, int64_t padded) {
    if (*chunk.weight == 0.0f) return;
    const float largest = first(max(all(*chunk.largest), all(*total.largest)));
    const float old = exp_one(*total.largest - largest), fresh = exp_one(*chunk.largest - largest);
    *total.largest = largest;
    *total.weight = *total.weight * old + *chunk.weight * fresh;
    for (int64_t i = 0; i < padded; i += kWidth) {
        const f32 kept = mul(load(total.values + i), all(old));
        store(total.values + i, fma(load(chunk.values + i), all(fresh), kept));
    }
}

}  // namespace moeserve::MOESERVE_ISA::attention
