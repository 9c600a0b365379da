// The steps before attention (latent or not): per-head norms, clipping, rotary embedding (Su et al.
// 2021, half layout), softmax scale, and KV cache write. All in fp32, from the projection's output
// to a single rounding.
#pragma once

#include "kernels/norms.hpp"

namespace moeserve::MOESERVE_ISA {

/// Both keep NaN.
MOESERVE_INLINE f32 clipped(f32 x, f32 limit) { return min(limit, max(sub(zero(), limit), x)); }

/// Writes the head, rotated and scaled, to y. x and y must have room for one more vector.
MOESERVE_INLINE void rotate(const float* x, const float* cos, const float* sin, size_t dim, float scale, float* y) {
    const size_t half = dim / 2;
    const f32 factor = all(scale);
    // The last vector may extend into the second half, which is written later.
    for (size_t i = 0; i < half; i += kWidth) {
        const f32 c = load_at<Float32>(bytes_of(cos), i, dim), s = load_at<Float32>(bytes_of(sin), i, dim);
        store(y + i, mul(add(mul(load(x + i), c), mul(load(x + half + i), s)), factor));
    }
    for (size_t i = 0; i < half; i += kWidth) {
        const f32 c = load_at<Float32>(bytes_of(cos), half + i, dim), s = load_at<Float32>(bytes_of(sin), half + i, dim);
        store(y + half + i, mul(add(mul(load(x + half + i), c), mul(load(x + i), s)), factor));
    }
}

/// Computes x = x / sqrt(mean(x^2) + eps), times the weight if there is one.
MOESERVE_INLINE void normalise(float* x, const float* weight, size_t dim, float eps) {
    const f32 inverse = inverse_rms<Float32>(bytes_of(x), dim, eps);
    for (size_t i = 0; i < dim; i += kWidth) {
        const f32 y = mul(load(x + i), inverse);
        store(x + i, weight ? mul(y, load_at<Float32>(bytes_of(weight), i, dim)) : y);
    }
}

/// Computes one query or key head of a row, from the projection (or `normed`) to y.
template <class E>
MOESERVE_INLINE void query_or_key(const QkNormRopeCacheArgs& args, size_t row, size_t head, float* x, float* y) {
    const size_t dim = args.dim, both = args.heads + args.kv_heads;
    if (args.normed) {
        memcpy(x, args.normed + (row * both + head) * dim, dim * sizeof(float));
    } else {
        const char* from = static_cast<const char*>(args.qkv) + (row * args.stride + head * dim) * E::bytes;
        for (size_t i = 0; i < dim; i += kWidth) store(x + i, load_at<E>(from, i, dim));
    }
    const float* norm = args.norms ? args.norms + head * dim : nullptr;
    if (norm && !args.norm_last) normalise(x, norm, dim, args.eps);
    if (args.clip < __builtin_inff()) {
        for (size_t i = 0; i < dim; i += kWidth) store(x + i, clipped(load(x + i), all(args.clip)));
    }
    const float scale = head < args.heads ? args.scale : 1.0f, *cos = args.cos + row * dim, *sin = args.sin + row * dim;
    if (!norm || !args.norm_last) return rotate(x, cos, sin, dim, scale, y);
    rotate(x, cos, sin, dim, 1.0f, y);
    normalise(y, norm, dim, args.eps);
    for (size_t i = 0; i < dim; i += kWidth) store(y + i, mul(load(y + i), all(scale)));
}

template <class E>
MOESERVE_INLINE void store_head(const float* y, size_t dim, char* to) {
    for (size_t i = 0; i < dim; i += kWidth) store_at<E>(to, i, dim, load(y + i));
}

/// Stores int8 multiples of a scale, the largest magnitude / 127. If an element is not finite, the
/// scale is NaN, and so is every attention result that includes the entry.
template <>
MOESERVE_INLINE void store_head<Int8>(const float* y, size_t dim, char* to) {
    i32 peak = all_words(0);  // as integers, magnitudes have the same order, and NaN is above infinity
    for (size_t i = 0; i < dim; i += kWidth) {
        peak = max(peak, both(words(load_at<Float32>(bytes_of(y), i, dim)), all_words(0x7fffffff)));
    }
    const int32_t bits = largest(peak);
    float most;
    memcpy(&most, &bits, sizeof most);
    const float scale = most < __builtin_inff() ? most / 127.0f : __builtin_nanf("");
    for (size_t i = 0; i < dim; i += kWidth) {
        const f32 x = scale > 0.0f ? div(load(y + i), all(scale)) : zero();
        store_at<Int8>(to, i, dim, max(all(-127.0f), min(all(127.0f), x)));  // a denormal scale is inexact
    }
    memcpy(to + dim, &scale, sizeof scale);
}

/// Cache: the element type of k and v.
template <class E, class Cache>
void qk_norm_rope_cache_into(const QkNormRopeCacheArgs& args, size_t begin, size_t end) {
    alignas(64) float x[QkNormRopeCacheArgs::kMaxDim + 2 * kWidth] = {}, y[QkNormRopeCacheArgs::kMaxDim + 2 * kWidth];
    const size_t dim = args.dim, v_dim = args.v_dim, head_bytes = dim * E::bytes;
    const size_t k_bytes = stored_bytes<Cache>(dim), v_bytes = stored_bytes<Cache>(v_dim);
    for (size_t row = begin; row < end; ++row) {
        char* q = static_cast<char*>(args.q) + row * args.heads * head_bytes;
        for (size_t head = 0; head < args.heads; ++head) {
            query_or_key<E>(args, row, head, x, y);
            store_head<E>(y, dim, q + head * head_bytes);
        }
        if (row >= args.real) continue;
        const size_t kv_slot = static_cast<size_t>(args.slot_mapping[row]) * args.kv_heads;
        const char* values = static_cast<const char*>(args.qkv) +
                             (row * args.stride + (args.heads + args.kv_heads) * dim) * E::bytes;
        for (size_t group = 0; group < args.kv_heads; ++group) {
            query_or_key<E>(args, row, args.heads + group, x, y);
            store_head<Cache>(y, dim, static_cast<char*>(args.k) + (kv_slot + group) * k_bytes);
            const char* value = values + group * v_dim * E::bytes;
            if (args.norm_values) {
                for (size_t i = 0; i < v_dim; i += kWidth) store(y + i, load_at<E>(value, i, v_dim));
                normalise(y, nullptr, v_dim, args.eps);
                for (size_t i = 0; i < v_dim; i += kWidth) store(y + i, clipped(load(y + i), all(args.clip)));
            } else {
                for (size_t i = 0; i < v_dim; i += kWidth) {
                    store(y + i, clipped(load_at<E>(value, i, v_dim), all(args.clip)));
                }
            }
            store_head<Cache>(y, v_dim, static_cast<char*>(args.v) + (kv_slot + group) * v_bytes);
        }
    }
}

template <class E>
void qk_norm_rope_cache_of(const QkNormRopeCacheArgs& args, size_t begin, size_t end) {
    if (args.kv_type == Type::int8) return qk_norm_rope_cache_into<E, Int8>(args, begin, end);
    qk_norm_rope_cache_into<E, E>(args, begin, end);
}

inline void qk_norm_rope_cache(const QkNormRopeCacheArgs& args, size_t begin, size_t end) {
    MOESERVE_BY_TYPE(qk_norm_rope_cache_of, args, begin, end)
}

template <class E>
void latent_rope_cache_of(const LatentRopeCacheArgs& args, size_t begin, size_t end) {
    alignas(64) float x[QkNormRopeCacheArgs::kMaxDim + 2 * kWidth] = {}, y[QkNormRopeCacheArgs::kMaxDim + 2 * kWidth];
    const size_t nope = args.nope, rope = args.rope, rank = args.rank, entry = rank + rope;
    for (size_t row = begin; row < end; ++row) {
        const float *cos = args.cos + row * rope, *sin = args.sin + row * rope;
        const auto rotated = [&](const char* from, float scale, char* to) {
            for (size_t i = 0; i < rope; i += kWidth) store(x + i, load_at<E>(from, i, rope));
            rotate(x, cos, sin, rope, scale, y);
            store_head<E>(y, rope, to);
        };
        for (size_t head = 0; head < args.heads; ++head) {
            const size_t place = row * args.heads + head;
            const char* q = static_cast<const char*>(args.q) + (row * args.q_stride + head * (nope + rope)) * E::bytes;
            char* to = static_cast<char*>(args.q_nope) + place * nope * E::bytes;
            for (size_t i = 0; i < nope; i += kWidth) {
                store_at<E>(to, i, nope, mul(load_at<E>(q, i, nope), all(args.scale)));
            }
            rotated(q + nope * E::bytes, args.scale, static_cast<char*>(args.latent_q) + (place * entry + rank) * E::bytes);
        }
        if (row >= args.real) continue;
        const char* kv = static_cast<const char*>(args.kv) + row * args.kv_stride * E::bytes;
        char* to = static_cast<char*>(args.cache) + static_cast<size_t>(args.slot_mapping[row]) * entry * E::bytes;
        const f32 inverse = inverse_rms<E>(kv, rank, args.eps);
        for (size_t i = 0; i < rank; i += kWidth) {
            const f32 weight = load_at<Float32>(bytes_of(args.norm), i, rank);
            store_at<E>(to, i, rank, mul(mul(load_at<E>(kv, i, rank), inverse), weight));
        }
        rotated(kv + rank * E::bytes, 1.0f, to + rank * E::bytes);
    }
}

inline void latent_rope_cache(const LatentRopeCacheArgs& args, size_t begin, size_t end) {
    MOESERVE_BY_TYPE(latent_rope_cache_of, args, begin, end)
}

}  // namespace moeserve::MOESERVE_ISA
