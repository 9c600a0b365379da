// Packed weights as floats. The layouts are at `Packing`.
#pragma once

#include "kernels/product_args.hpp"
#include "kernels/table.hpp"

namespace moeserve::MOESERVE_ISA {

constexpr size_t kColumns = Packing::kBlock;  // of a block
constexpr int kVectors = static_cast<int>(kColumns) / kWidth;  // of one block

/// A format yields input `d` of a step for vector `v` of a block. kDepth: inputs of a step. kGrouped: groups of inputs
/// have a head with scales. kCostly: worth unpacking once for several tiles.
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
        if constexpr (d == 0) return floats(left<16>(load_words(step + v * kWidth * 4)));
        const uint32_t* high = kHighHalves;
        if (kRegisters < 32) asm("" : "+r"(high));  // stays in memory: 16 registers are all taken
        return floats(both(load_words(step + v * kWidth * 4), load_words(high)));
    }
};

struct WeightsInt8 {
    static constexpr int kDepth = 1;
    static constexpr size_t kStepBytes = kColumns;
    static constexpr bool kGrouped = false, kCostly = true;

    template <int d>
    static MOESERVE_INLINE f32 get(const uint8_t* step, const uint8_t*, int v) {
        return load_int8(step + v * kWidth);
    }
};

/// Unsigned nibbles less a zero point, which is 8 where there is none for the group.
template <bool zero_points>
struct WeightsInt4 {
    static constexpr int kDepth = 8;
    static constexpr size_t kStepBytes = kColumns * 4;
    static constexpr size_t kHeadBytes = kColumns * (zero_points ? 8 : 4);
    static constexpr bool kGrouped = true, kCostly = true;

    template <int d>
    static MOESERVE_INLINE f32 get(const uint8_t* step, const uint8_t* head, int v) {
        i32 nibbles = right<4 * d>(load_words(step + v * kWidth * 4));
        if constexpr (d < 7) nibbles = both(nibbles, all_words(15));
        return sub(to_float(nibbles), zero_points ? scale(head + kColumns * 4, v) : all(8.0f));
    }
    static MOESERVE_INLINE f32 scale(const uint8_t* head, int v) {
        return load(reinterpret_cast<const float*>(head) + v * kWidth);
    }
};

/// Floats that were unpacked before; their group's scales are still in its head.
struct WeightsUnpacked : WeightsFp32 {
    static constexpr bool kGrouped = true;

    static MOESERVE_INLINE f32 scale(const uint8_t* head, int v) {
        return load(reinterpret_cast<const float*>(head) + v * kWidth);
    }
};

}  // namespace moeserve::MOESERVE_ISA
