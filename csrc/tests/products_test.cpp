// Products with packed weights against chains of std::fma, bit for bit: every format, odd shapes and addresses, weights
// and scratch memory that end where their contents end.
#include <algorithm>
#include <memory>
#include <thread>

#include "kernels/pack.hpp"
#include "pool/pool.hpp"
#include "tests/exact.hpp"

#include "kernels/product.hpp"

using namespace moeserve;

namespace {

/// e4m3fn from its bits: 1 sign, 4 of an exponent whose bias is 7, 3 of a mantissa.
struct Fp8 {
    uint8_t bits;

    Fp8() = default;
    explicit Fp8(float number) : bits(static_cast<uint8_t>(number)) {}
    explicit operator float() const {
        const int exponent = bits >> 3 & 15, mantissa = bits & 7;
        const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
        return bits & 128 ? -size : size;
    }
};

/// e2m1: of a sign, two bits of exponent and one of mantissa.
struct Fp4 {
    uint8_t bits;

    Fp4() = default;
    explicit Fp4(float number) : bits(static_cast<uint8_t>(number)) {}
    explicit operator float() const {
        const int exponent = bits >> 1 & 3, mantissa = bits & 1;
        const float size = exponent ? std::ldexp(2.0f + mantissa, exponent - 2) : 0.5f * mantissa;
        return bits & 8 ? -size : size;
    }
};

/// A matrix [columns, depth]: packed, and as the floats that the products see, scales apart.
struct Matrix {
    Packing packing;
    Exact<float> plain, scales, zero_points;
    Exact<uint8_t> packed;

    size_t groups() const { return packing.group ? (packing.depth + packing.group - 1) / packing.group : 1; }

    Matrix(const Packing& p, size_t offset)
        : packing(p),
          plain(p.columns * p.depth),
          scales(random<float>(p.columns * groups(), offset)),
          zero_points(p.columns * groups(), offset),
          packed(p.bytes()) {
        for (size_t i = 0; i < zero_points.size(); ++i) zero_points[i] = static_cast<float>(below(16));
        switch (p.type) {
            case Type::bf16: fill<Bf16>(offset, [] { return normal(); }); break;
            case Type::bf12:  // some are escapes
                fill<Bf16>(offset, [] { return below(1000) ? normal() : std::ldexp(normal(), -static_cast<int>(below(140))); });
                break;
            case Type::fp16: fill<Fp16>(offset, [] { return normal(); }); break;
            case Type::int8: fill<int8_t>(offset, [] { return static_cast<float>(below(256)) - 128; }); break;
            case Type::fp8: fill<Fp8>(offset, [] { return static_cast<float>(below(127) + 128 * below(2)); }); break;
            case Type::int4: fill<uint8_t>(offset, [] { return static_cast<float>(below(16)); }); break;
            case Type::fp4: fill<Fp4>(offset, [] { return static_cast<float>(below(16)); }); break;
            default: fill<float>(offset, [] { return normal(); }); break;
        }
    }

    template <class T, class Value>
    void fill(size_t offset, const Value& value) {
        const size_t stride = packing.depth + 3;
        Exact<T> from((packing.columns - 1) * stride + packing.depth, offset);
        for (size_t n = 0; n < packing.columns; ++n) {
            for (size_t k = 0; k < packing.depth; ++k) {
                const T weight = from[n * stride + k] = T(value());
                float& x = plain[n * packing.depth + k] = static_cast<float>(weight);
                if (packing.type != Type::int4) continue;
                x -= packing.zero_points ? zero_points[n * groups() + k / packing.group] : 8.0f;
            }
        }
        CHECK(pack(packing, {from.data(), stride, scales.data(), zero_points.data()}, packed.data(), packing.block_bytes(),
                   0, packing.num_blocks()));
    }

    float sum(const float* x, size_t column) const {
        const float* w = plain.data() + column * packing.depth;
        if (!packing.group) {
            float y;
            product_reference(x, 1, packing.depth, w, 1, &y);
            return packing.type == Type::int8 || packing.type == Type::fp8 ? y * scales[column] : y;
        }
        float total = 0;
        for (size_t g = 0; g < groups(); ++g) {
            float chain;
            const size_t first = g * packing.group;
            product_reference(x + first, 1, std::min(packing.group, packing.depth - first), w + first, 1, &chain);
            total = std::fma(chain, scales[column * groups() + g], total);
        }
        return total;
    }
};

ProductArgs arguments(const Packing& packing, size_t num_blocks) {
    ProductArgs args{};
    args.weight_type = packing.type;
    args.depth = packing.depth;
    args.columns = packing.columns;
    args.num_blocks = num_blocks;
    args.block_bytes = packing.block_bytes();
    args.group = packing.group;
    args.zero_points = packing.zero_points;
    return args;
}

/// Runs a product, its tasks shared out as bindings/products.cpp does.
void run(ProductArgs args, const std::vector<Part>& parts) {
    args.parts = parts.data();
    args.y_type = args.type;
    for (const Part& part : parts) args.most_rows = std::max(args.most_rows, part.count);
    const std::shared_ptr<Pool> threads = pool();
    std::vector<size_t> held(static_cast<size_t>(threads->size()) * (64 / sizeof(size_t)), ~size_t{0});
    args.held = held.data();
    const auto work = [](void* context, size_t begin, size_t end, int worker) {
        tested::product(*static_cast<const ProductArgs*>(context), begin, end, worker);
    };
    threads->share(parts.size() * args.units(), 1, Work{work, &args});
}

/// Two experts, and no rows for a third between them. E: of activations.
template <class E>
void linear(const Packing& packing, size_t rows, size_t offset) {
    const Matrix matrix(packing, offset);
    const size_t depth = packing.depth, columns = packing.columns, x_stride = depth + 1, y_stride = columns + 2;
    const auto x = random<E>((rows - 1) * x_stride + depth, offset);
    auto bias = random<float>(packing.num_blocks() * Packing::kBlock, offset);
    Exact<E> y((rows - 1) * y_stride + columns, 1 - offset), expected(y);
    for (int way = 0; way < 8; ++way) {
        const bool biased = way & 1, acts = way & 2;
        ProductArgs args = arguments(packing, packing.num_blocks());
        args.acts = acts;
        args.dot_rows = way & 4 ? SIZE_MAX : 0;
        args.activation.kind = Activation::Kind::relu2;
        args.type = kType<E>;
        args.x = x.data(), args.x_stride = x_stride;
        args.y = y.data(), args.y_stride = y_stride;
        args.weights = matrix.packed.data();
        args.bias = biased ? bias.data() : nullptr;
        const size_t half = rows / 2;
        run(args, half ? std::vector<Part>{{0, 0, half}, {0, half, rows - half}} : std::vector<Part>{{0, 0, rows}});
        std::vector<float> row(depth);
        for (size_t r = 0; r < rows; ++r) {
            for (size_t k = 0; k < depth; ++k) row[k] = static_cast<float>(x[r * x_stride + k]);
            for (size_t n = 0; n < columns; ++n) {
                const float sum = matrix.sum(row.data(), n), y_n = biased ? sum + bias[n] : sum, rest = std::max(y_n, 0.0f);
                expected[r * y_stride + n] = E(acts ? rest * rest : y_n);
            }
        }
        CHECK(same(y, expected));
    }
    run(arguments(packing, packing.num_blocks()), {});
}

/// The first product of gated experts: blocks of gate and up take turns, experts lie one behind the other.
template <class E>
void gated(const Packing& packing, size_t offset) {
    const size_t experts = 3, depth = packing.depth, columns = packing.columns, block = packing.block_bytes();
    const size_t num_blocks = 2 * packing.num_blocks(), num_biases = num_blocks * Packing::kBlock;
    const size_t expert_bytes = 2 * packing.bytes() + num_biases * sizeof(float);
    std::vector<std::unique_ptr<Matrix>> halves;
    Exact<uint8_t> weights(experts * expert_bytes);
    std::vector<Exact<float>> biases;
    for (size_t i = 0; i < 2 * experts; ++i) {
        halves.push_back(std::make_unique<Matrix>(packing, offset));
        for (size_t b = 0; b < packing.num_blocks(); ++b) {
            std::memcpy(weights.data() + i / 2 * expert_bytes + (2 * b + i % 2) * block, halves[i]->packed.data() + b * block,
                        block);
        }
    }
    for (size_t e = 0; e < experts; ++e) {
        biases.push_back(random<float>(num_biases));
        std::memcpy(weights.data() + e * expert_bytes + 2 * packing.bytes(), biases[e].data(), num_biases * sizeof(float));
    }
    const std::vector<Part> parts{{0, 0, 1}, {2, 1, 8}, {2, 9, 2}};
    const size_t rows = 11;
    const auto x = random<E>(rows * depth, offset);
    Exact<E> y(rows * columns, 1 - offset), expected(rows * columns);
    ProductArgs args = arguments(packing, num_blocks);
    args.type = kType<E>;
    args.acts = true;
    args.expert_bytes = expert_bytes;
    args.x = x.data(), args.x_stride = depth;
    args.y = y.data(), args.y_stride = columns;
    args.weights = weights.data();
    std::vector<float> row(depth), gates(rows * columns), ups(rows * columns);
    for (const Part& part : parts) {
        for (size_t r = part.first; r < part.first + part.count; ++r) {
            for (size_t k = 0; k < depth; ++k) row[k] = static_cast<float>(x[r * depth + k]);
            for (size_t n = 0; n < columns; ++n) {
                gates[r * columns + n] = halves[2 * part.expert]->sum(row.data(), n);
                ups[r * columns + n] = halves[2 * part.expert + 1]->sum(row.data(), n);
            }
        }
    }
    for (int way = 0; way < 16; ++way) {
        const bool biased = way & 1;
        args.dot_rows = way & 8 ? 4 : 0;
        args.activation = kActivations[way / 2 % 4];
        args.bias = biased ? reinterpret_cast<const float*>(weights.data() + 2 * packing.bytes()) : nullptr;
        run(args, parts);
        for (const Part& part : parts) {
            for (size_t i = part.first * columns; i < (part.first + part.count) * columns; ++i) {
                const float* bias = biases[part.expert].data() + i % columns / 16 * 32 + i % columns % 16;
                const float gate = biased ? gates[i] + bias[0] : gates[i], up = biased ? ups[i] + bias[16] : ups[i];
                expected[i] = E(gated_of(args.activation, gate, up));
            }
        }
        CHECK(same(y, expected));
    }
}

void every_format(size_t offset) {
    std::vector<Packing> formats;
    const size_t shapes[][2] = {{1, 1}, {2, 16}, {7, 17}, {9, 65}, {40, 22}, {33, 100}, {300, 33}};  // inputs, outputs
    for (const auto& [depth, columns] : shapes) {
        for (Type type : {Type::fp32, Type::bf16, Type::fp16, Type::int8, Type::fp8}) {
            formats.push_back({type, depth, columns});
        }
        for (size_t group : {8, 32, 264}) {
            for (bool zero_points : {false, true}) formats.push_back({Type::int4, depth, columns, group, zero_points});
            for (Type type : {Type::int8, Type::fp8, Type::fp4}) formats.push_back({type, depth, columns, group});
        }
    }
#ifdef __AVX512BF16__
    for (const auto& [depth, columns] : {std::pair<size_t, size_t>{8, 17}, {304, 33}, {648, 100}}) {
        formats.push_back({Type::bf12, depth, columns});
    }
#endif
    for (const Packing& packing : formats) {
        for (size_t rows : {1, 2, 3, 5, 6, 7, 25}) linear<float>(packing, rows, offset);
        for (size_t rows : {1, 2, 4, 13, 25}) linear<Bf16>(packing, rows, offset);
        linear<Fp16>(packing, 13, 1 - offset);
        gated<float>(packing, offset);
        gated<Bf16>(packing, offset);
        gated<Fp16>(packing, 1 - offset);
    }
}

/// Weights whose upper bytes are all equally frequent have too many escapes.
void too_many_escapes() {
    const Packing packing{Type::bf12, 64, 16};
    Exact<uint16_t> weights(packing.depth * packing.columns);
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<uint16_t>(below(1 << 16));
    Exact<uint8_t> packed(packing.bytes());
    CHECK(!pack(packing, {weights.data(), packing.depth}, packed.data(), packing.block_bytes(), 0, 1));
}

/// Two threads multiply at once on the same workers, whose scratch memory both products use.
void ubatches() {
    std::vector<std::thread> threads;
    for (size_t ubatch = 0; ubatch < 2; ++ubatch) {
        threads.emplace_back([ubatch] {
            const Packing packing{Type::bf16, 40 + 20 * ubatch, 150};
            const Matrix matrix(packing, ubatch);
            const size_t rows = 30, depth = packing.depth;
            const auto x = random<float>(rows * depth);
            Exact<float> expected(rows * packing.columns);
            for (size_t i = 0; i < expected.size(); ++i) {
                expected[i] = matrix.sum(x.data() + i / packing.columns * depth, i % packing.columns);
            }
            for (int turn = 0; turn < 10; ++turn) {
                Exact<float> y(expected.size());
                ProductArgs args = arguments(packing, packing.num_blocks());
                args.x = x.data(), args.x_stride = depth;
                args.y = y.data(), args.y_stride = packing.columns;
                args.weights = matrix.packed.data();
                run(args, {{0, 0, 12}, {0, 12, 12}, {0, 24, 6}});
                CHECK(y == expected);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char**) {
    too_many_escapes();
    for (size_t workers : {1, 2, 3}) {
        set_pool(std::make_shared<Pool>(std::vector<int>(workers, -1)));
        if (argc == 1 && workers < 3) every_format(workers - 1);  // with an argument: what threads share, and no more
        ubatches();
    }
    std::puts("ok");
}
