// Row kernels against loops that say the same, bit for bit: odd widths and addresses, buffers without a byte to spare.
#include <algorithm>
#include <numeric>

#include "core/bitmask.hpp"
#include "core/grouping.hpp"
#include "tests/exact.hpp"

#include "kernels/activation.hpp"
#include "kernels/rotary.hpp"
#include "kernels/routing.hpp"
#include "kernels/sampling.hpp"

using namespace moeserve;

namespace {

constexpr size_t kRows = 3;
constexpr size_t kWidths[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100};

template <class T>
float inverse_rms(const T* x, size_t width, float eps) {
    float sums[32] = {};
    for (size_t i = 0; i < width; ++i) sums[i % 32] = std::fma(float(x[i]), float(x[i]), sums[i % 32]);
    return 1.0f / std::sqrt(folded(sums) / static_cast<float>(width) + eps);
}

template <class T>
void norms(size_t width, size_t offset) {
    const size_t stride = width + 3;  // the last row ends with its memory, not after a whole stride
    const auto x = random<T>((kRows - 1) * stride + width, offset), residual = random<T>(kRows * width, 1 - offset);
    const auto weight = random<float>(width, offset);
    Exact<T> out(kRows * width, offset), total(kRows * width, 1 - offset), normed(kRows * width), summed(kRows * width);
    for (bool add : {false, true}) {
        const NormArgs args{kType<T>, width, x.data(), stride, add ? residual.data() : nullptr, width, weight.data(), 1e-5f,
                            out.data(), total.data()};
        tested::rms_norm(args, 1, 1);
        CHECK(same(total, Exact<T>(kRows * width)));
        tested::rms_norm(args, 0, 1);
        tested::rms_norm(args, 1, kRows);
        for (size_t r = 0; r < kRows; ++r) {
            for (size_t i = 0; i < width; ++i) {
                summed[r * width + i] = T(add ? float(x[r * stride + i]) + float(residual[r * width + i]) : float(x[r * stride + i]));
            }
            const float inverse = inverse_rms(summed.data() + r * width, width, 1e-5f);
            for (size_t i = 0; i < width; ++i) normed[r * width + i] = T(float(summed[r * width + i]) * inverse * weight[i]);
        }
        CHECK(same(out, normed));
        CHECK(!add || same(total, summed));
    }
}

template <class T>
void activations(size_t width, size_t offset) {
    const size_t stride = 2 * width + 1;
    auto x = random<T>((kRows - 1) * stride + 2 * width, offset, 20);
    x[0] = T(kInfinity), x[2 * width - 1] = T(-1e30f), x[stride] = T(kNan);
    Exact<T> out(kRows * width, offset), expected(kRows * width);
    Exact<float> gate(kRows, offset), expected_gate(kRows);
    for (const Activation& activation : kActivations) {
        tested::act_mul(ActMulArgs{kType<T>, width, x.data(), stride, activation, out.data()}, 0, kRows);
        for (size_t r = 0; r < kRows; ++r) {
            const T* row = x.data() + r * stride;
            for (size_t i = 0; i < width; ++i) {
                expected[r * width + i] = T(gated_of(activation, float(row[i]), float(row[width + i])));
            }
        }
        CHECK(same(out, expected));
    }
    tested::sigmoid(SigmoidArgs{kType<T>, x.data(), stride, gate.data()}, 0, kRows);
    for (size_t r = 0; r < kRows; ++r) {
        const T* row = x.data() + r * stride;
        expected_gate[r] = 1.0f / (1.0f + exp_of(0.0f - float(row[0])));
    }
    CHECK(same(gate, expected_gate));
}

/// What `QkNormRopeCacheArgs` says, one head at a time.
template <class T>
std::vector<float> head_of(const QkNormRopeCacheArgs& args, size_t row, size_t head) {
    const size_t both = args.heads + args.kv_heads, at = (row * both + head) * args.dim;
    const bool value = head >= both;
    const size_t dim = value ? args.v_dim : args.dim;
    std::vector<float> x(dim), y(dim);
    const T* from = static_cast<const T*>(args.qkv) + row * args.stride + std::min(head, both) * args.dim;
    if (value) from += (head - both) * dim;
    for (size_t i = 0; i < dim; ++i) x[i] = args.normed && !value ? args.normed[at + i] : float(from[i]);
    const auto normalise = [&](std::vector<float>& z) {
        const float inverse = inverse_rms(z.data(), dim, args.eps);
        for (size_t i = 0; i < dim; ++i) z[i] = z[i] * inverse * (value ? 1.0f : args.norms[head * dim + i]);
    };
    if (value ? args.norm_values : args.norms && !args.norm_last) normalise(x);
    for (float& element : x) element = std::clamp(element, -args.clip, args.clip);
    if (value) return x;
    for (size_t i = 0; i < dim; ++i) {
        y[i] = x[i] * args.cos[row * dim + i] + x[(i + dim / 2) % dim] * args.sin[row * dim + i];
    }
    if (args.norms && args.norm_last) normalise(y);
    for (size_t i = 0; i < dim && head < args.heads; ++i) y[i] *= args.scale;
    return y;
}

template <class T>
void store(const std::vector<float>& x, T* to) {
    for (size_t i = 0; i < x.size(); ++i) to[i] = T(x[i]);
}
void store(const std::vector<float>& x, int8_t* to) {
    float scale = 0;
    for (float value : x) scale = std::isfinite(value) ? std::max(scale, std::abs(value) / 127.0f) : kNan;
    for (size_t i = 0; i < x.size(); ++i) {
        to[i] = scale > 0 ? static_cast<int8_t>(std::clamp(std::nearbyint(x[i] / scale), -127.0f, 127.0f)) : 0;
    }
    std::memcpy(to + x.size(), &scale, sizeof scale);
}

/// Cache: the elements of keys and values.
template <class T, class Cache>
void qk_norm_rope_caches(size_t dim, size_t v_dim, size_t offset) {
    const size_t heads = 3, groups = 2, columns = (heads + groups) * dim + groups * v_dim, stride = columns + 1;
    const size_t real = kRows - 1, kv_slots = 4, width = stored_width<Cache>(dim), v_width = stored_width<Cache>(v_dim);
    auto qkv = random<T>((kRows - 1) * stride + columns, offset);
    for (size_t i = 0; i < v_dim; ++i) {  // values of the first row: nothing, and next to it
        qkv[(heads + groups) * dim + i] = T(0.0f);
        qkv[(heads + groups) * dim + v_dim + i] = T(-1e-44f * static_cast<float>(i % 20));
    }
    qkv[stride + columns - 1 - below(v_dim)] = T(offset ? kNan : -kInfinity);
    const auto normed = random<float>(kRows * (heads + groups) * dim, offset), norms = random<float>((heads + groups) * dim, offset);
    const auto cos = random<float>(kRows * dim, offset), sin = random<float>(kRows * dim, 1 - offset);
    Exact<int64_t> kv_slot(real);
    kv_slot[0] = 3, kv_slot[1] = 0;
    for (int way = 0; way < 32; ++way) {
        Exact<Cache> k(kv_slots * groups * width, offset), v(kv_slots * groups * v_width, 1 - offset), want_k(k), want_v(v);
        Exact<T> q(kRows * heads * dim, offset), want_q(q);
        const QkNormRopeCacheArgs args{kType<T>, kType<Cache>, heads, groups, dim, v_dim, real, qkv.data(), stride,
                                       way & 1 ? normed.data() : nullptr, way & 2 ? norms.data() : nullptr, (way & 8) != 0,
                                       (way & 16) != 0, 1e-5f, way & 4 ? 0.6f : kInfinity, cos.data(), sin.data(), 0.37f,
                                       kv_slot.data(), k.data(), v.data(), q.data()};
        tested::qk_norm_rope_cache(args, 0, kRows);
        for (size_t r = 0; r < kRows; ++r) {
            for (size_t h = 0; h < heads; ++h) store(head_of<T>(args, r, h), want_q.data() + (r * heads + h) * dim);
            for (size_t g = 0; g < groups && r < real; ++g) {
                const size_t entry = static_cast<size_t>(kv_slot[r]) * groups + g;
                store(head_of<T>(args, r, heads + g), want_k.data() + entry * width);
                store(head_of<T>(args, r, heads + groups + g), want_v.data() + entry * v_width);
            }
        }
        CHECK(same(q, want_q) && same(k, want_k) && same(v, want_v));
    }
}

template <class T>
void latents(size_t rope, size_t nope, size_t rank, size_t offset) {
    const size_t heads = 3, head = nope + rope, entry = rank + rope, q_stride = heads * head + 1, kv_stride = entry + 2;
    const auto q = random<T>((kRows - 1) * q_stride + heads * head, offset), kv = random<T>((kRows - 1) * kv_stride + entry, 1 - offset);
    const auto norm = random<float>(rank, offset), cos = random<float>(kRows * rope, offset), sin = random<float>(kRows * rope, 1 - offset);
    const int64_t kv_slot[] = {3, 0};
    Exact<T> cache(4 * entry, offset), q_nope(kRows * heads * nope, offset), latent_q(kRows * heads * entry, 1 - offset);
    Exact<T> want_cache(cache), want_nope(q_nope), want_q(latent_q);
    const LatentRopeCacheArgs args{kType<T>, heads, nope, rope, rank, kRows - 1, q.data(), q_stride, kv.data(), kv_stride,
                                   norm.data(), 1e-5f, cos.data(), sin.data(), 0.37f, kv_slot, cache.data(), q_nope.data(),
                                   latent_q.data()};
    tested::latent_rope_cache(args, 0, kRows);
    for (size_t r = 0; r < kRows; ++r) {
        const auto rotated = [&](const T* x, float scale, T* to) {
            for (size_t i = 0; i < rope; ++i) {
                const float other = float(x[(i + rope / 2) % rope]) * sin[r * rope + i];
                to[i] = T((float(x[i]) * cos[r * rope + i] + other) * scale);
            }
        };
        for (size_t h = 0; h < heads; ++h) {
            const T* x = q.data() + r * q_stride + h * head;
            for (size_t i = 0; i < nope; ++i) want_nope[(r * heads + h) * nope + i] = T(float(x[i]) * 0.37f);
            rotated(x + nope, 0.37f, want_q.data() + (r * heads + h) * entry + rank);
        }
        if (r == kRows - 1) continue;
        const T* x = kv.data() + r * kv_stride;
        T* to = want_cache.data() + static_cast<size_t>(kv_slot[r]) * entry;
        const float inverse = inverse_rms(x, rank, 1e-5f);
        for (size_t i = 0; i < rank; ++i) to[i] = T(float(x[i]) * inverse * norm[i]);
        rotated(x + rank, 1.0f, to + rank);
    }
    CHECK(same(cache, want_cache) && same(q_nope, want_nope) && same(latent_q, want_q));
}

void softmax(std::vector<float>& x) {
    float sums[32] = {};
    const float peak = *std::max_element(x.begin(), x.end());
    for (size_t i = 0; i < x.size(); ++i) sums[i % 32] += x[i] = exp_of(x[i] - peak);
    const float total = folded(sums);
    for (float& term : x) term /= total;
}

template <class T>
void routes(size_t experts, size_t top_k, size_t offset) {
    const size_t stride = experts + 1;
    auto logits = random<T>((kRows - 1) * stride + experts, offset);
    for (size_t i = 0; i < logits.size(); ++i) logits[i] = T(std::round(float(logits[i]) * 2) / 2);  // ties, -0
    for (int way = 0; way < 4; ++way) {
        Exact<int32_t> ids(kRows * top_k, offset), want_ids(kRows * top_k);
        Exact<float> weights(kRows * top_k, 1 - offset), want(kRows * top_k);
        RouteRule rule;
        rule.score = way & 1 ? RouteRule::Score::softmax_selected : RouteRule::Score::softmax;
        rule.renormalize = (way & 2) != 0;
        tested::route(RouteArgs{kType<T>, experts, top_k, logits.data(), stride, rule, nullptr, nullptr, ids.data(),
                                weights.data()}, 0, kRows);
        for (size_t r = 0; r < kRows; ++r) {
            std::vector<float> scores(logits.data() + r * stride, logits.data() + r * stride + experts), chosen;
            if (!(way & 1)) softmax(scores);
            std::vector<int32_t> order(experts);
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return scores[a] > scores[b]; });
            for (size_t k = 0; k < top_k; ++k) chosen.push_back(scores[want_ids[r * top_k + k] = order[k]]);
            if (way & 1) softmax(chosen);
            const float total = std::accumulate(chosen.begin() + 1, chosen.end(), chosen[0]);
            for (size_t k = 0; k < top_k; ++k) want[r * top_k + k] = way & 2 ? chosen[k] / total : chosen[k];
        }
        CHECK(ids == want_ids && same(weights, want));
    }
    for (size_t i = 0; i < logits.size(); ++i) logits[i] = T(below(2) ? kNan : kInfinity);  // any, but distinct ones
    Exact<int32_t> ids(top_k);
    Exact<float> weights(top_k);
    for (int score = 0; score < 4; ++score) {
        RouteRule rule;
        rule.score = static_cast<RouteRule::Score>(score);
        rule.renormalize = offset == 1;
        tested::route(RouteArgs{kType<T>, experts, top_k, logits.data(), stride, rule, nullptr, nullptr, ids.data(),
                                weights.data()}, 0, 1);
        std::sort(ids.data(), ids.data() + top_k);
        for (size_t k = 0; k < top_k; ++k) CHECK(ids[k] >= 0 && ids[k] < int32_t(experts) && (!k || ids[k] > ids[k - 1]));
    }
}

/// The best groups' best experts by sigmoid and bias; scales, a least sum.
void grouped_routes(size_t groups, size_t size, size_t group_scores, size_t offset) {
    const size_t experts = groups * size, kept = groups / 2 + 1, top_k = std::min<size_t>(kept * size, 5);
    auto logits = random<float>(kRows * experts, offset), bias = random<float>(experts, 1 - offset);
    const auto scale = random<float>(experts, offset);
    for (size_t i = 0; i < logits.size(); ++i) logits[i] = std::round(logits[i]);
    for (size_t i = 0; i < experts; ++i) bias[i] = std::round(bias[i]);
    const RouteRule rule{RouteRule::Score::sigmoid, groups, kept, group_scores, true, 0.125f, 1.5f, 2.5f, 0.0f};
    Exact<int32_t> ids(kRows * top_k, offset), want_ids(kRows * top_k);
    Exact<float> weights(kRows * top_k, 1 - offset), want(kRows * top_k);
    tested::route(RouteArgs{Type::fp32, experts, top_k, logits.data(), experts, rule, bias.data(), scale.data(),
                            ids.data(), weights.data()}, 0, kRows);
    for (size_t r = 0; r < kRows; ++r) {
        std::vector<float> scores(experts), judged(experts), of_group(groups);
        for (size_t i = 0; i < experts; ++i) {
            scores[i] = 1.0f / (1.0f + exp_of(0.0f - logits[r * experts + i]));
            judged[i] = scores[i] + bias[i];
        }
        std::vector<size_t> best(groups), order;
        std::iota(best.begin(), best.end(), size_t{0});
        for (size_t g = 0; g < groups; ++g) {
            std::vector<float> group(judged.begin() + long(g * size), judged.begin() + long((g + 1) * size));
            std::sort(group.rbegin(), group.rend());
            of_group[g] = group_scores == 2 ? group[0] + group[1] : group[0];
        }
        std::stable_sort(best.begin(), best.end(), [&](size_t a, size_t b) { return of_group[a] > of_group[b]; });
        best.resize(kept);
        std::sort(best.begin(), best.end());
        for (size_t g : best) {
            for (size_t i = g * size; i < (g + 1) * size; ++i) order.push_back(i);
        }
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return judged[a] > judged[b]; });
        float total = 0;
        for (size_t k = 0; k < top_k; ++k) total += scores[order[k]];
        total = std::max(total + rule.epsilon, rule.floor);
        for (size_t k = 0; k < top_k; ++k) {
            want_ids[r * top_k + k] = static_cast<int32_t>(order[k]);
            want[r * top_k + k] = scores[order[k]] / total * rule.scale * scale[order[k]];
        }
    }
    CHECK(ids == want_ids && same(weights, want));
}

void maxima(size_t width, size_t offset) {
    auto x = random<float>(4 * width, offset);
    for (size_t i = 0; i < width; ++i) x[i] = -kInfinity, x[width + i] = std::round(x[width + i]);
    x[2 * width + below(width)] = kInfinity;
    x[3 * width + below(width)] = kNan;
    Exact<float> peak(4, offset);
    Exact<int64_t> column(4, offset);
    tested::argmax(ArgmaxArgs{width, x.data(), width, peak.data(), column.data()}, 0, 4);
    for (size_t r = 0; r < 4; ++r) {
        const float* row = x.data() + r * width;
        const float* best = std::find_if(row, row + width, [](float value) { return value != value; });
        if (best == row + width) best = std::max_element(row, row + width);
        CHECK(column[r] == best - row && std::memcmp(&peak[r], best, 4) == 0);
    }
}

double noise_of(uint32_t hash, uint32_t low, uint32_t high) {
    uint32_t h = (hash ^ low) * 0x85ebca6bu;
    h = (h ^ h >> 16 ^ high) * 0xc2b2ae35u;
    h = (h ^ h >> 15) * 0x7feb352du >> 1;
    return -std::log(-std::log1p(-double((float(h) + 0.5f) * 0x1.fffffcp-32f)));
}

void races(size_t width, size_t offset, bool in_blocks) {
    const size_t rows = 20, blocks = (width + 63) / 64;
    const auto x = random<float>(rows * width, offset, 3);
    Exact<int32_t> low(rows), high(rows), hash((blocks + 2) * 64, offset);
    for (auto* numbers : {&low, &high, &hash}) {
        for (size_t i = 0; i < numbers->size(); ++i) (*numbers)[i] = static_cast<int32_t>(rng());
    }
    Exact<int64_t> of(rows * blocks), column(rows, offset);
    for (size_t i = 0; i < of.size(); ++i) of[i] = int64_t(i % blocks + below(3));
    tested::race(RaceArgs{width, x.data(), width, low.data(), high.data(), hash.data(),
                          in_blocks ? of.data() : nullptr, column.data()}, 0, rows);
    size_t undecided = 0;
    for (size_t r = 0; r < rows; ++r) {
        const float* row = x.data() + r * width;
        double best = -kInfinity;
        int64_t winner = -1;
        for (size_t c = 0; c < width; ++c) {
            const size_t token = (in_blocks ? size_t(of[r * blocks + c / 64]) : c / 64) * 64 + c % 64;
            const double score = row[c] + noise_of(hash[token], low[r], high[r]);
            if (score > best) best = score, winner = int64_t(c);
        }
        CHECK(column[r] == winner || column[r] == -1);
        undecided += column[r] < 0;
    }
    CHECK(undecided < 3);
}

/// Rows in turn: greedy, random, both with masks, a trait for others; the last three are NaN, or allow nothing.
void draws(size_t width, size_t offset) {
    const size_t rows = 24, words = (width + 31) / 32, padded = (width + 63) / 64 * 64;
    const uint16_t elsewhere = 4, drawn = 1;
    auto x = random<float>(rows * width, offset, 3);
    x[(rows - 3) * width + below(width)] = kNan;
    Exact<uint32_t> bits(rows * words, offset);
    for (size_t i = 0; i < bits.size(); ++i) bits[i] = below(3) ? static_cast<uint32_t>(rng()) : below(2) ? ~0u : 0u;
    for (size_t i = (rows - 2) * words; i < rows * words; ++i) bits[i] = 0;
    Exact<int64_t> slots(rows), positions(rows), mask_of(rows), column(rows, offset);
    Exact<uint16_t> traits(rows);
    Exact<float> temperature(rows), peak(rows);
    Exact<uint64_t> seed(rows);
    Exact<uint8_t> status(rows);
    Exact<int32_t> hash(padded, offset);
    for (size_t i = 0; i < padded; ++i) hash[i] = static_cast<int32_t>(rng());
    for (size_t r = 0; r < rows; ++r) {
        slots[r] = int64_t(rows - 1 - r), positions[r] = int64_t(below(1000));
        const size_t kind = r < rows - 3 ? r % 5 : 3;
        mask_of[r] = kind == 2 || kind == 3 ? int64_t(r) : -1;
        const size_t slot = rows - 1 - r;
        traits[slot] = kind == 4 ? elsewhere : kind % 2 ? drawn : 0;
        temperature[slot] = 0.5f + 0.1f * float(below(10)), seed[slot] = rng();
    }
    const std::vector<float> before(x.data(), x.data() + x.size());
    tested::draw(DrawArgs{width, x.data(), width, slots.data(), positions.data(), traits.data(), temperature.data(),
                          seed.data(), elsewhere, drawn, hash.data(), mask_of.data(), bits.data(), words, peak.data(),
                          column.data(), status.data()}, 0, rows);
    CHECK(std::memcmp(x.data(), before.data(), x.size() * sizeof(float)) == 0);
    size_t undecided = 0;
    for (size_t r = 0; r < rows; ++r) {
        const size_t slot = rows - 1 - r;
        Exact<float> y(width);
        std::copy_n(x.data() + r * width, width, y.data());
        const bool nan = r == rows - 3;
        if (!nan && mask_of[r] >= 0) apply_bitmask(y.data(), width, bits.data() + r * words);
        const float most = *std::max_element(y.data(), y.data() + width);
        const uint8_t expected = nan ? 1 : most == -kInfinity ? 2 : 0;
        CHECK(status[r] == expected);
        if (traits[slot] == elsewhere) {
            CHECK(column[r] == -1);
        } else if (expected) {
            CHECK(column[r] == 0);
        } else if (traits[slot] == 0) {
            CHECK(column[r] == std::max_element(y.data(), y.data() + width) - y.data());
        } else {
            for (size_t i = 0; i < width; ++i) y[i] = (y[i] - most) / temperature[slot];
            uint64_t key = seed[slot] + uint64_t(positions[r]) * 0x9E3779B97F4A7C15u;
            key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9u, key = (key ^ key >> 27) * 0x94D049BB133111EBu;
            key ^= key >> 31;
            const auto low = int32_t(key), high = int32_t(key >> 32);
            int64_t winner = -2;
            tested::race(RaceArgs{width, y.data(), width, &low, &high, hash.data(), nullptr, &winner}, 0, 1);
            CHECK(column[r] == winner);
            undecided += winner < 0;
        }
    }
    CHECK(undecided < 3);
}

void masks(size_t width, size_t offset) {
    const auto x = random<float>(width, offset);
    Exact<float> masked(width, offset);
    Exact<uint32_t> bits((width + 31) / 32, offset);
    for (size_t i = 0; i < bits.size(); ++i) bits[i] = below(3) ? static_cast<uint32_t>(rng()) : below(2) ? ~0u : 0u;
    std::copy_n(x.data(), width, masked.data());
    apply_bitmask(masked.data(), width, bits.data());
    for (size_t v = 0; v < width; ++v) CHECK(masked[v] == (bits[v / 32] >> v % 32 & 1 ? x[v] : -kInfinity));
}

void copies() {
    const auto from = random<uint8_t>(4 * 13, 1);
    Exact<int64_t> index(5);
    for (size_t j = 0; j < 5; ++j) index[j] = int64_t(11 - 2 * j);
    Exact<uint8_t> to(5 * 13, 1);
    copy_rows(reinterpret_cast<const char*>(from.data()), index.data(), 3, 13, 0, 5, reinterpret_cast<char*>(to.data()));
    for (size_t i = 0; i < to.size(); ++i) CHECK(to[i] == from[size_t(index[i / 13] / 3) * 13 + i % 13]);
    copy_rows(nullptr, nullptr, 1, 13, 0, 0, nullptr);
}

template <class T>
void all_of(size_t offset) {
    for (size_t width : kWidths) {
        norms<T>(width, offset);
        activations<T>(width, offset);
        for (size_t top_k : {size_t{1}, std::min<size_t>(width, 6), width}) routes<T>(width, top_k, offset);
    }
    for (size_t dim : {2, 6, 8, 10, 16, 24, 40, 72, 1024}) {
        for (size_t v_dim : {dim, size_t{9}, size_t{64}}) {
            qk_norm_rope_caches<T, T>(dim, v_dim, offset);
            qk_norm_rope_caches<T, int8_t>(dim, v_dim, offset);
        }
        latents<T>(dim, 8, 40, offset);
        latents<T>(dim, 17, 9, 1 - offset);
    }
    routes<T>(RouteArgs::kMaxExperts, 8, offset);
}

}  // namespace

int main() {
    for (size_t offset : {0, 1}) {
        all_of<float>(offset);
        all_of<Bf16>(offset);
        all_of<Fp16>(offset);
        for (size_t size : {1, 2, 7, 32}) {
            for (size_t groups : {1, 4, 9}) {
                for (size_t scores = 1; scores <= std::min<size_t>(size, 2); ++scores) grouped_routes(groups, size, scores, offset);
            }
        }
        for (size_t width : {1, 9, 511, 512, 513, 1500}) maxima(width, offset);
        for (size_t width : {1, 31, 32, 33, 64, 700}) masks(width, offset);
        for (size_t width : {1, 63, 64, 65, 700}) races(width, offset, false);
        for (size_t width : {64, 320}) races(width, offset, true);
        for (size_t width : {1, 31, 33, 63, 64, 65, 97, 700}) draws(width, offset);
    }
    copies();
    std::puts("ok");
}
