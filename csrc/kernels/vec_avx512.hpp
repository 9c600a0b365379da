// Vectors of 16 floats for CPUs with AVX-512 (F, BW, DQ, VL). The same names as in vec_avx2.hpp.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define MOESERVE_INLINE inline __attribute__((always_inline))

namespace moeserve::MOESERVE_ISA {

constexpr int kWidth = 16;  // floats in a vector
constexpr int kRegisters = 32;
#ifdef __AVX512BF16__
constexpr bool kDots = true;  // dot products of bf16 pairs
#else
constexpr bool kDots = false;
#endif

#ifdef __AVX512VNNI__
constexpr bool kByteDots = true;  // dot products of four bytes
#else
constexpr bool kByteDots = false;
#endif

using f32 = __m512;
using i32 = __m512i;

MOESERVE_INLINE f32 zero() { return _mm512_setzero_ps(); }
MOESERVE_INLINE f32 all(float x) { return _mm512_set1_ps(x); }
MOESERVE_INLINE f32 all(const float* x) { return _mm512_set1_ps(*x); }
MOESERVE_INLINE i32 all_words(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
MOESERVE_INLINE f32 add(f32 a, f32 b) { return _mm512_add_ps(a, b); }
MOESERVE_INLINE f32 sub(f32 a, f32 b) { return _mm512_sub_ps(a, b); }
MOESERVE_INLINE f32 mul(f32 a, f32 b) { return _mm512_mul_ps(a, b); }
MOESERVE_INLINE f32 div(f32 a, f32 b) { return _mm512_div_ps(a, b); }
MOESERVE_INLINE f32 max(f32 a, f32 b) { return _mm512_max_ps(a, b); }
MOESERVE_INLINE f32 min(f32 a, f32 b) { return _mm512_min_ps(a, b); }
MOESERVE_INLINE f32 sqrt(f32 a) { return _mm512_sqrt_ps(a); }
/// a * b + c, rounded once.
MOESERVE_INLINE f32 fma(f32 a, f32 b, f32 c) { return _mm512_fmadd_ps(a, b, c); }
/// c - a * b, rounded once.
MOESERVE_INLINE f32 fnma(f32 a, f32 b, f32 c) { return _mm512_fnmadd_ps(a, b, c); }
MOESERVE_INLINE f32 nearest(f32 a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

MOESERVE_INLINE i32 words(f32 a) { return _mm512_castps_si512(a); }
MOESERVE_INLINE f32 floats(i32 a) { return _mm512_castsi512_ps(a); }
MOESERVE_INLINE f32 to_float(i32 a) { return _mm512_cvtepi32_ps(a); }
MOESERVE_INLINE i32 to_int(f32 a) { return _mm512_cvtps_epi32(a); }
MOESERVE_INLINE i32 add(i32 a, i32 b) { return _mm512_add_epi32(a, b); }
MOESERVE_INLINE i32 both(i32 a, i32 b) { return _mm512_and_si512(a, b); }
MOESERVE_INLINE i32 either(i32 a, i32 b) { return _mm512_or_si512(a, b); }
MOESERVE_INLINE i32 differing(i32 a, i32 b) { return _mm512_xor_si512(a, b); }
MOESERVE_INLINE i32 mul(i32 a, i32 b) { return _mm512_mullo_epi32(a, b); }  // the lower 32 bits
MOESERVE_INLINE i32 max(i32 a, i32 b) { return _mm512_max_epi32(a, b); }
template <int bits>
MOESERVE_INLINE i32 left(i32 a) {
    return _mm512_slli_epi32(a, bits);
}
template <int bits>
MOESERVE_INLINE i32 right(i32 a) {  // zeros come in
    return _mm512_srli_epi32(a, bits);
}
template <int bits>
MOESERVE_INLINE i32 right_signed(i32 a) {
    return _mm512_srai_epi32(a, bits);
}

/// a * 2^n for whole numbers n in [-252, 254], rounded once, if a is in [0.5, 2) or NaN.
MOESERVE_INLINE f32 times_power_of_two(f32 a, f32 n) { return _mm512_scalef_ps(a, n); }

MOESERVE_INLINE f32 load(const float* p) { return _mm512_loadu_ps(p); }
MOESERVE_INLINE void store(float* p, f32 a) { _mm512_storeu_ps(p, a); }
MOESERVE_INLINE i32 load_words(const void* p) { return _mm512_loadu_si512(p); }
/// The same for words that are used several times: the compiler would read them again for each use.
MOESERVE_INLINE i32 load_once(const void* p) {
    i32 words = load_words(p);
    asm("" : "+v"(words));
    return words;
}
MOESERVE_INLINE void store_words(void* p, i32 a) { _mm512_storeu_si512(p, a); }

/// Comparisons, one bit per lane, lane 0 lowest. not_below: a >= b, or one of them is NaN.
MOESERVE_INLINE unsigned equal(i32 a, i32 b) { return _mm512_cmpeq_epi32_mask(a, b); }
MOESERVE_INLINE unsigned not_below(f32 a, f32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }

MOESERVE_INLINE f32 load_bf16(const void* p) {
    return floats(left<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)))));
}
MOESERVE_INLINE f32 load_fp16(const void* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
MOESERVE_INLINE f32 load_int8(const void* p) {
    return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
/// e4m3fn but for NaN. As fp16 their exponents are 8 too small.
MOESERVE_INLINE f32 load_fp8(const void* p) {
    const __m256i bytes = _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(bytes, 7), _mm256_set1_epi16(static_cast<short>(0xbfff)));
    return mul(_mm512_cvtph_ps(halves), all(256.0f));
}
/// The lowest four bits of each word, less 8.
template <bool>
MOESERVE_INLINE f32 of_int4(i32 a) {
    const f32 values = _mm512_setr_ps(-8.0f, -7.0f, -6.0f, -5.0f, -4.0f, -3.0f, -2.0f, -1.0f, 0.0f, 1.0f, 2.0f, 3.0f,
                                      4.0f, 5.0f, 6.0f, 7.0f);
    return _mm512_permutexvar_ps(a, values);
}
/// e2m1 in the lowest four bits of each word; the others do not matter.
MOESERVE_INLINE f32 of_fp4(i32 a) {
    const f32 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f,
                                      -3.0f, -4.0f, -6.0f);
    return _mm512_permutexvar_ps(a, values);
}

/// Rounded to nearest even; NaN stays NaN.
MOESERVE_INLINE void store_bf16(void* p, f32 a) {
    const i32 b = words(a);
    const i32 up = add(add(b, all_words(0x7fff)), both(right<16>(b), all_words(1)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const i32 high = right<16>(_mm512_mask_mov_epi32(up, nan, all_words(0x7fc00000)));
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
}
MOESERVE_INLINE void store_fp16(void* p, f32 a) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
/// Rounded to nearest even, which must be an int8.
MOESERVE_INLINE void store_int8(void* p, f32 a) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(to_int(a)));
}

/// The sum of all lanes, in one fixed order: halves onto halves.
MOESERVE_INLINE float sum(f32 a) {
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
MOESERVE_INLINE float largest(f32 a) { return _mm512_reduce_max_ps(a); }
MOESERVE_INLINE int32_t largest(i32 a) { return _mm512_reduce_max_epi32(a); }

#ifdef __AVX512BF16__
/// While it lives this thread takes denormals for zeros and makes none.
class DenormalsAreZeros {
    const unsigned before_ = _mm_getcsr();

   public:
    explicit DenormalsAreZeros(bool on) { set(on ? before_ | 0x8040 : before_); }
    ~DenormalsAreZeros() { set(before_); }
    DenormalsAreZeros(const DenormalsAreZeros&) = delete;

   private:
    static void set(unsigned state) {
        asm volatile("" ::: "memory");  // what is computed is stored, and stays on its side
        _mm_setcsr(state);
        asm volatile("" ::: "memory");
    }
};

/// sum + a * b of the upper, then of the lower of two bf16 values in a word: two fused
/// multiply-adds. Denormals are zeros.
MOESERVE_INLINE f32 dot(f32 sum, i32 a, i32 b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
/// table[a % 32] for every half of a word.
MOESERVE_INLINE i32 look_up(const uint16_t* table, i32 a) { return _mm512_permutexvar_epi16(a, load_words(table)); }
/// The lower bytes of the halves of `a`, below the upper ones of `b`, whose lower ones are zeros.
MOESERVE_INLINE i32 lower_bytes(i32 a, i32 b) {
    return _mm512_ternarylogic_epi32(a, all_words(0x00ff00ff), b, 0xea);
}
/// The upper halves of the words of `a`, over the upper halves of those of `b`.
MOESERVE_INLINE i32 upper_halves(i32 a, i32 b) {
    return _mm512_ternarylogic_epi32(a, right<16>(b), all_words(0xffff0000), 0xe4);
}
MOESERVE_INLINE i32 swap_halves(i32 a) { return _mm512_rol_epi32(a, 16); }
/// The lanes of `a` and then of `b` as bf16, two to a word, the earlier one in its lower half.
MOESERVE_INLINE i32 to_pairs(f32 a, f32 b) { return reinterpret_cast<i32>(_mm512_cvtne2ps_pbh(b, a)); }
#endif

/// Sums of the products of two bytes, the first unsigned, as halves of words. They must not
/// overflow.
MOESERVE_INLINE i32 byte_pairs(i32 a, i32 b) { return _mm512_maddubs_epi16(a, b); }
MOESERVE_INLINE i32 add_halves(i32 a, i32 b) { return _mm512_add_epi16(a, b); }
/// The sum of the halves of each word.
MOESERVE_INLINE i32 sum_halves(i32 a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
/// Of bytes: magnitudes; `a` negative where b is.
MOESERVE_INLINE i32 byte_sizes(i32 a) { return _mm512_abs_epi8(a); }
MOESERVE_INLINE i32 byte_signs(i32 a, i32 b) { return _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(b), _mm512_setzero_si512(), a); }
/// A table of 16 bytes, for look_up_bytes.
MOESERVE_INLINE i32 load_table(const int8_t* table) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}
/// table[a] for every byte of a word, of which only four bits are set.
MOESERVE_INLINE i32 look_up_bytes(i32 table, i32 a) { return _mm512_shuffle_epi8(table, a); }
MOESERVE_INLINE f32 load_bytes(const void* p) {  // unsigned
    return to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
#ifdef __AVX512VNNI__
/// sum + the products of four bytes, those of `a` unsigned.
MOESERVE_INLINE i32 dot_bytes(i32 sum, i32 a, i32 b) { return _mm512_dpbusd_epi32(sum, a, b); }
#endif

/// (a[0], b[0], a[1], ...) in place of a and b.
MOESERVE_INLINE void interleave(f32& a, f32& b) {
    const i32 low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const f32 front = _mm512_permutex2var_ps(a, low, b);
    b = _mm512_permutex2var_ps(a, add(low, all_words(8)), b);
    a = front;
}
/// The first lane.
MOESERVE_INLINE float first(f32 a) { return _mm512_cvtss_f32(a); }

/// r[i][j] and r[j][i] change places.
MOESERVE_INLINE void transpose(f32 (&r)[16]) {
    f32 a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    // b[4 * i + j]: column j of each group of four columns, of rows 4 * i to 4 * i + 3.
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const f32 even_top = _mm512_shuffle_f32x4(b[j], b[j + 4], 0x88);  // groups 0 and 2 of rows 0 to 7
        const f32 odd_top = _mm512_shuffle_f32x4(b[j], b[j + 4], 0xdd);   // groups 1 and 3
        const f32 even_low = _mm512_shuffle_f32x4(b[j + 8], b[j + 12], 0x88);
        const f32 odd_low = _mm512_shuffle_f32x4(b[j + 8], b[j + 12], 0xdd);
        r[j] = _mm512_shuffle_f32x4(even_top, even_low, 0x88);
        r[j + 4] = _mm512_shuffle_f32x4(odd_top, odd_low, 0x88);
        r[j + 8] = _mm512_shuffle_f32x4(even_top, even_low, 0xdd);
        r[j + 12] = _mm512_shuffle_f32x4(odd_top, odd_low, 0xdd);
    }
}

}  // namespace moeserve::MOESERVE_ISA
