// Matrix products over parts of the rows: linear layers, and both products of gated experts.
#pragma once

#include "kernels/elements.hpp"
#include "kernels/gemm.hpp"
#include "kernels/math.hpp"
#include "pool/scratch.hpp"

namespace moeserve::MOESERVE_ISA {

constexpr size_t kChunk = 256;  // inputs that several tiles share while a block's weights for them are in the L1 cache

/// A worker's scratch for one part: its rows as floats, the results of a task, a chunk of unpacked weights.
struct Workspace {
    size_t stride;
    float *a, *c, *unpacked;

    explicit Workspace(const ProductArgs& args) {
        // Rows are not a multiple of 4 KiB apart, where their elements would compete for the same lines of a cache.
        stride = (args.depth + 15) / 16 * 16 + 16;
        const size_t chunk = args.group > kChunk ? args.group : kChunk;
        const size_t floats = args.most_rows * (stride + kSumsStride) + chunk * kColumns;
        a = reinterpret_cast<float*>(scratch(Scratch::product, floats * sizeof(float)));
        c = a + args.most_rows * stride;
        unpacked = c + args.most_rows * kSumsStride;
    }
};

template <class E>
void widen_rows(const ProductArgs& args, const Part& part, const Workspace& space) {
    for (size_t r = 0; r < part.count; ++r) {
        const char* x = static_cast<const char*>(args.x) + (part.first + r) * args.x_stride * E::bytes;
        float* a = space.a + r * space.stride;
        for (size_t i = 0; i < args.depth; i += kWidth) store(a + i, load_at<E>(x, i, args.depth));
    }
}

/// `depth` inputs of one block as floats [depth, 16], zero points subtracted, not scaled.
template <class F>
void unpack(const uint8_t* w, const uint8_t* head, size_t depth, float* to) {
    for (size_t k = 0; k < depth; k += F::kDepth, w += F::kStepBytes) {
        MOESERVE_EACH(d, F::kDepth) {
            if (k + d < depth) {
                for (int v = 0; v < kVectors; ++v) store(to + (k + d) * kColumns + v * kWidth, F::template get<d>(w, head, v));
            }
        });
    }
}

/// Bytes of `depth` inputs (a whole number of steps) in a block of format F.
template <class F>
constexpr size_t bytes_of_inputs(size_t depth) {
    return depth / F::kDepth * F::kStepBytes;
}

/// c [rows, blocks * 16] for few rows: each weight is used once, so blocks are read from end to end, several at once.
template <class F>
void few_rows(const ProductArgs& args, const Workspace& space, size_t rows, const uint8_t* w, size_t blocks) {
    const size_t chunk = F::kGrouped ? args.group : args.depth;
    for (size_t k = 0; k < args.depth; k += chunk) {
        const size_t depth = args.depth - k < chunk ? args.depth - k : chunk;
        const uint8_t* head = w;
        if constexpr (F::kGrouped) w += F::kHeadBytes;
        tiles_of<F>(rows, space.a + k, space.stride, w, head, args.block_bytes, blocks, depth, space.c, k > 0);
        w += bytes_of_inputs<F>(depth + F::kDepth - 1);
    }
}

/// The same for many rows: block by block, in chunks that stay in the L1 cache while tile after tile passes over them.
template <class F>
void many_rows(const ProductArgs& args, const Workspace& space, size_t rows, const uint8_t* w, float* c) {
    using Floats = std::conditional_t<F::kGrouped, WeightsUnpacked, WeightsFp32>;
    using Tile = std::conditional_t<F::kCostly, Floats, F>;
    const size_t chunk = F::kGrouped ? args.group : kChunk, num_tiles = (rows + kTileRows - 1) / kTileRows;
    for (size_t k = 0; k < args.depth; k += chunk) {
        const size_t depth = args.depth - k < chunk ? args.depth - k : chunk;
        const uint8_t* head = w;
        if constexpr (F::kGrouped) w += F::kHeadBytes;
        const uint8_t* weights = w;
        if constexpr (F::kCostly) {
            unpack<F>(w, head, depth, space.unpacked);
            weights = reinterpret_cast<const uint8_t*>(space.unpacked);
        }
        for (size_t t = 0; t < num_tiles; ++t) {
            const size_t first = rows * t / num_tiles, count = rows * (t + 1) / num_tiles - first;
            tiles_of<Tile>(count, space.a + first * space.stride + k, space.stride, weights, head, 0, 1, depth,
                           c + first * kSumsStride, k > 0);
        }
        w += bytes_of_inputs<F>(depth + F::kDepth - 1);
    }
}

template <class F>
void sums_of(const ProductArgs& args, const Workspace& space, size_t rows, const uint8_t* w, size_t blocks) {
    if (rows <= (F::kCostly ? 2 : kTileRows)) {
        few_rows<F>(args, space, rows, w, blocks);
    } else {
        for (size_t b = 0; b < blocks; ++b) many_rows<F>(args, space, rows, w + b * args.block_bytes, space.c + b * kColumns);
    }
}

/// int8: times the scale of each column, which lies behind its block's weights.
inline void scale_columns(const ProductArgs& args, const Workspace& space, size_t rows, const uint8_t* w, size_t blocks) {
    for (size_t b = 0; b < blocks; ++b) {
        const float* scales = reinterpret_cast<const float*>(w + b * args.block_bytes + args.depth * kColumns);
        for (size_t r = 0; r < rows; ++r) {
            float* c = space.c + r * kSumsStride + b * kColumns;
            for (int v = 0; v < kVectors; ++v) store(c + v * kWidth, mul(load(c + v * kWidth), load(scales + v * kWidth)));
        }
    }
}

inline void sums(const ProductArgs& args, const Workspace& space, size_t rows, const uint8_t* w, size_t blocks) {
    switch (args.weight_type) {
        case Type::fp32: return sums_of<WeightsFp32>(args, space, rows, w, blocks);
        case Type::bf16: return sums_of<WeightsBf16>(args, space, rows, w, blocks);
        case Type::fp16: return sums_of<WeightsFp16>(args, space, rows, w, blocks);
        case Type::int8:
            sums_of<WeightsInt8>(args, space, rows, w, blocks);
            return scale_columns(args, space, rows, w, blocks);
        case Type::int4:
            if (args.zero_points) return sums_of<WeightsInt4<true>>(args, space, rows, w, blocks);
            return sums_of<WeightsInt4<false>>(args, space, rows, w, blocks);
        default: return;
    }
}

template <class E>
void finish(const ProductArgs& args, const Part& part, const Workspace& space, size_t first_block, size_t blocks) {
    const size_t step = args.gated ? 2 : 1;
    for (size_t r = 0; r < part.count; ++r) {
        const float* c = space.c + r * kSumsStride;
        char* y = static_cast<char*>(args.y) + (part.first + r) * args.y_stride * E::bytes;
        for (size_t b = 0; b < blocks; b += step, c += step * kColumns) {
            const size_t column = (first_block + b) / step * kColumns;
            for (int v = 0; v < kVectors; ++v) {
                f32 value = load(c + v * kWidth);
                if (args.gated) value = mul(silu(value), load(c + kColumns + v * kWidth));
                if (args.bias) value = add(value, load(args.bias + column + v * kWidth));
                store_at<E>(y, column + v * kWidth, args.columns, value);
            }
        }
    }
}

template <class E>
void product_of(const ProductArgs& args, size_t begin, size_t end, int worker) {
    const Workspace space(args);
    const size_t units = args.units();
    size_t& held = args.held[worker * (64 / sizeof(size_t))];
    for (size_t task = begin; task < end; ++task) {
        const Part& part = args.parts[task / units];
        if (held != task / units) {
            held = task / units;
            widen_rows<E>(args, part, space);
        }
        const size_t first = task % units * ProductArgs::kUnit, left = args.num_blocks - first;
        const size_t blocks = left < ProductArgs::kUnit ? left : ProductArgs::kUnit;
        const uint8_t* w = args.weights + part.slot * args.slot_bytes + first * args.block_bytes;
        sums(args, space, part.count, w, blocks);
        finish<E>(args, part, space, first, blocks);
    }
}

inline void product(const ProductArgs& args, size_t begin, size_t end, int worker) {
    switch (args.type) {
        case Type::fp32: return product_of<Float32>(args, begin, end, worker);
        case Type::bf16: return product_of<BFloat16>(args, begin, end, worker);
        case Type::fp16: return product_of<Float16>(args, begin, end, worker);
        default: return;
    }
}

}  // namespace moeserve::MOESERVE_ISA
