// Load and store the element types of activations as vectors of floats. Include after a vec_*.hpp.
#pragma once

#include "kernels/table.hpp"

namespace moeserve::MOESERVE_ISA {

struct Float32 {
    static constexpr size_t bytes = 4;
    static MOESERVE_INLINE f32 load(const char* p) { return MOESERVE_ISA::load(reinterpret_cast<const float*>(p)); }
    static MOESERVE_INLINE void store(char* p, f32 a) { MOESERVE_ISA::store(reinterpret_cast<float*>(p), a); }
};

struct BFloat16 {
    static constexpr size_t bytes = 2;
    static MOESERVE_INLINE f32 load(const char* p) { return load_bf16(p); }
    static MOESERVE_INLINE void store(char* p, f32 a) { store_bf16(p, a); }
};

struct Float16 {
    static constexpr size_t bytes = 2;
    static MOESERVE_INLINE f32 load(const char* p) { return load_fp16(p); }
    static MOESERVE_INLINE void store(char* p, f32 a) { store_fp16(p, a); }
};

/// int8 in the KV cache: integer multiples of a scale, which each head has for itself as a float
/// after its elements.
struct Int8 {
    static constexpr size_t bytes = 1;
    static MOESERVE_INLINE f32 load(const char* p) { return load_int8(p); }
    static MOESERVE_INLINE void store(char* p, f32 a) { store_int8(p, a); }
};

template <class E>
constexpr bool kScaled = false;
template <>
constexpr bool kScaled<Int8> = true;

/// The bytes of one head in a cache.
template <class E>
constexpr size_t stored_bytes(size_t dim) {
    return dim * E::bytes + (kScaled<E> ? sizeof(float) : 0);
}

/// Loads elements [i, i + kWidth) of a row of `width`. Elements after its end become zero and are
/// not read.
template <class E>
MOESERVE_INLINE f32 load_at(const char* row, size_t i, size_t width) {
    if (i + kWidth <= width) return E::load(row + i * E::bytes);
    char part[kWidth * E::bytes] = {};
    if (i < width) memcpy(part, row + i * E::bytes, (width - i) * E::bytes);
    return E::load(part);
}

template <class E>
MOESERVE_INLINE void store_at(char* row, size_t i, size_t width, f32 a) {
    if (i + kWidth <= width) return E::store(row + i * E::bytes, a);
    char part[kWidth * E::bytes];
    E::store(part, a);
    if (i < width) memcpy(row + i * E::bytes, part, (width - i) * E::bytes);
}

MOESERVE_INLINE const char* bytes_of(const float* row) { return reinterpret_cast<const char*>(row); }
MOESERVE_INLINE char* bytes_of(float* row) { return reinterpret_cast<char*>(row); }

/// 32 sums side by side, whatever the width of a vector, so that every instruction set adds in the
/// same order.
struct Sums {
    static constexpr int kParts = 32 / kWidth;
    f32 part[kParts];

    MOESERVE_INLINE Sums() {
        for (f32& sum : part) sum = zero();
    }
    MOESERVE_INLINE float total() const {
        f32 halves[kParts];
        for (int p = 0; p < kParts; ++p) halves[p] = part[p];
        for (int count = kParts / 2; count > 0; count /= 2) {
            for (int p = 0; p < count; ++p) halves[p] = add(halves[p], halves[p + count]);
        }
        return sum(halves[0]);
    }
};

/// Calls the instance of a kernel for the type of its arguments.
#define MOESERVE_BY_TYPE(kernel, args, begin, end)                                        \
    switch ((args).type) {                                                                \
        case Type::fp32: return kernel<Float32>(args, begin, end);                        \
        case Type::bf16: return kernel<BFloat16>(args, begin, end);                       \
        case Type::fp16: return kernel<Float16>(args, begin, end);                        \
        default: return;                                                                  \
    }

}  // namespace moeserve::MOESERVE_ISA
