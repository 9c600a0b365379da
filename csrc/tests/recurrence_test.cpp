// The recurrence and the convolution before it in steps of any length, bit for bit those of one step, and the gates around
// them against plain loops: odd widths and addresses, buffers without a byte to spare.
#include <algorithm>

#include "tests/exact.hpp"
#include "tests/tiles.hpp"

#include "kernels/causal_conv.hpp"
#include "kernels/recurrence.hpp"
#include "kernels/recurrent_gates.hpp"

using namespace moeserve;

namespace {

constexpr size_t kTokens = 70, kBlocks = 4, kRows = kBlocks * kPerBlock * kStateTile;

struct Shape {
    size_t groups, heads, d, v, decays;
    bool delta;
};

/// What one request's tokens make, in steps of `chunk`; `columns` of a head's values at a time.
Exact<float> recur(const Shape& shape, size_t columns, size_t chunk, bool kept, size_t offset) {
    rng.seed(7);
    const size_t heads = shape.heads, of_key = shape.groups * shape.d, of_value = heads * shape.v;
    const size_t of_decay = heads * shape.decays;
    const auto q = random<float>(kTokens * of_key, offset), k = random<float>(kTokens * of_key, 1 - offset);
    const auto values = random<float>(kTokens * of_value, offset), beta = random<float>(kTokens * heads, 1 - offset);
    auto decay = random<float>(kTokens * of_decay, offset);
    for (size_t i = 0; i < decay.size(); ++i) decay[i] = -std::abs(decay[i]) * (i % 7 ? 0.1f : 60.0f);
    Exact<float> states(kBlocks * kPerBlock * heads * shape.d * shape.v, offset), keys(kRows * of_key, offset);
    Exact<float> updates(kRows * of_value, 1 - offset), sums(kRows * of_decay, offset), out(kTokens * of_value, offset);
    for (size_t start = 0; start < kTokens; start += chunk) {
        const std::vector<StateTile> tiles = tiles_of(start, std::min(chunk, kTokens - start), kept);
        const size_t runs[] = {0, tiles.size()};
        RecurrenceArgs args{};
        args.plan = {tiles.data(), runs, 1, kPerBlock};
        args.groups = shape.groups, args.heads = heads, args.d = shape.d, args.v = shape.v, args.decays = shape.decays;
        args.q = q.data() + start * of_key, args.k = k.data() + start * of_key, args.q_stride = args.k_stride = of_key;
        args.values = values.data() + start * of_value, args.v_stride = of_value;
        args.log_decay = decay.data() + start * of_decay, args.decay_stride = of_decay;
        args.beta = shape.delta ? beta.data() + start * heads : nullptr, args.beta_stride = heads;
        args.states = states.data(), args.keys = keys.data(), args.updates = updates.data(), args.sums = sums.data();
        args.out = out.data() + start * of_value;
        args.columns = columns;
        Exact<float> scratch(args.scratch_floats());
        args.scratch = scratch.data();
        tested::recurrent::recurrence(&args, 0, args.pieces(), 0);
    }
    return out;
}

template <class E>
Exact<float> convolve(size_t channels, size_t inputs, size_t chunk, bool kept, size_t offset) {
    rng.seed(7);
    const size_t stride = channels + 1;
    const auto x = random<E>(kTokens * stride, offset);
    const auto weight = random<float>(channels * inputs, 1 - offset), bias = random<float>(channels, offset);
    Exact<float> rows(kRows * channels, offset), borders(kBlocks * kPerBlock * (inputs - 1) * channels, 1 - offset);
    Exact<float> out(kTokens * channels, offset);
    for (size_t start = 0; start < kTokens; start += chunk) {
        const std::vector<StateTile> tiles = tiles_of(start, std::min(chunk, kTokens - start), kept);
        const size_t runs[] = {0, tiles.size()};
        CausalConvArgs args{{tiles.data(), runs, 1, kPerBlock}, kType<E>, channels, inputs, x.data() + start * stride,
                            stride, weight.data(), bias.data(), true, rows.data(), borders.data(),
                            out.data() + start * channels, nullptr};
        Exact<float> scratch(args.scratch_floats());
        args.scratch = scratch.data();
        tested::causal_conv(&args, 0, args.pieces(), 0);
    }
    return out;
}

bool close(float found, double expected) {
    return std::abs(found - expected) <= 1e-5 * std::max(1.0, std::abs(expected));
}

double silu(double x) { return x / (1 + std::exp(-x)); }

template <class E>
void gates(size_t heads, size_t rows, size_t offset) {
    const auto both = random<E>(rows * 2 * heads, offset);
    const auto bias = random<float>(heads, 1 - offset), decay = random<float>(heads, offset);
    Exact<float> log_decay(rows * heads, offset), steps(rows * heads), betas(rows * heads, 1 - offset);
    const DecayArgs args{kType<E>, heads, both.data() + heads, both.data(), 2 * heads, bias.data(), decay.data(), 0.2f, 1.5f,
                         log_decay.data(), steps.data(), betas.data()};
    tested::decays(args, 0, rows);
    for (size_t n = 0; n < rows * heads; ++n) {
        const size_t row = n / heads, head = n % heads;
        const double dt = double(float(both[row * 2 * heads + heads + head])) + bias[head];
        const double step = std::clamp(std::log1p(std::exp(dt)), 0.2, 1.5);
        CHECK(close(steps[n], step) && close(log_decay[n], step * decay[head]));
        CHECK(close(betas[n], 1 / (1 + std::exp(-double(float(both[row * 2 * heads + head]))))));
    }
}

template <class E>
void norms(size_t parts, size_t width, bool gate_first, bool reversed, size_t offset) {
    const size_t rows = 3, columns = parts * width;
    const auto gate = random<E>(rows * (columns + 2), offset);
    auto x = random<float>(rows * columns, 1 - offset);
    const auto given = x, weight = random<float>(gate_first ? columns : width, offset);
    Exact<E> out(rows * columns, offset);
    std::vector<int64_t> places(parts);
    for (size_t part = 0; part < parts; ++part) places[part] = static_cast<int64_t>(parts - 1 - part);
    const GatedNormArgs args{kType<E>, parts, width, gate.data(), columns + 2, x.data(), weight.data(),
                             gate_first ? width : 0, 1e-6f, gate_first, out.data(), reversed ? places.data() : nullptr};
    tested::gated_norm(args, 0, rows);
    for (size_t n = 0; n < rows * parts; ++n) {
        const size_t at = (reversed ? n / parts * parts + parts - 1 - n % parts : n) * width;
        std::vector<double> values(width);
        double squares = 0;
        const auto gated = [&](size_t i) { return silu(float(gate[n / parts * (columns + 2) + n % parts * width + i])); };
        for (size_t i = 0; i < width; ++i) {
            values[i] = given[n * width + i] * (gate_first ? gated(i) : 1.0);
            squares += values[i] * values[i];
        }
        for (size_t i = 0; i < width; ++i) {
            const double normed = values[i] / std::sqrt(squares / double(width) + 1e-6);
            const double expected = normed * weight[gate_first ? n % parts * width + i : i] * (gate_first ? 1.0 : gated(i));
            const double found = float(out[at + i]);
            CHECK(std::abs(found - expected) <= (sizeof(E) == 4 ? 1e-5 : 1e-2) * std::max(1.0, std::abs(expected)));
        }
    }
}

}  // namespace

int main() {
    const Shape shapes[] = {{1, 2, 19, 40, 1, true}, {2, 2, 12, 7, 12, true}, {1, 3, 16, 33, 1, false}, {2, 4, 5, 16, 5, false}};
    for (size_t offset : {0, 1}) {
        for (const Shape& shape : shapes) {
            const Exact<float> whole = recur(shape, RecurrenceArgs::padded(shape.v), kTokens, true, offset);
            CHECK(std::isfinite(whole[0]) && std::isfinite(whole[whole.size() - 1]));
            for (size_t chunk : {1, 5, 16, 33}) CHECK(same(recur(shape, 16, chunk, true, offset), whole));
            CHECK(same(recur(shape, 32, kTokens, false, offset), whole));
        }
        for (size_t channels : {1, 9, 300}) {
            for (size_t inputs : {2, 4, 17}) {
                const Exact<float> whole = convolve<float>(channels, inputs, kTokens, true, offset);
                for (size_t chunk : {1, 5, 33}) CHECK(same(convolve<float>(channels, inputs, chunk, true, offset), whole));
                CHECK(same(convolve<float>(channels, inputs, kTokens, false, offset), whole));
                CHECK(same(convolve<Bf16>(channels, inputs, 1, true, offset),
                           convolve<Bf16>(channels, inputs, kTokens, false, offset)));
            }
        }
        for (size_t heads : {1, 8, 19}) {
            gates<float>(heads, 3, offset);
            gates<Bf16>(heads, 2, offset);
        }
        for (size_t width : {1, 9, 40}) {
            for (bool gate_first : {false, true}) {
                norms<float>(2, width, gate_first, false, offset);
                norms<Fp16>(3, width, gate_first, true, offset);
            }
        }
    }
    std::puts("ok");
}
