// The frame of a matrix product: a worker's scratch memory, its tasks, and bias, activation and rounding of their sums.
// product.hpp and int_product.hpp fill it.
#pragma once

#include <unistd.h>

#include "kernels/activation.hpp"
#include "kernels/elements.hpp"
#include "kernels/gemm.hpp"
#include "kernels/math.hpp"
#include "pool/scratch.hpp"

namespace moeserve::MOESERVE_ISA {

constexpr size_t kBlocks = kWidth == 16 ? 2 : 1;  // that many rows meet at once
/// Inputs that several tiles share while the blocks' weights for them are in the L1 cache, beside a few rows.
inline const size_t kChunk = kBlocks == 1 || sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 << 10 ? 512 : 256;

/// A worker's scratch for one part: its rows as elements for tiles, the results of a task, a chunk of unpacked weights.
struct Workspace {
    size_t stride;
    float *a, *c, *unpacked;

    /// row_floats: floats that one row takes.
    Workspace(const ProductArgs& args, size_t row_floats) {
        // Rows are not a multiple of 4 KiB apart, where their elements would compete for the same lines of a cache.
        stride = (row_floats + 15) / 16 * 16 + 16;
        const size_t group = args.group < args.depth ? args.group : args.depth, chunk = group > kChunk ? group : kChunk;
        const size_t floats = args.most_rows * (stride + kSumsStride) + (chunk + 1) * kColumns * kBlocks;
        a = reinterpret_cast<float*>(scratch(Scratch::product, floats * sizeof(float)));
        c = a + args.most_rows * stride;
        unpacked = c + args.most_rows * kSumsStride;
    }
};

/// In the place of an activation, where there is none.
struct Plain {
    static constexpr bool kGated = false;

    MOESERVE_INLINE f32 operator()(f32 sum) const { return sum; }
};

template <class E, bool biased, class Gate>
void finish_as(const ProductArgs& args, const Part& part, const Workspace& space, size_t first_block, size_t blocks,
               const Gate& gate) {
    constexpr size_t step = Gate::kGated ? 2 : 1;
    const size_t first = first_block / step * kColumns, skipped = part.expert * (args.expert_bytes / sizeof(float));
    for (size_t r = 0; r < part.count; ++r) {
        const float *c = space.c + r * kSumsStride, *bias = args.bias;
        if constexpr (biased) bias += skipped + first_block * kColumns;
        char* y = static_cast<char*>(args.y) + (part.expert * args.y_step + (part.first + r) * args.y_stride) * E::bytes;
        for (size_t b = 0, column = first; b < blocks; b += step, column += kColumns, c += step * kColumns) {
            for (int v = 0; v < kVectors; ++v) {
                f32 value = load(c + v * kWidth);
                if constexpr (biased) value = add(value, load(bias + v * kWidth));
                if constexpr (Gate::kGated) {
                    f32 up = load(c + kColumns + v * kWidth);
                    if constexpr (biased) up = add(up, load(bias + kColumns + v * kWidth));
                    value = gate(value, up);
                } else {
                    value = gate(value);
                }
                store_at<E>(y, column + v * kWidth, args.columns, value);
            }
            if constexpr (biased) bias += step * kColumns;
        }
    }
}

/// Bias, activation and rounding of a task's sums.
template <class E>
void finish(const ProductArgs& args, const Part& part, const Workspace& space, size_t first, size_t blocks) {
    const auto as = [&](const auto& gate) {
        if (args.bias) return finish_as<E, true>(args, part, space, first, blocks, gate);
        finish_as<E, false>(args, part, space, first, blocks, gate);
    };
    if (args.acts) return with_activation(args.activation, as);
    as(Plain());
}

/// Computes tasks [begin, end). `Rows` says how a part's rows lie in scratch memory and how a task's sums are computed:
/// row_floats(args), load(args, part, space), sums(args, space, count, weights, blocks).
template <class Rows, class E>
void run_tasks(const ProductArgs& args, size_t begin, size_t end, int worker) {
    const Workspace space(args, Rows::row_floats(args));
    const size_t units = args.units();
    size_t& held = args.held[worker * (64 / sizeof(size_t))];
    for (size_t task = begin; task < end; ++task) {
        const Part& part = args.parts[task / units];
        if (held != task / units) {
            held = task / units;
            Rows::load(args, part, space);
        }
        const size_t first = task % units * ProductArgs::kUnit, left = args.num_blocks - first;
        const size_t blocks = left < ProductArgs::kUnit ? left : ProductArgs::kUnit;
        const uint8_t* w = args.weights + part.expert * args.expert_bytes + first * args.block_bytes;
        Rows::sums(args, space, part.count, w, blocks);
        if (args.y_type == args.type) {
            finish<E>(args, part, space, first, blocks);
        } else {
            finish<Float32>(args, part, space, first, blocks);
        }
    }
}

/// Row `r` of a part, as it was given.
template <class E>
const char* row_of(const ProductArgs& args, const Part& part, size_t r) {
    return static_cast<const char*>(args.x) + (part.expert * args.x_step + (part.first + r) * args.x_stride) * E::bytes;
}

/// The same for rows of the type that the arguments name.
template <template <class> class Rows>
void run_tasks_of_type(const ProductArgs& args, size_t begin, size_t end, int worker) {
    switch (args.type) {
        case Type::fp32: return run_tasks<Rows<Float32>, Float32>(args, begin, end, worker);
        case Type::bf16: return run_tasks<Rows<BFloat16>, BFloat16>(args, begin, end, worker);
        case Type::fp16: return run_tasks<Rows<Float16>, Float16>(args, begin, end, worker);
        default: return;
    }
}

}  // namespace moeserve::MOESERVE_ISA
