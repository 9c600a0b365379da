// Row kernels around a recurrence: decays and time steps before it, the output gate and its norm
// after it.
#pragma once

#include "kernels/elements.hpp"
#include "kernels/math.hpp"
#include "kernels/norms.hpp"
#include "kernels/recurrence_args.hpp"

namespace moeserve::MOESERVE_ISA {

/// Softplus: log(1 + e^x) = max(x, 0) + log1p(e^-|x|). log1p(t) = 2 atanh(s) for s = t / (2 + t),
/// which is at most 1/3, so eight terms of the series are exact to fp32.
MOESERVE_INLINE f32 softplus(f32 x) {
    const f32 t = exp(min(x, sub(zero(), x)));
    const f32 s = div(t, add(all(2.0f), t)), z = mul(s, s);
    f32 p = all(1.0f / 15);
    for (int odd = 13; odd >= 1; odd -= 2) p = fma(p, z, all(1.0f / static_cast<float>(odd)));
    return add(max(zero(), x), mul(add(s, s), p));  // max and min return their second operand if one is NaN
}

template <class E>
void decays_of(const DecayArgs& args, size_t begin, size_t end) {
    const size_t heads = args.heads;
    for (size_t r = begin; r < end; ++r) {
        const char* dt = static_cast<const char*>(args.dt) + r * args.stride * E::bytes;
        const char* beta = static_cast<const char*>(args.beta) + r * args.stride * E::bytes;
        for (size_t h = 0; h < heads; h += kWidth) {
            const auto each = [&](const float* x) { return load_at<Float32>(bytes_of(x), h, heads); };
            const f32 free = softplus(add(load_at<E>(dt, h, heads), each(args.bias)));
            const f32 step = min(all(args.most), max(all(args.least), free));
            store_at<Float32>(bytes_of(args.log_decay + r * heads), h, heads, mul(each(args.decay), step));
            if (args.steps) store_at<Float32>(bytes_of(args.steps + r * heads), h, heads, step);
            if (!args.beta) continue;
            const f32 x = load_at<E>(beta, h, heads);
            const f32 factor = div(all(1.0f), add(all(1.0f), exp(sub(zero(), x))));
            store_at<Float32>(bytes_of(args.betas + r * heads), h, heads, factor);
        }
    }
}

template <class E>
void gated_norm_of(const GatedNormArgs& args, size_t begin, size_t end) {
    const size_t width = args.width;
    for (size_t n = begin * args.parts; n < end * args.parts; ++n) {
        const size_t row = n / args.parts, part = n % args.parts;
        const char* gate = static_cast<const char*>(args.gate) + (row * args.stride + part * width) * E::bytes;
        const float* weight = args.weight + part * args.weight_stride;
        const size_t place = args.places ? static_cast<size_t>(args.places[part]) : part;
        char *x = bytes_of(args.x + n * width);
        char *out = static_cast<char*>(args.out) + (row * args.parts + place) * width * E::bytes;
        for (size_t i = 0; args.gate_first && i < width; i += kWidth) {
            store_at<Float32>(x, i, width, mul(silu(load_at<E>(gate, i, width)), load_at<Float32>(x, i, width)));
        }
        const f32 inverse = inverse_rms<Float32>(x, width, args.eps);
        for (size_t i = 0; i < width; i += kWidth) {
            const f32 normed = mul(mul(load_at<Float32>(x, i, width), inverse), load_at<Float32>(bytes_of(weight), i, width));
            store_at<E>(out, i, width, args.gate_first ? normed : mul(silu(load_at<E>(gate, i, width)), normed));
        }
    }
}

inline void decays(const DecayArgs& args, size_t begin, size_t end) { MOESERVE_BY_TYPE(decays_of, args, begin, end) }

inline void gated_norm(const GatedNormArgs& args, size_t begin, size_t end) {
    MOESERVE_BY_TYPE(gated_norm_of, args, begin, end)
}

}  // namespace moeserve::MOESERVE_ISA
