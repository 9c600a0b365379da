// The selective scan, and the scores and choice of the index selector, against loops that say the same, bit for bit: odd
// widths and addresses, buffers without a byte to spare.
#include <algorithm>
#include <numeric>

#include "core/top_k.hpp"
#include "tests/exact.hpp"
#include "tests/tiles.hpp"

#include "kernels/index_scores.hpp"
#include "kernels/selective_scan.hpp"

using namespace moeserve;

namespace {

/// One request's tokens, in steps of `chunk`.
void scans(size_t channels, size_t state, size_t chunk, bool kept, size_t offset) {
    const size_t tokens = 70, blocks = kept ? 4 : 1, rows = blocks * kPerBlock * kStateTile;
    const auto x = random<float>(tokens * channels, offset), skip = random<float>(channels, offset);
    const auto b = random<float>(tokens * state, 1 - offset), c = random<float>(tokens * state, offset);
    auto dt = random<float>(tokens * channels, 1 - offset), a = random<float>(state * channels, offset);
    for (size_t i = 0; i < dt.size(); ++i) dt[i] = std::abs(dt[i]);
    for (size_t i = 0; i < a.size(); ++i) a[i] = -std::abs(a[i]);
    Exact<float> out(tokens * channels, offset), expected(tokens * channels);
    Exact<float> states(blocks * kPerBlock * state * channels, offset), xs(rows * channels), dts(rows * channels, offset);
    Exact<float> bs(rows * state, 1 - offset), scratch(state * SelectiveScanArgs::kPiece);
    for (size_t start = 0; start < tokens; start += chunk) {
        const std::vector<StateTile> tiles = tiles_of(start, std::min(chunk, tokens - start), kept);
        const size_t runs[] = {0, tiles.size()}, at = start * channels;
        SelectiveScanArgs args{{tiles.data(), runs, 1, kPerBlock}, channels, state, x.data() + at, dt.data() + at, a.data(),
                               b.data() + start * state, c.data() + start * state, skip.data(), states.data(), xs.data(),
                               dts.data(), bs.data(), out.data() + at, scratch.data()};
        CHECK(args.scratch_floats() == scratch.size());
        tested::selective_scan(&args, 0, args.pieces(), 0);
    }
    for (size_t i = 0; i < channels; ++i) {
        std::vector<float> h(state);
        for (size_t t = 0; t < tokens; ++t) {
            const size_t at = t * channels + i;
            float y = skip[i] * x[at];
            for (size_t n = 0; n < state; ++n) {
                h[n] = std::fma(exp_of(dt[at] * a[n * channels + i]), h[n], b[t * state + n] * (dt[at] * x[at]));
                y = std::fma(c[t * state + n], h[n], y);
            }
            expected[at] = y;
        }
    }
    CHECK(same(out, expected));
}

template <class E>
void scores(size_t queries, size_t heads, size_t dim, size_t length, size_t offset) {
    const size_t rows = 300;
    const auto q = random<float>(queries * heads * dim, offset), weights = random<float>(queries * heads, 1 - offset);
    const auto keys = random<E>(rows * dim, offset);
    Exact<int64_t> slots(length, offset);
    for (size_t i = 0; i < length; ++i) slots[i] = int64_t(i + 1 == length ? rows - 1 : below(rows));
    IndexScoresArgs args{kType<E>, queries, heads, dim, q.data(), weights.data(), keys.data(), slots.data(), length, nullptr,
                         nullptr};
    Exact<float> found(queries * length, 1 - offset), expected(queries * length), scratch(args.scratch_floats());
    args.scores = found.data(), args.scratch = scratch.data();
    tested::index_scores(&args, 0, args.pieces(), 0);
    for (size_t m = 0; m < queries; ++m) {
        for (size_t i = 0; i < length; ++i) {
            float score = 0;
            for (size_t j = m * heads; j < (m + 1) * heads; ++j) {
                float dot = 0;
                for (size_t k = 0; k < dim; ++k) dot = std::fma(q[j * dim + k], float(keys[size_t(slots[i]) * dim + k]), dot);
                score = std::fma(weights[j], std::max(dot, 0.0f), score);
            }
            expected[m * length + i] = score;
        }
    }
    CHECK(same(found, expected));
}

void choices(size_t count, size_t top_k, size_t kinds) {
    const float values[] = {1.0f, -2.5f, 0.0f, -0.0f, kNan, -kInfinity, kInfinity, 1e-45f, -1e-45f, 3e38f};
    Exact<float> scores(count, 1);
    for (size_t i = 0; i < count; ++i) scores[i] = kinds ? values[below(kinds)] : normal();
    Exact<int64_t> slots(count), out(top_k, 1);
    for (size_t i = 0; i < count; ++i) slots[i] = int64_t(7 * i);
    take_largest(scores.data(), count, top_k, slots.data(), out.data());
    std::vector<size_t> order(count);
    std::iota(order.begin(), order.end(), size_t{0});
    const auto value = [&](size_t i) { return std::isnan(scores[i]) ? kInfinity : scores[i]; };
    std::stable_sort(order.begin(), order.end(), [&](size_t i, size_t j) { return value(i) > value(j); });
    std::sort(order.begin(), order.begin() + int64_t(top_k));
    for (size_t n = 0; n < top_k; ++n) CHECK(out[n] == slots[order[n]]);
}

}  // namespace

int main() {
    for (size_t offset : {0, 1}) {
        for (size_t channels : {1, 9, 33, 300}) {
            for (size_t chunk : {1, 5, 16, 33, 70}) scans(channels, 3, chunk, true, offset);
            scans(channels, 16, 70, false, offset);
        }
        for (size_t length : {1, 16, 31, 33, 100}) {
            for (size_t dim : {1, 8, 19, 40}) {
                scores<float>(1, 9, dim, length, offset);
                scores<Bf16>(3, 4, dim, length, offset);
                scores<Fp16>(2, 1, dim, length, offset);
            }
        }
    }
    for (size_t count : {1, 2, 40, 1000, 5000}) {
        for (size_t kinds : {0, 1, 4, 10}) {
            for (size_t top_k : {size_t{1}, (count + 1) / 2, count}) choices(count, top_k, kinds);
        }
    }
    std::puts("ok");
}
