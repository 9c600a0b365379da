// Unpack weights to floats. `Packing` documents the layouts.
#pragma once

#include <type_traits>

#include "kernels/product_args.hpp"
#include "kernels/table.hpp"

namespace moeserve::MOESERVE_ISA {

constexpr size_t kColumns = Packing::kBlock;  // of a block
constexpr int kVectors = static_cast<int>(kColumns) / kWidth;  // of one block

// A format returns input `d` of a step for vector `v` of a block, or the d-th pair of inputs.
// kDepth: inputs per step. kGrouped: groups of inputs have a head with scales. kCostly: unpacking
// is slow, so it is worth unpacking once for several tiles.
struct WeightsFp32 {
    static constexpr int kDepth = 1;
    static constexpr size_t kStepBytes = kColumns * 4;
    static constexpr bool kGrouped = false, kCostly = false;

    template <int d>
    static MOESERVE_INLINE f32 get(const uint8_t* step, const uint8_t*, int v) {
        return load(reinterpret_cast<const float*>(step) + v * kWidth);
    }
};

struct WeightsFp16 {
    static constexpr int kDepth = 1;
    static constexpr size_t kStepBytes = kColumns * 2;
    static constexpr bool kGrouped = false, kCostly = false;

    template <int d>
    static MOESERVE_INLINE f32 get(const uint8_t* step, const uint8_t*, int v) {
        return load_fp16(step + v * kWidth * 2);
    }
};

alignas(64) constexpr uint32_t kHighHalves[16] = {
    0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
    0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
};

struct WeightsBf16 {
    static constexpr int kDepth = 2;
    static constexpr size_t kStepBytes = kColumns * 4;
    static constexpr bool kGrouped = false, kCostly = false;

    template <int d>
    static MOESERVE_INLINE f32 get(const uint8_t* step, const uint8_t*, int v) {
        if constexpr (d == 1) return floats(left<16>(load_words(step + v * kWidth * 4)));
        const uint32_t* high = kHighHalves;
        if (kRegisters < 32) asm("" : "+r"(high));  // stays in memory: 16 registers are all taken
        return floats(both(load_words(step + v * kWidth * 4), load_words(high)));
    }
    template <int d>
    static MOESERVE_INLINE i32 pair(const uint8_t* step, const uint8_t*, int v) {
        return load_words(step + v * kWidth * 4);
    }
};

#ifdef __AVX512BF16__
/// bf16 compressed to 12 bits: the lower byte, and a code for the upper byte. Upper bytes without a
/// code are escapes. A step with escapes is unpacked, the escapes are inserted, and it is
/// multiplied like WeightsBf16.
struct WeightsBf12 {
    static constexpr int kDepth = 8;
    static constexpr size_t kStepBytes = kColumns * 12, kHeadBytes = 64;
    static constexpr bool kGrouped = false, kCostly = true;

    template <int d>
    static MOESERVE_INLINE i32 pair(const uint8_t* step, const uint8_t* head, int) {
        const i32 lower = load_words(step + (1 + d / 2) * kColumns * 4);
        const i32 upper = look_up(reinterpret_cast<const uint16_t*>(head), right<4 * d>(load_words(step)));
        return lower_bytes(d % 2 ? right<8>(lower) : lower, upper);
    }
    template <int d>
    static MOESERVE_INLINE f32 get(const uint8_t* step, const uint8_t* head, int v) {
        const i32 word = pair<d / 2>(step, head, v);
        return floats(d % 2 ? left<16>(word) : both(word, all_words(0xffff0000)));
    }
};
template <class F>
constexpr bool kEscapes = std::is_same_v<F, WeightsBf12>;
#else
template <class F>
constexpr bool kEscapes = false;
#endif

/// Weights of one byte, scaled per column, or per column and group of inputs.
template <bool grouped>
struct WeightBytes {
    static constexpr int kDepth = 1;
    static constexpr size_t kStepBytes = kColumns, kHeadBytes = kColumns * 4;
    static constexpr bool kGrouped = grouped, kCostly = true;

    static MOESERVE_INLINE f32 scale(const uint8_t* head, int v) {
        return load(reinterpret_cast<const float*>(head) + v * kWidth);
    }
};

template <bool grouped>
struct WeightsInt8 : WeightBytes<grouped> {
    template <int d>
    static MOESERVE_INLINE f32 get(const uint8_t* step, const uint8_t*, int v) {
        return load_int8(step + v * kWidth);
    }
};

template <bool grouped>
struct WeightsFp8 : WeightBytes<grouped> {
    template <int d>
    static MOESERVE_INLINE f32 get(const uint8_t* step, const uint8_t*, int v) {
        return load_fp8(step + v * kWidth);
    }
};

/// Lookup table: bf16 of -15 to 15, and an entry that is never used.
alignas(64) constexpr uint16_t kSmallInts[32] = {
    0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0,
    0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0,
    0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000,
};
/// Lookup table: bf16 of -8 to 7, twice, so that only four bits of an index matter.
alignas(64) constexpr uint16_t kNibbles[32] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
    0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
    0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
};

/// Unsigned 4-bit integers minus a zero point from 0 to 15, which is 8 if groups have none.
template <bool zero_points>
struct WeightsInt4 {
    static constexpr int kDepth = 8;
    static constexpr size_t kStepBytes = kColumns * 4;
    static constexpr size_t kHeadBytes = kColumns * (zero_points ? 8 : 4);
    static constexpr bool kGrouped = true, kCostly = true;

    template <int d>
    static MOESERVE_INLINE f32 get(const uint8_t* step, const uint8_t* head, int v) {
        constexpr int shift = d / 2 * 4 + (d % 2 == 0 ? 16 : 0);
        i32 nibbles = right<shift>(load_words(step + v * kWidth * 4));
        if constexpr (!zero_points) return of_int4<shift == 28>(nibbles);
        if constexpr (shift < 28) nibbles = both(nibbles, all_words(15));
        return sub(to_float(nibbles), scale(head + kColumns * 4, v));
    }
#ifdef __AVX512BF16__
    template <int d>
    static MOESERVE_INLINE i32 pair(const uint8_t* step, const uint8_t* head, int v) {
        const i32 nibbles = right<4 * d>(load_words(step + v * kWidth * 4));
        if constexpr (!zero_points) return look_up(kNibbles, nibbles);
        // 15 - zero point in both halves of a word. It is below 16, so a multiplication copies it
        // to the upper half.
        const i32 zero = to_int(sub(all(15.0f), scale(head + kColumns * 4, v)));
        const i32 shift = mul(zero, all_words(0x00010001));
        return look_up(kSmallInts, add(both(nibbles, all_words(0x000f000f)), shift));
    }
#endif
    static MOESERVE_INLINE f32 scale(const uint8_t* head, int v) {
        return load(reinterpret_cast<const float*>(head) + v * kWidth);
    }
};

/// Lookup table: bf16 of e2m1, twice.
alignas(64) constexpr uint16_t kFp4s[32] = {
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
    0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0, 0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
    0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
};

/// e2m1, packed like int4.
struct WeightsFp4 : WeightsInt4<false> {
    template <int d>
    static MOESERVE_INLINE f32 get(const uint8_t* step, const uint8_t*, int v) {
        constexpr int shift = d / 2 * 4 + (d % 2 == 0 ? 16 : 0);
        return of_fp4(right<shift>(load_words(step + v * kWidth * 4)));
    }
#ifdef __AVX512BF16__
    template <int d>
    static MOESERVE_INLINE i32 pair(const uint8_t* step, const uint8_t*, int v) {
        return look_up(kFp4s, right<4 * d>(load_words(step + v * kWidth * 4)));
    }
#endif
};

/// Weights that were unpacked before, as floats or as pairs. Their group's scales are still in the
/// head.
template <class F>
struct WeightsUnpacked : F {
    static constexpr bool kGrouped = true;

    static MOESERVE_INLINE f32 scale(const uint8_t* head, int v) {
        return load(reinterpret_cast<const float*>(head) + v * kWidth);
    }
};

}  // namespace moeserve::MOESERVE_ISA
