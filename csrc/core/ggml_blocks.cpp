#include "core/ggml_blocks.hpp"

#include <bit>
#include <cmath>
#include <cstring>

namespace moeserve {
namespace {

/// Where the parts of one decoded block go.
struct Block {
    int8_t* values;
    float *scales, *mins, *super, *min_super;
    int offset;
};

template <class T>
T word_at(const uint8_t* bytes) {
    T word;
    std::memcpy(&word, bytes, sizeof word);
    return word;
}

float from_half(uint16_t half) {
    const uint32_t exponent = half >> 10 & 31, mantissa = half & 1023u, sign = static_cast<uint32_t>(half >> 15) << 31;
    if (exponent == 31) return std::bit_cast<float>(sign | 255u << 23 | mantissa << 13);
    if (exponent == 0) return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(mantissa) * 0x1p-24f));
    return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

float half_at(const uint8_t* bytes) { return from_half(word_at<uint16_t>(bytes)); }

/// Unpacks numbers of `width` bits: of `run` bytes, the lowest bits come first.
template <size_t width, size_t run>
void unpack(const uint8_t* __restrict bytes, int8_t* __restrict to) {
    for (size_t field = 0; field < 8 / width; ++field) {
        for (size_t i = 0; i < run; ++i) {
            to[field * run + i] = static_cast<int8_t>(bytes[i] >> field * width & ((1 << width) - 1));
        }
    }
}

/// Adds the high bits of numbers: of each of `run` bytes, bits of `width` from bit 0 on, for `count` fields.
template <size_t width, size_t run>
void add_high(const uint8_t* __restrict bytes, size_t count, size_t shift, int8_t* __restrict to) {
    for (size_t field = 0; field < count; ++field) {
        for (size_t i = 0; i < run; ++i) {
            const int high = bytes[i] >> field * width & ((1 << width) - 1);
            to[field * run + i] = static_cast<int8_t>(to[field * run + i] | high << shift);
        }
    }
}

template <size_t count>
void add(int8_t* to, int number) {
    for (size_t i = 0; i < count; ++i) to[i] = static_cast<int8_t>(to[i] + number);
}

struct Q4_0 {
    static constexpr size_t kElements = 32, kBytes = 18, kGroups = 1;
    static constexpr bool kMins = false;
    static void decode(const uint8_t* raw, const uint8_t*, const Block& to) {
        unpack<4, 16>(raw + 2, to.values);
        if (to.offset != 8) add<32>(to.values, to.offset - 8);
        to.scales[0] = half_at(raw);
    }
};

struct Q4_1 {
    static constexpr size_t kElements = 32, kBytes = 20, kGroups = 1;
    static constexpr bool kMins = true;
    static void decode(const uint8_t* raw, const uint8_t*, const Block& to) {
        unpack<4, 16>(raw + 4, to.values);
        to.scales[0] = half_at(raw);
        to.mins[0] = -half_at(raw + 2);
    }
};

/// Spreads 8 bits to 8 bytes, each 0 or `one`.
uint64_t spread(uint32_t bits, uint64_t one) {
    constexpr uint64_t kOnes = 0x0101010101010101, kPlaces = 0x8040201008040201;
    const uint64_t chosen = bits * kOnes & kPlaces;  // byte i has bit i, or 0
    return ((chosen + 0x7f * kOnes) >> 7 & kOnes) * one;  // no carry: byte 7 ends the number
}

/// Adds 16 times each bit of a word to 32 values.
void add_fifth_bits(const uint8_t* bytes, int8_t* to) {
    for (size_t i = 0; i < 4; ++i, to += 8) {
        const uint64_t values = word_at<uint64_t>(reinterpret_cast<const uint8_t*>(to)) | spread(bytes[i], 16);
        std::memcpy(to, &values, sizeof values);
    }
}

struct Q5_0 {
    static constexpr size_t kElements = 32, kBytes = 22, kGroups = 1;
    static constexpr bool kMins = false;
    static void decode(const uint8_t* raw, const uint8_t*, const Block& to) {
        unpack<4, 16>(raw + 6, to.values);
        add_fifth_bits(raw + 2, to.values);
        add<32>(to.values, -16);
        to.scales[0] = half_at(raw);
    }
};

struct Q5_1 {
    static constexpr size_t kElements = 32, kBytes = 24, kGroups = 1;
    static constexpr bool kMins = true;
    static void decode(const uint8_t* raw, const uint8_t*, const Block& to) {
        unpack<4, 16>(raw + 8, to.values);
        add_fifth_bits(raw + 4, to.values);
        to.scales[0] = half_at(raw);
        to.mins[0] = -half_at(raw + 2);
    }
};

struct Q8_0 {
    static constexpr size_t kElements = 32, kBytes = 34, kGroups = 1;
    static constexpr bool kMins = false;
    static void decode(const uint8_t* raw, const uint8_t*, const Block& to) {
        std::memcpy(to.values, raw + 2, 32);
        to.scales[0] = half_at(raw);
    }
};

struct Q2_K {
    static constexpr size_t kElements = 256, kBytes = 84, kGroups = 16;
    static constexpr bool kMins = true;
    static void decode(const uint8_t* raw, const uint8_t*, const Block& to) {
        for (size_t i = 0; i < 2; ++i) unpack<2, 32>(raw + 16 + i * 32, to.values + i * 128);
        *to.super = half_at(raw + 80);
        *to.min_super = half_at(raw + 82);
        for (size_t g = 0; g < kGroups; ++g) {
            to.scales[g] = *to.super * static_cast<float>(raw[g] & 15);
            to.mins[g] = *to.min_super * static_cast<float>(raw[g] >> 4);
        }
    }
};

struct Q3_K {
    static constexpr size_t kElements = 256, kBytes = 110, kGroups = 16;
    static constexpr bool kMins = false;
    static void decode(const uint8_t* raw, const uint8_t*, const Block& to) {
        for (size_t i = 0; i < 2; ++i) unpack<2, 32>(raw + 32 + i * 32, to.values + i * 128);
        add_high<1, 32>(raw, 8, 2, to.values);
        add<256>(to.values, -4);
        int8_t low[kGroups];
        unpack<4, 8>(raw + 96, low);
        add_high<2, 4>(raw + 104, 4, 4, low);
        *to.super = half_at(raw + 108);
        for (size_t g = 0; g < kGroups; ++g) to.scales[g] = *to.super * static_cast<float>(low[g] - 32);
    }
};

/// The scales and mins of Q4_K and Q5_K: 8 of 6 bits each in 12 bytes.
void k_scales(const uint8_t* raw, const Block& to) {
    *to.super = half_at(raw);
    *to.min_super = half_at(raw + 2);
    const uint8_t *first = raw + 4, *second = raw + 8, *high = raw + 12;
    for (size_t i = 0; i < 4; ++i) {
        to.scales[i] = *to.super * static_cast<float>(first[i] & 63);
        to.scales[4 + i] = *to.super * static_cast<float>((high[i] & 15) | first[i] >> 6 << 4);
        to.mins[i] = *to.min_super * static_cast<float>(second[i] & 63);
        to.mins[4 + i] = *to.min_super * static_cast<float>(high[i] >> 4 | second[i] >> 6 << 4);
    }
}

struct Q4_K {
    static constexpr size_t kElements = 256, kBytes = 144, kGroups = 8;
    static constexpr bool kMins = true;
    static void decode(const uint8_t* raw, const uint8_t*, const Block& to) {
        for (size_t i = 0; i < 4; ++i) unpack<4, 32>(raw + 16 + i * 32, to.values + i * 64);
        k_scales(raw, to);
    }
};

struct Q5_K {
    static constexpr size_t kElements = 256, kBytes = 176, kGroups = 8;
    static constexpr bool kMins = true;
    static void decode(const uint8_t* raw, const uint8_t*, const Block& to) {
        for (size_t i = 0; i < 4; ++i) unpack<4, 32>(raw + 48 + i * 32, to.values + i * 64);
        add_high<1, 32>(raw + 16, 8, 4, to.values);
        k_scales(raw, to);
    }
};

struct Q6_K {
    static constexpr size_t kElements = 256, kBytes = 210, kGroups = 16;
    static constexpr bool kMins = false;
    static void decode(const uint8_t* raw, const uint8_t*, const Block& to) {
        for (size_t i = 0; i < 2; ++i) {
            unpack<4, 64>(raw + i * 64, to.values + i * 128);
            add_high<2, 32>(raw + 128 + i * 32, 4, 4, to.values + i * 128);
        }
        add<256>(to.values, -32);
        *to.super = half_at(raw + 208);
        for (size_t g = 0; g < kGroups; ++g) {
            to.scales[g] = *to.super * static_cast<float>(static_cast<int8_t>(raw[192 + g]));
        }
    }
};

struct IQ4_NL {
    static constexpr size_t kElements = 32, kBytes = 18, kGroups = 1;
    static constexpr bool kMins = false;
    static void decode(const uint8_t* raw, const uint8_t*, const Block& to) {
        unpack<4, 16>(raw + 2, to.values);
        to.scales[0] = half_at(raw);
    }
};

struct IQ4_XS {
    static constexpr size_t kElements = 256, kBytes = 136, kGroups = 8;
    static constexpr bool kMins = false;
    static void decode(const uint8_t* raw, const uint8_t*, const Block& to) {
        for (size_t i = 0; i < 8; ++i) unpack<4, 16>(raw + 8 + i * 16, to.values + i * 32);
        *to.super = half_at(raw);
        for (size_t g = 0; g < kGroups; ++g) {
            const int low = raw[4 + g / 2] >> g % 2 * 4 & 15, high = raw[2 + g / 4] >> g % 4 * 2 & 3;
            to.scales[g] = *to.super * static_cast<float>((low | high << 4) - 32);
        }
    }
};

struct MXFP4 {
    static constexpr size_t kElements = 32, kBytes = 17, kGroups = 1;
    static constexpr bool kMins = false;
    static void decode(const uint8_t* raw, const uint8_t*, const Block& to) {
        unpack<4, 16>(raw + 1, to.values);
        const uint32_t exponent = raw[0];
        const uint32_t bits = exponent > 1 ? (exponent - 1) << 23 : 0x200000u << exponent;
        to.scales[0] = exponent < 255 ? std::bit_cast<float>(bits) : NAN;
    }
};

/// 32 weights of the types with grids whose signs are 7 bits each, of which the eighth follows.
uint32_t even_signs(uint32_t seven) { return seven | static_cast<uint32_t>(std::popcount(seven) & 1) << 7; }

/// Stores 8 weights: an entry of the grid with signs.
void put_8(const uint8_t* grid, size_t place, uint64_t signs, int8_t* to) {
    const uint64_t codes = word_at<uint64_t>(grid + place * 8) | signs;
    std::memcpy(to, &codes, sizeof codes);
}

/// Stores 8 weights of two entries with 4 each.
void put_4_4(const uint8_t* grid, size_t first, size_t second, uint64_t signs, int8_t* to) {
    const uint64_t codes =
        (word_at<uint32_t>(grid + first * 4) | static_cast<uint64_t>(word_at<uint32_t>(grid + second * 4)) << 32) | signs;
    std::memcpy(to, &codes, sizeof codes);
}

float odd(uint32_t stored) { return static_cast<float>(2 * stored + 1); }

constexpr uint64_t kSign2 = 4, kSign3 = 8;  // the sign bit of codes of IQ2 and of IQ3

struct IQ2_XXS {
    static constexpr size_t kElements = 256, kBytes = 66, kGroups = 8;
    static constexpr bool kMins = false;
    static void decode(const uint8_t* raw, const uint8_t* grid, const Block& to) {
        *to.super = half_at(raw) / 8;
        for (size_t g = 0; g < kGroups; ++g) {
            const uint8_t* places = raw + 2 + g * 8;
            const uint32_t top = word_at<uint32_t>(places + 4);
            for (size_t i = 0; i < 4; ++i) {
                put_8(grid, places[i], spread(even_signs(top >> i * 7 & 127), kSign2), to.values + g * 32 + i * 8);
            }
            to.scales[g] = *to.super * odd(top >> 28);
        }
    }
};

/// The scales of 16 weights, 4 bits each.
void nibble_scales(const uint8_t* raw, size_t groups, const Block& to) {
    for (size_t g = 0; g < groups; ++g) to.scales[g] = *to.super * odd(raw[g / 2] >> g % 2 * 4 & 15u);
}

struct IQ2_XS {
    static constexpr size_t kElements = 256, kBytes = 74, kGroups = 16;
    static constexpr bool kMins = false;
    static void decode(const uint8_t* raw, const uint8_t* grid, const Block& to) {
        *to.super = half_at(raw) / 8;
        for (size_t i = 0; i < 32; ++i) {
            const uint32_t pair = word_at<uint16_t>(raw + 2 + i * 2);
            put_8(grid, pair & 511, spread(even_signs(pair >> 9), kSign2), to.values + i * 8);
        }
        nibble_scales(raw + 66, kGroups, to);
    }
};

struct IQ2_S {
    static constexpr size_t kElements = 256, kBytes = 82, kGroups = 16;
    static constexpr bool kMins = false;
    static void decode(const uint8_t* raw, const uint8_t* grid, const Block& to) {
        *to.super = half_at(raw) / 8;
        for (size_t i = 0; i < 32; ++i) {
            const size_t place = raw[2 + i] | (raw[66 + i / 4] >> i % 4 * 2 & 3u) << 8;
            put_8(grid, place, spread(raw[34 + i], kSign2), to.values + i * 8);
        }
        nibble_scales(raw + 74, kGroups, to);
    }
};

struct IQ3_XXS {
    static constexpr size_t kElements = 256, kBytes = 98, kGroups = 8;
    static constexpr bool kMins = false;
    static void decode(const uint8_t* raw, const uint8_t* grid, const Block& to) {
        *to.super = half_at(raw) / 4;
        for (size_t g = 0; g < kGroups; ++g) {
            const uint8_t* places = raw + 2 + g * 8;
            const uint32_t top = word_at<uint32_t>(raw + 66 + g * 4);
            for (size_t i = 0; i < 4; ++i) {
                const uint64_t signs = spread(even_signs(top >> i * 7 & 127), kSign3);
                put_4_4(grid, places[2 * i], places[2 * i + 1], signs, to.values + g * 32 + i * 8);
            }
            to.scales[g] = *to.super * odd(top >> 28);
        }
    }
};

struct IQ3_S {
    static constexpr size_t kElements = 256, kBytes = 110, kGroups = 8;
    static constexpr bool kMins = false;
    static void decode(const uint8_t* raw, const uint8_t* grid, const Block& to) {
        *to.super = half_at(raw);
        const auto place = [raw](size_t i) -> size_t { return raw[2 + i] | (raw[66 + i / 8] >> i % 8 & 1u) << 8; };
        for (size_t i = 0; i < 32; ++i) {
            put_4_4(grid, place(2 * i), place(2 * i + 1), spread(raw[74 + i], kSign3), to.values + i * 8);
        }
        nibble_scales(raw + 106, kGroups, to);
    }
};

/// 8 weights of the ternary grid, with a bit for the direction of their shift by an eighth.
void put_shifted(const uint8_t* grid, size_t place, uint32_t negative, int8_t* to) {
    put_8(grid, place, negative * 0x0404040404040404, to);
}

struct IQ1_S {
    static constexpr size_t kElements = 256, kBytes = 50, kGroups = 8;
    static constexpr bool kMins = false;
    static void decode(const uint8_t* raw, const uint8_t* grid, const Block& to) {
        *to.super = half_at(raw) / 8;
        for (size_t g = 0; g < kGroups; ++g) {
            const uint32_t top = word_at<uint16_t>(raw + 34 + g * 2);
            for (size_t i = 0; i < 4; ++i) {
                const size_t place = raw[2 + g * 4 + i] | (top >> i * 3 & 7) << 8;
                put_shifted(grid, place, top >> 15, to.values + g * 32 + i * 8);
            }
            to.scales[g] = *to.super * odd(top >> 12 & 7);
        }
    }
};

struct IQ1_M {
    static constexpr size_t kElements = 256, kBytes = 56, kGroups = 16;
    static constexpr bool kMins = false;
    static void decode(const uint8_t* raw, const uint8_t* grid, const Block& to) {
        const uint8_t *tops = raw + 32, *scales = raw + 48;
        uint32_t bits = 0;
        for (size_t i = 0; i < 4; ++i) bits |= (word_at<uint16_t>(scales + i * 2) >> 12 & 15u) << i * 4;
        *to.super = from_half(static_cast<uint16_t>(bits)) / 8;
        for (size_t i = 0; i < 32; ++i) {
            const uint32_t top = tops[i / 2] >> i % 2 * 4 & 15u;
            put_shifted(grid, raw[i] | (top & 7) << 8, top >> 3, to.values + i * 8);
        }
        for (size_t g = 0; g < kGroups; ++g) {
            to.scales[g] = *to.super * odd(word_at<uint16_t>(scales + g / 4 * 2) >> g % 4 * 3 & 7u);
        }
    }
};

template <class T>
bool decode_row(const uint8_t* raw, size_t blocks, const uint8_t* grid, const GgmlRows& to, size_t row) {
    float super, min_super;  // if they are not wanted
    bool finite = true;
    for (size_t b = 0; b < blocks; ++b, raw += T::kBytes) {
        Block block{};
        block.offset = to.offset;
        block.values = to.values + row * to.values_stride + b * T::kElements;
        block.scales = to.scales + row * to.scales_stride + b * T::kGroups;
        if constexpr (T::kMins) block.mins = to.mins + row * to.scales_stride + b * T::kGroups;
        block.super = to.supers ? to.supers + row * to.supers_stride + b : &super;
        block.min_super = to.min_supers ? to.min_supers + row * to.supers_stride + b : &min_super;
        T::decode(raw, grid, block);
        for (size_t g = 0; g < T::kGroups; ++g) {
            finite = finite && std::isfinite(block.scales[g]);
            if constexpr (T::kMins) finite = finite && std::isfinite(block.mins[g]);
            block.scales[g] *= to.factor;
        }
    }
    return finite;
}

template <class T>
constexpr GgmlType type_of() {
    return {&decode_row<T>, T::kBytes};
}

}  // namespace

GgmlType ggml_type(const std::string& name) {
    static const struct {
        const char* name;
        GgmlType type;
    } kTypes[] = {
        {"Q4_0", type_of<Q4_0>()},       {"Q4_1", type_of<Q4_1>()},     {"Q5_0", type_of<Q5_0>()},
        {"Q5_1", type_of<Q5_1>()},       {"Q8_0", type_of<Q8_0>()},     {"Q2_K", type_of<Q2_K>()},
        {"Q3_K", type_of<Q3_K>()},       {"Q4_K", type_of<Q4_K>()},     {"Q5_K", type_of<Q5_K>()},
        {"Q6_K", type_of<Q6_K>()},       {"IQ4_NL", type_of<IQ4_NL>()}, {"IQ4_XS", type_of<IQ4_XS>()},
        {"MXFP4", type_of<MXFP4>()},     {"IQ2_XXS", type_of<IQ2_XXS>()}, {"IQ2_XS", type_of<IQ2_XS>()},
        {"IQ2_S", type_of<IQ2_S>()},     {"IQ3_XXS", type_of<IQ3_XXS>()}, {"IQ3_S", type_of<IQ3_S>()},
        {"IQ1_S", type_of<IQ1_S>()},     {"IQ1_M", type_of<IQ1_M>()},
    };
    for (const auto& [known, type] : kTypes) {
        if (name == known) return type;
    }
    return {};
}

}  // namespace moeserve
