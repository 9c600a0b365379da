// Paged attention for decode and prefill. attention_partial computes (largest score, sum of
// weights, weighted values) of one cut of a context, by an online softmax over its tiles.
// merge_partial adds the next cut. ops/attention.py has the same two steps.
//
// The bits of a query's result depend only on the query and its context. Positions that it does not
// see have weight exactly 0, and their values are never multiplied, so unwritten KV slots may
// contain anything.
#pragma once

#include "kernels/attention_plan.hpp"
#include "kernels/attention_tile.hpp"

namespace moeserve::MOESERVE_ISA::attention {

/// Scratch memory of a piece.
struct AttentionRows {
    float* q;       // [rows, padded]
    float* partial;  // [rows, sums]: sums of one cut
    float* total;   // [rows, sums]: sums of all cuts so far
    float* p;       // [rows of a KV head, kTile]
    float* keys;    // [padded, kTile]
    float* values;  // [kTile, v_stride]
};

MOESERVE_INLINE AttentionRows attention_rows(const AttentionShape& shape, int64_t rows, float* at) {
    AttentionRows s{};
    s.q = at;
    s.partial = s.q + rows * shape.padded();
    s.total = s.partial + rows * shape.sums();
    s.p = s.total + rows * shape.sums();
    s.keys = s.p + rows * kTile;
    s.values = s.keys + shape.padded() * kTile;
    return s;
}

MOESERVE_INLINE int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
MOESERVE_INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

/// The part of a tile that the queries of a block see. Query i sees columns first(i) .. last(i) -
/// 1.
struct TileView {
    int64_t start, position, window, begin;  // begin: first column of their section

    MOESERVE_INLINE TileView(int64_t tile, const QueryBlock& block, const AttentionShape& shape)
        : start(tile), position(block.position), window(shape.window), begin(at_least(0, block.begin - tile)) {}

    MOESERVE_INLINE int64_t first(int64_t i) const { return at_least(begin, position + i - window + 1 - start); }
    MOESERVE_INLINE int64_t last(int64_t i) const { return at_most(kTile, position + i + 1 - start); }
    /// The queries that see any column: from .. to - 1.
    MOESERVE_INLINE int64_t from() const { return at_least(0, start - position); }
    MOESERVE_INLINE int64_t to(int64_t count) const {
        return at_most(count, start + kTile - 1 + window - position);
    }
};

/// Loads queries: widened to floats, or as pairs if products take two elements at a time.
template <class Step, class E>
inline void copy_queries(const AttentionCall& call, const QueryBlock& block, float* q) {
    const int64_t dim = call.shape.dim, group = call.shape.group(), padded = call.shape.padded(), bytes = E::bytes;
    for (int64_t head = block.head; head < block.head + block.heads; ++head) {
        for (int64_t i = 0; i < block.count; ++i) {
            const int64_t start = (block.token + i) * call.q_stride + head * group * dim;
            const char* from = static_cast<const char*>(call.q) + start * bytes;
            for (int64_t h = 0; h < group; ++h, q += padded, from += dim * bytes) {
                for (int64_t d = 0; d < padded; d += kWidth * Step::kDims) {
#ifdef __AVX512BF16__
                    if constexpr (Step::kDims == 2) {
                        store(q + d / 2, floats(swap_halves(load_pairs<E>(from, d, dim))));
                        continue;
                    }
#endif
                    store(q + d, load_at<E>(from, d, dim));
                }
            }
        }
    }
}

/// Multiplies p [rows, columns first..last) by the values. The range that a row sees begins and
/// ends no earlier than the range of the row before, so the rows that see a position are adjacent.
template <class Values>
inline void add_values(const AttentionShape& shape, const TileView& view, int64_t row, int64_t count, const float* p,
                       Values values, float* sums) {
    const int64_t group = shape.group(), columns = (shape.v_dim + kWidth - 1) / kWidth * kWidth, stride = shape.sums();
    const int64_t end = view.last((row + count - 1) / group);
    int64_t low = 0, high = 0;  // rows low .. high - 1 of the strip see position j
    for (int64_t j = view.first(row / group); j < end;) {
        while (view.last((row + low) / group) <= j) ++low;
        while (high < count && view.first((row + high) / group) <= j) ++high;
        int64_t next = view.last((row + low) / group);
        if (high < count) next = at_most(next, view.first((row + high) / group));
        if (low < high) {
            strip<OneByOne>(high - low, p + (row + low) * kTile, kTile, values, 0, columns, j, next,
                            sums + (row + low) * stride, stride, false);
        }
        j = next;
    }
}

/// Attends with the rows of one KV head to one tile. q and sums begin at the head's first row.
template <class Step, class E>
inline void attend_tile(const AttentionCall& call, const TileView& view, int64_t count, const Paged<E>& keys,
                        const Paged<E>& values, const AttentionRows& s, const float* q, float* sums) {
    const AttentionShape& shape = call.shape;
    const int64_t group = shape.group(), padded = shape.padded(), v_padded = shape.v_padded();
    const int64_t chain = (shape.dim + Step::kDims - 1) / Step::kDims;
    const int64_t from = view.from(), to = view.to(count);
    const int64_t first = view.first(from), last = view.last(to - 1);
    const int64_t begin = first / 16 * 16, end = (last + 15) / 16 * 16, end_row = to * group;
    // Few rows read the keys in parts that stay in the L1 cache, and read the values without
    // copying them.
    const bool many = (to - from) * group > (shape.dim > kWide ? kStrip : kMany), copy = many || shape.v_dim % kWidth != 0;
    const bool whole = many || Step::kDims == 2;
    const Scales<E> key_scales(keys, shape.dim), value_scales(values, shape.v_dim);
    if (whole) pack_keys<Step>(keys, shape.dim, begin, end, s.keys, kTile);
    if (copy) pack_values<E>(values, shape.v_dim, shape.v_stride(), first, last, s.values);
    const int64_t rows_left = end_row - from * group, strips = (rows_left + kStrip - 1) / kStrip;
    const int64_t most = (rows_left + strips - 1) / strips;
    for (int64_t row = from * group; row < end_row; row += most) {
        const int64_t rows = at_most(most, end_row - row);
        const int64_t left = view.first(row / group) / 16 * 16;
        const int64_t right = (view.last((row + rows - 1) / group) + 15) / 16 * 16;
        for (int64_t column = left, part; column < right; column += part) {
            part = whole ? right - left : at_most(32, right - column);
            const Even columns{whole ? s.keys : s.keys - column, whole ? kTile : 32};
            if (!whole) pack_keys<Step>(keys, shape.dim, column, column + part, s.keys - column, 32);
            strip<Step>(rows, q + row * padded, padded, columns, column, column + part, 0, chain, s.p + row * kTile,
                        kTile, true);
        }
        for (int64_t r = row, i = row / group, next = (i + 1) * group; r < row + rows; ++r) {
            if (r == next) ++i, next += group;
            float* p = s.p + r * kTile;
            const int64_t low = view.first(i), high = view.last(i);
            key_scales.apply(p, low, high);
            softmax_tile(p, low, high, call.soft_cap, row_sums(sums + r * shape.sums(), v_padded), v_padded);
            value_scales.apply(p, low, high);
        }
        if (copy) add_values(shape, view, row, rows, s.p, Even{s.values, shape.v_stride()}, sums);
        else add_values(shape, view, row, rows, s.p, values, sums);
    }
}

/// The addresses of the keys and values of one tile and KV head.
struct TileRows {
    const char *keys[kTile], *values[kTile];
};

/// Finds the addresses for the piece's first head. Columns that no query sees get the address of a
/// column that one sees.
inline void find_rows(const AttentionCall& call, const QueryBlock& block, int64_t tile, TileRows& rows) {
    const AttentionShape& shape = call.shape;
    const TileView view(tile, block, shape);
    const int64_t* table = call.tables + block.request * call.table_width;
    const int64_t entries = shape.kv_heads / shape.shares, head = block.head / shape.shares;
    const int64_t k_step = entries * call.k_bytes, v_step = entries * call.v_bytes, size = shape.block_size;
    const char* const keys = static_cast<const char*>(call.k) + head * call.k_bytes;
    const char* const values = static_cast<const char*>(call.v) + head * call.v_bytes;
    const int64_t first = view.first(view.from()), last = view.last(view.to(block.count) - 1);
    int64_t index = (view.start + first) / size, offset = (view.start + first) % size;
    for (int64_t j = first; j < last; ++j) {
        const int64_t kv_slot = table[index] * size + offset;
        rows.keys[j] = keys + kv_slot * k_step;
        rows.values[j] = values + kv_slot * v_step;
        if (++offset == size) ++index, offset = 0;
    }
    for (int64_t j = first == 0 ? last : 0; j < kTile; j = j + 1 == first ? last : j + 1) {
        rows.keys[j] = rows.keys[first];
        rows.values[j] = rows.values[first];
    }
}

MOESERVE_INLINE int64_t first_tile(const AttentionShape& shape, const QueryBlock& block, int64_t cut) {
    return at_least(at_least(block.begin, block.position - shape.window + 1), cut * kCut) / kTile * kTile;
}

/// Computes the sums of one cut in s.partial, (-inf, 0, 0) for rows that see nothing of it. next:
/// the piece that this thread will probably compute afterwards, to prefetch from, or nullptr.
template <class Step, class E>
inline void attention_partial(const AttentionCall& call, const QueryBlock& block, const QueryBlock* next, int64_t cut,
                         const AttentionRows& s) {
    const AttentionShape& shape = call.shape;
    const int64_t rows = shape.rows(block), head_rows = rows / block.heads, v_padded = shape.v_padded();
    for (int64_t r = 0; r < rows; ++r) clear(row_sums(s.partial + r * shape.sums(), v_padded), v_padded);
    const int64_t last = at_most(block.position + block.count, block.end_cut * kCut);
    const int64_t end = at_most(last, (cut + 1) * kCut), start = first_tile(shape, block, cut);
    TileRows tiles[2];
    find_rows(call, block, start, tiles[0]);
    int turn = 0;
    for (int64_t tile = start; tile < end; tile += kTile, turn ^= 1) {
        const TileView view(tile, block, shape);
        TileRows& then = tiles[turn ^ 1];
        const bool more = tile + kTile < last;
        if (more) find_rows(call, block, tile + kTile, then);
        else if (next) find_rows(call, *next, first_tile(shape, *next, next->first_cut), then);
        const int64_t heads = (more || !next ? block : *next).heads;
        Ahead keys{then.keys, heads * call.k_bytes}, values{then.values, heads * call.v_bytes};
        if (!more && !next) keys.row = values.row = kTile;  // prefetch nothing
        if (call.v == call.k) values.row = kTile;
        for (int64_t h = 0; h < block.heads; ++h) {
            attend_tile<Step, E>(call, view, block.count, {tiles[turn].keys, h * call.k_bytes, &keys},
                                 {tiles[turn].values, h * call.v_bytes, &values}, s,
                                 s.q + h * head_rows * shape.padded(), s.partial + h * head_rows * shape.sums());
        }
    }
}

/// Reorders elements from (even, odd) to the order of the head.
inline void join_columns(float* values, int64_t columns) {
    for (int64_t i = 0; i < columns; i += 2 * kWidth) {
        f32 even = load(values + i), odd = load(values + i + kWidth);
        interleave(even, odd);
        store(values + i, even);
        store(values + i + kWidth, odd);
    }
}

template <class E>
inline void write_row(const float* values, float weight, int64_t dim, char* out) {
    for (int64_t d = 0; d < dim; d += kWidth)  // + 0 turns -0 into 0
        store_at<E>(out, d, dim, add(div(load(values + d), all(weight)), zero()));
}

/// Divides the sums of a block's rows by their weights, and writes the results.
template <class E>
inline void write_rows(const AttentionCall& call, const QueryBlock& block, float* total) {
    const AttentionShape& shape = call.shape;
    const int64_t group = shape.group(), v_padded = shape.v_padded();
    for (int64_t r = 0; r < shape.rows(block); ++r) {
        const int64_t h = r % group, i = r / group % block.count, g = r / group / block.count;
        const int64_t head = (block.head + g) * group + h;
        const RowSums s = row_sums(total + r * shape.sums(), v_padded);
        if (call.sinks != nullptr) {  // one more score, whose value is zero
            const float sink = call.sinks[head], largest = sink > *s.largest ? sink : *s.largest;
            const float old = exp_one(*s.largest - largest);
            *s.weight = *s.weight * old + exp_one(sink - largest);
            for (int64_t d = 0; d < v_padded; d += kWidth) store(s.values + d, mul(load(s.values + d), all(old)));
        }
        if (call.kv_type == Type::bf16) join_columns(s.values, split_columns<BFloat16>(shape.v_dim));
        const int64_t at = ((block.token + i) * shape.heads + head) * shape.v_dim * static_cast<int64_t>(E::bytes);
        write_row<E>(s.values, *s.weight, shape.v_dim, static_cast<char*>(call.out) + at);
    }
}

inline void write_block(const AttentionCall& call, const QueryBlock& block, float* total) {
    switch (call.q_type) {
        case Type::bf16: return write_rows<BFloat16>(call, block, total);
        case Type::fp16: return write_rows<Float16>(call, block, total);
        default: return write_rows<Float32>(call, block, total);
    }
}

template <class Step, class E>
inline void attend_piece(const AttentionCall& call, const QueryBlock& piece, const QueryBlock* next, AttentionRows s) {
    const AttentionShape& shape = call.shape;
    const int64_t rows = shape.rows(piece), padded = shape.v_padded();
    if (piece.partial >= 0) {
        s.partial = call.partials + piece.partial;
        attention_partial<Step, E>(call, piece, next, piece.first_cut, s);
        return;
    }
    for (int64_t r = 0; r < rows; ++r) clear(row_sums(s.total + r * shape.sums(), padded), padded);
    for (int64_t cut = piece.first_cut; cut < piece.end_cut; ++cut) {
        attention_partial<Step, E>(call, piece, next, cut, s);
        for (int64_t r = 0; r < rows; ++r) {
            merge_partial(row_sums(s.total + r * shape.sums(), padded), row_sums(s.partial + r * shape.sums(), padded), padded);
        }
    }
    write_block(call, piece, s.total);
}

/// Chooses the element type of products: the queries' type if the CPU has dot products of pairs of
/// it, otherwise fp32.
template <class E>
inline void attend_in(const AttentionCall& call, int64_t i, float* scratch) {
    const QueryBlock& piece = call.pieces[i];
    const QueryBlock* next = i + call.threads < call.num_pieces ? &call.pieces[i + call.threads] : nullptr;
    const AttentionRows s = attention_rows(call.shape, call.shape.rows(piece), scratch);
#ifdef __AVX512BF16__
    if constexpr (kDotted<E>) {
        if (call.q_type == Type::bf16) {
            copy_queries<InPairs, BFloat16>(call, piece, s.q);
            return attend_piece<InPairs, E>(call, piece, next, s);
        }
    }
#endif
    switch (call.q_type) {
        case Type::bf16: copy_queries<OneByOne, BFloat16>(call, piece, s.q); break;
        case Type::fp16: copy_queries<OneByOne, Float16>(call, piece, s.q); break;
        default: copy_queries<OneByOne, Float32>(call, piece, s.q);
    }
    attend_piece<OneByOne, E>(call, piece, next, s);
}

/// The function of `Work` over pieces.
inline void attend(void* context, size_t begin, size_t end, int worker) {
    const AttentionCall& call = *static_cast<const AttentionCall*>(context);
    float* scratch = call.scratch + worker * call.scratch_size;
    for (int64_t i = static_cast<int64_t>(begin); i < static_cast<int64_t>(end); ++i) {
        switch (call.kv_type) {
            case Type::bf16: attend_in<BFloat16>(call, i, scratch); break;
            case Type::fp16: attend_in<Float16>(call, i, scratch); break;
            case Type::int8: attend_in<Int8>(call, i, scratch); break;
            default: attend_in<Float32>(call, i, scratch);
        }
    }
}

/// The function of `Work` over split blocks: merges their cuts in order.
inline void merge_attention(void* context, size_t begin, size_t end, int worker) {
    const AttentionCall& call = *static_cast<const AttentionCall*>(context);
    const AttentionShape& shape = call.shape;
    const int64_t padded = shape.v_padded();
    for (size_t i = begin; i < end; ++i) {
        const QueryBlock& block = call.merges[i];
        const int64_t rows = shape.rows(block);
        const AttentionRows s = attention_rows(shape, rows, call.scratch + worker * call.scratch_size);
        for (int64_t r = 0; r < rows; ++r) {
            const RowSums total = row_sums(s.total + r * shape.sums(), padded);
            clear(total, padded);
            for (int64_t cut = 0; cut < block.end_cut - block.first_cut; ++cut) {
                float* sums = call.partials + block.partial + (cut * rows + r) * shape.sums();
                merge_partial(total, row_sums(sums, padded), padded);
            }
        }
        write_block(call, block, s.total);
    }
}

}  // namespace moeserve::MOESERVE_ISA::attention
