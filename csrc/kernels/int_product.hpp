// Products of weights of few bits with rows rounded to int8, in sums of integers: without errors of their own, so that
// only the order of the floats matters, which is the same for every instruction set.
//
// A row has a scale per 32 inputs. An output is, over groups of inputs in ascending order from zero, one chain of fused
// multiply-adds: sum of the group times its scale, then less its min times the sum of the row there. The sum of a group is
// such a chain, too: an integer per 32 inputs (16 in groups of 16) times the row's scale.
#pragma once

#include "kernels/product_task.hpp"

namespace moeserve::MOESERVE_ISA {

constexpr int kIntRows = kWidth == 16 ? 8 : 4;  // of a tile

inline Packing packing_of(const ProductArgs& args) {
    return {args.weight_type, args.depth, args.columns, args.group, args.zero_points, args.ints};
}

/// Rows of a tile lie step by step, so that one pointer reaches all of them. A step has the bytes of each row, in the order of
/// the weights' words, then the rows' scales, and for each group two multiples of the sums of the bytes: what the sums of
/// products start with, and what meets mins (or zero points).
struct IntRow {
    static constexpr size_t kBlock = 32;  // inputs that have a scale

    static constexpr size_t step_floats(size_t groups) { return kBlock / 4 + 1 + 2 * groups; }
    static size_t floats(const ProductArgs& args) {
        return (args.depth + kBlock - 1) / kBlock * step_floats(packing_of(args).groups_per_step());
    }
};

/// A step of `rows` rows: where each value of row m is, in floats.
struct IntRowsAt {
    size_t rows, groups;

    constexpr size_t floats() const { return rows * IntRow::step_floats(groups); }
    constexpr size_t bytes(size_t m) const { return m * (IntRow::kBlock / 4); }
    constexpr size_t scale(size_t m) const { return bytes(rows) + m; }
    constexpr size_t start(size_t m, size_t group) const { return scale(rows) + group * rows + m; }
    constexpr size_t offset(size_t m, size_t group) const { return start(rows, groups - 1) + group * rows + m; }
};

/// What a format's bytes have too much.
inline int32_t bias_of(const ProductArgs& args) {
    if (args.ints.codes || args.ints.bits == 8) return kByteDots ? 128 : 0;
    return args.zero_points || args.ints.mins ? 0 : 1 << (args.ints.bits - 1);
}

/// Rounds row m of a tile: to nearest even multiples of 1/127 of the largest magnitude of 32 inputs. Blocks below 2^-100
/// become zeros; a block with infinity or NaN gets the scale NaN.
template <class E>
void round_row(const ProductArgs& args, const char* x, const IntRowsAt& at, size_t m, float* step) {
    typedef int8_t Bytes __attribute__((vector_size(16)));
    constexpr int n = 32 / kWidth;
    constexpr int32_t kInfinite = 0x7f800000;
    const int32_t bias = bias_of(args);
    for (size_t k = 0; k < args.depth; k += IntRow::kBlock, step += at.floats()) {
        f32 part[n];
        i32 sizes = all_words(0);
        for (int i = 0; i < n; ++i) {
            part[i] = load_at<E>(x, k + static_cast<size_t>(i * kWidth), args.depth);
            sizes = max(sizes, both(words(part[i]), all_words(0x7fffffff)));
        }
        const int32_t bits = largest(sizes);
        float size;
        memcpy(&size, &bits, sizeof size);
        const bool finite = bits < kInfinite, zeros = finite && size < 0x1p-100f;
        const float scale = zeros ? 0.0f : finite ? size / 127.0f : __builtin_nanf("");
        step[at.scale(m)] = scale;
        const f32 factor = all(zeros || !finite ? 0.0f : 127.0f / size);
        alignas(16) int8_t rounded[32];
        for (int i = 0; i < n; ++i) {
            part[i] = nearest(mul(part[i], factor));
            store_int8(rounded + i * kWidth, part[i]);
        }
        int32_t halves[2] = {};
        for (int half = 0; half < 2; ++half) {
            const f32* first = part + half * (n / 2);
            if (finite) halves[half] = static_cast<int32_t>(sum(kWidth == 16 ? *first : add(*first, first[n / 2 - 1])));
            Bytes a;
            memcpy(&a, rounded + 16 * half, sizeof a);
            a = __builtin_shufflevector(a, a, 1, 5, 0, 4, 3, 7, 2, 6, 9, 13, 8, 12, 11, 15, 10, 14);
            memcpy(step + at.bytes(m) + 4 * half, &a, sizeof a);
        }
        if (at.groups == 1) halves[0] += halves[1];
        for (size_t group = 0; group < at.groups; ++group) {
            const int32_t start = -bias * halves[group];
            memcpy(step + at.start(m, group), &start, sizeof start);
            step[at.offset(m, group)] = (args.zero_points ? 1.0f : scale) * static_cast<float>(halves[group]);
        }
    }
}

/// A format's `Words` yield words of four bytes, word<i>() of inputs [4 (first + i), 4 (first + i + 1)) of a step in the order
/// of a row's. kRun: so many products with a row's bytes can be added up as halves of words. kSigned: bytes are signed; with
/// dot products of bytes, of which one must be unsigned, words have 128 added. kNibbles: words are plain nibbles, lower ones
/// first.

/// Values of 2 to 6 bits, in planes.
template <int bits>
struct IntBits {
    static constexpr int kLow = bits < 4 ? 2 : 4, kHigh = bits - kLow;  // bits in each plane
    static constexpr int kRun = bits > 4 ? 8 >> (bits - 4) : 8;
    static constexpr bool kSigned = false, kNibbles = bits == 4;
    static constexpr size_t kBytes = kColumns * IntRow::kBlock * bits / 8;

    explicit IntBits(const ProductArgs&) {}

    /// Words [first, first + n) of a plane of `width` bits per byte. It stays in registers: weights are read once.
    template <int width, int first, int n>
    struct Plane {
        static constexpr int kPerWord = 8 / width, kFirst = first / kPerWord;
        static constexpr int kWords = (first + n - 1) / kPerWord + 1 - kFirst;
        i32 words[kWords];

        MOESERVE_INLINE Plane(const uint8_t* from, int v) {
            MOESERVE_EACH(i, kWords) { words[i] = load_once(from + ((kFirst + i) * kColumns + v * kWidth) * 4); });
        }

        /// Word first + i, its bits from bit `place` of each byte on.
        template <int i, int place>
        MOESERVE_INLINE i32 at() const {
            constexpr int j = first + i, up = place - j % kPerWord * width;
            i32 word = words[j / kPerWord - kFirst];
            if constexpr (up > 0) word = left<up>(word);
            if constexpr (up < 0) word = right<-up>(word);
            return both(word, all_words((((1 << width) - 1) << place) * 0x01010101));
        }
    };
    struct NoPlane {
        MOESERVE_INLINE NoPlane(const uint8_t*, int) {}
    };

    template <int first, int n>
    struct Words {
        Plane<kLow, first, n> low;
        std::conditional_t<kHigh == 0, NoPlane, Plane<kHigh ? kHigh : 1, first, n>> high;

        MOESERVE_INLINE Words(const IntBits&, const uint8_t* step, int v)
            : low(step, v), high(step + kColumns * 4 * kLow, v) {}

        template <int i>
        MOESERVE_INLINE i32 word() const {
            const i32 lower = low.template at<i, 0>();
            if constexpr (kHigh == 0) {
                return lower;
            } else {
                return either(lower, high.template at<i, kLow>());
            }
        }
    };
};

struct IntBytes {
    static constexpr int kRun = 1;
    static constexpr bool kSigned = true, kNibbles = false;
    static constexpr size_t kBytes = kColumns * IntRow::kBlock;

    explicit IntBytes(const ProductArgs&) {}

    template <int first, int n>
    struct Words {
        const uint8_t* from;

        MOESERVE_INLINE Words(const IntBytes&, const uint8_t* step, int v)
            : from(step + (first * kColumns + v * kWidth) * 4) {}

        template <int i>
        MOESERVE_INLINE i32 word() const {
            const i32 bytes = load_words(from + i * kColumns * 4);
            return kByteDots ? differing(bytes, all_words(0x80808080)) : bytes;
        }
    };
};

/// Values of 3 or 4 bits that stand for the numbers of a table.
template <int bits>
struct IntCodes : IntBits<bits> {
    static constexpr int kRun = 1;
    static constexpr bool kSigned = true, kNibbles = false;
    i32 table;

    explicit IntCodes(const ProductArgs& args) : IntBits<bits>(args), table(load_table(args.ints.table.data())) {
        if (kByteDots) table = differing(table, all_words(0x80808080));
    }

    template <int first, int n>
    struct Words {
        typename IntBits<bits>::template Words<first, n> codes;
        i32 table;

        MOESERVE_INLINE Words(const IntCodes& format, const uint8_t* step, int v)
            : codes(format, step, v), table(format.table) {}

        template <int i>
        MOESERVE_INLINE i32 word() const {
            return look_up_bytes(table, codes.template word<i>());
        }
    };
};

/// Adds the products of group `part` of a step, one of `parts`, to the sums of M rows.
template <int M, int parts, int part, class F>
MOESERVE_INLINE void add_step(const F& format, const uint8_t* step, int v, const float* rows, i32 (&sums)[M]) {
    constexpr int n = IntRow::kBlock / 4 / parts, first = part * n;  // words
    constexpr IntRowsAt at{M, parts};
    const auto word = [&](int m, int j) __attribute__((always_inline)) {
        uint32_t bytes;
        memcpy(&bytes, rows + at.bytes(static_cast<size_t>(m)) + j, sizeof bytes);
        return all_words(bytes);
    };
    if constexpr (kByteDots && F::kNibbles && M <= 2) {  // upper nibbles stay where they are: their sums are shifted
        i32 upper[M];
        MOESERVE_EACH(m, M) { upper[m] = all_words(0); });
        MOESERVE_EACH_CONSTANT(i, n / 2) {
            constexpr int j = first + 2 * i;
            const i32 w = load_words(step + (j / 2 * kColumns + v * kWidth) * 4);
            const i32 low = both(w, all_words(0x0f0f0f0f)), high = both(w, all_words(0xf0f0f0f0));
            MOESERVE_EACH(m, M) {
                sums[m] = dot_bytes(sums[m], low, word(m, j));
                upper[m] = dot_bytes(upper[m], high, word(m, j + 1));
            });
        });
        MOESERVE_EACH(m, M) { sums[m] = add(sums[m], right_signed<4>(upper[m])); });
        return;
    }
    i32 halves[M];
    const typename F::template Words<first, n> words(format, step, v);
    MOESERVE_EACH_CONSTANT(i, n) {
        const i32 w = words.template word<i>();
        const i32 sizes = F::kSigned && !kByteDots ? byte_sizes(w) : w;
        MOESERVE_EACH(m, M) {
            const i32 bytes = word(m, first + i);
            if constexpr (kByteDots) {
                sums[m] = dot_bytes(sums[m], w, bytes);
            } else {
                const i32 pairs = F::kSigned ? byte_pairs(sizes, byte_signs(bytes, w)) : byte_pairs(w, bytes);
                halves[m] = i % F::kRun ? add_halves(halves[m], pairs) : pairs;
                if constexpr (i % F::kRun == F::kRun - 1 || i == n - 1) sums[m] = add(sums[m], sum_halves(halves[m]));
            }
        });
    });
}

/// 16 scales (or mins) of a group from its head.
MOESERVE_INLINE f32 int_scale(const ProductArgs& args, const uint8_t* head, int v) {
    if (args.ints.scales == Type::fp32) return load(reinterpret_cast<const float*>(head) + v * kWidth);
    return args.ints.scales == Type::fp16 ? load_fp16(head + v * kWidth * 2) : load_bf16(head + v * kWidth * 2);
}

/// c [M, 16] of one block. rows: their first step. parts: groups of a step, 2 of 16 inputs or (a part of) one. supers: a
/// scale (and min) is a byte times a factor of 256 inputs.
template <class F, int parts, bool supers, int M>
void int_tile(const ProductArgs& args, const float* rows, const uint8_t* w, float* c) {
    constexpr size_t kAhead = 8192;  // bytes; 2048 come too late, from 4096 on it hardly matters
    constexpr size_t kStep = IntRow::kBlock;
    constexpr bool kEnds = supers || parts == 2;  // groups end with each step
    constexpr IntRowsAt at{M, parts};
    const F format(args);
    const Packing packing = packing_of(args);
    const size_t depth = (args.depth + kStep - 1) / kStep * kStep;
    const size_t group = kEnds ? kStep : args.group ? args.group : depth, head_bytes = packing.head_bytes();
    const bool zeros = !supers && args.zero_points, mins = args.ints.mins;
    const size_t second = head_bytes / (mins || zeros ? 2 : 1);  // where mins or zero points begin in a head
    const f32 factor = all(args.ints.factor);
    f32 totals[M][kVectors], units[kVectors], min_units[kVectors];
    MOESERVE_EACH(m, M) { for (f32& total : totals[m]) total = zero(); });
    for (int v = 0; v < kVectors; ++v) units[v] = min_units[v] = zero();
    for (size_t k = 0; k < depth;) {
        if (supers && k % 256 == 0) {
            MOESERVE_EACH(v, kVectors) {
                units[v] = mul(load_fp16(w + v * kWidth * 2), factor);
                if (mins) min_units[v] = load_fp16(w + (kColumns + v * kWidth) * 2);
            });
            w += packing.super_bytes();
        }
        const uint8_t* const heads = w;
        const size_t end = k + group < depth ? k + group : depth;
        f32 sums[M][kVectors];
        MOESERVE_EACH(m, M) { for (f32& sum : sums[m]) sum = zero(); });
        const auto end_group = [&](const uint8_t* head, int v, const float* offsets) __attribute__((always_inline)) {
            const auto scale_at = [&](const uint8_t* at, f32 unit) __attribute__((always_inline)) {
                if (!supers) return int_scale(args, at, v);
                return mul(unit, mins ? load_bytes(at + v * kWidth) : load_int8(at + v * kWidth));
            };
            const f32 scale = supers ? scale_at(head, units[v]) : mul(scale_at(head, units[v]), factor);
            MOESERVE_EACH(m, M) { totals[m][v] = fma(sums[m][v], scale, totals[m][v]); });
            if (mins) {
                const f32 min = scale_at(head + second, min_units[v]);
                MOESERVE_EACH(m, M) { totals[m][v] = fnma(min, all(offsets + m), totals[m][v]); });
            }
        };
        w += parts * head_bytes;
        do {
            for (size_t i = 0; i < F::kBytes + 32; i += 64) __builtin_prefetch(w + kAhead + i, 0, 2);  // 32: the next head
            MOESERVE_EACH(v, kVectors) {
                MOESERVE_EACH_CONSTANT(part, parts) {
                    const float *starts = rows + at.start(0, part), *offsets = rows + at.offset(0, part);
                    i32 dots[M];
                    MOESERVE_EACH(m, M) { dots[m] = words(all(starts + m)); });
                    add_step<M, parts, part>(format, w, v, rows, dots);
                    MOESERVE_EACH(m, M) {
                        f32 sum = to_float(dots[m]);
                        if (zeros) {
                            const f32 zero = load(reinterpret_cast<const float*>(heads + part * head_bytes + second) + v * kWidth);
                            sum = fnma(zero, all(offsets + m), sum);
                        }
                        sums[m][v] = fma(sum, all(rows + at.scale(0) + m), kEnds ? zero() : sums[m][v]);
                    });
                    if constexpr (kEnds) end_group(heads + part * head_bytes, v, offsets);
                });
            });
            k += kStep, w += F::kBytes, rows += at.floats();
        } while (!kEnds && k < end);
        if constexpr (!kEnds) {
            MOESERVE_EACH(v, kVectors) { end_group(heads, v, rows - at.floats() + at.offset(0, 0)); });
        }
    }
    MOESERVE_EACH(m, M) {
        for (int v = 0; v < kVectors; ++v) store(c + m * kSumsStride + v * kWidth, totals[m][v]);
    });
}

/// Calls body(first, rows) for the tiles of `count` rows.
template <class Body>
MOESERVE_INLINE void each_int_tile(size_t count, const Body& body) {
    const size_t num_tiles = (count + kIntRows - 1) / kIntRows;
    for (size_t t = 0; t < num_tiles; ++t) {
        const size_t first = count * t / num_tiles;
        body(first, count * (t + 1) / num_tiles - first);
    }
}

/// rows: those of a tile begin `stride` floats for each row before it.
template <class F, int parts, bool supers>
void int_tiles(const ProductArgs& args, const float* rows, size_t stride, size_t count, const uint8_t* w, float* c) {
    each_int_tile(count, [&](size_t first, size_t most) {
        MOESERVE_EACH_CONSTANT(m, kIntRows) {
            if (most == m + 1) int_tile<F, parts, supers, m + 1>(args, rows + first * stride, w, c + first * kSumsStride);
        });
    });
}

using IntTiles = void (*)(const ProductArgs&, const float*, size_t, size_t, const uint8_t*, float*);

/// The kernel of a form. `check_ints` (bindings/products.cpp) refuses all others.
inline IntTiles int_tiles_of(const ProductArgs& args) {
    const bool halves = args.group == 16, supers = args.ints.supers;
    if (args.ints.codes) {
        if (args.ints.bits == 3) return halves ? int_tiles<IntCodes<3>, 2, true> : int_tiles<IntCodes<3>, 1, true>;
        if (halves) return int_tiles<IntCodes<4>, 2, false>;
        return supers ? int_tiles<IntCodes<4>, 1, true> : int_tiles<IntCodes<4>, 1, false>;
    }
    switch (args.ints.bits) {
        case 2: return supers ? int_tiles<IntBits<2>, 2, true> : int_tiles<IntBits<2>, 1, false>;
        case 3: return int_tiles<IntBits<3>, 2, true>;
        case 4:
            if (halves) return int_tiles<IntBits<4>, 2, false>;
            return supers ? int_tiles<IntBits<4>, 1, true> : int_tiles<IntBits<4>, 1, false>;
        case 5: return supers ? int_tiles<IntBits<5>, 1, true> : int_tiles<IntBits<5>, 1, false>;
        case 6: return int_tiles<IntBits<6>, 2, true>;
        default: return halves ? int_tiles<IntBytes, 2, false> : int_tiles<IntBytes, 1, false>;
    }
}

/// c [rows, blocks * 16].
inline void int_sums(const ProductArgs& args, const float* rows, size_t stride, size_t count, const uint8_t* w,
                     size_t blocks, float* c) {
    const IntTiles tiles = int_tiles_of(args);
    for (; blocks; --blocks, w += args.block_bytes, c += kColumns) tiles(args, rows, stride, count, w, c);
}

/// Rows rounded to int8, each block of 32 inputs with a scale.
template <class E>
struct IntRows {
    static size_t row_floats(const ProductArgs& args) { return IntRow::floats(args); }
    static void load(const ProductArgs& args, const Part& part, const Workspace& space) {
        each_int_tile(part.count, [&](size_t first, size_t most) {
            const IntRowsAt at{most, packing_of(args).groups_per_step()};
            for (size_t m = 0; m < most; ++m) {
                round_row<E>(args, row_of<E>(args, part, first + m), at, m, space.a + first * space.stride);
            }
        });
    }
    static void sums(const ProductArgs& args, const Workspace& space, size_t rows, const uint8_t* w, size_t blocks) {
        int_sums(args, space.a, space.stride, rows, w, blocks, space.c);
    }
};

/// For arguments whose `ints` are on.
void int_product(const ProductArgs& args, size_t begin, size_t end, int worker) {
    run_tasks_of_type<IntRows>(args, begin, end, worker);
}

}  // namespace moeserve::MOESERVE_ISA
