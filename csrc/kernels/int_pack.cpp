// Packing of weights for rows of int8, and the reference of GEMMs with them.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/pack.hpp"
#include "kernels/table.hpp"

namespace moeserve {
namespace {

#if defined(__aarch64__)
using Half = __fp16;
#else
using Half = _Float16;
#endif

constexpr size_t kBlock = Packing::kBlock, kStep = Packing::kIntStep, kSuper = 256;

/// The bits of a number in fp16, in which it must be exact.
uint16_t half_bits(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value), exponent = bits >> 23 & 255;
    if (exponent > 112 && exponent < 143 && !(bits & 0x1fff)) {  // normal in fp16
        return static_cast<uint16_t>(bits >> 31 << 15 | (exponent - 112) << 10 | (bits >> 13 & 1023));
    }
    return std::bit_cast<uint16_t>(static_cast<Half>(value));  // a library function on x86-64, which takes long
}

/// Appends a number in a type of scales, in which it must be exact.
void put(uint8_t*& to, Type type, float value) {
    if (type == Type::fp16) {
        const uint16_t half = half_bits(value);
        std::memcpy(to, &half, sizeof half);
        to += sizeof half;
        return;
    }
    const size_t bytes = type == Type::bf16 ? 2 : 4;  // of bf16, the upper half
    std::memcpy(to, reinterpret_cast<const uint8_t*>(&value) + sizeof value - bytes, bytes);
    to += bytes;
}

/// Appends 16 numbers of a block, number `index` of `count` in each row (zeros behind the last). supers: the scales that
/// they are multiples of, or null.
void put_all(uint8_t*& to, const Packing& p, const float* from, size_t column, size_t columns, size_t count, size_t index,
             const float* supers, Type type) {
    const size_t num_supers = (p.depth + kSuper - 1) / kSuper, super = index * p.group / kSuper;
    for (size_t n = 0; n < kBlock; ++n) {
        const bool inside = n < columns && index < count;
        const float value = inside ? from[(column + n) * count + index] : 0.0f;
        if (supers == nullptr) {
            put(to, type, value);
            continue;
        }
        const float unit = inside ? supers[(column + n) * num_supers + super] : 0.0f;
        const float multiple = unit == 0.0f ? 0.0f : value / unit;  // almost an integer
        *to++ = static_cast<uint8_t>(static_cast<int>(multiple + (multiple < 0.0f ? -0.5f : 0.5f)));
    }
}

/// Appends the 16 scales of scales (or of mins) of 256 inputs.
void put_supers(uint8_t*& to, const float* from, size_t column, size_t columns, size_t count, size_t index, float factor) {
    for (size_t n = 0; n < kBlock; ++n) put(to, Type::fp16, n < columns ? from[(column + n) * count + index] / factor : 0.0f);
}

/// Appends the scales of group `g`, and its mins or zero points.
void put_head(uint8_t*& to, const Packing& p, const Unpacked& from, size_t column, size_t columns, size_t groups, size_t g) {
    const IntForm& form = p.ints;
    put_all(to, p, from.scales, column, columns, groups, g, form.supers ? from.supers : nullptr, form.scales);
    if (form.mins) put_all(to, p, from.mins, column, columns, groups, g, form.supers ? from.min_supers : nullptr, form.scales);
    if (p.zero_points) put_all(to, p, from.zero_points, column, columns, groups, g, nullptr, Type::fp32);
}

/// Packs eight values in the order of a row's bytes: inputs 1, 5, 0 and 4, then 3, 7, 2 and 6.
struct Eight {
    uint32_t first, second;
};

Eight eight_of(const uint8_t* row, size_t count, uint64_t bias) {
    constexpr uint64_t kOnes = 0x0101010101010101, kSigns = 0x80 * kOnes;
    uint64_t values = 0;
    std::memcpy(&values, row, count);
    values = ((values & ~kSigns) + bias * kOnes) ^ (values & kSigns);  // no carry from byte to byte
    const auto at = [values](int i) { return static_cast<uint32_t>(values >> 8 * i & 255); };
    return {at(1) | at(5) << 8 | at(0) << 16 | at(4) << 24, at(3) | at(7) << 8 | at(2) << 16 | at(6) << 24};
}

/// Stores `bits` bits of each byte of the words, from bit `first` on, as a plane of a step of one column. Returns its end.
uint8_t* store_plane(uint8_t* to, const uint32_t (&words)[kStep / 4], size_t first, size_t bits) {
    const size_t per_word = 8 / bits;
    const uint32_t kept = ((1u << bits) - 1) * 0x01010101u;
    for (size_t i = 0; i < kStep / 4; i += per_word, to += kBlock * 4) {
        uint32_t word = 0;
        for (size_t j = 0; j < per_word; ++j) word |= (words[i + j] >> first & kept) << j * bits;
        std::memcpy(to, &word, sizeof word);
    }
    return to;
}

/// Stores a step of one column.
void store_step(uint8_t* to, const uint32_t (&words)[kStep / 4], size_t bits) {
    const size_t low = bits == 8 ? 8 : bits < 4 ? 2 : 4;
    to = store_plane(to, words, 0, low);
    if (bits > low) store_plane(to, words, low, bits - low);
}

// The same for a whole step of 4 columns, by vectors of GCC and Clang, which compile for any architecture.
using Words = uint32_t __attribute__((vector_size(16)));  // a word of each column
using Longs = uint64_t __attribute__((vector_size(16)));
using Bytes = uint8_t __attribute__((vector_size(16)));

/// Of each eight bytes, of which only 0, 1, 4 and 5 are not zero: bytes 1, 5, 0 and 4 in the lower half.
Longs interleaved(Words fours) {
    const Longs spread = reinterpret_cast<Longs>(fours >> 8 | (fours << 16 & 0xff0000u));
    return spread | spread >> 24;
}

/// Stores the lower halves of two eights of 4 columns as two words of each column.
void transpose(const Longs (&columns)[4], Words& low, Words& high) {
    const auto shuffle = [](auto a, auto b, Words order) {
        return __builtin_shuffle(reinterpret_cast<Words>(a), reinterpret_cast<Words>(b), order);
    };
    const Words ab = shuffle(columns[0], columns[1], Words{0, 4, 2, 6});
    const Words cd = shuffle(columns[2], columns[3], Words{0, 4, 2, 6});
    low = shuffle(ab, cd, Words{0, 1, 4, 5});
    high = shuffle(ab, cd, Words{2, 3, 6, 7});
}

template <uint32_t first, uint32_t bits>
uint8_t* store_plane_4(uint8_t* to, const Words (&words)[kStep / 4]) {
    constexpr uint32_t kPerWord = 8 / bits, kKept = ((1u << bits) - 1) * 0x01010101u;
    for (size_t i = 0; i < kStep / 4; i += kPerWord, to += kBlock * 4) {
        Words word{};
        for (uint32_t j = 0; j < kPerWord; ++j) word |= (words[i + j] >> first & kKept) << j * bits;
        std::memcpy(to, &word, sizeof word);
    }
    return to;
}

void store_step_4(uint8_t* to, const Words (&words)[kStep / 4], size_t bits) {
    switch (bits) {
        case 2: store_plane_4<0, 2>(to, words); break;
        case 3: store_plane_4<2, 1>(store_plane_4<0, 2>(to, words), words); break;
        case 4: store_plane_4<0, 4>(to, words); break;
        case 5: store_plane_4<4, 1>(store_plane_4<0, 4>(to, words), words); break;
        case 6: store_plane_4<4, 2>(store_plane_4<0, 4>(to, words), words); break;
        default: store_plane_4<0, 8>(to, words); break;
    }
}

void pack_step_4(const uint8_t* row, size_t stride, uint8_t bias, size_t bits, uint8_t* to) {
    Words words[kStep / 4];
    for (size_t i = 0; i < kStep; i += sizeof(Bytes)) {
        Longs first[4], second[4];  // inputs 1, 5, 0 and 4, and 3, 7, 2 and 6
        for (size_t n = 0; n < 4; ++n) {
            Bytes values;
            std::memcpy(&values, row + n * stride + i, sizeof values);
            const Words fours = reinterpret_cast<Words>(values + bias);
            first[n] = interleaved(fours & 0xffffu);
            second[n] = interleaved(fours >> 16);
        }
        transpose(first, words[i / 4], words[i / 4 + 2]);
        transpose(second, words[i / 4 + 1], words[i / 4 + 3]);
    }
    store_step_4(to, words, bits);
}

}  // namespace

size_t int_block_bytes(const Packing& p) {
    const size_t steps = (p.depth + kStep - 1) / kStep;
    const size_t heads = p.group == 16 ? 2 * steps : p.group ? (p.depth + p.group - 1) / p.group : 1;
    return steps * kStep * kBlock * p.ints.bits / 8 + heads * p.head_bytes() + p.depth / kSuper * p.super_bytes();
}

void pack_ints(const Packing& p, const Unpacked& from, size_t column, size_t columns, uint8_t* to) {
    const IntForm& form = p.ints;
    const size_t groups = p.group ? (p.depth + p.group - 1) / p.group : 1;
    const bool plain = p.type != Type::int8 || form.codes || form.bits == 8 || form.mins;
    const uint64_t bias = plain ? 0 : 1 << (form.bits - 1);
    for (size_t k = 0; k < p.depth; k += kStep) {
        if (form.supers && k % kSuper == 0) {
            const size_t supers = p.depth / kSuper;
            put_supers(to, from.supers, column, columns, supers, k / kSuper, form.factor);
            if (form.mins) put_supers(to, from.min_supers, column, columns, supers, k / kSuper, 1.0f);
        }
        if (p.group ? k % p.group == 0 : k == 0) {
            const size_t g = p.group ? k / p.group : 0;
            for (size_t i = 0; i < p.groups_per_step(); ++i) put_head(to, p, from, column, columns, groups, g + i);
        }
        const size_t end = std::min(kStep, p.depth - k);
        const uint8_t* rows = static_cast<const uint8_t*>(from.weights) + column * from.stride + k;
        size_t n = 0;
        for (; end == kStep && n + 4 <= columns; n += 4) {
            pack_step_4(rows + n * from.stride, from.stride, static_cast<uint8_t>(bias), form.bits, to + n * 4);
        }
        for (; n < columns; ++n) {
            const uint8_t* row = rows + n * from.stride;
            uint32_t words[kStep / 4] = {};
            for (size_t i = 0; i < end; i += 8) {
                const Eight eight = eight_of(row + i, std::min<size_t>(8, end - i), bias);
                words[i / 4] = eight.first, words[i / 4 + 1] = eight.second;
            }
            store_step(to + n * 4, words, form.bits);
        }
        to += kStep * kBlock * form.bits / 8;
    }
}

void int_product_reference(const float* x, size_t rows, size_t depth, const int8_t* w, size_t columns, size_t group,
                           const float* scales, const float* mins, float* y) {
    constexpr size_t kRounded = 32;
    const size_t step = group == 16 ? 16 : kRounded, width = group ? group : depth, groups = (depth + width - 1) / width;
    for (size_t m = 0; m < rows; ++m, x += depth) {
        std::vector<float> units;
        std::vector<int> rounded(depth);
        for (size_t k = 0; k < depth; k += kRounded) {
            const size_t end = std::min(k + kRounded, depth);
            float size = 0.0f;
            bool finite = true;
            for (size_t i = k; i < end; ++i) {
                size = std::max(size, std::fabs(x[i]));
                finite = finite && std::isfinite(x[i]);
            }
            const bool zeros = size < 0x1p-100f;
            units.push_back(!finite ? NAN : zeros ? 0.0f : size / 127.0f);
            for (size_t i = k; i < end && finite; ++i) {
                rounded[i] = zeros ? 0 : static_cast<int>(std::nearbyint(x[i] * (127.0f / size)));
            }
        }
        for (size_t n = 0; n < columns; ++n) {
            float total = 0.0f;
            for (size_t g = 0; g < groups; ++g) {
                const size_t end = std::min((g + 1) * width, depth);
                float sum = 0.0f, all = 0.0f;
                for (size_t k = g * width; k < end; k += step) {
                    int products = 0, plain = 0;
                    for (size_t i = k; i < std::min(k + step, end); ++i) {
                        products += rounded[i] * w[n * depth + i];
                        plain += rounded[i];
                    }
                    sum = std::fma(static_cast<float>(products), units[k / kRounded], sum);
                    all = units[k / kRounded] * static_cast<float>(plain);
                }
                total = std::fma(sum, scales[n * groups + g], total);
                if (mins) total = std::fma(-mins[n * groups + g], all, total);
            }
            y[m * columns + n] = total;
        }
    }
}

}  // namespace moeserve
