#pragma once
// The combine step: the weighted sum of a token's expert outputs, in routing order.
#include <cstddef>
#include <cstdint>

namespace moeserve {

enum class Element : int { fp32 = 0, bf16 = 1, fp16 = 2 };

constexpr size_t element_bytes(Element element) { return element == Element::fp32 ? 4 : 2; }

/// Instruction sets that the sum is compiled for. All give the same bits.
enum class Isa : int { baseline = 0, avx2 = 1, avx512 = 2 };

bool has(Isa isa);
Isa best_isa();

/// Computes out[t] = sum over k = 0..top_k-1, in this order, of weights[t, k] * rows[t * top_k +
/// k]. Each product and each partial sum is rounded to fp32; the total is rounded once to the
/// element type (to nearest, ties to even). rows: pointers to `dim` elements each, never null
/// (pairs without an expert point to zeros).
void weighted_sum(const void* const* rows, const float* weights, size_t tokens, size_t top_k, size_t dim,
                  Element element, void* out, Isa isa);

}  // namespace moeserve
