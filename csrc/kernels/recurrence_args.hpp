// What the kernels of recurrent layers take. moeserve/ops/recurrence.py and selective_scan.py say what they compute, and
// name the shapes: T tokens, C channels, K inputs of a convolution, N numbers of a channel's state, G heads of queries and
// keys, H of values, d and v their widths, D of decays.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeserve {

enum class Type : int;

constexpr size_t kStateTile = 16;  // tokens between the borders at which states are kept

/// The tokens of a step that lie in one tile of one request.
struct StateTile {
    size_t token, count;           // rows of the step
    size_t first;                  // number of the first of them in the tile
    int64_t block, place;          // where the tile is cached: its block, and its number there; block 0 keeps nothing
    int64_t before_block, before_place;  // likewise the tile before; -1 at the beginning of a request
};

/// Tiles of requests: those of request i are [runs[i], runs[i + 1]), in ascending order. All but the first find the tile
/// before as the kernel left it.
struct StateTiles {
    const StateTile* tiles;
    const size_t* runs;
    size_t num_runs;
    size_t per_block;  // tiles of a block
};

/// Pieces of kPiece channels, each over all tiles.
struct CausalConvArgs {
    static constexpr size_t kPiece = 256;

    StateTiles plan;
    Type type;  // of x; all else is fp32
    size_t channels, inputs;
    const void* x;  // [T, C]; rows are `stride` elements apart
    size_t stride;
    const float* weight;  // [C, K]
    const float* bias;    // [C], or null
    bool silu;
    float* rows;     // [blocks, block size, C]: inputs of a tile's tokens
    float* borders;  // [blocks, tiles, K - 1, C]: those before its border
    float* out;      // [T, C]
    float* scratch;  // scratch_floats() per worker

    [[gnu::always_inline]] size_t pieces() const { return (channels + kPiece - 1) / kPiece; }
    /// Of weights and bias, and of the inputs that the tokens of a tile need.
    [[gnu::always_inline]] size_t scratch_floats() const { return (2 * inputs + kStateTile) * kPiece; }
};

/// Pieces of kPiece channels, each over all tiles. All is fp32.
struct SelectiveScanArgs {
    static constexpr size_t kPiece = 128;

    StateTiles plan;
    size_t channels, state;
    const float *x, *dt;  // [T, C]
    const float* a;       // [N, C]
    const float *b, *c;   // [T, N]
    const float* skip;    // [C]
    float* states;        // [blocks, tiles, N, C]: those at borders
    float *xs, *dts;      // [blocks, block size, C]: x and dt of a tile's tokens
    float* bs;            // [blocks, block size, N]
    float* out;           // [T, C]
    float* scratch;       // scratch_floats() per worker

    [[gnu::always_inline]] size_t pieces() const { return (channels + kPiece - 1) / kPiece; }
    /// Of states.
    [[gnu::always_inline]] size_t scratch_floats() const { return state * kPiece; }
};

/// Pieces of a request, a head and `columns` of its values, in this order. A token's heads lie side by side.
struct RecurrenceArgs {
    StateTiles plan;
    size_t groups, heads, d, v, decays;
    const float *q, *k;                    // [T, G, d]
    const float* values;                   // [T, H, v]
    const float* log_decay;                // [T, H, D]
    const float* beta;                     // [T, H]; or null: no delta rule
    size_t q_stride, k_stride, v_stride, decay_stride, beta_stride;  // elements from one token to the next
    float* states;                         // [blocks, tiles, H, d * v]: S_0
    float *keys, *updates, *sums;          // [blocks, block size]: k [G, d], u [H, v] and s [H, D] of a tile's tokens
    float* out;                            // [T, H, v]
    size_t columns;                        // a multiple of 16
    float* scratch;                        // scratch_floats() per worker

    [[gnu::always_inline]] static size_t padded(size_t width) { return (width + 15) / 16 * 16; }
    [[gnu::always_inline]] size_t parts() const { return (v + columns - 1) / columns; }
    [[gnu::always_inline]] size_t pieces() const { return plan.num_runs * heads * parts(); }
    /// A tile's k, s and u, and what is made of them; see `Piece` in recurrence.hpp.
    [[gnu::always_inline]] size_t scratch_floats() const {
        return kStateTile * (5 * padded(d) + 2 * padded(decays) + 3 * columns + 2 * kStateTile) + padded(d) * (columns + 1);
    }
};

/// What a token's projections say of time: log decays of each head, and steps of time or factors of the delta rule.
struct DecayArgs {
    Type type;
    size_t heads;
    const void *dt, *beta;  // [T, H]; beta null: no delta rule
    size_t stride;          // of both
    const float *bias, *decay;  // [H]: log decays are decay * steps, steps softplus(dt + bias) within the limits
    float least, most;
    float *log_decay, *steps, *betas;  // [T, H]; the last two where they are not null
};

/// What follows a recurrence: x times SiLU of its gate, and an RMS norm of each part, before it or behind it.
struct GatedNormArgs {
    Type type;
    size_t parts, width;  // of a row
    const void* gate;     // [T, parts * width]; rows are `stride` elements apart
    size_t stride;
    float* x;             // likewise, contiguous; overwritten
    const float* weight;  // of part p: from p * weight_stride on
    size_t weight_stride;
    float eps;
    bool gate_first;
    void* out;  // [T, parts * width]
};

}  // namespace moeserve
