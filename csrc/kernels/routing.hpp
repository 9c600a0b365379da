// Routing: expert scores, and the best experts of each token. Ties go to the lowest id.
#pragma once

#include "kernels/elements.hpp"
#include "kernels/math.hpp"
#include "kernels/row_args.hpp"

namespace moeserve::MOESERVE_ISA {

/// Computes x = softmax(x) over `width` elements; up to 32 more elements may be written. If an
/// element is NaN, all results are.
inline void softmax(float* x, size_t width) {
    for (size_t i = width; i % 32; ++i) x[i] = -__builtin_inff();
    f32 most = load(x);
    for (size_t i = kWidth; i < width; i += kWidth) most = max(most, load(x + i));
    const f32 peak = all(largest(most));
    Sums sums;
    for (size_t i = 0; i < width; i += 32) {
        for (int p = 0; p < Sums::kParts; ++p) {
            const f32 term = exp(sub(load(x + i + p * kWidth), peak));
            store(x + i + p * kWidth, term);
            sums.part[p] = add(sums.part[p], term);
        }
    }
    const f32 total = all(sums.total());
    for (size_t i = 0; i < width; i += kWidth) store(x + i, div(load(x + i), total));
}

/// Integer keys that are ordered like the scores. -0 counts as 0, NaN is beyond the infinity of its
/// sign. The smallest integer is never a key: it pads the last vector and marks removed keys.
inline void sort_keys(const float* scores, size_t width, int32_t* keys) {
    for (size_t i = 0; i < width; i += kWidth) {
        const i32 bits = words(add(load(scores + i), zero()));
        const i32 flipped = differing(bits, both(right_signed<31>(bits), all_words(0x7fffffff)));
        store_words(keys + i, max(flipped, all_words(0x80000001)));
    }
    for (size_t i = width; i % kWidth; ++i) keys[i] = INT32_MIN;
}

/// Removes the largest key and returns its index, the lowest on a tie.
inline size_t take_largest(int32_t* keys, size_t width) {
    i32 most = load_words(keys);
    for (size_t i = kWidth; i < width; i += kWidth) most = max(most, load_words(keys + i));
    const i32 best = all_words(static_cast<uint32_t>(largest(most)));
    for (size_t i = 0; i < width; i += kWidth) {
        if (const unsigned found = equal(load_words(keys + i), best)) {
            const size_t at = i + static_cast<size_t>(__builtin_ctz(found));
            keys[at] = INT32_MIN;
            return at;
        }
    }
    return 0;  // not reached, because the largest key exists
}

/// Computes x = 1 / (1 + e^-x), in whole vectors.
inline void sigmoids(float* x, size_t width) {
    for (size_t i = 0; i < width; i += kWidth) {
        store(x + i, div(all(1.0f), add(all(1.0f), exp(sub(zero(), load(x + i))))));
    }
}

inline int32_t sort_key(float score) {
    const int32_t bits = __builtin_bit_cast(int32_t, score + 0.0f), key = bits ^ (bits >> 31 & 0x7fffffff);
    return key == INT32_MIN ? key + 1 : key;
}
inline float score_of(int32_t key) { return __builtin_bit_cast(float, key ^ (key >> 31 & 0x7fffffff)); }

/// Removes the keys of all but the best groups. Ties go to the lowest group.
inline void keep_groups(const RouteRule& rule, int32_t* keys, size_t width) {
    const size_t size = width / rule.groups;
    alignas(64) int32_t group_keys[RouteArgs::kMaxExperts + 32];
    for (size_t g = 0; g < rule.groups; ++g) {
        int32_t best = INT32_MIN, second = INT32_MIN;
        for (size_t i = g * size; i < (g + 1) * size; ++i) {
            const int32_t lesser = keys[i] > best ? best : keys[i];
            second = lesser > second ? lesser : second;
            best = keys[i] > best ? keys[i] : best;
        }
        group_keys[g] = sort_key(rule.group_scores == 2 ? score_of(best) + score_of(second) : score_of(best));
    }
    for (size_t i = rule.groups; i % kWidth; ++i) group_keys[i] = INT32_MIN;
    for (size_t k = 0; k < rule.kept_groups; ++k) take_largest(group_keys, rule.groups);
    for (size_t g = 0; g < rule.groups; ++g) {
        if (group_keys[g] == INT32_MIN) continue;
        for (size_t i = g * size; i < (g + 1) * size; ++i) keys[i] = INT32_MIN;
    }
}

/// Removes the largest key and returns its index. weight: softmax of its logit over the remaining
/// ones that are not far below it.
inline size_t mix(const float* logits, int32_t* keys, size_t width, float band, float* weight) {
    alignas(64) float near[RouteArgs::kMaxExperts + 32];
    for (size_t i = 0; i < width; ++i) near[i] = keys[i] == INT32_MIN ? -__builtin_inff() : logits[i];
    const size_t id = take_largest(keys, width);
    const float peak = logits[id];
    for (size_t i = 0; i < width; ++i) {
        const float size = __builtin_fabsf(logits[i]);
        if ((peak - logits[i]) / (size < peak ? peak : size) > band) near[i] = -__builtin_inff();
    }
    softmax(near, width);
    *weight = near[id];
    return id;
}

/// Selects the experts of one row of scores, [width] floats with room for 32 more, and computes
/// their weights before normalization and scale.
inline void choose(const RouteArgs& args, float* scores, int32_t* ids, float* chosen) {
    using Score = RouteRule::Score;
    alignas(64) float judged[RouteArgs::kMaxExperts + 32];
    alignas(64) int32_t keys[RouteArgs::kMaxExperts + 32];
    const size_t width = args.experts, top_k = args.top_k;
    const RouteRule& rule = args.rule;
    if (rule.score == Score::sparsemixer) {
        sort_keys(scores, width, keys);
        for (size_t k = 0; k < top_k; ++k) {
            ids[k] = static_cast<int32_t>(mix(scores, keys, width, 2 * rule.jitter, chosen + k));
        }
        return;
    }
    if (rule.score == Score::softmax) softmax(scores, width);
    if (rule.score == Score::sigmoid) sigmoids(scores, width);
    const float* by = scores;
    if (args.bias) {
        by = judged;
        for (size_t i = 0; i < width; i += kWidth) {
            store(judged + i, add(load(scores + i), load_at<Float32>(bytes_of(args.bias), i, width)));
        }
    }
    sort_keys(by, width, keys);
    if (rule.kept_groups < rule.groups) keep_groups(rule, keys, width);
    for (size_t k = 0; k < top_k; ++k) {
        const size_t id = take_largest(keys, width);
        ids[k] = static_cast<int32_t>(id);
        chosen[k] = scores[id];
    }
    if (rule.score == Score::softmax_selected) softmax(chosen, top_k);
}

template <class E>
void route_of(const RouteArgs& args, size_t begin, size_t end) {
    alignas(64) float scores[RouteArgs::kMaxExperts + 32], chosen[RouteArgs::kMaxExperts + 32];
    const size_t width = args.experts, top_k = args.top_k;
    for (size_t r = begin; r < end; ++r) {
        const char* logits = static_cast<const char*>(args.logits) + r * args.stride * E::bytes;
        for (size_t i = 0; i < width; i += kWidth) store(scores + i, load_at<E>(logits, i, width));
        int32_t* ids = args.ids + r * top_k;
        choose(args, scores, ids, chosen);
        float total = chosen[0];
        for (size_t k = 1; k < top_k; ++k) total += chosen[k];
        total += args.rule.epsilon;
        if (total < args.rule.floor) total = args.rule.floor;
        float* weights = args.weights + r * top_k;
        for (size_t k = 0; k < top_k; ++k) {
            weights[k] = (args.rule.renormalize ? chosen[k] / total : chosen[k]) * args.rule.scale;
            if (args.expert_scale) weights[k] *= args.expert_scale[ids[k]];
        }
    }
}

inline void route(const RouteArgs& args, size_t begin, size_t end) { MOESERVE_BY_TYPE(route_of, args, begin, end) }

}  // namespace moeserve::MOESERVE_ISA
