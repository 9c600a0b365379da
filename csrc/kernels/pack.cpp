#include "kernels/pack.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/table.hpp"

namespace moeserve {
namespace {

constexpr size_t kBlock = Packing::kBlock;

/// One block, elements of T: inputs in steps of `inputs` that lie side by side.
template <class T, size_t inputs>
void pack_plain(const T* rows, size_t stride, size_t depth, size_t columns, T* to) {
    for (size_t k = 0; k < depth; k += inputs, to += kBlock * inputs) {
        const size_t have = std::min(inputs, depth - k);
        for (size_t n = 0; n < columns; ++n) {
            for (size_t i = 0; i < have; ++i) std::memcpy(to + n * inputs + i, rows + n * stride + k + i, sizeof(T));
        }
    }
}

void pack_int8(const Packing& p, const Unpacked& from, size_t column, size_t columns, uint8_t* to) {
    const uint8_t* rows = static_cast<const uint8_t*>(from.weights) + column * from.stride;
    pack_plain<uint8_t, 1>(rows, from.stride, p.depth, columns, to);
    std::memcpy(to + p.depth * kBlock, from.scales + column, columns * sizeof(float));
}

void pack_int4(const Packing& p, const Unpacked& from, size_t column, size_t columns, uint8_t* to) {
    const size_t groups = (p.depth + p.group - 1) / p.group;
    for (size_t g = 0; g < groups; ++g) {
        for (const float* values : {from.scales, p.zero_points ? from.zero_points : nullptr}) {
            if (!values) continue;
            for (size_t n = 0; n < columns; ++n) {
                std::memcpy(to + n * sizeof(float), values + (column + n) * groups + g, sizeof(float));
            }
            to += kBlock * sizeof(float);
        }
        const size_t end = std::min((g + 1) * p.group, p.depth);
        for (size_t k = g * p.group; k < end; k += 8, to += kBlock * 4) {
            for (size_t n = 0; n < columns; ++n) {
                const uint8_t* row = static_cast<const uint8_t*>(from.weights) + (column + n) * from.stride;
                uint32_t word = 0;
                for (size_t i = 0; i < std::min<size_t>(8, end - k); ++i) word |= (row[k + i] & 15u) << (4 * i);
                std::memcpy(to + n * 4, &word, 4);
            }
        }
    }
}

}  // namespace

size_t Packing::block_bytes() const {
    size_t bytes = 0;
    switch (type) {
        case Type::fp32: bytes = depth * kBlock * 4; break;
        case Type::fp16: bytes = depth * kBlock * 2; break;
        case Type::bf16: bytes = (depth + 1) / 2 * kBlock * 4; break;
        case Type::int8: bytes = depth * kBlock + kBlock * 4; break;
        case Type::int4: {
            const size_t head = kBlock * (zero_points ? 8 : 4), full = depth / group, rest = depth % group;
            bytes = full * (head + group / 8 * kBlock * 4) + (rest ? head + (rest + 7) / 8 * kBlock * 4 : 0);
            break;
        }
        default: break;
    }
    return (bytes + 63) / 64 * 64;
}

void pack(const Packing& packing, const Unpacked& from, uint8_t* to, size_t step, size_t begin, size_t end) {
    for (size_t b = begin; b < end; ++b) {
        uint8_t* block = to + b * step;
        std::memset(block, 0, packing.block_bytes());
        const size_t column = b * kBlock, columns = std::min(kBlock, packing.columns - column), depth = packing.depth;
        const size_t first = column * from.stride;
        switch (packing.type) {
            case Type::fp32:
                pack_plain<float, 1>(static_cast<const float*>(from.weights) + first, from.stride, depth, columns,
                                     reinterpret_cast<float*>(block));
                break;
            case Type::fp16:
                pack_plain<uint16_t, 1>(static_cast<const uint16_t*>(from.weights) + first, from.stride, depth, columns,
                                        reinterpret_cast<uint16_t*>(block));
                break;
            case Type::bf16:
                pack_plain<uint16_t, 2>(static_cast<const uint16_t*>(from.weights) + first, from.stride, depth, columns,
                                        reinterpret_cast<uint16_t*>(block));
                break;
            case Type::int8: pack_int8(packing, from, column, columns, block); break;
            case Type::int4: pack_int4(packing, from, column, columns, block); break;
            default: break;
        }
    }
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
