// How tiles multiply: rows of floats input by input, or rows of bf16 pairs by dot products. Both are the same chain of
// fused multiply-adds, since a dot product adds the upper halves of two words first and pairs lie that way round: their
// bits differ only where denormals are involved, which dot products take for zeros.
#pragma once

#include "kernels/weights.hpp"

namespace moeserve::MOESERVE_ISA {

/// An element of a row is a float.
template <class F>
struct Chains {
    using Format = F;
    using Vector = f32;
    template <class G>
    using Unpacked = Chains<std::conditional_t<!G::kCostly, G, std::conditional_t<G::kGrouped, WeightsUnpacked<WeightsFp32>, WeightsFp32>>>;
    static constexpr int kInputs = 1;  // of an element
    static constexpr int kDepth = F::kDepth;  // elements of a step
    static constexpr size_t kStepBytes = F::kStepBytes;

    template <int d>
    static MOESERVE_INLINE f32 column(const uint8_t* step, const uint8_t* head, int v) {
        return F::template get<d>(step, head, v);
    }
    static MOESERVE_INLINE f32 element(const float* a) { return all(a); }
    static MOESERVE_INLINE f32 add(f32 sum, f32 x, f32 column) { return fma(x, column, sum); }
};

#ifdef __AVX512BF16__
/// An element of a row is a pair of bf16 in a word, the first input in its upper half. Weights are exact in bf16.
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
