#include "kernels/pack.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kernels/table.hpp"

namespace moeserve {
namespace {

constexpr size_t kBlock = Packing::kBlock;

constexpr size_t kTile = 32;  // inputs at a time: a cache line per row, and the output stays in the L1 cache

template <class T>
T value_at(const T* rows, size_t index) {  // rows may be unaligned
    T value;
    std::memcpy(&value, rows + index, sizeof value);
    return value;
}

/// Packs one block of elements of T: [depth][16].
template <class T>
void pack_plain(const T* rows, size_t stride, size_t depth, size_t columns, T* to) {
    for (size_t tile = 0; tile < depth; tile += kTile) {
        const size_t end = std::min(tile + kTile, depth);
        for (size_t n = 0; n < columns; ++n) {
            for (size_t k = tile; k < end; ++k) to[k * kBlock + n] = value_at(rows, n * stride + k);
        }
    }
}

#if defined(__SSE2__)
/// Packs 8 inputs of 4 rows: 4 words for each pair of inputs.
void pack_pairs_4(const uint16_t* rows, size_t stride, uint32_t* to) {
    const auto load = [&](size_t n) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + n * stride)); };
    const auto store = [&](size_t k, __m128i words) {
        const __m128i swapped = _mm_or_si128(_mm_slli_epi32(words, 16), _mm_srli_epi32(words, 16));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + k * kBlock), swapped);
    };
    const __m128i a = load(0), b = load(1), c = load(2), d = load(3);
    const __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
    const __m128i ab_2 = _mm_unpackhi_epi32(a, b), cd_2 = _mm_unpackhi_epi32(c, d);
    store(0, _mm_unpacklo_epi64(ab, cd));
    store(1, _mm_unpackhi_epi64(ab, cd));
    store(2, _mm_unpacklo_epi64(ab_2, cd_2));
    store(3, _mm_unpackhi_epi64(ab_2, cd_2));
}
#endif

/// Packs words of two inputs, the first in the upper half: [depth / 2][16].
void pack_pairs(const uint16_t* rows, size_t stride, size_t depth, size_t columns, uint32_t* to) {
    for (size_t tile = 0; tile < depth; tile += kTile) {
        const size_t end = std::min(tile + kTile, depth);
        size_t full = tile, n = 0;  // inputs and rows that are packed already
#if defined(__SSE2__)
        for (full = tile + (end - tile) / 8 * 8; n + 4 <= columns; n += 4) {
            const uint16_t* row = rows + n * stride;
            for (size_t k = tile; k < full; k += 8) pack_pairs_4(row + k, stride, to + k / 2 * kBlock + n);
        }
#endif
        for (size_t m = 0; m < columns; ++m) {
            const uint16_t* row = rows + m * stride;
            for (size_t k = m < n ? full : tile; k < end; k += 2) {
                const uint32_t second = k + 1 < depth ? value_at(row, k + 1) : 0;
                to[k / 2 * kBlock + m] = static_cast<uint32_t>(value_at(row, k)) << 16 | second;
            }
        }
    }
}

/// Finds the block's 16 most frequent upper bytes (stored twice), and each byte's index among them,
/// 16 for all others.
std::array<uint8_t, 256> pack_table(const uint16_t* rows, size_t stride, size_t depth, size_t columns, uint8_t* to) {
    std::array<uint32_t, 256> counts{};
    for (size_t n = 0; n < columns; ++n) {
        for (size_t k = 0; k < depth; ++k) ++counts[value_at(rows, n * stride + k) >> 8];
    }
    std::array<uint8_t, 256> order, index;
    std::iota(order.begin(), order.end(), uint8_t{0});
    std::stable_sort(order.begin(), order.end(), [&](uint8_t a, uint8_t b) { return counts[a] > counts[b]; });
    index.fill(16);
    for (uint8_t i = 0; i < 16; ++i) {
        index[order[i]] = i;
        to[2 * i + 1] = to[32 + 2 * i + 1] = order[i];
    }
    return index;
}

/// Packs bf16 in 12 bits. Returns whether there was room for all escapes; if not, the packed block
/// is invalid.
bool pack_codes(const uint16_t* rows, size_t stride, size_t depth, size_t columns, uint8_t* to) {
    static constexpr int kPlaces[8] = {2, 0, 3, 1, 2, 0, 3, 1};  // places of lower bytes in their words
    const auto index = pack_table(rows, stride, depth, columns, to);
    Escape *escape = const_cast<Escape*>(escapes_of(to, depth)), *const last = escape + most_escapes(depth);
    std::fill(escape, last + 1, ~Escape{0});
    to += 64;
    for (size_t k = 0; k < depth; k += 8, to += kBlock * 12) {
        for (size_t n = 0; n < columns; ++n) {
            uint32_t codes = 0;
            for (size_t i = 0; i < 8; ++i) {
                const uint16_t value = value_at(rows, n * stride + k + i);
                const uint32_t code = index[value >> 8];
                to[(1 + i / 4) * kBlock * 4 + n * 4 + kPlaces[i]] = static_cast<uint8_t>(value);
                codes |= (code & 15) << (i / 2 * 4 + (i % 2 == 0 ? 16 : 0));
                if (code < 16) continue;
                if (escape == last) return false;
                *escape++ = static_cast<Escape>(((k + i) * kBlock + n) << 8 | value >> 8);
            }
            std::memcpy(to + n * 4, &codes, 4);
        }
    }
    return true;
}

/// Packs the scales (or zero points) of group g: [16].
uint8_t* pack_head(const float* values, size_t column, size_t columns, size_t groups, size_t g, uint8_t* to) {
    for (size_t n = 0; n < columns; ++n) {
        std::memcpy(to + n * sizeof(float), values + (column + n) * groups + g, sizeof(float));
    }
    return to + kBlock * sizeof(float);
}

/// Packs one byte per weight, scaled per column.
void pack_bytes(const Packing& p, const Unpacked& from, size_t column, size_t columns, uint8_t* to) {
    const uint8_t* rows = static_cast<const uint8_t*>(from.weights) + column * from.stride;
    pack_plain(rows, from.stride, p.depth, columns, to);
    pack_head(from.scales, column, columns, 1, 0, to + p.depth * kBlock);
}

/// Packs weights in groups of inputs, each after its scales.
void pack_groups(const Packing& p, const Unpacked& from, size_t column, size_t columns, uint8_t* to) {
    const uint8_t* rows = static_cast<const uint8_t*>(from.weights) + column * from.stride;
    const size_t groups = (p.depth + p.group - 1) / p.group;
    for (size_t g = 0; g < groups; ++g) {
        const size_t first = g * p.group, end = std::min(first + p.group, p.depth);
        to = pack_head(from.scales, column, columns, groups, g, to);
        if (p.type == Type::int8 || p.type == Type::fp8) {
            pack_plain(rows + first, from.stride, end - first, columns, to);
            to += (end - first) * kBlock;
            continue;
        }
        if (p.zero_points) to = pack_head(from.zero_points, column, columns, groups, g, to);
        for (size_t k = first; k < end; k += 8, to += kBlock * 4) {
            for (size_t n = 0; n < columns; ++n) {
                const uint8_t* row = rows + n * from.stride;
                uint32_t word = 0;
                for (size_t i = 0; i < std::min<size_t>(8, end - k); ++i) {
                    word |= (row[k + i] & 15u) << (i / 2 * 4 + (i % 2 == 0 ? 16 : 0));
                }
                std::memcpy(to + n * 4, &word, 4);
            }
        }
    }
}

}  // namespace

size_t Packing::block_bytes() const {
    size_t bytes = ints.on ? int_block_bytes(*this) : 0;
    if (!ints.on) switch (type) {
        case Type::fp32: bytes = depth * kBlock * 4; break;
        case Type::fp16: bytes = depth * kBlock * 2; break;
        case Type::bf16: bytes = (depth + 1) / 2 * kBlock * 4; break;
        case Type::bf12: bytes = 64 + depth * 24 + (most_escapes(depth) + 1) * sizeof(Escape); break;
        case Type::int8:
        case Type::fp8: bytes = depth * kBlock + (group ? (depth + group - 1) / group : 1) * kBlock * 4; break;
        case Type::int4:
        case Type::fp4: {
            const size_t head = kBlock * (zero_points ? 8 : 4), full = depth / group, rest = depth % group;
            bytes = full * (head + group / 8 * kBlock * 4) + (rest ? head + (rest + 7) / 8 * kBlock * 4 : 0);
            break;
        }
        default: break;
    }
    return (bytes + 63) / 64 * 64;
}

bool pack(const Packing& packing, const Unpacked& from, uint8_t* to, size_t step, size_t begin, size_t end) {
    for (size_t b = begin; b < end; ++b) {
        uint8_t* block = to + b * step;
        std::memset(block, 0, packing.block_bytes());
        const size_t column = b * kBlock, columns = std::min(kBlock, packing.columns - column), depth = packing.depth;
        const size_t first = column * from.stride;
        if (packing.ints.on) {
            pack_ints(packing, from, column, columns, block);
            continue;
        }
        switch (packing.type) {
            case Type::fp32:
                pack_plain(static_cast<const uint32_t*>(from.weights) + first, from.stride, depth, columns,
                           reinterpret_cast<uint32_t*>(block));
                break;
            case Type::fp16:
                pack_plain(static_cast<const uint16_t*>(from.weights) + first, from.stride, depth, columns,
                           reinterpret_cast<uint16_t*>(block));
                break;
            case Type::bf16:
                pack_pairs(static_cast<const uint16_t*>(from.weights) + first, from.stride, depth, columns,
                           reinterpret_cast<uint32_t*>(block));
                break;
            case Type::bf12:
                if (!pack_codes(static_cast<const uint16_t*>(from.weights) + first, from.stride, depth, columns, block)) return false;
                break;
            case Type::int4:
            case Type::fp4: pack_groups(packing, from, column, columns, block); break;
            case Type::int8:
            case Type::fp8: (packing.group ? pack_groups : pack_bytes)(packing, from, column, columns, block); break;
            default: break;
        }
    }
    return true;
}

void product_reference(const float* x, size_t rows, size_t depth, const float* w, size_t columns, float* y) {
    for (size_t m = 0; m < rows; ++m) {
        for (size_t n = 0; n < columns; ++n) {
            float sum = 0.0f;
            for (size_t k = 0; k < depth; ++k) sum = std::fma(x[m * depth + k], w[n * depth + k], sum);
            y[m * columns + n] = sum;
        }
    }
}

}  // namespace moeserve
