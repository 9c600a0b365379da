// The arguments of the kernels of recurrent layers. moeserve/ops/recurrence.py and
// selective_scan.py are the specification. Sizes: T tokens, C channels, K inputs of a convolution,
// N state elements per channel, G heads of queries and keys, H heads of values, d and v their
// widths, D decays per head.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeserve {

enum class Type : int;

constexpr size_t kStateTile = 16;  // tokens per tile; states are cached at the border before each tile

/// The tokens of a step that are in one tile of one request.
struct StateTile {
    size_t token, count;           // first token of the step, and number of tokens
    size_t first;                  // index of the first token in the tile
    int64_t block, place;          // cache block of the tile and its index in the block; block 0 stores nothing
    int64_t before_block, before_place;  // the same for the tile before; -1 at the beginning of a request
};

/// The tiles of all requests. Those of request i are [runs[i], runs[i + 1]), in ascending order.
/// Each but the first continues from the tile before, which the same call has computed.
struct StateTiles {
    const StateTile* tiles;
    const size_t* runs;
    size_t num_runs;
    size_t per_block;  // tiles per block
};

/// Pieces of kPiece channels, each over all tiles.
struct CausalConvArgs {
    static constexpr size_t kPiece = 256;

    StateTiles plan;
    Type type;  // of x; everything else is fp32
    size_t channels, inputs;
    const void* x;  // [T, C]; rows are `stride` elements apart
    size_t stride;
    const float* weight;  // [C, K]
    const float* bias;    // [C], or null
    bool silu;
    float* rows;     // [blocks, block size, C]: inputs of the tokens
    float* borders;  // [blocks, tiles, K - 1, C]: inputs of the tokens before each tile
    float* out;      // [T, C]
    float* scratch;  // scratch_floats() per worker

    [[gnu::always_inline]] size_t pieces() const { return (channels + kPiece - 1) / kPiece; }
    /// Scratch floats for weights and bias, and for the inputs of a tile's tokens.
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
    float* states;        // [blocks, tiles, N, C]: states at borders
    float *xs, *dts;      // [blocks, block size, C]: x and dt of the tokens
    float* bs;            // [blocks, block size, N]
    float* out;           // [T, C]
    float* scratch;       // scratch_floats() per worker

    [[gnu::always_inline]] size_t pieces() const { return (channels + kPiece - 1) / kPiece; }
    /// Scratch floats for states.
    [[gnu::always_inline]] size_t scratch_floats() const { return state * kPiece; }
};

/// A piece is (request, head, `columns` of its values); pieces are in this order. The heads of a
/// token are contiguous.
struct RecurrenceArgs {
    StateTiles plan;
    size_t groups, heads, d, v, decays;
    const float *q, *k;                    // [T, G, d]
    const float* values;                   // [T, H, v]
    const float* log_decay;                // [T, H, D]
    const float* beta;                     // [T, H]; null without the delta rule
    size_t q_stride, k_stride, v_stride, decay_stride, beta_stride;  // elements from one token to the next
    float* states;                         // [blocks, tiles, H, d * v]: states at borders
    float *keys, *updates, *sums;          // [blocks, block size]: k [G, d], u [H, v] and s [H, D] of the tokens
    float* out;                            // [T, H, v]
    size_t columns;                        // a multiple of 16
    float* scratch;                        // scratch_floats() per worker

    [[gnu::always_inline]] static size_t padded(size_t width) { return (width + 15) / 16 * 16; }
    [[gnu::always_inline]] size_t parts() const { return (v + columns - 1) / columns; }
    [[gnu::always_inline]] size_t pieces() const { return plan.num_runs * heads * parts(); }
    /// Scratch floats for a tile's k, s and u and derived values; see `Piece` in recurrence.hpp.
    [[gnu::always_inline]] size_t scratch_floats() const {
        return kStateTile * (5 * padded(d) + 2 * padded(decays) + 3 * columns + 2 * kStateTile) + padded(d) * (columns + 1);
    }
};

/// Computes log decays per head, and time steps or the factors of the delta rule, from a token's
/// projections.
struct DecayArgs {
    Type type;
    size_t heads;
    const void *dt, *beta;  // [T, H]; beta is null without the delta rule
    size_t stride;          // of both
    const float *bias, *decay;  // [H]: steps = softplus(dt + bias) within the limits, log decays = decay * steps
    float least, most;
    float *log_decay, *steps, *betas;  // outputs [T, H]; the last two may be null
};

/// The output gate after a recurrence: x times SiLU of the gate, with an RMS norm of each part
/// before or after it.
struct GatedNormArgs {
    Type type;
    size_t parts, width;  // number and width of a row's parts
    const void* gate;     // [T, parts * width]; rows are `stride` elements apart
    size_t stride;
    float* x;             // [T, parts * width], contiguous; overwritten
    const float* weight;  // the weight of part p begins at p * weight_stride
    size_t weight_stride;
    float eps;
    bool gate_first;
    void* out;  // [T, parts * width]
    const int64_t* places;  // [parts]: the place of each part in a row of `out`; null: in order
};

}  // namespace moeserve
