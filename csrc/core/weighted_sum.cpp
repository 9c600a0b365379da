#include "core/weighted_sum.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

// One loop, written with the compiler's vector types and compiled once per instruction set. The
// build forbids contraction (-ffp-contract=off): a fused multiply-add rounds once where the
// reference rounds twice.
#define INLINE inline __attribute__((always_inline))

namespace moeserve {
namespace {

template <int W>
struct Vec {
    typedef float f32 __attribute__((vector_size(W * 4)));
    typedef uint32_t u32 __attribute__((vector_size(W * 4)));
};

template <class To, class From>
INLINE To bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Each element type loads and stores 2 W elements as two vectors. 16-bit elements are split into
// even and odd ones of 32-bit words, which takes only shifts and masks. Widening them in order
// would need shuffles.

template <int W>
struct Fp32 {
    using f32 = typename Vec<W>::f32;
    static constexpr size_t size = 4;

    static INLINE void load(const char* from, f32* to) { std::memcpy(to, from, 2 * sizeof(f32)); }
    static INLINE void store(const f32* from, char* to) { std::memcpy(to, from, 2 * sizeof(f32)); }
};

template <int W>
struct Bf16 {
    using f32 = typename Vec<W>::f32;
    using u32 = typename Vec<W>::u32;
    static constexpr size_t size = 2;

    static INLINE void load(const char* from, f32* to) {
        u32 both;
        std::memcpy(&both, from, sizeof both);
        to[0] = bits<f32>(static_cast<u32>(both << 16));
        to[1] = bits<f32>(static_cast<u32>(both & 0xffff0000u));
    }

    static INLINE u32 rounded(const f32& from) {  // in the upper half
        const u32 b = bits<u32>(from), up = b + 0x7fffu + ((b >> 16) & 1u), nan = u32{} + 0x7fc00000u;
        return ((b & 0x7fffffffu) > 0x7f800000u ? nan : up) & 0xffff0000u;
    }

    static INLINE void store(const f32* from, char* to) {
        const u32 both = rounded(from[0]) >> 16 | rounded(from[1]);
        std::memcpy(to, &both, sizeof both);
    }
};

template <int W>
struct Fp16 {
    using f32 = typename Vec<W>::f32;
    using u32 = typename Vec<W>::u32;
    static constexpr size_t size = 2;

    static INLINE f32 widened(const u32& half) {
        const u32 magnitude = (half & 0x7fffu) << 13;
        const f32 scaled = bits<f32>(magnitude) * 0x1p112f;  // corrects the exponent bias; exact even for denormals
        const u32 finite = bits<u32>(scaled), special = magnitude | 0x7f800000u;
        return bits<f32>(static_cast<u32>((magnitude >= (0x7c00u << 13) ? special : finite) | (half & 0x8000u) << 16));
    }

    static INLINE void load(const char* from, f32* to) {
        u32 both;
        std::memcpy(&both, from, sizeof both);
        to[0] = widened(both & 0xffffu);
        to[1] = widened(both >> 16);
    }

    static INLINE u32 rounded(const f32& from) {  // in the lower half
        const u32 b = bits<u32>(from), u = b & 0x7fffffffu;
        const u32 normal = (u - (112u << 23) + 0xfffu + ((u >> 13) & 1u)) >> 13;
        // Below 2^-14: adding 0.5 aligns the last bit of the fp16 denormal with the last bit of
        // fp32, so it is rounded.
        const f32 shifted = bits<f32>(u) + 0.5f;
        const u32 denormal = bits<u32>(shifted) - 0x3f000000u;
        const u32 infinite = u32{} + 0x7c00u, nan = u32{} + 0x7e00u;
        const u32 special = u > 0x7f800000u ? nan : infinite, finite = u < (113u << 23) ? denormal : normal;
        return (u >= (143u << 23) ? special : finite) | ((b >> 16) & 0x8000u);
    }

    static INLINE void store(const f32* from, char* to) {
        const u32 both = rounded(from[0]) | rounded(from[1]) << 16;
        std::memcpy(to, &both, sizeof both);
    }
};

/// One token's rows from byte `at`.
struct Rows {
    const void* const* rows;
    const float* weights;
    size_t top_k, at;

    INLINE const char* row(size_t k) const { return static_cast<const char*>(rows[k]) + at; }
};

/// Sums N times two vectors, which stay in registers while all rows are added.
template <class E, int W, int N>
INLINE void sum_block(const Rows& from, char* out) {
    constexpr size_t step = 2 * W * E::size;
    typename Vec<W>::f32 total[2 * N], y[2];
    for (int n = 0; n < N; ++n) {
        E::load(from.row(0) + n * step, y);
        for (int half = 0; half < 2; ++half) total[2 * n + half] = y[half] * from.weights[0];
    }
    for (size_t k = 1; k < from.top_k; ++k) {
        for (int n = 0; n < N; ++n) {
            E::load(from.row(k) + n * step, y);
            for (int half = 0; half < 2; ++half) total[2 * n + half] += y[half] * from.weights[k];
        }
    }
    for (int n = 0; n < N; ++n) E::store(total + 2 * n, out + from.at + n * step);
}

/// Sums the last `bytes` of a row, less than a block.
template <class E, int W>
INLINE void sum_tail(const Rows& from, size_t bytes, char* out) {
    char block[2 * W * E::size] = {};
    typename Vec<W>::f32 total[2] = {}, y[2];
    for (size_t k = 0; k < from.top_k; ++k) {
        std::memcpy(block, from.row(k), bytes);
        E::load(block, y);
        for (int half = 0; half < 2; ++half) {
            const typename Vec<W>::f32 term = y[half] * from.weights[k];
            total[half] = k == 0 ? term : total[half] + term;
        }
    }
    E::store(total, block);
    std::memcpy(out + from.at, block, bytes);
}

template <class E, int W>
INLINE void sum_tokens(const void* const* rows, const float* weights, size_t tokens, size_t top_k, size_t dim,
                       char* out) {
    constexpr size_t step = 2 * W * E::size;
    const size_t row_bytes = dim * E::size;
    Rows from{rows, weights, top_k, 0};
    for (size_t t = 0; t < tokens; ++t) {
        for (from.at = 0; from.at + 4 * step <= row_bytes; from.at += 4 * step) sum_block<E, W, 4>(from, out);
        for (; from.at + step <= row_bytes; from.at += step) sum_block<E, W, 1>(from, out);
        if (from.at < row_bytes) sum_tail<E, W>(from, row_bytes - from.at, out);
        from.rows += top_k;
        from.weights += top_k;
        out += row_bytes;
    }
}

template <int W>
INLINE void sum_elements(const void* const* rows, const float* weights, size_t tokens, size_t top_k, size_t dim,
                         Element element, char* out) {
    switch (element) {
        case Element::fp32: return sum_tokens<Fp32<W>, W>(rows, weights, tokens, top_k, dim, out);
        case Element::bf16: return sum_tokens<Bf16<W>, W>(rows, weights, tokens, top_k, dim, out);
        case Element::fp16: return sum_tokens<Fp16<W>, W>(rows, weights, tokens, top_k, dim, out);
    }
}

#define VERSION(name, width, attribute)                                                                            \
    attribute void name(const void* const* rows, const float* weights, size_t tokens, size_t top_k, size_t dim,    \
                        Element element, char* out) {                                                              \
        sum_elements<width>(rows, weights, tokens, top_k, dim, element, out);                                      \
    }

VERSION(sum_baseline, 4, )
#if defined(__x86_64__)
VERSION(sum_avx2, 8, __attribute__((target("avx2"))))
VERSION(sum_avx512, 16, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#endif

}  // namespace

bool has(Isa isa) {
    if (isa == Isa::baseline) return true;
#if defined(__x86_64__)
    if (isa == Isa::avx2) return __builtin_cpu_supports("avx2");
    if (isa == Isa::avx512) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    }
#endif
    return false;
}

Isa best_isa() {
    static const Isa best = has(Isa::avx512) ? Isa::avx512 : has(Isa::avx2) ? Isa::avx2 : Isa::baseline;
    return best;
}

void weighted_sum(const void* const* rows, const float* weights, size_t tokens, size_t top_k, size_t dim,
                  Element element, void* out, Isa isa) {
    if (!has(isa)) throw std::invalid_argument("this CPU lacks the instruction set asked for");
    char* to = static_cast<char*>(out);
    if (top_k == 0) {
        std::fill_n(to, tokens * dim * element_bytes(element), '\0');
        return;
    }
#if defined(__x86_64__)
    if (isa == Isa::avx512) return sum_avx512(rows, weights, tokens, top_k, dim, element, to);
    if (isa == Isa::avx2) return sum_avx2(rows, weights, tokens, top_k, dim, element, to);
#endif
    sum_baseline(rows, weights, tokens, top_k, dim, element, to);
}

}  // namespace moeserve
