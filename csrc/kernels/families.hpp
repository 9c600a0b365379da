// All kernels, compiled for MOESERVE_ISA, and their table. Each isa_*.cpp includes a vec_*.hpp,
// then this file. GEMMs take longest to compile, so they have separate units: isa_*_product.cpp and
// isa_*_int_product.cpp.
#pragma once

#include "kernels/table.hpp"

#include "kernels/activation.hpp"
#include "kernels/attention.hpp"
#include "kernels/causal_conv.hpp"
#include "kernels/index_scores.hpp"
#include "kernels/math.hpp"
#include "kernels/norms.hpp"
#include "kernels/recurrence.hpp"
#include "kernels/recurrent_gates.hpp"
#include "kernels/rotary.hpp"
#include "kernels/routing.hpp"
#include "kernels/sampling.hpp"
#include "kernels/selective_scan.hpp"

namespace moeserve::MOESERVE_ISA {

void product(const ProductArgs& args, size_t begin, size_t end, int worker);
void int_product(const ProductArgs& args, size_t begin, size_t end, int worker);

inline void exp_all(const float* x, float* y, size_t count) {
    float part[kWidth];
    for (size_t i = 0; i < count; i += kWidth) {
        const size_t left = count - i < kWidth ? count - i : kWidth;
        for (size_t j = 0; j < kWidth; ++j) part[j] = j < left ? x[i + j] : 0.0f;
        store(part, exp(load(part)));
        for (size_t j = 0; j < left; ++j) y[i + j] = part[j];
    }
}

constexpr Kernels table(const char* name) {
    Kernels kernels{};
    kernels.name = name;
    kernels.pairs = kDots;
    kernels.exp = exp_all;
    kernels.rms_norm = rms_norm;
    kernels.act_mul = act_mul;
    kernels.sigmoid = sigmoid;
    kernels.qk_norm_rope_cache = qk_norm_rope_cache;
    kernels.latent_rope_cache = latent_rope_cache;
    kernels.route = route;
    kernels.argmax = argmax;
    kernels.product = product;
    kernels.int_product = int_product;
    kernels.race = race;
    kernels.draw = draw;
    kernels.attend = attention::attend;
    kernels.merge_attention = attention::merge_attention;
    kernels.causal_conv = causal_conv;
    kernels.recurrence = recurrent::recurrence;
    kernels.decays = decays;
    kernels.gated_norm = gated_norm;
    kernels.selective_scan = selective_scan;
    kernels.index_scores = index_scores;
    return kernels;
}

}  // namespace moeserve::MOESERVE_ISA
