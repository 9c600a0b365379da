// What the row kernels take: everything elementwise or row-wise. Each computes the rows [begin, end) of its arguments.
// Strides are in elements; outputs are contiguous. A row's bits depend on that row alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/activation_args.hpp"

namespace moeserve {

enum class Type : int;

/// out = x / sqrt(mean(x^2) + eps) * weight. With a residual: total = x + residual, rounded to the type, takes x's place.
struct NormArgs {
    Type type;
    size_t width;
    const void* x;
    size_t stride;
    const void* residual;  // null: none
    size_t residual_stride;
    const float* weight;
    float eps;
    void* out;
    void* total;  // where there is a residual
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

/// From a projection to attention's inputs: rows of heads + kv_heads heads of `dim`, queries first, and of kv_heads values.
struct QkNormRopeCacheArgs {
    static constexpr size_t kMaxDim = 1024;

    Type type;
    Type kv_type;  // of k and v: the same, or int8 with a scale per head
    size_t heads, kv_heads, dim, v_dim;
    size_t real;  // rows that have a KV slot; the others' keys and values go nowhere
    const void* qkv;
    size_t stride;
    const float* normed;  // queries and keys instead of qkv's, [rows, heads + kv_heads, dim]; or null
    const float* norms;   // weights of a norm per head, [heads + kv_heads, dim]; or null
    bool norm_last;       // behind the rotation
    bool norm_values;     // without weights
    float eps;
    float clip;        // infinity: none
    const float* cos;  // [rows, dim], as sin
    const float* sin;  // negative in the first half
    float scale;       // of queries
    const int64_t* slot_mapping;
    void* k;  // [KV slots, kv_heads, dim]; in int8 a float follows each head
    void* v;  // [KV slots, kv_heads, v_dim], likewise
    void* q;  // [rows, heads, dim]

    size_t columns() const { return (heads + kv_heads) * dim + kv_heads * v_dim; }
};

/// From two projections to latent attention's inputs. A cache entry is a normalised latent and a rotated key part.
struct LatentRopeCacheArgs {
    Type type;
    size_t heads, nope, rope, rank;
    size_t real;    // rows that have a KV slot
    const void* q;  // rows of heads of nope + rope elements
    size_t q_stride;
    const void* kv;  // rows of rank + rope elements
    size_t kv_stride;
    const float* norm;  // [rank]: of latents
    float eps;
    const float* cos;  // [rows, rope], as sin
    const float* sin;  // negative in the first half
    float scale;       // of queries
    const int64_t* slot_mapping;
    void* cache;    // [KV slots, rank + rope]
    void* q_nope;   // [rows, heads, nope]
    void* latent_q;  // [rows, heads, rank + rope], whose last `rope` columns are written
};

/// `RouterRule` in moeserve/ops/rules.py says what each of these means.
struct RouteRule {
    enum class Score : int { softmax, softmax_selected, sigmoid, sparsemixer };

    Score score = Score::softmax;
    size_t groups = 1, kept_groups = 1;
    size_t group_scores = 1;  // 1 or 2: scores that make up a group's
    bool renormalize = false;
    float epsilon = 0, floor = 0, scale = 1, jitter = 0;
};

/// The top_k experts of each row of logits, best first.
struct RouteArgs {
    static constexpr size_t kMaxExperts = 4096;

    Type type;
    size_t experts, top_k;
    const void* logits;
    size_t stride;
    RouteRule rule;
    const float* bias;          // [experts], of the choice; or null
    const float* expert_scale;  // [experts], of the weights; or null
    int32_t* ids;               // [rows, top_k], as weights
    float* weights;
};

/// The largest of each row and its lowest column; the first NaN where there is one.
struct ArgmaxArgs {
    size_t width;
    const float* x;
    size_t stride;
    float* peak;
    int64_t* column;
};

/// The column of the largest x - noise of each row; -1 where rounding could decide between two.
struct RaceArgs {
    size_t width;
    const float* x;
    size_t stride;
    const int32_t* low;  // the two halves of each row's key
    const int32_t* high;
    const int32_t* token_hash;
    const int64_t* blocks;  // [rows, width / 64]: column c is token blocks[c / 64] * 64 + c % 64; null: token c
    int64_t* column;
};

/// The token of each row whose request has no traits of `not_here`: the likeliest of those that a grammar allows, or with
/// the trait `random` the winner of the race at its temperature. -1: another traits' row, or one that rounding could
/// decide.
struct DrawArgs {
    static constexpr uint8_t kFine = 0, kNotFinite = 1, kNothingAllowed = 2;  // `Status` in runner/sampling/sampler.py

    size_t width;
    const float* x;
    size_t stride;
    const int64_t* slots;
    const int64_t* positions;
    const uint16_t* traits;  // and what follows: by slot
    const float* temperature;
    const uint64_t* seed;
    uint16_t not_here, random;
    const int32_t* token_hash;
    const int64_t* mask_of;  // each row's mask, or -1; null: none has one
    const uint32_t* bits;
    size_t words;
    float* peak;  // before the mask
    int64_t* column;
    uint8_t* status;
};

}  // namespace moeserve
