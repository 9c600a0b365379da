// The inner loops of attention: transpose keys to [dim][64 positions], multiply a few rows, and
// compute the softmax of one tile.
//
// Every sum is one chain of fused multiply-adds: over ascending elements of the head for a score,
// over ascending positions for a value. It does not depend on how many rows or columns are computed
// at once.
#pragma once

#include <type_traits>

#include "kernels/attention_plan.hpp"
#include "kernels/elements.hpp"
#include "kernels/math.hpp"

namespace moeserve::MOESERVE_ISA::attention {

template <class E>
constexpr bool kPairs = false;  // whether a word has two elements, each the upper half of a float
template <>
constexpr bool kPairs<BFloat16> = true;

template <class E>
constexpr bool kDotted = kPairs<E> || kScaled<E>;  // whether its elements are bf16 numbers

/// The number of elements in whole vectors of words. There, sums of values are ordered (even
/// elements, odd elements).
template <class E>
constexpr int64_t split_columns(int64_t dim) {
    return kPairs<E> ? dim / (2 * kWidth) * (2 * kWidth) : 0;
}

MOESERVE_INLINE f32 lower_halves(i32 pairs) { return floats(left<16>(pairs)); }
MOESERVE_INLINE f32 upper_halves(i32 pairs) { return floats(both(pairs, all_words(0xffff0000))); }

/// Continues a sum by one fused multiply-add.
struct OneByOne {
    static constexpr int64_t kDims = 1;
    static MOESERVE_INLINE f32 add(f32 sum, f32 a, f32 b) { return fma(a, b, sum); }
};

#ifdef __AVX512BF16__
/// Continues a sum by two at once, with words that have the earlier element in their upper half.
struct InPairs {
    static constexpr int64_t kDims = 2;
    static MOESERVE_INLINE f32 add(f32 sum, f32 a, f32 b) { return dot(sum, words(a), words(b)); }
};
#endif

/// Rows of floats with a fixed stride.
struct Even {
    const float* start;
    int64_t stride;

    template <int V>
    MOESERVE_INLINE void get(int64_t row, int64_t column, f32 (&to)[V]) const {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) to[v] = load(start + row * stride + column + v * kWidth);
    }
    MOESERVE_INLINE int take_ahead() const { return 0; }
    template <int V>
    MOESERVE_INLINE void fetch(int) const {}
    MOESERVE_INLINE void give_back(int) const {}
};

/// Prefetches the rows of the next tile, line by line in memory order, because the hardware
/// prefetcher cannot predict pages of the KV cache. It prefetches one line for each line that is
/// read, because more at once would wait for each other.
struct Ahead {
    const char* const* rows;  // of all heads
    int64_t row_bytes;
    int64_t row = 0;                            // the next row
    const char *at = nullptr, *end = nullptr;  // remaining bytes of the present row
    MOESERVE_INLINE void fetch() {
        while (at >= end) {
            if (row == kTile) return;
            const char* start = rows[row++];
            if (start > at || start + 64 <= at) at = start;  // otherwise the last line includes its first bytes
            end = start + row_bytes;
        }
        __builtin_prefetch(at, 0, 2);
        at += 64;
    }
    /// Prefetches as many lines as V vectors of E occupy.
    template <class E, int V>
    MOESERVE_INLINE void fetch() {
        for (size_t i = 0; i < V * kWidth * E::bytes; i += 64) fetch();
    }
};

/// One head's rows of a paged cache.
template <class E>
struct Paged {
    const char* const* rows;
    int64_t offset;  // of the head
    Ahead* ahead;    // what to prefetch while reading

    MOESERVE_INLINE const char* operator[](int64_t row) const { return rows[row] + offset; }
    template <int V>
    MOESERVE_INLINE void get(int64_t row, int64_t column, f32 (&to)[V]) const {
        const char* from = rows[row] + offset + column * E::bytes;
        if constexpr (kPairs<E> && V > 1) {
#pragma GCC unroll 8
            for (int v = 0; v < V; v += 2) {
                const i32 pairs = load_words(from + v * kWidth * E::bytes);
                to[v] = lower_halves(pairs);
                to[v + 1] = upper_halves(pairs);
            }
        } else {
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) to[v] = E::load(from + v * kWidth * E::bytes);
        }
    }
    /// A copy that stays in registers during a loop.
    MOESERVE_INLINE Ahead take_ahead() const { return *ahead; }
    template <int V>
    MOESERVE_INLINE void fetch(Ahead& lines) const {
        lines.fetch<E, V>();
    }
    MOESERVE_INLINE void give_back(const Ahead& lines) const { *ahead = lines; }
};

/// Computes c [R, V vectors] = (fresh ? 0 : c) + a [R, begin..end) times b [begin..end, V vectors
/// from `column`].
template <class Step, int R, int V, class B>
MOESERVE_INLINE void product(const float* a, int64_t a_stride, const B& b, int64_t column, int64_t begin, int64_t end,
                             float* c, int64_t c_stride, bool fresh) {
    f32 acc[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) acc[r][v] = fresh ? zero() : load(c + r * c_stride + column + v * kWidth);
    }
    auto ahead = b.take_ahead();
    for (int64_t k = begin; k < end; ++k) {
        f32 right[V];
        b.get(k, column, right);
        b.template fetch<V>(ahead);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const f32 left = all(a + r * a_stride + k);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) acc[r][v] = Step::add(acc[r][v], left, right[v]);
        }
    }
    b.give_back(ahead);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(c + r * c_stride + column + v * kWidth, acc[r][v]);
    }
}

constexpr int kStrip = 6;  // rows per product
constexpr int64_t kMany = kRegisters == 32 ? 16 : kStrip;  // with more rows, copying the values pays off
constexpr int64_t kWide = 256;  // wider keys do not fit into the L1 cache, not even in parts

/// Vectors per row: enough independent chains, but no more than fit into registers.
constexpr int strip_vectors(int rows) {
    if (kRegisters == 32) return rows <= 2 ? 8 : 4;
    return rows == 1 ? 8 : rows <= 3 ? 4 : 2;
}

/// Computes `product` for the columns from `column` to `columns`, multiples of kWidth. All vectors
/// but possibly the last are computed at least in pairs.
template <class Step, int R, int V, class B>
inline void strip_of(const float* a, int64_t a_stride, const B& b, int64_t column, int64_t columns, int64_t begin,
                     int64_t end, float* c, int64_t c_stride, bool fresh) {
    for (; column + V * kWidth <= columns; column += V * kWidth)
        product<Step, R, V>(a, a_stride, b, column, begin, end, c, c_stride, fresh);
    if constexpr (V > 1) strip_of<Step, R, V / 2>(a, a_stride, b, column, columns, begin, end, c, c_stride, fresh);
}

template <class Step, class B>
inline void strip(int64_t rows, const float* a, int64_t a_stride, const B& b, int64_t column, int64_t columns,
                  int64_t begin, int64_t end, float* c, int64_t c_stride, bool fresh) {
    const auto of = [&]<int R>(std::integral_constant<int, R>) {
        strip_of<Step, R, strip_vectors(R)>(a, a_stride, b, column, columns, begin, end, c, c_stride, fresh);
    };
    switch (rows) {
        case 1: return of(std::integral_constant<int, 1>());
        case 2: return of(std::integral_constant<int, 2>());
        case 3: return of(std::integral_constant<int, 3>());
        case 4: return of(std::integral_constant<int, 4>());
        case 5: return of(std::integral_constant<int, 5>());
        default: return of(std::integral_constant<int, 6>());
    }
}

/// Packs two vectors of elements into words of two.
template <class E>
MOESERVE_INLINE i32 pairs_at(const char* row) {
#ifdef __AVX512BF16__
    if constexpr (kScaled<E>) return to_pairs(E::load(row), E::load(row + kWidth * E::bytes));
#endif
    return load_words(row);
}

/// Loads elements i, i + 1, ... of a row as words of two; zeros after its end.
template <class E>
MOESERVE_INLINE i32 load_pairs(const char* row, int64_t i, int64_t dim) {
    if (i + 2 * kWidth <= dim) return pairs_at<E>(row + i * E::bytes);
    char part[2 * kWidth * E::bytes] = {};
    if (i < dim) memcpy(part, row + i * E::bytes, (dim - i) * E::bytes);
    return pairs_at<E>(part);
}

/// Transposes elements i to i + 2 * kWidth - 1 of kWidth keys to the columns of `out` from j.
/// load(key) returns them as words of two.
template <class Step, class E, class Load>
MOESERVE_INLINE void pack_pairs(const Paged<E>& keys, int64_t j, int64_t i, const Load& load, float* out, int64_t stride,
                                Ahead& ahead) {
    f32 square[kWidth];
#pragma GCC unroll 16
    for (int r = 0; r < kWidth; ++r) {
        square[r] = floats(load(keys[j + r]));
        if (r * 2 * kWidth * E::bytes % 64 == 0) ahead.fetch();
    }
    transpose(square);
#pragma GCC unroll 16
    for (int r = 0; r < kWidth; ++r) {
#ifdef __AVX512BF16__
        if constexpr (Step::kDims == 2) {
            store(out + (i / 2 + r) * stride + j, floats(swap_halves(words(square[r]))));
            continue;
        }
#endif
        store(out + (i + 2 * r) * stride + j, lower_halves(words(square[r])));
        store(out + (i + 2 * r + 1) * stride + j, upper_halves(words(square[r])));
    }
}

/// Transposes the keys of positions begin .. end - 1, multiples of kWidth, to out [dim / kDims,
/// columns begin .. end - 1].
template <class Step, class E>
inline void pack_keys(const Paged<E>& keys, int64_t dim, int64_t begin, int64_t end, float* out, int64_t stride) {
    Ahead ahead = keys.take_ahead();
    for (int64_t j = begin; j < end; j += kWidth) {
        int64_t i = 0;
        if constexpr (kPairs<E> || Step::kDims == 2) {  // two elements are moved as one word
            const auto whole = [&](const char* key) { return pairs_at<E>(key + i * E::bytes); };
            const auto rest = [&](const char* key) { return load_pairs<E>(key, i, dim); };
            for (; i + 2 * kWidth <= dim; i += 2 * kWidth) pack_pairs<Step>(keys, j, i, whole, out, stride, ahead);
            if (Step::kDims == 2 && i < dim) {
                pack_pairs<Step>(keys, j, i, rest, out, stride, ahead);
                continue;
            }
        }
        for (; i < dim; i += kWidth) {
            f32 square[kWidth];
#pragma GCC unroll 16
            for (int r = 0; r < kWidth; ++r) {
                square[r] = load_at<E>(keys[j + r], i, dim);
                ahead.fetch<E, 1>();
            }
            transpose(square);
#pragma GCC unroll 16
            for (int r = 0; r < kWidth; ++r) store(out + (i + r) * stride + j, square[r]);
        }
    }
    keys.give_back(ahead);
}

/// Copies the values of positions begin .. end - 1 to out [kTile][stride].
template <class E>
inline void pack_values(const Paged<E>& values, int64_t dim, int64_t stride, int64_t begin, int64_t end, float* out) {
    for (int64_t j = begin; j < end; ++j) {
        float* to = out + j * stride;
        int64_t i = 0;
        for (; i < split_columns<E>(dim); i += 2 * kWidth) {
            f32 pair[2];
            values.get(j, i, pair);
            store(to + i, pair[0]);
            store(to + i + kWidth, pair[1]);
        }
        for (; i < dim; i += kWidth) store(to + i, load_at<E>(values[j], i, dim));
    }
}

/// The scales of a tile's keys or values, by which scores or weights are multiplied.
template <class E>
struct Scales {
    Scales(const Paged<E>&, int64_t) {}
    MOESERVE_INLINE void apply(float*, int64_t, int64_t) const {}
};
template <>
struct Scales<Int8> {
    alignas(64) float of[kTile];

    Scales(const Paged<Int8>& heads, int64_t dim) {
        Ahead ahead = heads.take_ahead();
#pragma GCC unroll 16
        for (int64_t j = 0; j < kTile; ++j) {
            memcpy(of + j, heads[j] + dim, sizeof(float));
            if (j % 16 == 0) ahead.fetch();
        }
        heads.give_back(ahead);
    }
    /// Multiplies x[begin..end), and other elements in the same groups of 16.
    MOESERVE_INLINE void apply(float* x, int64_t begin, int64_t end) const {
        for (int64_t j = begin / 16 * 16; j < end; j += kWidth) store(x + j, mul(load(x + j), load(of + j)));
    }
};

/// Computes cap * tanh(x / cap).
MOESERVE_INLINE f32 capped(f32 x, f32 cap) {
    const f32 e = exp(mul(all(2.0f), div(x, cap)));
    return mul(cap, sub(all(1.0f), div(all(2.0f), add(e, all(1.0f)))));
}

MOESERVE_INLINE float exp_one(float x) { return first(exp(all(x))); }

/// The sums of one query row so far: values [padded] and weight, both scaled by e^-largest.
struct RowSums {
    float* values;
    float* largest;  // -infinity at first
    float* weight;   // 0 at first, and at least 1 after a score above -infinity
};

MOESERVE_INLINE RowSums row_sums(float* sums, int64_t padded) { return {sums, sums + padded, sums + padded + 1}; }

MOESERVE_INLINE void clear(RowSums s, int64_t padded) {
    for (int64_t i = 0; i < padded; i += kWidth) store(s.values + i, zero());
    *s.largest = -__builtin_inff();
    *s.weight = 0.0f;
}

/// Computes `softmax_tile` for the columns from .. to - 1, multiples of 16, which may be
/// compile-time constants.
MOESERVE_INLINE void softmax_columns(float* x, int64_t from, int64_t to, RowSums s, int64_t padded) {
    f32 highest = load(x + from);
#pragma GCC unroll 8
    for (int64_t j = from + kWidth; j < to; j += kWidth) highest = max(highest, load(x + j));
    const float before = *s.largest, in_tile = first(max(all(largest(highest)), all(before)));
    *s.largest = in_tile;
    const f32 base = max(all(in_tile), all(-__FLT_MAX__));  // if all scores are -infinity, all weights are 0
    // 16 sums, folded in the same order for every width of vectors.
    constexpr int kParts = 16 / kWidth;
    f32 part[kParts];
    for (int i = 0; i < kParts; ++i) part[i] = zero();
#pragma GCC unroll 4
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

/// Replaces the scores x[begin..end) by exp(score - largest), and others in the same groups of 16
/// by
/// 0. Rescales the sums to the new largest score.
inline void softmax_tile(float* x, int64_t begin, int64_t end, float soft_cap, RowSums s, int64_t padded) {
    const int64_t from = begin / 16 * 16, to = (end + 15) / 16 * 16;
    if (soft_cap != 0.0f)
        for (int64_t j = from; j < to; j += kWidth) store(x + j, capped(load(x + j), all(soft_cap)));
    if (begin == 0 && end == kTile) return softmax_columns(x, 0, kTile, s, padded);
    for (int64_t j = from; j < begin; ++j) x[j] = -__builtin_inff();
    for (int64_t j = end; j < to; ++j) x[j] = -__builtin_inff();
    softmax_columns(x, from, to, s, padded);
}

/// Adds the sums of the next cut to those of the earlier cuts. A cut of which the row sees nothing
/// changes nothing.
inline void merge_partial(RowSums total, RowSums cut, int64_t padded) {
    if (*cut.weight == 0.0f) return;
    const float largest = first(max(all(*cut.largest), all(*total.largest)));
    const float old = exp_one(*total.largest - largest), fresh = exp_one(*cut.largest - largest);
    *total.largest = largest;
    *total.weight = *total.weight * old + *cut.weight * fresh;
    for (int64_t i = 0; i < padded; i += kWidth) {
        const f32 kept = mul(load(total.values + i), all(old));
        store(total.values + i, fma(load(cut.values + i), all(fresh), kept));
    }
}

}  // namespace moeserve::MOESERVE_ISA::attention
