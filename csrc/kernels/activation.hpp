// The activations of MLPs (SwiGLU, Shazeer 2020, and variants), and the gate of a shared expert.
#pragma once

#include "kernels/elements.hpp"
#include "kernels/math.hpp"
#include "kernels/row_args.hpp"

namespace moeserve::MOESERVE_ISA {

struct SwiGlu {
    static constexpr bool kGated = true;

    MOESERVE_INLINE explicit SwiGlu(const Activation&) {}
    MOESERVE_INLINE f32 operator()(f32 gate, f32 up) const { return mul(silu(gate), up); }
};

/// The general gated activation, with all limits and factors. GELU uses 0.5 (1 + tanh(u)) = 1 / (1
/// + e^-2u) for u = sqrt(2 / pi) (x + 0.044715 x^3).
template <bool gelu>
struct Gated {
    static constexpr bool kGated = true;
    float alpha, gate_limit, act_limit, up_limit, up_shift;

    MOESERVE_INLINE explicit Gated(const Activation& a)
        : alpha(a.alpha), gate_limit(a.gate_limit), act_limit(a.act_limit), up_limit(a.up_limit), up_shift(a.up_shift) {}

    MOESERVE_INLINE f32 operator()(f32 gate, f32 up) const {  // min and max return their second operand if one is NaN
        const f32 x = min(all(gate_limit), gate);
        const f32 factor = gelu ? fma(mul(x, x), all(0.0713548162726f), all(1.5957691216057f)) : all(alpha);
        const f32 y = div(x, add(all(1.0f), exp(sub(zero(), mul(factor, x)))));
        return mul(min(all(act_limit), y), add(max(all(-up_limit), min(all(up_limit), up)), all(up_shift)));
    }
};

/// max(up, 0)^2.
struct Relu2 {
    static constexpr bool kGated = false;

    MOESERVE_INLINE f32 operator()(f32 up) const {
        const f32 x = max(zero(), up);  // returns its second operand if one is NaN
        return mul(x, x);
    }
};

/// Calls body with the functor that computes this activation.
template <class Body>
MOESERVE_INLINE void with_activation(const Activation& activation, const Body& body) {
    switch (activation.kind) {
        case Activation::Kind::swiglu: return body(SwiGlu(activation));
        case Activation::Kind::silu: return body(Gated<false>(activation));
        case Activation::Kind::gelu_tanh: return body(Gated<true>(activation));
        case Activation::Kind::relu2: return body(Relu2());
    }
}

template <class E, class Gate>
void act_mul_by(const ActMulArgs& args, const Gate& act_mul, size_t begin, size_t end) {
    const size_t width = args.width;
    for (size_t r = begin; r < end; ++r) {
        const char* gate = static_cast<const char*>(args.x) + r * args.stride * E::bytes;
        const char* up = gate + width * E::bytes;
        char* out = static_cast<char*>(args.out) + r * width * E::bytes;
        for (size_t i = 0; i < width; i += kWidth) {
            const f32 x = load_at<E>(gate, i, width);
            if constexpr (Gate::kGated) {
                store_at<E>(out, i, width, act_mul(x, load_at<E>(up, i, width)));
            } else {
                store_at<E>(out, i, width, act_mul(x));
            }
        }
    }
}

template <class E>
void act_mul_of(const ActMulArgs& args, size_t begin, size_t end) {
    with_activation(args.activation, [&](const auto& gate) { act_mul_by<E>(args, gate, begin, end); });
}

template <class E>
void sigmoid_of(const SigmoidArgs& args, size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) {
        const f32 x = load_at<E>(static_cast<const char*>(args.x) + r * args.stride * E::bytes, 0, 1);
        const f32 y = div(all(1.0f), add(all(1.0f), exp(sub(zero(), x))));
        store_at<Float32>(bytes_of(args.out + r), 0, 1, y);
    }
}

inline void act_mul(const ActMulArgs& args, size_t begin, size_t end) {
    MOESERVE_BY_TYPE(act_mul_of, args, begin, end)
}

inline void sigmoid(const SigmoidArgs& args, size_t begin, size_t end) {
    MOESERVE_BY_TYPE(sigmoid_of, args, begin, end)
}

}  // namespace moeserve::MOESERVE_ISA
