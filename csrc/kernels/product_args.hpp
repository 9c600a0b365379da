// What matrix products take: packed weights, rows grouped by the weights that they meet, and where results go.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/activation_args.hpp"

namespace moeserve {

enum class Type : int;

/// How weights lie that meet rows of int8 (kernels/int_product.hpp). bits: of a value, 2 to 6, or 8. scales: the type of
/// scales and mins. supers: scales and mins are bytes times an fp16 of 256 inputs. codes: values are indices into `table`,
/// 3 or 4 bits each. factor: what scales are multiplied with when they are used.
struct IntForm {
    bool on = false;
    size_t bits = 8;
    Type scales{};
    bool mins = false, supers = false;
    bool codes = false;
    float factor = 1.0f;
    alignas(16) std::array<int8_t, 16> table{};
};

/// A weight matrix in blocks of 16 columns (outputs), zeros filling up the last. All inputs of a block are in one piece:
///   bf16  [depth / 2][16] words of two inputs, the first in the upper half; an odd last one has a zero below it
///   bf12  bf16 in 12 bits without loss: the block's 16 most frequent upper bytes, twice, each above a zero byte; for each
///         8 inputs [16] words of indices there, in int4's order, and [2][16] words of lower bytes: of inputs 1, 3, 0 and
///         2, then of 5, 7, 4 and 6, first ones lowest; then `Escape`s for other upper bytes, by place, and ones
///   fp16, fp32  [depth][16]
///   int8, fp8  [depth][16], then 16 scales
///   int8, fp8 in groups of inputs: for each group 16 scales, [group][16]
///   int4  per group of inputs: 16 scales, 16 zero points unless symmetric, [group / 8][16] words of 8 inputs: 0, 2, 4
///         and 6 in the upper half, the others in the lower, first ones lowest
///   fp4 (e2m1)  as int4 without zero points
/// For rows of int8, weights come in steps of 32 inputs; zeros fill up the last one. Before the first step of a group (both
/// groups of a step, if groups are of 16 inputs) come 16 scales, then 16 mins or zero points if there are any. A step:
///   bits 8  [8][16] words: of 8 inputs 1, 5, 0 and 4, then 3, 7, 2 and 6, first ones lowest
///   bits 2 to 6  the same 8 words, cut into planes: the lower 4 bits (the lower 2 of bits 2 and 3), then the upper ones. In
///         a plane of n bits, 8 / n words of bytes share a word, first ones lowest.
/// supers: before 256 inputs 16 factors of scales, and of mins.
/// Scales and zero points are fp32 unless `ints` says otherwise. A block is filled up to a multiple of 64 bytes.
struct Packing {
    static constexpr size_t kBlock = 16;

    Type type;
    size_t depth, columns;
    size_t group = 0;  // of less than 16 bits: inputs of a group, a multiple of 8; the last may be smaller
    bool zero_points = false;
    IntForm ints{};

    static constexpr size_t kIntStep = 32;  // inputs of a step of integers
    size_t groups_per_step() const { return group == 16 ? 2 : 1; }
    size_t super_bytes() const { return ints.supers ? kBlock * (ints.mins ? 4 : 2) : 0; }
    size_t head_bytes() const {
        const size_t scale = ints.supers ? 1 : ints.scales == Type{} ? 4 : 2;
        return kBlock * (scale * (ints.mins ? 2 : 1) + (zero_points ? 4 : 0));
    }
    size_t num_blocks() const { return (columns + kBlock - 1) / kBlock; }
    size_t block_bytes() const;
    size_t bytes() const { return num_blocks() * block_bytes(); }
};

/// A weight of bf12 whose upper byte has no index: the byte, below its place in the block (input * 16 + column).
using Escape = uint32_t;

/// Those of a block, and ones behind the last.
inline const Escape* escapes_of(const uint8_t* block, size_t depth) {
    return reinterpret_cast<const Escape*>(block + 64 + depth * 24);
}
constexpr size_t most_escapes(size_t depth) { return 15 + depth / 64; }
constexpr size_t input_of(Escape escape) { return escape >> 12; }

/// Rows [first, first + count) meet the weights of `expert`.
struct Part {
    size_t expert, first, count;
};

/// y = x times weights (+ bias): one fp32 chain of fused multiply-adds per output, rounded once to y's type.
/// acts: y is the activation of the sums. Before one with gates, blocks come in pairs, gate and up; y is `columns` wide.
struct ProductArgs {
    static constexpr size_t kUnit = 4;  // blocks of one task

    Type type;    // of x
    Type y_type;  // the same, or fp32
    const void* x;
    size_t x_stride;  // elements
    const uint8_t* weights;
    size_t expert_bytes;
    Type weight_type;
    size_t depth, columns, num_blocks, block_bytes, group;
    bool zero_points, acts;
    size_t dot_rows = 0;  // parts of at most so many rows of bf16 meet weights by dot products of pairs, if kernels have them
    IntForm ints;
    Activation activation;
    const float* bias;      // or null; [num_blocks, 16], of expert e `expert_bytes` times e further
    void* y;
    size_t y_stride;
    const Part* parts;  // of at most `most_rows` rows
    size_t x_step = 0, y_step = 0;  // elements from one expert's rows to the next one's, where these lie side by side
    size_t most_rows;
    size_t* held;  // per worker, 64 bytes apart: the part whose rows it holds, ~0 at first

    /// Tasks are numbered part by part.
    size_t units() const { return (num_blocks + kUnit - 1) / kUnit; }
};

}  // namespace moeserve
