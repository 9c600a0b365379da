// Matrix products over parts of the rows, with weights as floats or bf16 pairs: linear layers, and both products of experts.
#pragma once

#include "kernels/product_task.hpp"

namespace moeserve::MOESERVE_ISA {

/// Whether rows of E may meet these weights as bf16 pairs. Then denormals are zeros, as dot products take them, also where
/// a part of more rows meets them as floats: a row's bits do not depend on its company.
template <class E>
bool are_pairs(const ProductArgs& args) {
    const bool exact = args.weight_type != Type::fp32 && args.weight_type != Type::fp16;
    return kDots && std::is_same_v<E, BFloat16> && exact;
}

/// Whether those of a part of so many rows do.
template <class E>
bool in_pairs(const ProductArgs& args, size_t rows) {
    return are_pairs<E>(args) && rows <= args.dot_rows;
}

/// Rows as floats.
template <class E>
void widen_rows(const ProductArgs& args, const Part& part, const Workspace& space) {
    for (size_t r = 0; r < part.count; ++r) {
        const char* x = row_of<E>(args, part, r);
        float* a = space.a + r * space.stride;
        for (size_t i = 0; i < args.depth; i += kWidth) store(a + i, load_at<E>(x, i, args.depth));
    }
}

#ifdef __AVX512BF16__
/// Rows as pairs of bf16, the first in the upper half of a word.
inline void pair_rows(const ProductArgs& args, const Part& part, const Workspace& space) {
    for (size_t r = 0; r < part.count; ++r) {
        const char* x = row_of<BFloat16>(args, part, r);
        float* a = space.a + r * space.stride;
        for (size_t i = 0; i < args.depth; i += 2 * kWidth) {
            i32 pairs;
            if (i + 2 * kWidth <= args.depth) {
                pairs = load_words(x + i * 2);
            } else {
                char rest[4 * kWidth] = {};
                memcpy(rest, x + i * 2, (args.depth - i) * 2);
                pairs = load_words(rest);
            }
            store_words(a + i / 2, swap_halves(pairs));
        }
    }
}
#endif

constexpr size_t kUnpackedAhead = 8192;  // bytes: about as many as are unpacked between two visits to a block

/// The scales of one block's group if there are groups, [16], and its `depth` elements, zero points subtracted,
/// not scaled: [depth, 16].
template <class A>
void unpack(const uint8_t* w, const uint8_t* head, size_t depth, float* to) {
    if constexpr (A::Format::kGrouped) memcpy(to, head, kColumns * sizeof(float));
    const auto step = [&](size_t count) __attribute__((always_inline)) {
        MOESERVE_EACH_CONSTANT(d, A::kDepth) {
            for (int v = 0; d < count && v < kVectors; ++v) {
                const auto column = A::template column<d>(w, head, v);
                memcpy(to + d * kColumns + v * kWidth, &column, sizeof column);
            }
        });
    };
    to += kColumns;
    for (; depth >= A::kDepth; depth -= A::kDepth, w += A::kStepBytes, to += A::kDepth * kColumns) {
        for (size_t line = 0; line < A::kStepBytes; line += 64) __builtin_prefetch(w + kUnpackedAhead + line, 0, 2);
        step(A::kDepth);
    }
    step(depth);
}

/// Puts the escapes from `next` on that are of `depth` inputs from `first` where these were unpacked; returns the one
/// behind.
template <class A>
const Escape* put_escapes(const Escape* next, size_t first, size_t depth, float* to) {
    uint8_t* bytes = reinterpret_cast<uint8_t*>(to + kColumns);
    for (; input_of(*next) < first + depth; ++next) {
        const size_t k = input_of(*next) - first, column = *next >> 8 & (kColumns - 1);
        bytes[(k / A::kInputs * kColumns + column) * sizeof(float) + 3 - 2 * (k % A::kInputs)] = static_cast<uint8_t>(*next);
    }
    return next;
}

/// Bytes of `depth` inputs (a whole number of steps) in a block of format F.
template <class F>
constexpr size_t bytes_of_inputs(size_t depth) {
    return depth / F::kDepth * F::kStepBytes;
}

/// Elements of A that hold so many inputs; only the last of a row may be half full.
template <class A>
constexpr size_t elements(size_t depth) {
    return (depth + A::kInputs - 1) / A::kInputs;
}

/// c [rows, blocks * 16] for the rows of one tile: each weight is used once, so blocks are read from end to end, several
/// at once.
template <class A>
void few_rows(const ProductArgs& args, const Workspace& space, size_t rows, const uint8_t* w, size_t blocks) {
    using F = typename A::Format;
    const size_t chunk = F::kGrouped ? args.group : args.depth;
    const uint8_t* const end = w + args.block_bytes;
    for (size_t k = 0; k < args.depth; k += chunk) {
        const size_t depth = args.depth - k < chunk ? args.depth - k : chunk;
        const uint8_t* head = w;
        if constexpr (F::kGrouped) w += F::kHeadBytes;
        tiles_of<A, kTileRows>(rows, space.a + k / A::kInputs, space.stride, w, head, args.block_bytes, blocks,
                                 elements<A>(depth), space.c, k > 0, static_cast<size_t>(end - w));
        w += bytes_of_inputs<F>(depth + F::kDepth - 1);
    }
}

/// The same for many rows: in chunks of a few blocks that stay in the L1 cache while tile after tile passes over them.
template <class A>
void many_rows(const ProductArgs& args, const Workspace& space, size_t rows, const uint8_t* w, size_t blocks, float* c) {
    using F = typename A::Format;
    using Tile = typename A::template Unpacked<F>;
    const size_t chunk = F::kGrouped ? args.group : kChunk, num_tiles = (rows + kTileRows - 1) / kTileRows;
    const uint8_t* const end = w + args.block_bytes;
    const uint8_t* const block = w;
    const Escape* next[kBlocks];
    if constexpr (kEscapes<F>) {
        w += F::kHeadBytes;
        for (size_t b = 0; b < blocks; ++b) next[b] = escapes_of(block + b * args.block_bytes, args.depth);
    }
    for (size_t k = 0; k < args.depth; k += chunk) {
        const size_t depth = args.depth - k < chunk ? args.depth - k : chunk, num_elements = elements<A>(depth);
        const uint8_t *head = kEscapes<F> ? block : w, *weights = w;
        size_t block_bytes = args.block_bytes;
        if constexpr (F::kGrouped) weights = w += F::kHeadBytes;
        if constexpr (F::kCostly) {
            for (size_t b = 0; b < blocks; ++b) {
                const size_t from = b * args.block_bytes;
                float* to = space.unpacked + b * (num_elements + 1) * kColumns;
                unpack<A>(w + from, head + from, num_elements, to);
                if constexpr (kEscapes<F>) next[b] = put_escapes<A>(next[b], k, depth, to);
            }
            block_bytes = (num_elements + 1) * kColumns * sizeof(float);
            head = reinterpret_cast<const uint8_t*>(space.unpacked);
            weights = head + kColumns * sizeof(float);
        }
        const size_t left = static_cast<size_t>(F::kCostly ? PTRDIFF_MAX : end - w);  // unpacked: no end
        for (size_t t = 0; t < num_tiles; ++t) {
            const size_t first = rows * t / num_tiles, count = rows * (t + 1) / num_tiles - first;
            tiles_of<Tile, kTileRows>(count, space.a + first * space.stride + k / A::kInputs, space.stride, weights,
                                      head, block_bytes, blocks, num_elements, c + first * kSumsStride, k > 0, left);
        }
        w += bytes_of_inputs<F>(depth + F::kDepth - 1);
    }
}

/// The same for weights with escapes: at a step with one, tiles stop, and go on with what is unpacked and put right.
template <class A>
void few_rows_with_escapes(const ProductArgs& args, const Workspace& space, size_t rows, const uint8_t* w, size_t blocks) {
    using F = typename A::Format;
    constexpr size_t kElements = F::kDepth / A::kInputs, kBytes = (kElements + 1) * kColumns * sizeof(float);
    const Escape* next[ProductArgs::kUnit];
    for (size_t b = 0; b < blocks; ++b) next[b] = escapes_of(w + b * args.block_bytes, args.depth);
    for (size_t k = 0; k < args.depth; k += F::kDepth) {
        const size_t at = F::kHeadBytes + bytes_of_inputs<F>(k);
        size_t end = args.depth;
        for (size_t b = 0; b < blocks; ++b) end = std::min(end, input_of(*next[b]) / F::kDepth * F::kDepth);
        tiles_of<A, kTileRows>(rows, space.a + k / A::kInputs, space.stride, w + at, w, args.block_bytes, blocks,
                               (end - k) / A::kInputs, space.c, k > 0, args.block_bytes - at);
        if (end == args.depth) return;
        for (size_t b = 0; b < blocks; ++b) {
            const uint8_t* block = w + b * args.block_bytes;
            float* to = space.unpacked + b * kBytes / sizeof(float);
            unpack<A>(block + F::kHeadBytes + bytes_of_inputs<F>(end), block, kElements, to);
            next[b] = put_escapes<A>(next[b], end, F::kDepth, to);
        }
        const uint8_t* unpacked = reinterpret_cast<const uint8_t*>(space.unpacked);
        tiles_of<typename A::template Unpacked<F>, kTileRows>(
            rows, space.a + end / A::kInputs, space.stride, unpacked + kColumns * sizeof(float), unpacked, kBytes, blocks,
            kElements, space.c, end > 0, PTRDIFF_MAX);
        k = end;
    }
}

template <class A>
void sums_of(const ProductArgs& args, const Workspace& space, size_t rows, const uint8_t* w, size_t blocks) {
    // Tiles read whole steps of costly weights. If the last step is partial, unpack the weights first.
    const bool whole_steps = !A::Format::kCostly || elements<A>(args.depth) % A::kDepth == 0;
    if (rows <= kTileRows && whole_steps) {
        if constexpr (kEscapes<typename A::Format>) return few_rows_with_escapes<A>(args, space, rows, w, blocks);
        return few_rows<A>(args, space, rows, w, blocks);
    }
    for (size_t b = 0; b < blocks; b += kBlocks) {
        const size_t count = blocks - b < kBlocks ? blocks - b : kBlocks;
        many_rows<A>(args, space, rows, w + b * args.block_bytes, count, space.c + b * kColumns);
    }
}

/// Times the scale of each column, which lies behind its block's bytes.
inline void scale_columns(const ProductArgs& args, const Workspace& space, size_t rows, const uint8_t* w, size_t blocks) {
    for (size_t b = 0; b < blocks; ++b) {
        const float* scales = reinterpret_cast<const float*>(w + b * args.block_bytes + args.depth * kColumns);
        for (size_t r = 0; r < rows; ++r) {
            float* c = space.c + r * kSumsStride + b * kColumns;
            for (int v = 0; v < kVectors; ++v) store(c + v * kWidth, mul(load(c + v * kWidth), load(scales + v * kWidth)));
        }
    }
}

/// With weights that are exact in bf16.
template <template <class> class A>
void sums_in(const ProductArgs& args, const Workspace& space, size_t rows, const uint8_t* w, size_t blocks) {
    switch (args.weight_type) {
        case Type::bf16: return sums_of<A<WeightsBf16>>(args, space, rows, w, blocks);
#ifdef __AVX512BF16__
        case Type::bf12: return sums_of<A<WeightsBf12>>(args, space, rows, w, blocks);
#endif
        case Type::int8:
            if (args.group) return sums_of<A<WeightsInt8<true>>>(args, space, rows, w, blocks);
            sums_of<A<WeightsInt8<false>>>(args, space, rows, w, blocks);
            return scale_columns(args, space, rows, w, blocks);
        case Type::int4:
            if (args.zero_points) return sums_of<A<WeightsInt4<true>>>(args, space, rows, w, blocks);
            return sums_of<A<WeightsInt4<false>>>(args, space, rows, w, blocks);
        case Type::fp4: return sums_of<A<WeightsFp4>>(args, space, rows, w, blocks);
        case Type::fp8:
            if (args.group) return sums_of<A<WeightsFp8<true>>>(args, space, rows, w, blocks);
            sums_of<A<WeightsFp8<false>>>(args, space, rows, w, blocks);
            return scale_columns(args, space, rows, w, blocks);
        default: return;
    }
}

template <class E>
void sums_with(const ProductArgs& args, const Workspace& space, size_t rows, const uint8_t* w, size_t blocks) {
    switch (args.weight_type) {
        case Type::fp32: return sums_of<Chains<WeightsFp32>>(args, space, rows, w, blocks);
        case Type::fp16: return sums_of<Chains<WeightsFp16>>(args, space, rows, w, blocks);
        default:
#ifdef __AVX512BF16__
            if (in_pairs<E>(args, rows)) return sums_in<Dots>(args, space, rows, w, blocks);
#endif
            return sums_in<Chains>(args, space, rows, w, blocks);
    }
}

template <class E>
void take_rows(const ProductArgs& args, const Part& part, const Workspace& space) {
#ifdef __AVX512BF16__
    if (in_pairs<E>(args, part.count)) return pair_rows(args, part, space);
#endif
    widen_rows<E>(args, part, space);
}

/// Rows as floats, or as pairs of bf16 where the processor multiplies such.
template <class E>
struct FloatRows {
    static size_t row_floats(const ProductArgs& args) {
        return in_pairs<E>(args, args.most_rows) ? (args.depth + 1) / 2 : args.depth;
    }
    static void load(const ProductArgs& args, const Part& part, const Workspace& space) { take_rows<E>(args, part, space); }
    static void sums(const ProductArgs& args, const Workspace& space, size_t rows, const uint8_t* w, size_t blocks) {
#ifdef __AVX512BF16__
        const DenormalsAreZeros zeros(are_pairs<E>(args));
#endif
        sums_with<E>(args, space, rows, w, blocks);
    }
};

void product(const ProductArgs& args, size_t begin, size_t end, int worker) {
    run_tasks_of_type<FloatRows>(args, begin, end, worker);
}

}  // namespace moeserve::MOESERVE_ISA
