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

/// A row: its bytes in the order of the weights' words, scales, and for each step, [depth / 32 or 16], two multiples of the
/// sum of its bytes: what the sums of products start with, and what meets mins (or zero points).
struct IntRow {
    static constexpr size_t kBlock = 32;  // inputs that have a scale
    const uint8_t* bytes;
    const float* scales;
    const uint32_t* starts;
    const float* offsets;

    static size_t blocks(const ProductArgs& args) { return (args.depth + kBlock - 1) / kBlock; }
    static size_t floats(const ProductArgs& args) { return blocks(args) * (kBlock / 4 + 1 + 2 + 2); }
    IntRow(const ProductArgs& args, const float* row)
        : bytes(reinterpret_cast<const uint8_t*>(row)),
          scales(row + blocks(args) * (kBlock / 4)),
          starts(reinterpret_cast<const uint32_t*>(scales + blocks(args))),
          offsets(scales + 3 * blocks(args)) {}
};

/// What a format's bytes have too much.
inline int32_t bias_of(const ProductArgs& args) {
    if (args.ints.codes || args.ints.bits == 8) return kByteDots ? 128 : 0;
    return args.zero_points || args.ints.mins ? 0 : 1 << (args.ints.bits - 1);
}

/// Rounds a row: to nearest even multiples of 1/127 of the largest magnitude of 32 inputs. Blocks below 2^-100 become
/// zeros; a block with infinity or NaN gets the scale NaN.
template <class E>
void round_row(const ProductArgs& args, const char* x, float* row) {
    typedef int8_t Bytes __attribute__((vector_size(16)));
    constexpr int n = 32 / kWidth;
    constexpr int32_t kInfinite = 0x7f800000;
    const IntRow to(args, row);
    int8_t* bytes = reinterpret_cast<int8_t*>(row);
    float* scales = const_cast<float*>(to.scales);
    uint32_t* starts = const_cast<uint32_t*>(to.starts);
    float* offsets = const_cast<float*>(to.offsets);
    const int32_t bias = bias_of(args);
    for (size_t k = 0; k < args.depth; k += IntRow::kBlock, bytes += IntRow::kBlock) {
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
        *scales++ = scale;
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
            memcpy(bytes + 16 * half, &a, sizeof a);
        }
        if (args.group != 16) halves[0] += halves[1];
        for (int i = 0; i < (args.group == 16 ? 2 : 1); ++i) {
            *starts++ = static_cast<uint32_t>(-bias * halves[i]);
            *offsets++ = (args.zero_points ? 1.0f : scale) * static_cast<float>(halves[i]);
        }
    }
}

/// A format yields words of four bytes: of inputs [4 j, 4 j + 4) of a step in the order of a row's, for vector `v` of a
/// block. kRun: so many products with a row's bytes can be added up as halves of words. kNibbles: words are plain nibbles,
/// lower ones first.

/// Values of 2 to 6 bits, in planes.
template <int bits>
struct IntBits {
    static constexpr int kLow = bits < 4 ? 2 : 4, kHigh = bits - kLow;  // bits in each plane
    static constexpr int kRun = bits > 4 ? 8 >> (bits - 4) : 8;
    static constexpr bool kSigned = false, kNibbles = bits == 4;
    static constexpr size_t kBytes = kColumns * IntRow::kBlock * bits / 8;

    explicit IntBits(const ProductArgs&) {}

    /// Word `j` of a plane of `width` bits per byte, which go to bit `place` of each byte.
    template <int j, int width, int place>
    static MOESERVE_INLINE i32 plane(const uint8_t* from, int v) {
        constexpr int per_word = 8 / width, up = place - j % per_word * width;
        i32 word = load_words(from + (j / per_word * kColumns + v * kWidth) * 4);
        if constexpr (up > 0) word = left<up>(word);
        if constexpr (up < 0) word = right<-up>(word);
        return both(word, all_words((((1 << width) - 1) << place) * 0x01010101));
    }

    template <int j>
    MOESERVE_INLINE i32 bytes(const uint8_t* step, int v) const {
        const i32 low = plane<j, kLow, 0>(step, v);
        if constexpr (kHigh == 0) {
            return low;
        } else {
            return either(low, plane<j, kHigh, kLow>(step + kColumns * 4 * kLow, v));
        }
    }
};

struct IntBytes {
    static constexpr int kRun = 1;
    static constexpr bool kSigned = true, kNibbles = false;
    static constexpr size_t kBytes = kColumns * IntRow::kBlock;

    explicit IntBytes(const ProductArgs&) {}

    template <int j>
    MOESERVE_INLINE i32 bytes(const uint8_t* step, int v) const {
        return load_words(step + (j * kColumns + v * kWidth) * 4);
    }
};

/// Values of 3 or 4 bits that stand for the numbers of a table.
template <int bits>
struct IntCodes : IntBits<bits> {
    static constexpr int kRun = 1;
    static constexpr bool kSigned = true, kNibbles = false;
    const int8_t* table;

    explicit IntCodes(const ProductArgs& args) : IntBits<bits>(args), table(args.ints.table.data()) {}

    template <int j>
    MOESERVE_INLINE i32 bytes(const uint8_t* step, int v) const {
        return look_up_bytes(table, IntBits<bits>::template bytes<j>(step, v));
    }
};

/// Adds the products of part `part` of a step, one of `parts` equal ones, to the sums of M rows.
template <int M, int parts, int part, class F>
MOESERVE_INLINE void add_step(const F& format, const uint8_t* step, int v, const uint8_t* x, size_t stride, i32 (&sums)[M]) {
    constexpr int n = IntRow::kBlock / 4 / parts, first = part * n;  // words
    const auto word = [&](int m, int j) __attribute__((always_inline)) {
        uint32_t bytes;
        memcpy(&bytes, x + static_cast<size_t>(m) * stride + 4 * j, sizeof bytes);
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
    MOESERVE_EACH_CONSTANT(i, n) {
        i32 w = format.template bytes<first + i>(step, v), sizes = w;
        if constexpr (F::kSigned) {
            if constexpr (kByteDots) {
                w = differing(w, all_words(0x80808080));
            } else {
                sizes = byte_sizes(w);
            }
        }
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

/// c [M, 16] of one block. rows: of `stride` floats. parts: groups of a step, 2 of 16 inputs or (a part of) one. supers: a
/// scale (and min) is a byte times a factor of 256 inputs.
template <class F, int parts, bool supers, int M>
void int_tile(const ProductArgs& args, const float* rows, size_t stride, const uint8_t* w, float* c) {
    constexpr size_t kAhead = 8192;  // bytes; 2048 come too late, from 4096 on it hardly matters
    constexpr size_t kStep = IntRow::kBlock;
    constexpr bool kEnds = supers || parts == 2;  // groups end with each step
    const F format(args);
    const Packing packing = packing_of(args);
    const IntRow row(args, rows);
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
        const auto end_group = [&](const uint8_t* head, int v, size_t block) __attribute__((always_inline)) {
            const auto scale_at = [&](const uint8_t* at, f32 unit) __attribute__((always_inline)) {
                if (!supers) return int_scale(args, at, v);
                return mul(unit, mins ? load_bytes(at + v * kWidth) : load_int8(at + v * kWidth));
            };
            const f32 scale = supers ? scale_at(head, units[v]) : mul(scale_at(head, units[v]), factor);
            MOESERVE_EACH(m, M) { totals[m][v] = fma(sums[m][v], scale, totals[m][v]); });
            if (mins) {
                const f32 min = scale_at(head + second, min_units[v]);
                MOESERVE_EACH(m, M) { totals[m][v] = fnma(min, all(row.offsets + m * stride + block), totals[m][v]); });
            }
        };
        w += parts * head_bytes;
        do {
            for (size_t i = 0; i < F::kBytes + 32; i += 64) __builtin_prefetch(w + kAhead + i, 0, 2);  // 32: the next head
            MOESERVE_EACH(v, kVectors) {
                MOESERVE_EACH_CONSTANT(part, parts) {
                    const size_t block = k / kStep * parts + part;
                    i32 dots[M];
                    MOESERVE_EACH(m, M) { dots[m] = all_words(row.starts[m * stride + block]); });
                    add_step<M, parts, part>(format, w, v, row.bytes + k, stride * sizeof(float), dots);
                    MOESERVE_EACH(m, M) {
                        f32 sum = to_float(dots[m]);
                        if (zeros) {
                            const f32 zero = load(reinterpret_cast<const float*>(heads + part * head_bytes + second) + v * kWidth);
                            sum = fnma(zero, all(row.offsets + m * stride + block), sum);
                        }
                        sums[m][v] = fma(sum, all(row.scales + m * stride + k / kStep), kEnds ? zero() : sums[m][v]);
                    });
                    if constexpr (kEnds) end_group(heads + part * head_bytes, v, block);
                });
            });
            k += kStep, w += F::kBytes;
        } while (!kEnds && k < end);
        if constexpr (!kEnds) {
            MOESERVE_EACH(v, kVectors) { end_group(heads, v, (k - kStep) / kStep); });
        }
    }
    MOESERVE_EACH(m, M) {
        for (int v = 0; v < kVectors; ++v) store(c + m * kSumsStride + v * kWidth, totals[m][v]);
    });
}

template <class F, int parts, bool supers>
void int_tiles(const ProductArgs& args, const float* rows, size_t stride, size_t count, const uint8_t* w, float* c) {
    const size_t num_tiles = (count + kIntRows - 1) / kIntRows;
    for (size_t t = 0; t < num_tiles; ++t) {
        const size_t first = count * t / num_tiles, most = count * (t + 1) / num_tiles - first;
        MOESERVE_EACH_CONSTANT(m, kIntRows) {
            if (most == m + 1) {
                int_tile<F, parts, supers, m + 1>(args, rows + first * stride, stride, w, c + first * kSumsStride);
            }
        });
    }
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
        for (size_t r = 0; r < part.count; ++r) round_row<E>(args, row_of<E>(args, part, r), space.a + r * space.stride);
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
