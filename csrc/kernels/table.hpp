// The kernels of one instruction set, as function pointers. Callers must check shapes and dtypes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/product_args.hpp"
#include "kernels/recurrence_args.hpp"
#include "kernels/row_args.hpp"
#include "pool/pool.hpp"

namespace moeserve {

/// Element types of activations and weights.
enum class Type : int { fp32, bf16, fp16, int8, int4, fp8, fp4, bf12 };

/// One pointer per kernel. Kernels are documented where they are defined, in kernels/<family>.hpp.
struct Kernels {
    const char* name;
    bool pairs;  // whether GEMMs can use bf16 pairs as rows, which are half as large as floats
    void (*exp)(const float* x, float* y, size_t count);  // for tests of math.hpp
    void (*rms_norm)(const NormArgs&, size_t begin, size_t end);
    void (*act_mul)(const ActMulArgs&, size_t begin, size_t end);
    void (*sigmoid)(const SigmoidArgs&, size_t begin, size_t end);
    void (*qk_norm_rope_cache)(const QkNormRopeCacheArgs&, size_t begin, size_t end);
    void (*latent_rope_cache)(const LatentRopeCacheArgs&, size_t begin, size_t end);
    void (*route)(const RouteArgs&, size_t begin, size_t end);
    void (*argmax)(const ArgmaxArgs&, size_t begin, size_t end);
    void (*product)(const ProductArgs&, size_t begin, size_t end, int worker);
    void (*int_product)(const ProductArgs&, size_t begin, size_t end, int worker);  // rows rounded to int8
    void (*race)(const RaceArgs&, size_t begin, size_t end);
    void (*draw)(const DrawArgs&, size_t begin, size_t end);
    void (*attend)(void* call, size_t begin, size_t end, int worker);           // pieces of an AttentionCall
    void (*merge_attention)(void* call, size_t begin, size_t end, int worker);  // merges of one
    void (*causal_conv)(void* call, size_t begin, size_t end, int worker);      // pieces of CausalConvArgs
    void (*recurrence)(void* call, size_t begin, size_t end, int worker);       // pieces of RecurrenceArgs
    void (*decays)(const DecayArgs&, size_t begin, size_t end);
    void (*gated_norm)(const GatedNormArgs&, size_t begin, size_t end);
    void (*selective_scan)(void* call, size_t begin, size_t end, int worker);   // pieces of SelectiveScanArgs
    void (*index_scores)(void* call, size_t begin, size_t end, int worker);     // pieces of IndexScoresArgs
};

/// Names of the instruction sets that this module was compiled for and this CPU supports, best
/// last.
std::vector<std::string> supported_isas();

/// Uses one of them from now on. Throws std::invalid_argument for any other name.
void use_isa(const std::string& name);

/// The table in use: that of the best instruction set until `use_isa`; nullptr if none is
/// supported.
const Kernels* kernels();

}  // namespace moeserve
