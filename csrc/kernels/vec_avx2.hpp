// Vectors of 8 floats for CPUs with AVX2, FMA and F16C. The same names as in vec_avx512.hpp:
// kernels are written once.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define MOESERVE_INLINE inline __attribute__((always_inline))

namespace moeserve::MOESERVE_ISA {

constexpr int kWidth = 8;  // floats in a vector
constexpr int kRegisters = 16;
constexpr bool kDots = false;

#ifdef __AVXVNNI__
constexpr bool kByteDots = true;  // dot products of four bytes
#else
constexpr bool kByteDots = false;
#endif

using f32 = __m256;
using i32 = __m256i;

MOESERVE_INLINE f32 zero() { return _mm256_setzero_ps(); }
MOESERVE_INLINE f32 all(float x) { return _mm256_set1_ps(x); }
MOESERVE_INLINE f32 all(const float* x) { return _mm256_broadcast_ss(x); }
MOESERVE_INLINE i32 all_words(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
MOESERVE_INLINE f32 add(f32 a, f32 b) { return _mm256_add_ps(a, b); }
MOESERVE_INLINE f32 sub(f32 a, f32 b) { return _mm256_sub_ps(a, b); }
MOESERVE_INLINE f32 mul(f32 a, f32 b) { return _mm256_mul_ps(a, b); }
MOESERVE_INLINE f32 div(f32 a, f32 b) { return _mm256_div_ps(a, b); }
MOESERVE_INLINE f32 max(f32 a, f32 b) { return _mm256_max_ps(a, b); }
MOESERVE_INLINE f32 min(f32 a, f32 b) { return _mm256_min_ps(a, b); }
MOESERVE_INLINE f32 sqrt(f32 a) { return _mm256_sqrt_ps(a); }
/// a * b + c, rounded once.
MOESERVE_INLINE f32 fma(f32 a, f32 b, f32 c) { return _mm256_fmadd_ps(a, b, c); }
/// c - a * b, rounded once.
MOESERVE_INLINE f32 fnma(f32 a, f32 b, f32 c) { return _mm256_fnmadd_ps(a, b, c); }
MOESERVE_INLINE f32 nearest(f32 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

MOESERVE_INLINE i32 words(f32 a) { return _mm256_castps_si256(a); }
MOESERVE_INLINE f32 floats(i32 a) { return _mm256_castsi256_ps(a); }
MOESERVE_INLINE f32 to_float(i32 a) { return _mm256_cvtepi32_ps(a); }
MOESERVE_INLINE i32 to_int(f32 a) { return _mm256_cvtps_epi32(a); }
MOESERVE_INLINE i32 add(i32 a, i32 b) { return _mm256_add_epi32(a, b); }
MOESERVE_INLINE i32 both(i32 a, i32 b) { return _mm256_and_si256(a, b); }
MOESERVE_INLINE i32 either(i32 a, i32 b) { return _mm256_or_si256(a, b); }
MOESERVE_INLINE i32 differing(i32 a, i32 b) { return _mm256_xor_si256(a, b); }
MOESERVE_INLINE i32 mul(i32 a, i32 b) { return _mm256_mullo_epi32(a, b); }  // the lower 32 bits
MOESERVE_INLINE i32 max(i32 a, i32 b) { return _mm256_max_epi32(a, b); }
template <int bits>
MOESERVE_INLINE i32 left(i32 a) {
    return _mm256_slli_epi32(a, bits);
}
template <int bits>
MOESERVE_INLINE i32 right(i32 a) {  // zeros come in
    return _mm256_srli_epi32(a, bits);
}
template <int bits>
MOESERVE_INLINE i32 right_signed(i32 a) {
    return _mm256_srai_epi32(a, bits);
}

/// 2^n for whole numbers n in [-126, 127].
MOESERVE_INLINE f32 power_of_two(f32 n) { return floats(left<23>(add(to_int(n), all_words(127)))); }
/// a * 2^n for whole numbers n in [-252, 254], rounded once, if a is in [0.5, 2) or NaN.
MOESERVE_INLINE f32 times_power_of_two(f32 a, f32 n) {
    const f32 half = nearest(mul(n, all(0.5f)));  // in two factors: 2^n need not be a float itself
    return mul(mul(a, power_of_two(half)), power_of_two(sub(n, half)));
}

MOESERVE_INLINE f32 load(const float* p) { return _mm256_loadu_ps(p); }
MOESERVE_INLINE void store(float* p, f32 a) { _mm256_storeu_ps(p, a); }
MOESERVE_INLINE i32 load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
MOESERVE_INLINE i32 load_once(const void* p) { return load_words(p); }  // as in vec_avx512.hpp
MOESERVE_INLINE void store_words(void* p, i32 a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }

/// Comparisons, one bit per lane, lane 0 lowest. not_below: a >= b, or one of them is NaN.
MOESERVE_INLINE unsigned equal(i32 a, i32 b) {
    return static_cast<unsigned>(_mm256_movemask_ps(floats(_mm256_cmpeq_epi32(a, b))));
}
MOESERVE_INLINE unsigned not_below(f32 a, f32 b) {
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLT_UQ)));
}

MOESERVE_INLINE f32 load_bf16(const void* p) {
    return floats(left<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))));
}
MOESERVE_INLINE f32 load_fp16(const void* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
MOESERVE_INLINE f32 load_int8(const void* p) {
    return to_float(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
/// e4m3fn but for NaN. As fp16 their exponents are 8 too small.
MOESERVE_INLINE f32 load_fp8(const void* p) {
    const __m128i bytes = _mm_cvtepi8_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
    const __m128i halves = _mm_and_si128(_mm_slli_epi16(bytes, 7), _mm_set1_epi16(static_cast<short>(0xbfff)));
    return mul(_mm256_cvtph_ps(halves), all(256.0f));
}
/// The lowest four bits of each word, less 8. alone: the others are zeros.
template <bool alone>
MOESERVE_INLINE f32 of_int4(i32 a) {
    if constexpr (!alone) a = both(a, all_words(15));
    return sub(to_float(a), all(8.0f));
}
/// e2m1 in the lowest four bits of each word; the others do not matter.
MOESERVE_INLINE f32 of_fp4(i32 a) {
    const f32 sizes = _mm256_permutevar8x32_ps(_mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f), a);
    return floats(either(words(sizes), both(left<28>(a), all_words(0x80000000))));
}

/// Rounded to nearest even; NaN stays NaN.
MOESERVE_INLINE void store_bf16(void* p, f32 a) {
    const i32 b = words(a);
    const i32 up = add(add(b, all_words(0x7fff)), both(right<16>(b), all_words(1)));
    const i32 nan = words(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    const i32 high = right<16>(_mm256_blendv_epi8(up, all_words(0x7fc00000), nan));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
MOESERVE_INLINE void store_fp16(void* p, f32 a) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
/// Rounded to nearest even, which must be an int8.
MOESERVE_INLINE void store_int8(void* p, f32 a) {
    const __m256i w = to_int(a);
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
    _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
}

/// The sum of all lanes, in one fixed order: (0+4, 1+5, 2+6, 3+7), then halves again.
MOESERVE_INLINE float sum(f32 a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
MOESERVE_INLINE float largest(f32 a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
MOESERVE_INLINE int32_t largest(i32 a) {
    __m128i s = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

/// Sums of the products of two bytes, the first unsigned, as halves of words. They must not
/// overflow.
MOESERVE_INLINE i32 byte_pairs(i32 a, i32 b) { return _mm256_maddubs_epi16(a, b); }
MOESERVE_INLINE i32 add_halves(i32 a, i32 b) { return _mm256_add_epi16(a, b); }
/// The sum of the halves of each word.
MOESERVE_INLINE i32 sum_halves(i32 a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
/// Of bytes: magnitudes; `a` negative where b is.
MOESERVE_INLINE i32 byte_sizes(i32 a) { return _mm256_abs_epi8(a); }
MOESERVE_INLINE i32 byte_signs(i32 a, i32 b) { return _mm256_sign_epi8(a, b); }
/// A table of 16 bytes, for look_up_bytes.
MOESERVE_INLINE i32 load_table(const int8_t* table) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}
/// table[a] for every byte of a word, of which only four bits are set.
MOESERVE_INLINE i32 look_up_bytes(i32 table, i32 a) { return _mm256_shuffle_epi8(table, a); }
MOESERVE_INLINE f32 load_bytes(const void* p) {  // unsigned
    return to_float(_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
#ifdef __AVXVNNI__
/// sum + the products of four bytes, those of `a` unsigned.
MOESERVE_INLINE i32 dot_bytes(i32 sum, i32 a, i32 b) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
#endif

/// (a[0], b[0], a[1], ...) in place of a and b.
MOESERVE_INLINE void interleave(f32& a, f32& b) {
    const f32 low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
    a = _mm256_permute2f128_ps(low, high, 0x20);
    b = _mm256_permute2f128_ps(low, high, 0x31);
}
/// The first lane.
MOESERVE_INLINE float first(f32 a) { return _mm256_cvtss_f32(a); }

/// r[i][j] and r[j][i] change places.
MOESERVE_INLINE void transpose(f32 (&r)[8]) {
    f32 a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}

}  // namespace moeserve::MOESERVE_ISA
