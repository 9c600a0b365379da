// SwiGLU's product (Shazeer 2020) and the gate of a shared expert.
#pragma once

#include "kernels/elements.hpp"
#include "kernels/math.hpp"
#include "kernels/row_args.hpp"

namespace moeserve::MOESERVE_ISA {

template <class E>
void silu_mul_of(const SiluArgs& args, size_t begin, size_t end) {
    const size_t width = args.width;
    for (size_t r = begin; r < end; ++r) {
        const char* gate = static_cast<const char*>(args.x) + r * args.stride * E::bytes;
        const char* up = gate + width * E::bytes;
        char* out = static_cast<char*>(args.out) + r * width * E::bytes;
        for (size_t i = 0; i < width; i += kWidth) {
            store_at<E>(out, i, width, mul(silu(load_at<E>(gate, i, width)), load_at<E>(up, i, width)));
        }
    }
}

template <class E>
void sigmoid_of(const SigmoidArgs& args, size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) {
        const f32 x = load_at<E>(static_cast<const char*>(args.x) + r * args.stride * E::bytes, 0, 1);
        const f32 y = div(all(1.0f), add(all(1.0f), exp(sub(zero(), x))));
        store_at<Float32>(bytes_of(args.out + r), 0, 1, y);
    }
}

inline void silu_mul(const SiluArgs& args, size_t begin, size_t end) {
    MOESERVE_BY_TYPE(silu_mul_of, args, begin, end)
}

inline void sigmoid(const SigmoidArgs& args, size_t begin, size_t end) {
    MOESERVE_BY_TYPE(sigmoid_of, args, begin, end)
}

}  // namespace moeserve::MOESERVE_ISA
