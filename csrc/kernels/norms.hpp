// RMS norms (Zhang and Sennrich 2019), with or without the residual addition before.
#pragma once

#include "kernels/elements.hpp"
#include "kernels/row_args.hpp"

namespace moeserve::MOESERVE_ISA {

/// Returns 1 / sqrt(mean(x^2) + eps) in every lane.
template <class E>
MOESERVE_INLINE f32 inverse_rms(const char* x, size_t width, float eps) {
    Sums sums;
    for (size_t i = 0; i < width; i += 32) {
        for (int p = 0; p < Sums::kParts; ++p) {
            const f32 part = load_at<E>(x, i + p * kWidth, width);
            sums.part[p] = fma(part, part, sums.part[p]);
        }
    }
    return div(all(1.0f), sqrt(all(sums.total() / static_cast<float>(width) + eps)));
}

template <class E>
void rms_norm_of(const NormArgs& args, size_t begin, size_t end) {
    const size_t width = args.width, row_bytes = width * E::bytes;
    for (size_t r = begin; r < end; ++r) {
        const char* x = static_cast<const char*>(args.x) + r * args.stride * E::bytes;
        if (args.residual) {
            const char* residual = static_cast<const char*>(args.residual) + r * args.residual_stride * E::bytes;
            char* total = static_cast<char*>(args.total) + r * row_bytes;
            for (size_t i = 0; i < width; i += kWidth) {
                store_at<E>(total, i, width, add(load_at<E>(x, i, width), load_at<E>(residual, i, width)));
            }
            x = total;
        }
        const f32 inverse = inverse_rms<E>(x, width, args.eps);
        char* out = static_cast<char*>(args.out) + r * row_bytes;
        for (size_t i = 0; i < width; i += kWidth) {
            const f32 weight = load_at<Float32>(bytes_of(args.weight), i, width);
            store_at<E>(out, i, width, mul(mul(load_at<E>(x, i, width), inverse), weight));
        }
    }
}

inline void rms_norm(const NormArgs& args, size_t begin, size_t end) {
    MOESERVE_BY_TYPE(rms_norm_of, args, begin, end)
}

}  // namespace moeserve::MOESERVE_ISA
