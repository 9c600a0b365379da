// The router's choice: softmax and the best experts of each token, equal scores to the lowest id.
#pragma once

#include "kernels/elements.hpp"
#include "kernels/math.hpp"
#include "kernels/row_args.hpp"

namespace moeserve::MOESERVE_ISA {

/// x = softmax(x) over `width` elements, of which 32 more may be written. Not a number anywhere: all of it.
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

/// Keys that order as (score, -0 as 0) does, NaN beyond the infinity of its sign; never the smallest integer, which
/// fills the last vector up and marks what is taken.
inline void sort_keys(const float* scores, size_t width, int32_t* keys) {
    for (size_t i = 0; i < width; i += kWidth) {
        const i32 bits = words(add(load(scores + i), zero()));
        const i32 flipped = differing(bits, both(right_signed<31>(bits), all_words(0x7fffffff)));
        store_words(keys + i, max(flipped, all_words(0x80000001)));
    }
    for (size_t i = width; i % kWidth; ++i) keys[i] = INT32_MIN;
}

/// Takes out the largest key and returns its index, the lowest of equal ones.
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
    return 0;  // never: the largest is there
}

template <class E>
void route_of(const RouteArgs& args, size_t begin, size_t end) {
    alignas(64) float scores[RouteArgs::kMaxExperts + 32], chosen[RouteArgs::kMaxExperts + 32];
    alignas(64) int32_t keys[RouteArgs::kMaxExperts + 32];
    const size_t width = args.experts, top_k = args.top_k;
    for (size_t r = begin; r < end; ++r) {
        const char* logits = static_cast<const char*>(args.logits) + r * args.stride * E::bytes;
        for (size_t i = 0; i < width; i += kWidth) store(scores + i, load_at<E>(logits, i, width));
        if (!args.selected) softmax(scores, width);
        sort_keys(scores, width, keys);
        int32_t* ids = args.ids + r * top_k;
        for (size_t k = 0; k < top_k; ++k) {
            const size_t id = take_largest(keys, width);
            ids[k] = static_cast<int32_t>(id);
            chosen[k] = scores[id];
        }
        if (args.selected) softmax(chosen, top_k);
        float total = chosen[0];
        for (size_t k = 1; k < top_k; ++k) total += chosen[k];
        float* weights = args.weights + r * top_k;
        for (size_t k = 0; k < top_k; ++k) weights[k] = args.renormalize ? chosen[k] / total : chosen[k];
    }
}

inline void route(const RouteArgs& args, size_t begin, size_t end) { MOESERVE_BY_TYPE(route_of, args, begin, end) }

}  // namespace moeserve::MOESERVE_ISA
