// Packing of weights for rows of int8, and the reference of GEMMs with them.
#include <algorithm>
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

constexpr size_t kBlock = Packing::kBlock, kSuper = 256;

/// Appends a number in a type of scales, in which it must be exact.
void put(uint8_t*& to, Type type, float value) {
    if (type == Type::fp16) {
        const Half half = static_cast<Half>(value);
        std::memcpy(to, &half, sizeof half);
        to += sizeof half;
        return;
    }
    const size_t bytes = type == Type::bf16 ? 2 : 4;  // of bf16, the upper half
    std::memcpy(to, reinterpret_cast<const uint8_t*>(&value) + sizeof value - bytes, bytes);
    to += bytes;
}

/// Appends 16 numbers of a block, number `index` of `count` in each row. supers: the scales that
/// they are multiples of, or null.
void put_all(uint8_t*& to, const Packing& p, const float* from, size_t column, size_t columns, size_t count, size_t index,
             const float* supers, Type type) {
    const size_t num_supers = (p.depth + kSuper - 1) / kSuper, super = index * p.group / kSuper;
    for (size_t n = 0; n < kBlock; ++n) {
        const float value = n < columns ? from[(column + n) * count + index] : 0.0f;
        if (supers == nullptr) {
            put(to, type, value);
            continue;
        }
        const float unit = n < columns ? supers[(column + n) * num_supers + super] : 0.0f;
        *to++ = static_cast<uint8_t>(unit == 0.0f ? 0 : static_cast<int>(std::lround(value / unit)));
    }
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

void store_word(uint8_t* to, uint32_t word) { std::memcpy(to, &word, sizeof word); }

}  // namespace

size_t int_block_bytes(const Packing& p) {
    const size_t steps = (p.depth + p.step() - 1) / p.step(), groups = p.group ? (p.depth + p.group - 1) / p.group : 1;
    return steps * p.step() * kBlock * p.ints.bits / 8 + groups * p.head_bytes() + p.depth / kSuper * p.super_bytes();
}

void pack_ints(const Packing& p, const Unpacked& from, size_t column, size_t columns, uint8_t* to) {
    const IntForm& form = p.ints;
    const size_t groups = p.group ? (p.depth + p.group - 1) / p.group : 1, step = p.step(), more = form.bits - 4;
    const uint64_t bias = p.type != Type::int8 || form.bits == 8 || form.mins ? 0 : 1 << (form.bits - 1);
    for (size_t k = 0; k < p.depth; k += step) {
        if (form.supers && k % kSuper == 0) {
            const size_t supers = p.depth / kSuper;
            put_all(to, p, from.supers, column, columns, supers, k / kSuper, nullptr, Type::fp16);
            if (form.mins) put_all(to, p, from.min_supers, column, columns, supers, k / kSuper, nullptr, Type::fp16);
        }
        if (p.group ? k % p.group == 0 : k == 0) {
            const size_t g = p.group ? k / p.group : 0;
            put_all(to, p, from.scales, column, columns, groups, g, form.supers ? from.supers : nullptr, form.scales);
            if (form.mins) {
                put_all(to, p, from.mins, column, columns, groups, g, form.supers ? from.min_supers : nullptr, form.scales);
            }
            if (p.zero_points) put_all(to, p, from.zero_points, column, columns, groups, g, nullptr, Type::fp32);
        }
        const size_t end = std::min(step, p.depth - k);
        for (size_t n = 0; n < columns; ++n) {
            const uint8_t* row = static_cast<const uint8_t*>(from.weights) + (column + n) * from.stride + k;
            uint32_t high = 0;
            for (size_t i = 0; i < end; i += 8) {
                const Eight eight = eight_of(row + i, std::min<size_t>(8, end - i), bias);
                if (form.bits == 8) {
                    store_word(to + (i / 4 * kBlock + n) * 4, eight.first);
                    store_word(to + ((i / 4 + 1) * kBlock + n) * 4, eight.second);
                    continue;
                }
                store_word(to + (i / 8 * kBlock + n) * 4, (eight.first & 0x0f0f0f0f) | (eight.second & 0x0f0f0f0f) << 4);
                const uint32_t kept = more == 2 ? 0x03030303 : 0x01010101;
                high |= ((eight.first >> 4 & kept) | (eight.second >> 4 & kept) << more) << i / 4 * more;
            }
            if (more && form.bits != 8) store_word(to + step / 2 * kBlock + n * 4, high);
        }
        to += step * kBlock * form.bits / 8;
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
