// Gated linear recurrences in tiles of tokens; moeserve/ops/recurrence.py is the specification.
// Every sum is a chain of fused multiply-adds in ascending order, with different sums in the lanes
// of a vector. So a result depends neither on the width of vectors nor on the other tokens of the
// call.
#pragma once

#include <type_traits>

#include "kernels/elements.hpp"
#include "kernels/math.hpp"
#include "kernels/recurrence_args.hpp"

namespace moeserve::MOESERVE_ISA::recurrent {

constexpr size_t kTile = kStateTile;

/// The stride of the columns of a tile's queries and keys: 16 of queries, then 16 of keys.
constexpr size_t kBoth = 2 * kTile;

/// Computes y[16 n + t][c] = sum over i of x[i][16 n + t] * a[i][c] for n < kinds and t < tokens,
/// in `vectors` vectors of columns. whole: all vectors are full. x: [depth, 32].
template <int kinds, int tokens, int vectors, bool whole>
MOESERVE_INLINE void chains(const float* x, const float* a, size_t a_stride, size_t depth, size_t left, float* y,
                            size_t y_stride) {
    f32 sums[kinds][tokens][vectors];
    for (auto& kind : sums)
        for (auto& token : kind)
            for (f32& sum : token) sum = zero();
    for (size_t i = 0; i < depth; ++i, x += kBoth, a += a_stride) {
        f32 columns[vectors];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) columns[v] = whole ? load(a + v * kWidth) : load_at<Float32>(bytes_of(a), 0, left);
#pragma GCC unroll 2
        for (int n = 0; n < kinds; ++n) {
#pragma GCC unroll 8
            for (int t = 0; t < tokens; ++t) {
                const f32 factor = all(x + n * kTile + t);
#pragma GCC unroll 8
                for (int v = 0; v < vectors; ++v) sums[n][t][v] = fma(factor, columns[v], sums[n][t][v]);
            }
        }
    }
    for (int n = 0; n < kinds; ++n)
        for (int t = 0; t < tokens; ++t)
            for (int v = 0; v < vectors; ++v) store(y + (n * kTile + t) * y_stride + v * kWidth, sums[n][t][v]);
}

/// Computes `chains` for all columns, with as many vectors at a time as possible.
template <int kinds, int tokens, int vectors>
inline void chains_of(const float* x, const float* a, size_t a_stride, size_t depth, size_t width, float* y,
                      size_t y_stride) {
    size_t c = 0;
    for (; c + vectors * kWidth <= width; c += vectors * kWidth) {
        chains<kinds, tokens, vectors, true>(x, a + c, a_stride, depth, 0, y + c, y_stride);
    }
    if (c == width) return;
    if constexpr (vectors > 1) {
        chains_of<kinds, tokens, vectors / 2>(x, a + c, a_stride, depth, width - c, y + c, y_stride);
    } else {
        chains<kinds, tokens, 1, false>(x, a + c, a_stride, depth, width - c, y + c, y_stride);
    }
}

/// Multiplies the queries, or queries and keys, of `tokens` tokens, x [depth, 32], by A [depth,
/// width]. The result y [32, width] must have room for whole vectors.
template <int kinds>
inline void product(const float* x, size_t count, const float* a, size_t a_stride, size_t depth, size_t width, float* y,
                    size_t y_stride) {
    constexpr int kMost = kRegisters / 4 / kinds;  // tokens that share a load of A
    size_t t = 0;
    const auto next = [&]<int tokens>(std::integral_constant<int, tokens>) {
        constexpr int kFree = kRegisters / 2 / kinds / tokens, kVectors = kFree < 8 ? kFree : 8;
        for (; t + tokens <= count; t += tokens) {
            chains_of<kinds, tokens, kVectors>(x + t, a, a_stride, depth, width, y + t * y_stride, y_stride);
        }
    };
    if constexpr (kMost >= 8) next(std::integral_constant<int, 8>());
    if constexpr (kMost >= 4) next(std::integral_constant<int, 4>());
    next(std::integral_constant<int, 2>());
    next(std::integral_constant<int, 1>());
}

/// Transposes: to[i][r] = rows[r][i], with i padded to a multiple of 16. Missing rows and elements
/// are 0. `to` has rows of 16, `stride` apart.
inline void transposed(const float* const (&rows)[kTile], size_t width, float* to, size_t stride) {
    for (size_t r = 0; r < kTile; r += kWidth) {
        for (size_t i = 0; i < width; i += kWidth) {
            f32 square[kWidth];
#pragma GCC unroll 16
            for (size_t j = 0; j < kWidth; ++j) {
                square[j] = rows[r + j] ? load_at<Float32>(bytes_of(rows[r + j]), i, width) : zero();
            }
            transpose(square);
#pragma GCC unroll 16
            for (size_t j = 0; j < kWidth; ++j) store(to + (i + j) * stride + r, square[j]);
        }
    }
}

MOESERVE_INLINE float dot(const float* x, const float* y, size_t width) {
    Sums sums;
    for (size_t i = 0; i < width; i += 32) {
        for (int p = 0; p < Sums::kParts; ++p) {
            const size_t at = i + p * kWidth;
            sums.part[p] = fma(load_at<Float32>(bytes_of(x), at, width), load_at<Float32>(bytes_of(y), at, width), sums.part[p]);
        }
    }
    return sums.total();
}

/// A state or some of its columns.
struct State {
    float* at;
    size_t stride;  // from one row to the next
};

/// A piece: some columns of one head's values, of one request. delta: use the delta rule (beta).
template <bool delta>
struct Piece {
    const RecurrenceArgs& args;
    const size_t head, group, from, width;  // columns [from, from + width) of the values
    const size_t deep, wide;                // d and the width, rounded up
    const size_t decays;                    // stride of sum_rows
    const bool keeps;                       // store what all pieces of a head share
    const bool keeps_keys;                  // store what all heads of a group share
    float *both, *grown;       // columns of a tile's q and k [d, 32]; the same times exp(s)
    float *sum_rows, *sums;    // s by rows, and by columns [D, 16]
    float *updates;            // u [16, width]
    float *products;           // products of queries and keys with the state, [32, width]
    float *weights;            // products of queries and keys with the tile's keys, [32, 16]
    float *since, *growth;     // decays of keys and state up to the tile's end, [d, 16] and [d]
    float *own;                // a state that is not in the cache

    Piece(const RecurrenceArgs& args, size_t head, size_t part, float* memory)
        : args(args), head(head), group(head / (args.heads / args.groups)), from(part * args.columns),
          width(args.v - from < args.columns ? args.v - from : args.columns), deep(args.padded(args.d)),
          wide(args.columns), decays(args.decays == 1 ? 1 : args.padded(args.decays)), keeps(part == 0),
          keeps_keys(keeps && head % (args.heads / args.groups) == 0) {
        const auto take = [&](size_t count) { return memory += count, memory - count; };
        both = take(kBoth * deep);
        grown = take(kBoth * deep);
        sum_rows = take(kTile * decays);
        sums = args.decays == 1 ? sum_rows : take(kTile * decays);
        updates = take(kTile * wide);
        products = take(kBoth * wide);
        weights = take(kBoth * kTile);
        since = take(kTile * deep);
        growth = take(deep);
        own = take(deep * wide);
    }

    MOESERVE_INLINE State cached(int64_t block, int64_t place) const {
        const size_t at = (block * args.plan.per_block + place) * args.heads + head;
        return {args.states + at * args.d * args.v + from, args.v};
    }
    MOESERVE_INLINE size_t token(int64_t block, int64_t place, size_t r) const {
        return (block * args.plan.per_block + place) * kTile + r;
    }
    MOESERVE_INLINE float* key_of(size_t token) const { return args.keys + (token * args.groups + group) * args.d; }
    MOESERVE_INLINE float* sum_of(size_t token) const { return args.sums + (token * args.heads + head) * args.decays; }
    MOESERVE_INLINE float* update_of(size_t token) const {
        return args.updates + (token * args.heads + head) * args.v + from;
    }

    /// Loads the first `cached` rows of a tile from the cache, and `fresh` rows of the call, from
    /// `step`.
    void take_rows(int64_t block, int64_t place, size_t cached, size_t step, size_t fresh) const {
        const float *query_at[kTile] = {}, *key_at[kTile] = {}, *sum_at[kTile] = {};
        for (size_t r = 0; r < cached + fresh; ++r) {
            float* s = sum_rows + r * decays;
            sum_at[r] = s;
            if (r < cached) {
                const size_t at = token(block, place, r);
                key_at[r] = key_of(at);
                memcpy(s, sum_of(at), args.decays * sizeof(float));
                memcpy(updates + r * wide, update_of(at), width * sizeof(float));
            } else {
                const size_t at = step + r - cached;
                const float* decay = args.log_decay + at * args.decay_stride + head * args.decays;
                query_at[r] = args.q + at * args.q_stride + group * args.d;
                key_at[r] = args.k + at * args.k_stride + group * args.d;
                for (size_t i = 0; i < args.decays; ++i) s[i] = r ? (s - decays)[i] + decay[i] : decay[i];
            }
        }
        if (fresh) transposed(query_at, args.d, both, kBoth);
        transposed(key_at, args.d, both + kTile, kBoth);
        if (args.decays > 1) transposed(sum_at, args.decays, sums, kTile);
    }

    /// Computes the state at the next border from the state at the tile's border and the full tile.
    /// `from` and `to` may be the same.
    void next_state(State from, State to) const {
        const float* last = sum_rows + (kTile - 1) * decays;
        for (size_t i = 0; i < deep; i += kWidth) {
            store(growth + i, exp(args.decays == 1 ? all(last) : load_at<Float32>(bytes_of(last), i, args.decays)));
        }
        for (size_t i = 0; i < args.d; ++i) {
            const size_t decay = args.decays == 1 ? 0 : i;
            for (size_t r = 0; r < kTile; r += kWidth) {
                const f32 factor = exp(sub(all(last + decay), load(sums + decay * kTile + r)));
                store(since + i * kTile + r, mul(load(both + i * kBoth + kTile + r), factor));
            }
        }
        constexpr int kVectors = kRegisters / 8;
        size_t c = 0;
        for (; c + kVectors * kWidth <= width; c += kVectors * kWidth) {
            size_t i = 0;
            for (; i + 4 <= args.d; i += 4) add_rows<4, kVectors, true>(from, to, i, c);
            for (; i < args.d; ++i) add_rows<1, kVectors, true>(from, to, i, c);
        }
        for (; c < width; c += kWidth)
            for (size_t i = 0; i < args.d; ++i) add_rows<1, 1, false>(from, to, i, c);
    }

    template <int count, int vectors, bool whole>
    MOESERVE_INLINE void add_rows(State from, State to, size_t i, size_t c) const {
        f32 state[count][vectors];
        for (int n = 0; n < count; ++n) {
            const float* row = from.at + (i + n) * from.stride;
            const f32 grown = all(growth + i + n);
            for (int v = 0; v < vectors; ++v) {
                state[n][v] = mul(grown, whole ? load(row + c + v * kWidth) : load_at<Float32>(bytes_of(row), c, width));
            }
        }
        for (size_t r = 0; r < kTile; ++r) {
            f32 u[vectors];
            for (int v = 0; v < vectors; ++v) u[v] = load(updates + r * wide + c + v * kWidth);
            for (int n = 0; n < count; ++n) {
                const f32 key = all(since + (i + n) * kTile + r);
                for (int v = 0; v < vectors; ++v) state[n][v] = fma(key, u[v], state[n][v]);
            }
        }
        for (int n = 0; n < count; ++n) {
            float* row = to.at + (i + n) * to.stride;
            for (int v = 0; v < vectors; ++v) {
                if (whole) {
                    store(row + c + v * kWidth, state[n][v]);
                } else {
                    store_at<Float32>(bytes_of(row), c, width, state[n][v]);
                }
            }
        }
    }

    /// Multiplies the queries and keys by exp(s), for products with the state.
    void grow() const {
        const size_t step = args.decays == 1 ? 0 : kTile;
        for (size_t r = 0; r < kTile; r += kWidth) {
            f32 factor = zero();
            for (size_t i = 0; i < args.d; ++i) {
                if (i == 0 || step) factor = exp(load(sums + i * step + r));
                const float* x = both + i * kBoth + r;
                float* to = grown + i * kBoth + r;
                store(to, mul(load(x), factor));
                if (delta) store(to + kTile, mul(load(x + kTile), factor));
            }
        }
    }

    /// Computes the products of each new token's query or key with the keys of the tile's tokens.
    /// Products with later tokens are not used.
    void weigh(const StateTile& tile) const {
        const float* keys = both + kTile;
        if (args.decays == 1) {
            product<delta ? 2 : 1>(both + tile.first, tile.count, keys, kBoth, args.d, kTile, weights, kTile);
        }
        for (size_t t = 0; t < tile.count; ++t) {
            const size_t row = tile.first + t;
            const float *s = sum_rows + row * decays, *x = both + row;
            float *of_query = weights + t * kTile, *of_key = of_query + kTile * kTile;
            float own = of_query[row];  // a token's own key does not decay
            if (args.decays > 1) {
                const size_t at = tile.token + t;
                own = dot(args.q + at * args.q_stride + group * args.d, args.k + at * args.k_stride + group * args.d, args.d);
            }
            for (size_t r = 0; r <= row; r += kWidth) {
                f32 sum = zero(), key_sum = zero();
                if (args.decays == 1) {
                    const f32 factor = exp(sub(all(s), load(sums + r)));
                    sum = mul(load(of_query + r), factor);
                    if (delta) key_sum = mul(load(of_key + r), factor);
                } else {
                    for (size_t i = 0; i < args.d; ++i) {
                        const f32 factor = exp(sub(all(s + i), load(sums + i * kTile + r)));
                        const f32 weight = mul(factor, load(keys + i * kBoth + r));
                        sum = fma(all(x + i * kBoth), weight, sum);
                        if (delta) key_sum = fma(all(x + i * kBoth + kTile), weight, key_sum);
                    }
                }
                store(of_query + r, sum);
                if (delta) store(of_key + r, key_sum);
            }
            of_query[row] = own;
        }
    }

    /// Computes u and o of the new tokens, one after the other, in `vectors` vectors of columns.
    template <int vectors, bool whole>
    MOESERVE_INLINE void recur(const StateTile& tile, size_t c) const {
        const auto get = [&](const float* row, int v) __attribute__((always_inline)) {
            return whole ? load(row + c + v * kWidth) : load_at<Float32>(bytes_of(row), c, width);
        };
        const auto put = [&](float* row, int v, f32 x) __attribute__((always_inline)) {
            if (whole) return store(row + c + v * kWidth, x);
            store_at<Float32>(bytes_of(row), c, width, x);
        };
        for (size_t t = 0; t < tile.count; ++t) {
            const size_t row = tile.first + t, step = tile.token + t;
            const float* value = args.values + step * args.v_stride + head * args.v + from;
            const float *weight = weights + t * kTile, *key_weight = weight + kTile * kTile;
            f32 u[vectors], o[vectors];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
                const float* product = products + t * wide + c + v * kWidth;
                u[v] = get(value, v);
                if (delta) u[v] = sub(u[v], load(product + kTile * wide));
                o[v] = load(product);
            }
            const float* earlier = updates + c;
            for (size_t r = 0; r < row; ++r, earlier += wide) {
                const f32 of_query = all(weight + r), of_key = all(key_weight + r);
#pragma GCC unroll 4
                for (int v = 0; v < vectors; ++v) {
                    const f32 update = load(earlier + v * kWidth);
                    if (delta) u[v] = fnma(of_key, update, u[v]);
                    o[v] = fma(of_query, update, o[v]);
                }
            }
            const f32 beta = delta ? all(args.beta + step * args.beta_stride + head) : zero();
            float* out = args.out + (step * args.heads + head) * args.v + from;
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
                if (delta) u[v] = mul(u[v], beta);
                store(updates + row * wide + c + v * kWidth, u[v]);
                if (tile.block) put(update_of(token(tile.block, tile.place, row)), v, u[v]);
                put(out, v, fma(all(weight + row), u[v], o[v]));
            }
        }
    }

    /// Returns the state at the tile's border. state: that of the previous tile. carried: this call
    /// has computed the previous tile.
    State begin(const StateTile& tile, State state, bool carried) const {
        const State to = tile.block ? cached(tile.block, tile.place) : State{own, wide};
        if (tile.first) return cached(tile.block, tile.place);
        if (tile.before_block < 0) {
            for (size_t i = 0; i < args.d; ++i) memset(to.at + i * to.stride, 0, width * sizeof(float));
            return to;
        }
        if (!carried) {
            take_rows(tile.before_block, tile.before_place, kTile, 0, 0);
            state = cached(tile.before_block, tile.before_place);
        }
        next_state(state, to);
        return to;
    }

    void compute(const StateTile& tile, State state) const {
        take_rows(tile.block, tile.place, tile.first, tile.token, tile.count);
        for (size_t t = 0; t < (tile.block ? tile.count : 0); ++t) {
            const size_t at = token(tile.block, tile.place, tile.first + t);
            const float* k = args.k + (tile.token + t) * args.k_stride + group * args.d;
            if (keeps) memcpy(sum_of(at), sum_rows + (tile.first + t) * decays, args.decays * sizeof(float));
            if (keeps_keys) memcpy(key_of(at), k, args.d * sizeof(float));
        }
        grow();
        product<delta ? 2 : 1>(grown + tile.first, tile.count, state.at, state.stride, args.d, width, products, wide);
        weigh(tile);
        size_t c = 0;
        for (; c + 4 * kWidth <= width; c += 4 * kWidth) recur<4, true>(tile, c);
        for (; c < width; c += kWidth) recur<1, false>(tile, c);
    }

    void run(size_t begin_tile, size_t end_tile) const {
        State state{own, wide};
        for (size_t i = begin_tile; i < end_tile; ++i) {
            const StateTile& tile = args.plan.tiles[i];
            state = begin(tile, state, i > begin_tile);
            compute(tile, state);
        }
    }
};

/// Computes pieces of RecurrenceArgs.
inline void recurrence(void* call, size_t begin, size_t end, int worker) {
    const FlushSubnormals flush;
    const auto& args = *static_cast<const RecurrenceArgs*>(call);
    float* memory = args.scratch + worker * args.scratch_floats();
    for (size_t piece = begin; piece < end; ++piece) {
        const size_t part = piece % args.parts(), head = piece / args.parts() % args.heads;
        const size_t* run = args.plan.runs + piece / args.parts() / args.heads;
        if (args.beta) {
            Piece<true>(args, head, part, memory).run(run[0], run[1]);
        } else {
            Piece<false>(args, head, part, memory).run(run[0], run[1]);
        }
    }
}

}  // namespace moeserve::MOESERVE_ISA::recurrent
