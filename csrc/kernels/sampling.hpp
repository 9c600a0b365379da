// Sampling from rows of logits: greedy, and random by the Gumbel-max trick. The noise is defined in
// moeserve/runner/sampling/noise.py.
#pragma once

#include "kernels/math.hpp"
#include "kernels/row_args.hpp"

namespace moeserve::MOESERVE_ISA {

constexpr size_t kStretch = 512;  // columns that are checked for a new maximum at once

struct Peak {
    float value;
    size_t column;
};

/// Returns the largest element of a row and its lowest column, or the first NaN if there is one.
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

/// Maps 31 bits of the hash of a token and a row's key to (0, 1), rounded as in noise.py.
MOESERVE_INLINE f32 uniform(const int32_t* token_hash, uint32_t low, uint32_t high) {
    i32 h = mul(differing(load_words(token_hash), all_words(low)), all_words(0x85ebca6bu));
    h = mul(differing(differing(h, right<16>(h)), all_words(high)), all_words(0xc2b2ae35u));
    h = right<1>(mul(differing(h, right<15>(h)), all_words(0x7feb352du)));
    return mul(add(to_float(h), all(0.5f)), all(0x1.fffffcp-32f));
}

constexpr size_t kBlock = 64;  // columns; equal to noise.LANES

/// The best column of a row so far. The score of column c is x[c] - log(-log(1 - u)), where u is
/// the token's uniform random number.
struct Race {
    uint32_t low, high;
    double best = -__builtin_inf(), second = -__builtin_inf();
    size_t column = 0;

    /// A bound of the rounding error between two scores of the reference, which computes logarithms
    /// in fp32 (scores here are double precision): twice six roundings of numbers below 32, or of
    /// larger ones.
    double doubt() const { return 3e-5 + __builtin_fabs(best) * 0x1p-21; }

    /// Computes the scores of these lanes, whose columns may beat the best one.
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

    /// An upper bound of u for which x can come near the best score, because -log(1 - u) >= u.
    MOESERVE_INLINE f32 limit(f32 x) const {
        const float to_beat = static_cast<float>(best - 4 * doubt());
        return exp(sub(x, all(to_beat)));
    }

    /// Processes a block of columns. The bound for its largest logit excludes nearly all of them.
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

    /// The smallest x that can win, because noise adds at most 22.2.
    float hopeless() const {
        const float bound = static_cast<float>(best - 22.3);
        return bound - __builtin_fabsf(bound) * 0x1p-20f;
    }
};

/// Returns whether any column of a block reaches `bound`.
MOESERVE_INLINE bool reaches(const float* x, float bound) {
    f32 most = load(x);
    for (size_t i = kWidth; i < kBlock; i += kWidth) most = max(most, load(x + i));
    return not_below(most, all(bound)) != 0;
}

/// Returns the winner's column, or -1. read(block, part): returns a block's columns, possibly
/// written to `part`, or null if none may win. blocks: see RaceArgs. first: the block of the most
/// likely column. It is processed first, so that the number of columns that need a closer look is
/// about the logarithm of the number of likely columns.
template <class Read>
inline int64_t race_row(Race race, const int32_t* token_hash, const int64_t* blocks, size_t num_blocks, size_t first,
                        const Read& read) {
    const auto enter = [&](size_t block, float bound) {
        alignas(64) float part[kBlock];
        const float* here = read(block, part);
        if (!here || !reaches(here, bound)) return false;
        const size_t of = blocks ? static_cast<size_t>(blocks[block]) : block;
        race.enter_block(here, token_hash + of * kBlock, block * kBlock);
        return true;
    };
    enter(first, -__builtin_inff());
    float bound = race.hopeless();
    for (size_t block = 0; block < num_blocks; ++block) {
        if (block != first && enter(block, bound)) bound = race.hopeless();
    }
    return race.best - race.second > race.doubt() ? static_cast<int64_t>(race.column) : -1;
}

/// A row, read in blocks. bits: the columns that a grammar allows; null for all. Logits x become
/// (x - peak) / temperature.
struct MaskedRow {
    const float* x;
    size_t width;
    const uint32_t* bits;
    float peak = 0, temperature = 1;

    /// Copies a block with -infinity for columns that are not allowed or do not exist. Returns null
    /// if no column is left.
    MOESERVE_INLINE const float* masked(size_t block, float* part) const {
        const float* here = x + block * kBlock;
        const size_t left = width - block * kBlock;
        if (!bits && left >= kBlock) return here;
        for (size_t half = 0; half < kBlock; half += 32) {
            const uint32_t word = half >= left ? 0 : bits ? bits[(block * kBlock + half) / 32] : ~0u;
            if (half + 32 <= left && word) {
                for (size_t i = 0; i < 32; ++i) part[half + i] = word >> i & 1 ? here[half + i] : -__builtin_inff();
                continue;
            }
            for (size_t i = half; i < half + 32; ++i) {
                part[i] = i < left && word >> (i - half) & 1 ? here[i] : -__builtin_inff();
            }
        }
        return part;
    }

    bool empty(size_t block) const {
        const size_t word = block * kBlock / 32;
        return bits && !bits[word] && (word * 32 + 32 >= width || !bits[word + 1]);
    }

    const float* operator()(size_t block, float* part) const {
        if (empty(block)) return nullptr;
        const float* here = masked(block, part);
        for (size_t i = 0; i < kBlock; i += kWidth) {
            store(part + i, div(sub(load(here + i), all(peak)), all(temperature)));
        }
        return part;
    }

    /// Returns the largest logit that is allowed, -infinity if none is.
    Peak largest_allowed() const {
        Peak best{-__builtin_inff(), 0};
        alignas(64) float part[kBlock];
        for (size_t block = 0; block * kBlock < width; ++block) {
            if (empty(block)) continue;
            const float* here = masked(block, part);
            f32 most = load(here);
            for (size_t i = kWidth; i < kBlock; i += kWidth) most = max(most, load(here + i));
            const float value = largest(most);
            if (!(value > best.value)) continue;
            size_t i = 0;
            while (here[i] != value) ++i;
            best = {value, block * kBlock + i};
        }
        return best;
    }
};

inline void race(const RaceArgs& args, size_t begin, size_t end) {
    const size_t num_blocks = (args.width + kBlock - 1) / kBlock;
    for (size_t r = begin; r < end; ++r) {
        const float* x = args.x + r * args.stride;
        const Peak peak = row_peak(x, args.width);
        args.column[r] = -1;
        if (!(__builtin_fabsf(peak.value) < __builtin_inff())) continue;
        const MaskedRow row{x, args.width, nullptr};
        const auto read = [&](size_t block, float* part) { return row.masked(block, part); };
        const Race race{static_cast<uint32_t>(args.low[r]), static_cast<uint32_t>(args.high[r])};
        const int64_t* blocks = args.blocks ? args.blocks + r * num_blocks : nullptr;
        args.column[r] = race_row(race, args.token_hash, blocks, num_blocks, peak.column / kBlock, read);
    }
}

/// Returns the key of a row's noise: `row_keys` in moeserve/runner/sampling/sampler.py
/// (splitmix64).
inline uint64_t row_key(uint64_t seed, int64_t position) {
    uint64_t key = seed + static_cast<uint64_t>(position) * 0x9E3779B97F4A7C15u;
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9u;
    key = (key ^ key >> 27) * 0x94D049BB133111EBu;
    return key ^ key >> 31;
}

inline void draw(const DrawArgs& args, size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) {
        const int64_t slot = args.slots[r];
        const float* x = args.x + r * args.stride;
        const uint16_t traits = args.traits[slot];
        Peak peak = row_peak(x, args.width);
        args.peak[r] = peak.value;
        args.status[r] = peak.value - peak.value != 0 ? DrawArgs::kNotFinite : DrawArgs::kFine;
        args.column[r] = args.status[r] ? 0 : static_cast<int64_t>(peak.column);
        if (traits & args.not_here) args.column[r] = -1;
        if (args.status[r] || traits & args.not_here) continue;
        const int64_t mask = args.mask_of ? args.mask_of[r] : -1;
        MaskedRow row{x, args.width, mask < 0 ? nullptr : args.bits + static_cast<size_t>(mask) * args.words};
        if (row.bits) {
            peak = row.largest_allowed();
            args.column[r] = static_cast<int64_t>(peak.column);
            if (peak.value == -__builtin_inff()) {
                args.status[r] = DrawArgs::kNothingAllowed, args.column[r] = 0;
                continue;
            }
        }
        if (!(traits & args.random)) continue;
        row.peak = peak.value, row.temperature = args.temperature[slot];
        const uint64_t key = row_key(args.seed[slot], args.positions[r]);
        const Race race{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
        args.column[r] = race_row(race, args.token_hash, nullptr, (args.width + kBlock - 1) / kBlock,
                                  peak.column / kBlock, row);
    }
}

}  // namespace moeserve::MOESERVE_ISA
