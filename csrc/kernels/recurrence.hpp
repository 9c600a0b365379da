// Gated linear recurrences in tiles of tokens; moeserve/ops/recurrence.py is the specification. Every sum is a chain of
// fused multiply-adds in ascending order, side by side in the lanes of a vector: a result depends neither on the width of
// vectors nor on the tokens that it is computed together with.
#pragma once

#include "kernels/elements.hpp"
#include "kernels/math.hpp"
#include "kernels/recurrence_args.hpp"

namespace moeserve::MOESERVE_ISA::recurrent {

constexpr size_t kTile = kStateTile;

/// y[r][c] = sum over i of x[r][i] * a[i][c], for `vectors` vectors of columns; whole: none of them is a row's last part.
template <int rows, int vectors, bool whole>
MOESERVE_INLINE void chains(const float* x, size_t x_stride, const float* a, size_t a_stride, size_t depth, size_t left,
                            float* y, size_t y_stride) {
    f32 sums[rows][vectors];
    for (int r = 0; r < rows; ++r)
        for (int v = 0; v < vectors; ++v) sums[r][v] = zero();
    for (size_t i = 0; i < depth; ++i) {
        f32 columns[vectors];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            columns[v] = whole ? load(a + i * a_stride + v * kWidth) : load_at<Float32>(bytes_of(a + i * a_stride), 0, left);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            const f32 factor = all(x + r * x_stride + i);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; ++v) sums[r][v] = fma(factor, columns[v], sums[r][v]);
        }
    }
    for (int r = 0; r < rows; ++r)
        for (int v = 0; v < vectors; ++v) store(y + r * y_stride + v * kWidth, sums[r][v]);
}

/// `chains` of all columns: as many vectors at a time as are there.
template <int rows, int vectors>
inline void chains_of(const float* x, size_t x_stride, const float* a, size_t a_stride, size_t depth, size_t width,
                      float* y, size_t y_stride) {
    size_t c = 0;
    for (; c + vectors * kWidth <= width; c += vectors * kWidth) {
        chains<rows, vectors, true>(x, x_stride, a + c, a_stride, depth, 0, y + c, y_stride);
    }
    if (c == width) return;
    if constexpr (vectors > 1) {
        chains_of<rows, vectors / 2>(x, x_stride, a + c, a_stride, depth, width - c, y + c, y_stride);
    } else {
        chains<rows, 1, false>(x, x_stride, a + c, a_stride, depth, width - c, y + c, y_stride);
    }
}

/// y = x A for x [rows, depth] and A [depth, width]; y has room for whole vectors.
inline void product(const float* x, size_t x_stride, size_t rows, const float* a, size_t a_stride, size_t depth,
                    size_t width, float* y, size_t y_stride) {
    constexpr int kSums = kRegisters / 2, kMost = kRegisters / 4;  // of registers; rows that share a load of A
    size_t r = 0;
    const auto next = [&]<int count>(std::integral_constant<int, count>) {
        constexpr int kVectors = kSums / count < 8 ? kSums / count : 8;
        for (; r + count <= rows; r += count) {
            chains_of<count, kVectors>(x + r * x_stride, x_stride, a, a_stride, depth, width, y + r * y_stride, y_stride);
        }
    };
    if constexpr (kMost >= 8) next(std::integral_constant<int, 8>());
    next(std::integral_constant<int, 4>());
    next(std::integral_constant<int, 2>());
    next(std::integral_constant<int, 1>());
}

/// to[i][r] = rows[r][i], up to whole 16 of i; 0 beyond the width and where there is no row.
inline void transposed(const float* const (&rows)[kTile], size_t width, float* to) {
    for (size_t r = 0; r < kTile; r += kWidth) {
        for (size_t i = 0; i < width; i += kWidth) {
            f32 square[kWidth];
#pragma GCC unroll 16
            for (size_t j = 0; j < kWidth; ++j) {
                square[j] = rows[r + j] ? load_at<Float32>(bytes_of(rows[r + j]), i, width) : zero();
            }
            transpose(square);
#pragma GCC unroll 16
            for (size_t j = 0; j < kWidth; ++j) store(to + (i + j) * kTile + r, square[j]);
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

/// A state, or some columns of it.
struct State {
    float* at;
    size_t stride;  // from one row to the next
};

/// Some columns of one head's values, of one request. delta: there is a beta.
template <bool delta>
struct Piece {
    const RecurrenceArgs& args;
    const size_t head, group, from, width;  // columns [from, from + width) of the values
    const size_t deep, decays, wide;        // d, D and width, rounded up
    const bool keeps;                       // what all pieces of a head have in common
    const bool keeps_keys;                  // and all heads of a group
    float *keys, *since_keys, *sums, *sum_rows, *updates;  // of a tile: k and s by columns [.., 16], s and u by rows
    float *rows, *products;                 // queries and keys from the border on, and their products with the state
    float *weights, *key_weights;           // of each token's queries and keys with the tile's keys, [16, 16]
    float *growth, *own;                    // of the state up to the tile's last token; a state that no cache keeps

    Piece(const RecurrenceArgs& args, size_t head, size_t part, float* memory)
        : args(args), head(head), group(head / (args.heads / args.groups)), from(part * args.columns),
          width(args.v - from < args.columns ? args.v - from : args.columns), deep(args.padded(args.d)),
          decays(args.padded(args.decays)), wide(args.columns), keeps(part == 0),
          keeps_keys(keeps && head % (args.heads / args.groups) == 0) {
        const auto take = [&](size_t count) { return memory += count, memory - count; };
        keys = take(kTile * deep);
        since_keys = take(kTile * deep);
        sums = take(kTile * decays);
        sum_rows = take(kTile * decays);
        updates = take(kTile * wide);
        rows = take(2 * kTile * deep);
        products = take(2 * kTile * wide);
        weights = take(kTile * kTile);
        key_weights = take(kTile * kTile);
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

    /// Takes the first `cached` rows of a tile from the cache, and `fresh` keys and decays of the call from `step` on.
    void take_rows(int64_t block, int64_t place, size_t cached, size_t step, size_t fresh) const {
        const float *key_at[kTile] = {}, *sum_at[kTile] = {};
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
                key_at[r] = args.k + at * args.k_stride + group * args.d;
                for (size_t i = 0; i < args.decays; ++i) s[i] = r ? (s - decays)[i] + decay[i] : decay[i];
            }
        }
        transposed(key_at, args.d, keys);
        transposed(sum_at, args.decays, sums);
    }

    /// The state at the next border from a full tile and the state at its own; `from` and `to` may be the same.
    void next_state(State from, State to) const {
        const float* last = sum_rows + (kTile - 1) * decays;
        for (size_t i = 0; i < deep; i += kWidth) {
            store(growth + i, exp(args.decays == 1 ? all(last) : load_at<Float32>(bytes_of(last), i, args.decays)));
        }
        for (size_t i = 0; i < args.d; ++i) {
            const size_t decay = args.decays == 1 ? 0 : i;
            for (size_t r = 0; r < kTile; r += kWidth) {
                const f32 since = exp(sub(all(last + decay), load(sums + decay * kTile + r)));
                store(since_keys + i * kTile + r, mul(load(keys + i * kTile + r), since));
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
                const f32 key = all(since_keys + (i + n) * kTile + r);
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

    /// x exp(s): what a query or key meets the state with.
    MOESERVE_INLINE void grown(const float* x, const float* s, float* to) const {
        for (size_t i = 0; i < args.d; i += kWidth) {
            const f32 factor = exp(args.decays == 1 ? all(s) : load_at<Float32>(bytes_of(s), i, args.decays));
            store(to + i, mul(load_at<Float32>(bytes_of(x), i, args.d), factor));
        }
    }

    /// The weights of the tile's tokens up to each of the call's; those of later ones mean nothing.
    void weigh(const StateTile& tile, const float* q, const float* k) const {
        if (args.decays == 1) {
            product(q, args.q_stride, tile.count, keys, kTile, args.d, kTile, weights, kTile);
            if (delta) product(k, args.k_stride, tile.count, keys, kTile, args.d, kTile, key_weights, kTile);
        }
        for (size_t t = 0; t < tile.count; ++t) {
            const float *s = sum_rows + (tile.first + t) * decays, *query = q + t * args.q_stride, *key = k + t * args.k_stride;
            float *of_query = weights + t * kTile, *of_key = key_weights + t * kTile;
            for (size_t r = 0; r <= tile.first + t; r += kWidth) {
                f32 sum = zero(), key_sum = zero();
                if (args.decays == 1) {
                    const f32 since = exp(sub(all(s), load(sums + r)));
                    sum = mul(load(of_query + r), since);
                    if (delta) key_sum = mul(load(of_key + r), since);
                } else {
                    for (size_t i = 0; i < args.d; ++i) {
                        const f32 since = exp(sub(all(s + i), load(sums + i * kTile + r)));
                        const f32 weight = mul(since, load(keys + i * kTile + r));
                        sum = fma(all(query + i), weight, sum);
                        if (delta) key_sum = fma(all(key + i), weight, key_sum);
                    }
                }
                store(of_query + r, sum);
                if (delta) store(of_key + r, key_sum);
            }
            of_query[tile.first + t] = dot(query, key, args.d);
        }
    }

    /// u and o of the call's tokens, one after the other, in `vectors` vectors of columns.
    template <int vectors>
    MOESERVE_INLINE void recur(const StateTile& tile, size_t c) const {
        for (size_t t = 0; t < tile.count; ++t) {
            const size_t row = tile.first + t, step = tile.token + t;
            const char* value = bytes_of(args.values + step * args.v_stride + head * args.v + from);
            const float *weight = weights + t * kTile, *key_weight = key_weights + t * kTile;
            f32 u[vectors], o[vectors];
            for (int v = 0; v < vectors; ++v) {
                const size_t at = c + v * kWidth;
                u[v] = load_at<Float32>(value, at, width);
                if (delta) u[v] = sub(u[v], load(products + (tile.count + t) * wide + at));
                o[v] = load(products + t * wide + at);
            }
            for (size_t r = 0; r < row; ++r) {
                for (int v = 0; v < vectors; ++v) {
                    const f32 earlier = load(updates + r * wide + c + v * kWidth);
                    if (delta) u[v] = fnma(all(key_weight + r), earlier, u[v]);
                    o[v] = fma(all(weight + r), earlier, o[v]);
                }
            }
            for (int v = 0; v < vectors; ++v) {
                const size_t at = c + v * kWidth;
                if (delta) u[v] = mul(u[v], all(args.beta + step * args.beta_stride + head));
                store(updates + row * wide + at, u[v]);
                if (tile.block) store_at<Float32>(bytes_of(update_of(token(tile.block, tile.place, row))), at, width, u[v]);
                o[v] = fma(all(weight + row), u[v], o[v]);
                store_at<Float32>(bytes_of(args.out + (step * args.heads + head) * args.v + from), at, width, o[v]);
            }
        }
    }

    /// The state at the tile's border. state: that of the tile before; carried: which this call has computed.
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
        const float* q = args.q + tile.token * args.q_stride + group * args.d;
        const float* k = args.k + tile.token * args.k_stride + group * args.d;
        take_rows(tile.block, tile.place, tile.first, tile.token, tile.count);
        for (size_t t = 0; t < tile.count; ++t) {
            const float* s = sum_rows + (tile.first + t) * decays;
            grown(q + t * args.q_stride, s, rows + t * deep);
            if (delta) grown(k + t * args.k_stride, s, rows + (tile.count + t) * deep);
            if (!tile.block) continue;
            const size_t at = token(tile.block, tile.place, tile.first + t);
            if (keeps) memcpy(sum_of(at), s, args.decays * sizeof(float));
            if (keeps_keys) memcpy(key_of(at), k + t * args.k_stride, args.d * sizeof(float));
        }
        product(rows, deep, tile.count * (delta ? 2 : 1), state.at, state.stride, args.d, width, products, wide);
        weigh(tile, q, k);
        size_t c = 0;
        for (; c + 4 * kWidth <= width; c += 4 * kWidth) recur<4>(tile, c);
        for (; c < width; c += kWidth) recur<1>(tile, c);
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
