// Decodes rows of ggml's quantized types, with the same bits as loader/gguf_quants.py and
// loader/gguf_grids.py, which are the references.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace moeserve {

/// Where decoded rows go. A row has one value per weight, and a scale (and min) per group.
struct GgmlRows {
    int8_t* values;
    size_t values_stride;  // from row to row
    float* scales;
    float* mins;  // null for types without mins
    size_t scales_stride;
    float* supers;      // scales of 256 weights, null for types without
    float* min_supers;  // of mins, null for types without
    size_t supers_stride;
    int offset = 0;       // added to the values of Q4_0
    float factor = 1.0f;  // multiplied to scales
};

/// Decodes the blocks of one row, and returns whether its scales and mins are finite. grid: of the types that have one,
/// 8 codes per entry (IQ3: 4).
using GgmlDecoder = bool (*)(const uint8_t* raw, size_t blocks, const uint8_t* grid, const GgmlRows& to, size_t row);

/// The decoder of a type and the bytes of its blocks; null if there is none.
struct GgmlType {
    GgmlDecoder decode = nullptr;
    size_t block_bytes = 0;
};

GgmlType ggml_type(const std::string& name);

}  // namespace moeserve
