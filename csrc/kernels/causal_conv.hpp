// Short causal depthwise convolutions, with the inputs of earlier tokens in a paged cache.
#pragma once

#include "kernels/elements.hpp"
#include "kernels/recurrence_args.hpp"

namespace moeserve::MOESERVE_ISA {

/// `width` channels from `from`. Scratch memory has K rows of weights, a row of biases, and the
/// inputs of K - 1 tokens and of a tile.
template <class E>
struct ConvPiece {
    static constexpr size_t kPiece = CausalConvArgs::kPiece;

    const CausalConvArgs& args;
    size_t from, width;  // channels
    size_t before;       // number of earlier tokens whose inputs a token needs
    float* weights;
    float* inputs;

    ConvPiece(const CausalConvArgs& args, size_t piece, float* memory)
        : args(args), from(piece * kPiece), width(args.channels - from < kPiece ? args.channels - from : kPiece),
          before(args.inputs - 1), weights(memory), inputs(memory + (args.inputs + 1) * kPiece) {
        for (size_t c = 0; c < width; ++c) {
            for (size_t j = 0; j <= before; ++j) weights[j * kPiece + c] = args.weight[(from + c) * args.inputs + j];
            if (args.bias) weights[args.inputs * kPiece + c] = args.bias[from + c];
        }
    }

    MOESERVE_INLINE float* row(int64_t block, size_t token) const {
        return args.rows + (block * args.plan.per_block * kStateTile + token) * args.channels + from;
    }
    MOESERVE_INLINE float* border(const StateTile& tile, size_t j) const {
        return args.borders + ((tile.block * args.plan.per_block + tile.place) * before + j) * args.channels + from;
    }
    MOESERVE_INLINE void copy(const float* x, float* to) const { memcpy(to, x, width * sizeof(float)); }

    /// Loads the inputs before the tile's first token of this call, and stores those before the
    /// tile's border to the cache. carried: number of tokens of the previous tile whose inputs are
    /// still in scratch memory; 0 if this call has not computed it.
    void begin(const StateTile& tile, size_t carried) const {
        for (size_t j = 0; j < before; ++j) {
            float* to = inputs + j * kPiece;
            const size_t at = tile.first + j;
            if (tile.first) {
                copy(at < before ? border(tile, at) : row(tile.block, tile.place * kStateTile + at - before), to);
            } else if (carried) {
                copy(inputs + (carried + j) * kPiece, to);
            } else if (tile.before_block >= 0) {
                copy(row(tile.before_block, (tile.before_place + 1) * kStateTile - before + j), to);
            } else {
                memset(to, 0, kPiece * sizeof(float));
            }
            if (!tile.first && tile.block) copy(to, border(tile, j));
        }
    }

    void compute(const StateTile& tile) const {
        for (size_t t = 0; t < tile.count; ++t) {
            const char* x = static_cast<const char*>(args.x) + ((tile.token + t) * args.stride + from) * E::bytes;
            float* input = inputs + t * kPiece;
            char* kept = bytes_of(row(tile.block, tile.place * kStateTile + tile.first + t));
            char* out = bytes_of(args.out + (tile.token + t) * args.channels + from);
            for (size_t c = 0; c < width; c += kWidth) {
                const f32 last = load_at<E>(x, c, width);
                store(input + before * kPiece + c, last);
                if (tile.block) store_at<Float32>(kept, c, width, last);
                f32 y = zero();
                for (size_t j = 0; j < before; ++j) {
                    y = fma(load(weights + j * kPiece + c), load(input + j * kPiece + c), y);
                }
                y = fma(load(weights + before * kPiece + c), last, y);
                if (args.bias) y = add(y, load(weights + args.inputs * kPiece + c));
                store_at<Float32>(out, c, width, args.silu ? silu(y) : y);
            }
        }
    }

    void run() const {
        for (size_t r = 0; r < args.plan.num_runs; ++r) {
            size_t carried = 0;
            for (size_t i = args.plan.runs[r]; i < args.plan.runs[r + 1]; ++i) {
                const StateTile& tile = args.plan.tiles[i];
                begin(tile, carried);
                compute(tile);
                carried = tile.count;
            }
        }
    }
};

template <class E>
void causal_conv_of(const CausalConvArgs& args, size_t piece, float* memory) {
    ConvPiece<E>(args, piece, memory).run();
}

/// Computes pieces of CausalConvArgs.
inline void causal_conv(void* call, size_t begin, size_t end, int worker) {
    const auto& args = *static_cast<const CausalConvArgs*>(call);
    float* memory = args.scratch + worker * args.scratch_floats();
    for (size_t piece = begin; piece < end; ++piece) {
        switch (args.type) {
            case Type::fp32: causal_conv_of<Float32>(args, piece, memory); break;
            case Type::bf16: causal_conv_of<BFloat16>(args, piece, memory); break;
            default: causal_conv_of<Float16>(args, piece, memory);
        }
    }
}

}  // namespace moeserve::MOESERVE_ISA
