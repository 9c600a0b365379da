// Vectors of 8 floats in two registers, for 64-bit ARM CPUs. The same names, lanes and bits as in
// vec_avx2.hpp.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#define MOESERVE_INLINE inline __attribute__((always_inline))

namespace moeserve::MOESERVE_ISA {

constexpr int kWidth = 8;  // floats in a vector
constexpr int kRegisters = 16;
constexpr bool kDots = false, kByteDots = false;

struct f32 {
    float32x4_t low, high;
};
struct i32 {
    int32x4_t low, high;
};

MOESERVE_INLINE f32 all(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
MOESERVE_INLINE f32 all(const float* x) { return all(*x); }
MOESERVE_INLINE f32 zero() { return all(0.0f); }
MOESERVE_INLINE i32 all_words(uint32_t x) {
    const int32x4_t words = vdupq_n_s32(static_cast<int32_t>(x));
    return {words, words};
}
MOESERVE_INLINE f32 add(f32 a, f32 b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
MOESERVE_INLINE f32 sub(f32 a, f32 b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
MOESERVE_INLINE f32 mul(f32 a, f32 b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
MOESERVE_INLINE f32 div(f32 a, f32 b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
/// As on x86: b where one of them is NaN, or both are zeros.
MOESERVE_INLINE float32x4_t max(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
MOESERVE_INLINE float32x4_t min(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
MOESERVE_INLINE f32 max(f32 a, f32 b) { return {max(a.low, b.low), max(a.high, b.high)}; }
MOESERVE_INLINE f32 min(f32 a, f32 b) { return {min(a.low, b.low), min(a.high, b.high)}; }
MOESERVE_INLINE f32 sqrt(f32 a) { return {vsqrtq_f32(a.low), vsqrtq_f32(a.high)}; }
/// a * b + c, rounded once.
MOESERVE_INLINE f32 fma(f32 a, f32 b, f32 c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
/// c - a * b, rounded once.
MOESERVE_INLINE f32 fnma(f32 a, f32 b, f32 c) { return {vfmsq_f32(c.low, a.low, b.low), vfmsq_f32(c.high, a.high, b.high)}; }
MOESERVE_INLINE f32 nearest(f32 a) { return {vrndnq_f32(a.low), vrndnq_f32(a.high)}; }

MOESERVE_INLINE i32 words(f32 a) { return {vreinterpretq_s32_f32(a.low), vreinterpretq_s32_f32(a.high)}; }
MOESERVE_INLINE f32 floats(i32 a) { return {vreinterpretq_f32_s32(a.low), vreinterpretq_f32_s32(a.high)}; }
MOESERVE_INLINE f32 to_float(i32 a) { return {vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)}; }
MOESERVE_INLINE i32 to_int(f32 a) { return {vcvtnq_s32_f32(a.low), vcvtnq_s32_f32(a.high)}; }
MOESERVE_INLINE i32 add(i32 a, i32 b) { return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)}; }
MOESERVE_INLINE i32 both(i32 a, i32 b) { return {vandq_s32(a.low, b.low), vandq_s32(a.high, b.high)}; }
MOESERVE_INLINE i32 either(i32 a, i32 b) { return {vorrq_s32(a.low, b.low), vorrq_s32(a.high, b.high)}; }
MOESERVE_INLINE i32 differing(i32 a, i32 b) { return {veorq_s32(a.low, b.low), veorq_s32(a.high, b.high)}; }
MOESERVE_INLINE i32 mul(i32 a, i32 b) { return {vmulq_s32(a.low, b.low), vmulq_s32(a.high, b.high)}; }  // the lower 32 bits
MOESERVE_INLINE i32 max(i32 a, i32 b) { return {vmaxq_s32(a.low, b.low), vmaxq_s32(a.high, b.high)}; }
template <int bits>
MOESERVE_INLINE i32 left(i32 a) {
    return {vshlq_n_s32(a.low, bits), vshlq_n_s32(a.high, bits)};
}
template <int bits>
MOESERVE_INLINE int32x4_t right(int32x4_t a) {
    if constexpr (bits == 0) return a;  // no shift by 0
    return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), bits ? bits : 1));
}
template <int bits>
MOESERVE_INLINE i32 right(i32 a) {  // zeros come in
    return {right<bits>(a.low), right<bits>(a.high)};
}
template <int bits>
MOESERVE_INLINE i32 right_signed(i32 a) {
    return {vshrq_n_s32(a.low, bits), vshrq_n_s32(a.high, bits)};
}

/// 2^n for whole numbers n in [-126, 127].
MOESERVE_INLINE f32 power_of_two(f32 n) { return floats(left<23>(add(to_int(n), all_words(127)))); }
/// a * 2^n for whole numbers n in [-252, 254], rounded once, if a is in [0.5, 2) or NaN.
MOESERVE_INLINE f32 times_power_of_two(f32 a, f32 n) {
    const f32 half = nearest(mul(n, all(0.5f)));  // in two factors: 2^n need not be a float itself
    return mul(mul(a, power_of_two(half)), power_of_two(sub(n, half)));
}

MOESERVE_INLINE f32 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
MOESERVE_INLINE void store(float* p, f32 a) {
    vst1q_f32(p, a.low);
    vst1q_f32(p + 4, a.high);
}
MOESERVE_INLINE i32 load_words(const void* p) {
    const uint8_t* bytes = static_cast<const uint8_t*>(p);  // at any address
    return {vreinterpretq_s32_u8(vld1q_u8(bytes)), vreinterpretq_s32_u8(vld1q_u8(bytes + 16))};
}
MOESERVE_INLINE i32 load_once(const void* p) { return load_words(p); }  // as in vec_avx512.hpp
MOESERVE_INLINE void store_words(void* p, i32 a) {
    vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_s32(a.low));
    vst1q_u8(static_cast<uint8_t*>(p) + 16, vreinterpretq_u8_s32(a.high));
}

/// One bit per lane that is all ones, lane 0 lowest.
MOESERVE_INLINE unsigned bits_of(uint32x4_t low, uint32x4_t high) {
    const uint32x4_t ones = {1, 2, 4, 8}, others = {16, 32, 64, 128};
    return vaddvq_u32(vorrq_u32(vandq_u32(low, ones), vandq_u32(high, others)));
}
/// Comparisons, one bit per lane, lane 0 lowest. not_below: a >= b, or one of them is NaN.
MOESERVE_INLINE unsigned equal(i32 a, i32 b) { return bits_of(vceqq_s32(a.low, b.low), vceqq_s32(a.high, b.high)); }
MOESERVE_INLINE unsigned not_below(f32 a, f32 b) {
    return bits_of(vmvnq_u32(vcltq_f32(a.low, b.low)), vmvnq_u32(vcltq_f32(a.high, b.high)));
}

MOESERVE_INLINE uint16x8_t load_halves(const void* p) {
    return vreinterpretq_u16_u8(vld1q_u8(static_cast<const uint8_t*>(p)));
}
MOESERVE_INLINE f32 load_bf16(const void* p) {
    const uint16x8_t halves = load_halves(p);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16)),
            vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(halves), 16))};
}
MOESERVE_INLINE f32 of_fp16(uint16x8_t halves) {
    const float16x8_t values = vreinterpretq_f16_u16(halves);
    return {vcvt_f32_f16(vget_low_f16(values)), vcvt_f32_f16(vget_high_f16(values))};
}
MOESERVE_INLINE f32 load_fp16(const void* p) { return of_fp16(load_halves(p)); }
MOESERVE_INLINE f32 load_int8(const void* p) {
    const int16x8_t halves = vmovl_s8(vld1_s8(static_cast<const int8_t*>(p)));
    return to_float({vmovl_s16(vget_low_s16(halves)), vmovl_s16(vget_high_s16(halves))});
}
/// e4m3fn but for NaN. As fp16 their exponents are 8 too small.
MOESERVE_INLINE f32 load_fp8(const void* p) {
    const int16x8_t halves = vshlq_n_s16(vmovl_s8(vld1_s8(static_cast<const int8_t*>(p))), 7);
    return mul(of_fp16(vandq_u16(vreinterpretq_u16_s16(halves), vdupq_n_u16(0xbfff))), all(256.0f));
}
/// The lowest four bits of each word, less 8. alone: the others are zeros.
template <bool alone>
MOESERVE_INLINE f32 of_int4(i32 a) {
    if constexpr (!alone) a = both(a, all_words(15));
    return sub(to_float(a), all(8.0f));
}
/// e2m1 in the lowest four bits of each word; the others do not matter.
MOESERVE_INLINE int32x4_t of_fp4(int32x4_t a) {
    // The third bytes of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 as floats, then their fourth. No byte 255 is
    // in the table: zeros.
    const uint8x16_t table = {0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0, 0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40};
    const int32x4_t size = vandq_s32(a, vdupq_n_s32(7));
    const int32x4_t places = vaddq_s32(vmulq_n_s32(size, 0x01010000), vdupq_n_s32(0x0800ffff));
    const uint8x16_t sizes = vqtbl1q_u8(table, vreinterpretq_u8_s32(places));
    return vorrq_s32(vreinterpretq_s32_u8(sizes), vshlq_n_s32(vandq_s32(a, vdupq_n_s32(8)), 28));
}
MOESERVE_INLINE f32 of_fp4(i32 a) { return floats({of_fp4(a.low), of_fp4(a.high)}); }

/// Rounded to nearest even; NaN stays NaN.
MOESERVE_INLINE uint16x4_t to_bf16(float32x4_t a) {
    const uint32x4_t b = vreinterpretq_u32_f32(a);
    const uint32x4_t up = vaddq_u32(vaddq_u32(b, vdupq_n_u32(0x7fff)), vandq_u32(vshrq_n_u32(b, 16), vdupq_n_u32(1)));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), up, vdupq_n_u32(0x7fc00000)), 16);
}
MOESERVE_INLINE void store_bf16(void* p, f32 a) {
    vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_u16(vcombine_u16(to_bf16(a.low), to_bf16(a.high))));
}
MOESERVE_INLINE void store_fp16(void* p, f32 a) {
    const float16x8_t halves = vcombine_f16(vcvt_f16_f32(a.low), vcvt_f16_f32(a.high));
    vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_f16(halves));
}
/// Rounded to nearest even, which must be an int8.
MOESERVE_INLINE void store_int8(void* p, f32 a) {
    const i32 w = to_int(a);
    vst1_s8(static_cast<int8_t*>(p), vqmovn_s16(vcombine_s16(vqmovn_s32(w.low), vqmovn_s32(w.high))));
}

/// The sum of all lanes, in one fixed order: (0+4, 1+5, 2+6, 3+7), then halves again.
MOESERVE_INLINE float sum(f32 a) {
    const float32x4_t s = vaddq_f32(a.low, a.high);
    const float32x2_t t = vadd_f32(vget_low_f32(s), vget_high_f32(s));
    return vget_lane_f32(t, 0) + vget_lane_f32(t, 1);
}
MOESERVE_INLINE float largest(f32 a) {
    const float32x4_t s = max(a.low, a.high);
    const float32x4_t t = max(s, vextq_f32(s, s, 2));
    return vgetq_lane_f32(max(t, vextq_f32(t, t, 1)), 0);
}
MOESERVE_INLINE int32_t largest(i32 a) { return vmaxvq_s32(vmaxq_s32(a.low, a.high)); }

MOESERVE_INLINE int8x16_t as_bytes(int32x4_t a) { return vreinterpretq_s8_s32(a); }
MOESERVE_INLINE int32x4_t byte_pairs(int8x16_t a, int8x16_t b) {
    return vreinterpretq_s32_s16(vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b)));
}
/// Sums of the products of two bytes, as halves of words. Both are signed, unlike those of x86.
MOESERVE_INLINE i32 byte_pairs(i32 a, i32 b) {
    return {byte_pairs(as_bytes(a.low), as_bytes(b.low)), byte_pairs(as_bytes(a.high), as_bytes(b.high))};
}
MOESERVE_INLINE i32 byte_sizes(i32 a) { return a; }  // so the product's sign need not move to its second factor
MOESERVE_INLINE i32 byte_signs(i32 a, i32) { return a; }
MOESERVE_INLINE int16x8_t as_halves(int32x4_t a) { return vreinterpretq_s16_s32(a); }
MOESERVE_INLINE i32 add_halves(i32 a, i32 b) {
    return {vreinterpretq_s32_s16(vaddq_s16(as_halves(a.low), as_halves(b.low))),
            vreinterpretq_s32_s16(vaddq_s16(as_halves(a.high), as_halves(b.high)))};
}
/// The sum of the halves of each word.
MOESERVE_INLINE i32 sum_halves(i32 a) { return {vpaddlq_s16(as_halves(a.low)), vpaddlq_s16(as_halves(a.high))}; }
/// A table of 16 bytes, for look_up_bytes.
MOESERVE_INLINE i32 load_table(const int8_t* table) {
    const int32x4_t bytes = vreinterpretq_s32_s8(vld1q_s8(table));
    return {bytes, bytes};
}
/// table[a] for every byte of a word, of which only four bits are set.
MOESERVE_INLINE i32 look_up_bytes(i32 table, i32 a) {
    const int8x16_t bytes = as_bytes(table.low);
    return {vreinterpretq_s32_s8(vqtbl1q_s8(bytes, vreinterpretq_u8_s32(a.low))),
            vreinterpretq_s32_s8(vqtbl1q_s8(bytes, vreinterpretq_u8_s32(a.high)))};
}
MOESERVE_INLINE f32 load_bytes(const void* p) {  // unsigned
    const uint16x8_t halves = vmovl_u8(vld1_u8(static_cast<const uint8_t*>(p)));
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(halves))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(halves)))};
}

/// (a[0], b[0], a[1], ...) in place of a and b.
MOESERVE_INLINE void interleave(f32& a, f32& b) {
    const f32 front = {vzip1q_f32(a.low, b.low), vzip2q_f32(a.low, b.low)};
    b = {vzip1q_f32(a.high, b.high), vzip2q_f32(a.high, b.high)};
    a = front;
}
/// The first lane.
MOESERVE_INLINE float first(f32 a) { return vgetq_lane_f32(a.low, 0); }

/// r[i][j] and r[j][i] change places.
MOESERVE_INLINE void transpose(float32x4_t& r0, float32x4_t& r1, float32x4_t& r2, float32x4_t& r3) {
    const float64x2_t even = vreinterpretq_f64_f32(vtrn1q_f32(r0, r1)), odd = vreinterpretq_f64_f32(vtrn2q_f32(r0, r1));
    const float64x2_t even2 = vreinterpretq_f64_f32(vtrn1q_f32(r2, r3)), odd2 = vreinterpretq_f64_f32(vtrn2q_f32(r2, r3));
    r0 = vreinterpretq_f32_f64(vtrn1q_f64(even, even2));
    r1 = vreinterpretq_f32_f64(vtrn1q_f64(odd, odd2));
    r2 = vreinterpretq_f32_f64(vtrn2q_f64(even, even2));
    r3 = vreinterpretq_f32_f64(vtrn2q_f64(odd, odd2));
}
MOESERVE_INLINE void transpose(f32 (&r)[8]) {
    transpose(r[0].low, r[1].low, r[2].low, r[3].low);
    transpose(r[4].high, r[5].high, r[6].high, r[7].high);
    transpose(r[0].high, r[1].high, r[2].high, r[3].high);
    transpose(r[4].low, r[5].low, r[6].low, r[7].low);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const float32x4_t high = r[i].high;
        r[i].high = r[i + 4].low;
        r[i + 4].low = high;
    }
}

}  // namespace moeserve::MOESERVE_ISA
