// The arguments of the elementwise and row-wise kernels. Each kernel computes rows [begin, end).
// Strides are in elements; outputs are contiguous. The bits of a row depend on that row alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/activation_args.hpp"

namespace moeserve {

enum class Type : int;

/// RMS norm: out = x / sqrt(mean(x^2) + eps) * weight. With a residual, total = x + residual
/// (rounded to the type) is used in place of x.
struct NormArgs {
    Type type;
    size_t width;
    const void* x;
    size_t stride;
    const void* residual;  // or null
    size_t residual_stride;
    const float* weight;
    float eps;
    void* out;
    void* total;  // written if there is a residual
};

/// out = act(first half of x) * second half, each half `width` wide.
struct ActMulArgs {
    Type type;
    size_t width;
    const void* x;
    size_t stride;
    Activation activation;
    void* out;
};

/// out = sigmoid of each row's first element.
struct SigmoidArgs {
    Type type;
    const void* x;
    size_t stride;
    float* out;
};

/// QK-norm, rotary embedding and KV write: from the QKV projection to attention's inputs. A row has
/// heads queries, kv_heads keys of `dim`, and kv_heads values.
struct QkNormRopeCacheArgs {
    static constexpr size_t kMaxDim = 1024;

    Type type;
    Type kv_type;  // of k and v: the type of the projection, or int8 with a scale per head
    size_t heads, kv_heads, dim, v_dim;
    size_t real;  // number of rows with a KV slot; keys and values of other rows are dropped
    const void* qkv;
    size_t stride;
    const float* normed;  // queries and keys to use instead of those in qkv, [rows, heads + kv_heads, dim]; or null
    const float* norms;   // weights of a norm per head, [heads + kv_heads, dim]; or null
    bool norm_last;       // normalize after the rotation
    bool norm_values;     // normalize values, without weights
    float eps;
    float clip;        // infinity for none
    const float* cos;  // [rows, dim]
    const float* sin;  // like cos, negated in the first half
    float scale;       // of queries
    const int64_t* slot_mapping;
    void* k;  // [KV slots, kv_heads, dim]; in int8 a float follows each head
    void* v;  // [KV slots, kv_heads, v_dim], likewise
    void* q;  // [rows, heads, dim]

    size_t columns() const { return (heads + kv_heads) * dim + kv_heads * v_dim; }
};

/// Norm, rotary embedding and cache write of latent attention: from its two projections to its
/// inputs. A cache entry is a normalized latent and a rotated part of the key.
struct LatentRopeCacheArgs {
    Type type;
    size_t heads, nope, rope, rank;
    size_t real;    // number of rows with a KV slot
    const void* q;  // rows of heads of nope + rope elements
    size_t q_stride;
    const void* kv;  // rows of rank + rope elements
    size_t kv_stride;
    const float* norm;  // [rank]: weights of the latents' norm
    float eps;
    const float* cos;  // [rows, rope]
    const float* sin;  // like cos, negated in the first half
    float scale;       // of queries
    const int64_t* slot_mapping;
    void* cache;    // [KV slots, rank + rope]
    void* q_nope;   // [rows, heads, nope]
    void* latent_q;  // [rows, heads, rank + rope], whose last `rope` columns are written
};

/// `RouterRule` in moeserve/ops/rules.py documents the fields.
struct RouteRule {
    enum class Score : int { softmax, softmax_selected, sigmoid, sparsemixer };

    Score score = Score::softmax;
    size_t groups = 1, kept_groups = 1;
    size_t group_scores = 1;  // 1 or 2: number of best expert scores that are summed for a group's score
    bool renormalize = false;
    float epsilon = 0, floor = 0, scale = 1, jitter = 0;
};

/// Routing: the top_k experts of each row of logits, best first.
struct RouteArgs {
    static constexpr size_t kMaxExperts = 4096;

    Type type;
    size_t experts, top_k;
    const void* logits;
    size_t stride;
    RouteRule rule;
    const float* bias;          // [experts], added to scores for the selection; or null
    const float* expert_scale;  // [experts], multiplied to the weights; or null
    int32_t* ids;               // [rows, top_k], like weights
    float* weights;
};

/// Argmax: the largest element of each row and its lowest column, or the first NaN if there is one.
struct ArgmaxArgs {
    size_t width;
    const float* x;
    size_t stride;
    float* peak;
    int64_t* column;
};

/// Random sampling: the column of the largest x - noise of each row, -1 if rounding could decide
/// between two columns.
struct RaceArgs {
    size_t width;
    const float* x;
    size_t stride;
    const int32_t* low;  // lower and upper half of each row's random key
    const int32_t* high;
    const int32_t* token_hash;
    const int64_t* blocks;  // [rows, width / 64]: column c is token blocks[c / 64] * 64 + c % 64; if null, token c
    int64_t* column;
};

/// Sampling of rows whose requests have none of the traits `not_here`: the most likely token that
/// the grammar allows or, with the trait `random`, a random one at the request's temperature. The
/// token is -1 for other rows, and for rows where rounding could decide.
struct DrawArgs {
    static constexpr uint8_t kFine = 0, kNotFinite = 1, kNothingAllowed = 2;  // `Status` in runner/sampling/sampler.py

    size_t width;
    const float* x;
    size_t stride;
    const int64_t* slots;
    const int64_t* positions;
    const uint16_t* traits;  // by slot, like the following arrays
    const float* temperature;
    const uint64_t* seed;
    uint16_t not_here, random;
    const int32_t* token_hash;
    const int64_t* mask_of;  // index of each row's mask, or -1; null if no row has one
    const uint32_t* bits;
    size_t words;
    float* peak;  // largest logit before the mask
    int64_t* column;
    uint8_t* status;
};

}  // namespace moeserve
