// Products with rows rounded to int8 against the scalar ones, bit for bit: every form, odd numbers of rows and columns,
// weights and scratch memory that end where their contents end.
#include <algorithm>
#include <memory>

#include "kernels/pack.hpp"
#include "pool/pool.hpp"
#include "tests/exact.hpp"

#include "kernels/int_product.hpp"

using namespace moeserve;

namespace {

constexpr std::array<int8_t, 16> kNumbers{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

/// A number that is exact in every type of scale.
float scale() { return std::ldexp(static_cast<float>(below(15)) - 7, -static_cast<int>(below(9))); }

template <class E>
void product(const Packing& p, size_t rows, size_t offset) {
    const size_t groups = p.group ? (p.depth + p.group - 1) / p.group : 1, supers = p.depth / 256;
    const bool words = p.type == Type::int8 && !p.ints.codes;
    Exact<uint8_t> values(p.columns * p.depth, offset), packed(p.bytes());
    Exact<int8_t> whole(p.columns * p.depth);
    Exact<float> scales(p.columns * groups), mins(scales), zeros(scales), units(p.columns * supers), min_units(units);
    for (size_t i = 0; i < units.size(); ++i) units[i] = scale(), min_units[i] = scale();
    for (size_t i = 0; i < scales.size(); ++i) {
        const size_t at = i / groups * supers + i % groups * p.group / 256;
        const int least = p.ints.mins ? 0 : -128, most = p.ints.mins ? 64 : 256;
        const auto times = [&](float unit) { return unit * static_cast<float>(static_cast<int>(below(most)) + least); };
        scales[i] = p.ints.supers ? times(units[at]) : scale();
        mins[i] = p.ints.supers ? times(min_units[at]) : scale();
        zeros[i] = static_cast<float>(below(16));
    }
    for (size_t i = 0; i < values.size(); ++i) {
        const int bias = p.ints.mins ? 0 : 1 << (p.ints.bits - 1), number = static_cast<int>(below(1 << p.ints.bits));
        values[i] = static_cast<uint8_t>(words ? number - bias : number);
        const float zero = zeros[i / p.depth * groups + (p.group ? i % p.depth / p.group : 0)];
        whole[i] = static_cast<int8_t>(p.ints.codes    ? p.ints.table[static_cast<size_t>(number)]
                                       : p.zero_points ? number - static_cast<int>(zero)
                                                       : number - bias);
    }
    pack(p, {values.data(), p.depth, scales.data(), zeros.data(), mins.data(), units.data(), min_units.data()},
         packed.data(), p.block_bytes(), 0, p.num_blocks());
    if (!p.ints.supers) {
        for (size_t i = 0; i < scales.size(); ++i) scales[i] *= p.ints.factor;
    }
    const auto x = random<E>(rows * p.depth, offset);
    Exact<float> wide(x.size()), plain(rows * p.columns);
    for (size_t i = 0; i < x.size(); ++i) wide[i] = static_cast<float>(x[i]);
    Exact<E> y(plain.size(), 1 - offset), expected(plain.size());
    int_product_reference(wide.data(), rows, p.depth, whole.data(), p.columns, p.group, scales.data(),
                          p.ints.mins ? mins.data() : nullptr, plain.data());
    for (size_t i = 0; i < plain.size(); ++i) expected[i] = E(plain[i]);
    ProductArgs args{};
    args.type = args.y_type = kType<E>;
    args.weight_type = p.type, args.ints = p.ints, args.zero_points = p.zero_points;
    args.depth = p.depth, args.columns = p.columns, args.group = p.group;
    args.num_blocks = p.num_blocks(), args.block_bytes = p.block_bytes();
    args.x = x.data(), args.x_stride = p.depth, args.y = y.data(), args.y_stride = p.columns;
    args.weights = packed.data();
    const Part part{0, 0, rows};
    args.parts = &part, args.most_rows = rows;
    std::vector<size_t> held(64 / sizeof(size_t), ~size_t{0});
    args.held = held.data();
    tested::int_product(args, 0, args.units(), 0);
    CHECK(same(y, expected));
}

}  // namespace

int main() {
    std::vector<Packing> forms;
    for (size_t depth : {32, 100, 512}) {
        for (size_t group : {16, 32, 96}) {
            for (bool zeros : {false, true}) forms.push_back({Type::int4, depth, 37, group, zeros, {true, 4}});
            forms.push_back({Type::int8, depth, 37, group, false, {true, 8, Type::fp16}});
        }
        forms.push_back({Type::int8, depth, 5, 0, false, {true, 8}});
        for (size_t group : {16, 32}) {
            forms.push_back({Type::fp4, depth, 16, group, false, {true, 4, Type::bf16, false, false, true, 0.5f, kNumbers}});
        }
        forms.push_back({Type::int8, depth, 37, 96, false, {true, 2, Type::fp16}});
        forms.push_back({Type::int8, depth, 17, 32, false, {true, 5, Type::fp16}});
        forms.push_back({Type::int4, depth, 17, 32, false, {true, 4, Type::fp16, true}});
        if (depth % 256) continue;
        forms.push_back({Type::int4, depth, 70, 32, false, {true, 4, Type::fp32, true, true}});
        forms.push_back({Type::int8, depth, 70, 16, false, {true, 2, Type::fp32, true, true}});
        forms.push_back({Type::int8, depth, 70, 16, false, {true, 3, Type::fp32, false, true}});
        forms.push_back({Type::int8, depth, 16, 32, false, {true, 4, Type::fp32, false, true, true, 0.25f, kNumbers}});
        for (size_t group : {16, 32}) {
            forms.push_back({Type::int8, depth, 37, group, false, {true, 3, Type::fp32, false, true, true, 0.125f, kNumbers}});
        }
        forms.push_back({Type::int8, depth, 70, 32, false, {true, 5, Type::fp32, true, true}});
        forms.push_back({Type::int8, depth, 70, 16, false, {true, 6, Type::fp32, false, true}});
    }
    for (const Packing& form : forms) {
        for (size_t rows : {1, 2, 3, 8, 21}) {
            product<float>(form, rows, rows % 2);
            product<Bf16>(form, rows, 1 - rows % 2);
        }
    }
    std::puts("ok");
}
