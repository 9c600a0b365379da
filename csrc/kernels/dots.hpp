// The two ways in which tiles multiply: rows of floats, one input at a time, or rows of bf16 pairs
// with dot products. Both are the same chain of fused multiply-adds, because a dot product adds the
// product of the upper halves first, and the first input of a pair is in the upper half. Their bits
// differ only for denormals, which dot products treat as zeros.
#pragma once

#include "kernels/weights.hpp"

namespace moeserve::MOESERVE_ISA {

/// Rows of floats.
template <class F>
struct Chains {
    using Format = F;
    using Vector = f32;
    template <class G>
    using Unpacked = Chains<std::conditional_t<!G::kCostly, G, std::conditional_t<G::kGrouped, WeightsUnpacked<WeightsFp32>, WeightsFp32>>>;
    static constexpr int kInputs = 1;  // per element
    static constexpr int kDepth = F::kDepth;  // elements per step
    static constexpr size_t kStepBytes = F::kStepBytes;

    template <int d>
    static MOESERVE_INLINE f32 column(const uint8_t* step, const uint8_t* head, int v) {
        return F::template get<d>(step, head, v);
    }
    static MOESERVE_INLINE f32 element(const float* a) { return all(a); }
    static MOESERVE_INLINE f32 add(f32 sum, f32 x, f32 column) { return fma(x, column, sum); }
};

#ifdef __AVX512BF16__
/// Rows of words with a pair of bf16, the first input in the upper half. Weights must be exact in
/// bf16.
template <class F>
struct Dots {
    using Format = F;
    using Vector = i32;
    template <class G>
    using Unpacked = Dots<std::conditional_t<!G::kCostly, G, std::conditional_t<G::kGrouped, WeightsUnpacked<WeightsBf16>, WeightsBf16>>>;
    static constexpr int kInputs = 2;
    static constexpr int kDepth = F::kDepth > 1 ? F::kDepth / 2 : 1;
    static constexpr size_t kStepBytes = F::kDepth > 1 ? F::kStepBytes : 2 * F::kStepBytes;

    template <int d>
    static MOESERVE_INLINE i32 column(const uint8_t* step, const uint8_t* head, int v) {
        if constexpr (requires { F::template pair<d>(step, head, v); }) {
            return F::template pair<d>(step, head, v);
        } else {
            return upper_halves(words(F::template get<0>(step, head, v)),
                                words(F::template get<0>(step + F::kStepBytes, head, v)));
        }
    }
    static MOESERVE_INLINE i32 element(const float* a) {
        uint32_t pair;
        memcpy(&pair, a, sizeof pair);
        return all_words(pair);
    }
    static MOESERVE_INLINE f32 add(f32 sum, i32 x, i32 column) { return dot(sum, x, column); }
};
#endif

}  // namespace moeserve::MOESERVE_ISA
