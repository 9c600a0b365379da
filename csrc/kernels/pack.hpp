// Pack weights of a checkpoint into blocks of 16 columns.
#pragma once

#include "kernels/product_args.hpp"

namespace moeserve {

/// A matrix [columns, depth], row-major. Quantized weights have one byte each (signed, or 0 to 15),
/// and scales and zero points [columns, groups].
struct Unpacked {
    const void* weights;
    size_t stride;  // elements from row to row
    const float* scales = nullptr;
    const float* zero_points = nullptr;
    const float* mins = nullptr;
    const float* supers = nullptr;      // [columns, depth / 256], scales of the scales
    const float* min_supers = nullptr;  // [columns, depth / 256], scales of the mins
};

/// Packs the blocks [begin, end), each `step` bytes after the one before. Every byte of a block is
/// written. Returns false if a block of compressed bf16 has too many escapes.
bool pack(const Packing& packing, const Unpacked& from, uint8_t* to, size_t step, size_t begin, size_t end);

/// Packs one block of weights for rows of int8. Its bytes must be zero.
void pack_ints(const Packing& packing, const Unpacked& from, size_t column, size_t columns, uint8_t* to);
size_t int_block_bytes(const Packing& packing);  // without padding

/// The reference of GEMMs in tests, with the same bits: y = x w^T with one chain of std::fma per
/// output, in fp32.
void product_reference(const float* x, size_t rows, size_t depth, const float* w, size_t columns, float* y);
/// The reference for rows rounded to int8, with integers w and scales (and mins, or null) of groups
/// of `group` inputs; 0: one group of all inputs.
void int_product_reference(const float* x, size_t rows, size_t depth, const int8_t* w, size_t columns, size_t group,
                           const float* scales, const float* mins, float* y);

}  // namespace moeserve
