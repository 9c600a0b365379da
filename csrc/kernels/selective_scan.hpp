// Mamba's selective scan in tiles of tokens; moeserve/ops/selective_scan.py is the specification.
// The lanes of a vector are channels, and the elements of a channel's state are added in ascending
// order. So a result depends neither on the width of vectors nor on the other tokens of the call.
#pragma once

#include "kernels/elements.hpp"
#include "kernels/math.hpp"
#include "kernels/recurrence_args.hpp"

namespace moeserve::MOESERVE_ISA {

/// `width` channels from `from`. Scratch memory has their states, [N, kPiece].
struct ScanPiece {
    static constexpr size_t kPiece = SelectiveScanArgs::kPiece;

    const SelectiveScanArgs& args;
    const size_t from, width;  // channels
    float* states;

    ScanPiece(const SelectiveScanArgs& args, size_t piece, float* memory)
        : args(args), from(piece * kPiece), width(args.channels - from < kPiece ? args.channels - from : kPiece),
          states(memory) {}

    MOESERVE_INLINE f32 get(const float* row, size_t i) const { return load_at<Float32>(bytes_of(row), i, width); }
    MOESERVE_INLINE float* border(int64_t block, int64_t place) const {
        return args.states + (block * args.plan.per_block + place) * args.state * args.channels + from;
    }
    MOESERVE_INLINE size_t token(int64_t block, int64_t place) const {
        return (block * args.plan.per_block + place) * kStateTile;
    }

    /// Advances the states by `count` tokens. gives: write their results to `out`.
    template <bool gives>
    void scan(size_t count, const float* x, const float* dt, const float* b, const float* c, float* out) const {
        const size_t channels = args.channels, numbers = args.state;
        for (size_t i = 0; i < width; i += kWidth) {
            f32 steps[kStateTile], inputs[kStateTile], y[kStateTile];
            for (size_t t = 0; t < count; ++t) {
                const f32 x_t = get(x + t * channels, i);
                steps[t] = get(dt + t * channels, i);
                inputs[t] = mul(steps[t], x_t);
                if (gives) y[t] = mul(get(args.skip + from, i), x_t);
            }
            for (size_t n = 0; n < numbers; ++n) {
                const f32 a = get(args.a + n * channels + from, i);
                f32 h = load(states + n * kPiece + i);
                for (size_t t = 0; t < count; ++t) {
                    h = fma(exp(mul(steps[t], a)), h, mul(all(b + t * numbers + n), inputs[t]));
                    if (gives) y[t] = fma(all(c + t * numbers + n), h, y[t]);
                }
                store(states + n * kPiece + i, h);
            }
            if (!gives) continue;
            for (size_t t = 0; t < count; ++t) store_at<Float32>(bytes_of(out + t * channels), i, width, y[t]);
        }
    }

    /// Advances the states from a border by the first `count` tokens of its tile.
    void begin_at(int64_t block, int64_t place, size_t count) const {
        const float* cached = border(block, place);
        for (size_t n = 0; n < args.state; ++n) {
            for (size_t i = 0; i < width; i += kWidth) store(states + n * kPiece + i, get(cached + n * args.channels, i));
        }
        const size_t at = token(block, place);
        const size_t first = at * args.channels + from;
        scan<false>(count, args.xs + first, args.dts + first, args.bs + at * args.state, nullptr, nullptr);
    }

    /// Computes the states before the tile's first token, and stores those at its border. carried:
    /// this call has computed the previous tile.
    void begin(const StateTile& tile, bool carried) const {
        if (tile.first) return begin_at(tile.block, tile.place, tile.first);
        if (tile.before_block < 0) {
            memset(states, 0, args.scratch_floats() * sizeof(float));
        } else if (!carried) {
            begin_at(tile.before_block, tile.before_place, kStateTile);
        }
        if (!tile.block) return;
        float* to = border(tile.block, tile.place);
        for (size_t n = 0; n < args.state; ++n) memcpy(to + n * args.channels, states + n * kPiece, width * sizeof(float));
    }

    void compute(const StateTile& tile) const {
        const size_t at = tile.token * args.channels + from, numbers = tile.token * args.state;
        scan<true>(tile.count, args.x + at, args.dt + at, args.b + numbers, args.c + numbers, args.out + at);
        if (!tile.block) return;
        const size_t kept = token(tile.block, tile.place) + tile.first;
        for (size_t t = 0; t < tile.count; ++t) {
            const size_t row = t * args.channels, to = kept * args.channels + from + row;
            memcpy(args.xs + to, args.x + at + row, width * sizeof(float));
            memcpy(args.dts + to, args.dt + at + row, width * sizeof(float));
        }
        if (from == 0) memcpy(args.bs + kept * args.state, args.b + numbers, tile.count * args.state * sizeof(float));
    }

    void run() const {
        for (size_t r = 0; r < args.plan.num_runs; ++r) {
            for (size_t i = args.plan.runs[r]; i < args.plan.runs[r + 1]; ++i) {
                begin(args.plan.tiles[i], i > args.plan.runs[r]);
                compute(args.plan.tiles[i]);
            }
        }
    }
};

/// Computes pieces of SelectiveScanArgs.
inline void selective_scan(void* call, size_t begin, size_t end, int worker) {
    const FlushSubnormals flush;
    const auto& args = *static_cast<const SelectiveScanArgs*>(call);
    float* memory = args.scratch + worker * args.scratch_floats();
    for (size_t piece = begin; piece < end; ++piece) ScanPiece(args, piece, memory).run();
}

}  // namespace moeserve::MOESERVE_ISA
