// Chooses tokens from rows of logits: the largest, and the winner of the Gumbel race, whose noise
// moeserve/runner/sampling/noise.py defines.
#pragma once

#include "kernels/math.hpp"
#include "kernels/row_args.hpp"

namespace moeserve::MOESERVE_ISA {

constexpr size_t kStretch = 512;  // columns that are looked at for a new maximum at once

struct Peak {
    float value;
    size_t column;
};

/// The largest of one row and its lowest column; the first NaN where there is one.
inline Peak row_peak(const float* x, size_t width) {
    float best = -__builtin_inff();
    size_t stretch = 0;
    const i32 magnitude = all_words(0x7fffffff);
    i32 loudest = all_words(0);  // NaN has a larger magnitude than infinity
    size_t start = 0;
    for (; start + kStretch <= width; start += kStretch) {
        f32 most[4];
        for (f32& part : most) part = all(best);
        for (size_t i = start; i < start + kStretch; i += 4 * kWidth) {
            for (int p = 0; p < 4; ++p) {
                const f32 part = load(x + i + p * kWidth);
                most[p] = max(most[p], part);
                loudest = max(loudest, both(words(part), magnitude));
            }
        }
        const float here = largest(max(max(most[0], most[1]), max(most[2], most[3])));
        if (here > best) best = here, stretch = start;
    }
    bool nan = largest(loudest) > 0x7f800000;
    for (size_t i = start; i < width; ++i) {
        nan |= x[i] != x[i];
        if (x[i] > best) best = x[i], stretch = i;
    }
    size_t column = nan ? 0 : stretch;
    if (nan) {
        while (x[column] == x[column]) ++column;
    } else {
        while (x[column] != best) ++column;
    }
    return {x[column], column};
}

inline void argmax(const ArgmaxArgs& args, size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) {
        const Peak peak = row_peak(args.x + r * args.stride, args.width);
        args.peak[r] = peak.value;
        args.column[r] = static_cast<int64_t>(peak.column);
    }
}

/// 31 bits of a token's and a row's hash mapped into (0, 1), rounded as in noise.py.
MOESERVE_INLINE f32 uniform(const int32_t* token_hash, uint32_t low, uint32_t high) {
    i32 h = mul(differing(load_words(token_hash), all_words(low)), all_words(0x85ebca6bu));
    h = mul(differing(differing(h, right<16>(h)), all_words(high)), all_words(0xc2b2ae35u));
    h = right<1>(mul(differing(h, right<15>(h)), all_words(0x7feb352du)));
    return mul(add(to_float(h), all(0.5f)), all(0x1.fffffcp-32f));
}

constexpr size_t kBlock = 64;  // columns; noise.LANES

/// One row's race so far: column c's score is x[c] - log(-log(1 - u)), u the token's uniform number.
struct Race {
    uint32_t low, high;
    double best = -__builtin_inf(), second = -__builtin_inf();
    size_t column = 0;

    /// How much the reference, which takes its logarithms in fp32, may differ from scores in double precision, between
    /// two of them: six roundings of numbers below 32, or of larger ones, doubled.
    double doubt() const { return 3e-5 + __builtin_fabs(best) * 0x1p-21; }

    /// The lanes of these columns, which may beat the best.
    void enter(f32 x, f32 uniform, size_t first, unsigned lanes) {
        float at[kWidth], u[kWidth];
        store(at, x);
        store(u, uniform);
        for (; lanes; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes);
            const double score = at[lane] - __builtin_log(-__builtin_log1p(-static_cast<double>(u[lane])));
            if (score > best) {
                second = best, best = score, column = first + static_cast<size_t>(lane);
            } else if (score > second) {
                second = score;
            }
        }
    }

    /// What u must not exceed for x to come near the best: -log(1 - u) is at least u.
    MOESERVE_INLINE f32 limit(f32 x) const {
        const float to_beat = static_cast<float>(best - 4 * doubt());
        return exp(sub(x, all(to_beat)));
    }

    /// A block of columns. One limit for its largest tells that hardly any comes near, whatever their noise.
    void enter_block(const float* x, const int32_t* token_hash, size_t first) {
        f32 most = load(x);
        for (size_t i = kWidth; i < kBlock; i += kWidth) most = max(most, load(x + i));
        const f32 loosest = limit(all(largest(most)));
        for (size_t i = 0; i < kBlock; i += kWidth) {
            const f32 u = uniform(token_hash + i, low, high);
            if (!not_below(loosest, u)) continue;
            const f32 part = load(x + i);
            if (const unsigned lanes = not_below(limit(part), u)) enter(part, u, first + i, lanes);
        }
    }

    /// No column with a smaller x can win: noise adds 22.2 at most.
    float hopeless() const {
        const float bound = static_cast<float>(best - 22.3);
        return bound - __builtin_fabsf(bound) * 0x1p-20f;
    }
};

/// Whether any of a block's columns reaches `bound`.
MOESERVE_INLINE bool reaches(const float* x, float bound) {
    f32 most = load(x);
    for (size_t i = kWidth; i < kBlock; i += kWidth) most = max(most, load(x + i));
    return not_below(most, all(bound)) != 0;
}

/// The winner's column among `width`, or -1. likeliest: the column of the row's maximum, a number.
inline int64_t race_row(const RaceArgs& args, size_t r, const float* x, size_t likeliest) {
    const size_t width = args.width, num_blocks = (width + kBlock - 1) / kBlock;
    const int64_t* blocks = args.blocks ? args.blocks + r * num_blocks : nullptr;
    Race race{static_cast<uint32_t>(args.low[r]), static_cast<uint32_t>(args.high[r])};
    const auto enter = [&](size_t block, float bound) {
        alignas(64) float part[kBlock];
        const float* here = x + block * kBlock;
        const size_t left = width - block * kBlock;
        if (left < kBlock) {
            for (size_t i = 0; i < kBlock; ++i) part[i] = i < left ? here[i] : -__builtin_inff();
            here = part;
        }
        if (!reaches(here, bound)) return false;
        const size_t of = blocks ? static_cast<size_t>(blocks[block]) : block;
        race.enter_block(here, args.token_hash + of * kBlock, block * kBlock);
        return true;
    };
    // The likeliest goes first: then the number of columns that must be looked at closely is about the logarithm of
    // the number of likely ones, wherever they are.
    const size_t first = likeliest / kBlock;
    enter(first, -__builtin_inff());
    float bound = race.hopeless();
    for (size_t block = 0; block < num_blocks; ++block) {
        if (block != first && enter(block, bound)) bound = race.hopeless();
    }
    return race.best - race.second > race.doubt() ? static_cast<int64_t>(race.column) : -1;
}

inline void race(const RaceArgs& args, size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) {
        const float* x = args.x + r * args.stride;
        const Peak peak = row_peak(x, args.width);
        const bool finite = __builtin_fabsf(peak.value) < __builtin_inff();
        args.column[r] = finite ? race_row(args, r, x, peak.column) : -1;
    }
}

}  // namespace moeserve::MOESERVE_ISA
