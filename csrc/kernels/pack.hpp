// Weights as they come from a checkpoint, into blocks of 16 columns.
#pragma once

#include "kernels/product_args.hpp"

namespace moeserve {

/// A matrix [columns, depth] row by row. Quantised ones have one byte per weight (signed, or 0 to 15) and scales and zero
/// points per column and group of inputs: [columns, groups].
struct Unpacked {
    const void* weights;
    size_t stride;  // elements from row to row
    const float* scales = nullptr;
    const float* zero_points = nullptr;
    const float* mins = nullptr;
    const float* supers = nullptr;      // [columns, depth / 256], of scales
    const float* min_supers = nullptr;  // and of mins
};

/// Packs the blocks [begin, end), each `step` bytes behind the one before. Every byte of a block is written. Returns false
/// where one of bf12 has too many escapes.
bool pack(const Packing& packing, const Unpacked& from, uint8_t* to, size_t step, size_t begin, size_t end);

/// The same for weights that meet rows of int8: one block, whose bytes are zeros.
void pack_ints(const Packing& packing, const Unpacked& from, size_t column, size_t columns, uint8_t* to);
size_t int_block_bytes(const Packing& packing);  // not filled up

/// What products are compared with in tests, bit for bit: y = x w^T by one chain of std::fma per output, in fp32.
void product_reference(const float* x, size_t rows, size_t depth, const float* w, size_t columns, float* y);
/// Likewise of rows rounded to int8, with whole numbers w and scales (mins or null) of `group` inputs, 0: of all.
void int_product_reference(const float* x, size_t rows, size_t depth, const int8_t* w, size_t columns, size_t group,
                           const float* scales, const float* mins, float* y);

}  // namespace moeserve
