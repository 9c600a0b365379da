// What precedes attention: per-head norms, clipping, rotary embedding (Su et al. 2021, half layout), the softmax scale, and
// the way of keys and values into the cache. In fp32 from the projection's output to the one rounding.
#pragma once

#include "kernels/norms.hpp"

namespace moeserve::MOESERVE_ISA {

/// Both keep NaN.
MOESERVE_INLINE f32 clipped(f32 x, f32 limit) { return min(limit, max(sub(zero(), limit), x)); }

/// y = the head, rotated and scaled. x and y have room for one vector more.
MOESERVE_INLINE void rotate(const float* x, const float* cos, const float* sin, size_t dim, float scale, float* y) {
    const size_t half = dim / 2;
    const f32 factor = all(scale);
    // A last vector may run over into the second half, which is written after.
    for (size_t i = 0; i < half; i += kWidth) {
        const f32 c = load_at<Float32>(bytes_of(cos), i, dim), s = load_at<Float32>(bytes_of(sin), i, dim);
        store(y + i, mul(add(mul(load(x + i), c), mul(load(x + half + i), s)), factor));
    }
    for (size_t i = 0; i < half; i += kWidth) {
        const f32 c = load_at<Float32>(bytes_of(cos), half + i, dim), s = load_at<Float32>(bytes_of(sin), half + i, dim);
        store(y + half + i, mul(add(mul(load(x + half + i), c), mul(load(x + i), s)), factor));
    }
}

/// One query or key head of a row, from its place in the projection (or in `normed`) to y.
template <class E>
MOESERVE_INLINE void query_or_key(const QkNormRopeCacheArgs& args, size_t row, size_t head, float* x, float* y) {
    const size_t dim = args.dim, both = args.heads + args.kv_heads;
    if (args.normed) {
        memcpy(x, args.normed + (row * both + head) * dim, dim * sizeof(float));
    } else {
        const char* from = static_cast<const char*>(args.qkv) + (row * args.stride + head * dim) * E::bytes;
        for (size_t i = 0; i < dim; i += kWidth) store(x + i, load_at<E>(from, i, dim));
    }
    if (args.norms) {
        const f32 inverse = inverse_rms<Float32>(bytes_of(x), dim, args.eps);
        const char* weight = bytes_of(args.norms + head * dim);
        for (size_t i = 0; i < dim; i += kWidth) {
            store(x + i, mul(mul(load(x + i), inverse), load_at<Float32>(weight, i, dim)));
        }
    }
    if (args.clip < __builtin_inff()) {
        for (size_t i = 0; i < dim; i += kWidth) store(x + i, clipped(load(x + i), all(args.clip)));
    }
    rotate(x, args.cos + row * dim, args.sin + row * dim, dim, head < args.heads ? args.scale : 1.0f, y);
}

template <class E>
MOESERVE_INLINE void store_head(const float* y, size_t dim, char* to) {
    for (size_t i = 0; i < dim; i += kWidth) store_at<E>(to, i, dim, load(y + i));
}

/// In multiples of the largest magnitude / 127. What is not finite makes that NaN, and so whatever is attended to with it.
template <>
MOESERVE_INLINE void store_head<Int8>(const float* y, size_t dim, char* to) {
    i32 peak = all_words(0);  // as whole numbers, magnitudes have the same order, and NaN lies above infinity
    for (size_t i = 0; i < dim; i += kWidth) {
        peak = max(peak, both(words(load_at<Float32>(bytes_of(y), i, dim)), all_words(0x7fffffff)));
    }
    const int32_t bits = largest(peak);
    float most;
    memcpy(&most, &bits, sizeof most);
    const float scale = most < __builtin_inff() ? most / 127.0f : __builtin_nanf("");
    for (size_t i = 0; i < dim; i += kWidth) {
        const f32 x = scale > 0.0f ? div(load(y + i), all(scale)) : zero();
        store_at<Int8>(to, i, dim, max(all(-127.0f), min(all(127.0f), x)));  // a denormal scale is no exact share
    }
    memcpy(to + dim, &scale, sizeof scale);
}

/// Cache: the elements of k and v.
template <class E, class Cache>
void qk_norm_rope_cache_into(const QkNormRopeCacheArgs& args, size_t begin, size_t end) {
    alignas(64) float x[QkNormRopeCacheArgs::kMaxDim + 2 * kWidth] = {}, y[QkNormRopeCacheArgs::kMaxDim + 2 * kWidth];
    const size_t dim = args.dim, head_bytes = dim * E::bytes, cache_bytes = stored_bytes<Cache>(dim);
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
            store_head<Cache>(y, dim, static_cast<char*>(args.k) + (kv_slot + group) * cache_bytes);
            for (size_t i = 0; i < dim; i += kWidth) {
                store(y + i, clipped(load_at<E>(values + group * head_bytes, i, dim), all(args.clip)));
            }
            store_head<Cache>(y, dim, static_cast<char*>(args.v) + (kv_slot + group) * cache_bytes);
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

}  // namespace moeserve::MOESERVE_ISA
