// For tests of kernels: buffers that end where their contents end, element types in plain C++, and sums in the kernels'
// order. A test includes the families that it is about after this, compiled for what the compiler's flags allow.
#pragma once

#define MOESERVE_ISA tested
#if defined(__AVX512F__)
#include "kernels/vec_avx512.hpp"
#elif defined(__aarch64__)
#include "kernels/vec_neon.hpp"
#else
#include "kernels/vec_avx2.hpp"
#endif

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/math.hpp"
#include "kernels/table.hpp"
#include "tests/check.hpp"

namespace moeserve {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();

/// `count` elements that end with their memory, after `offset` others: all bits set, which is NaN in every type.
template <class T>
class Exact {
  public:
    explicit Exact(size_t count, size_t offset = 0) : count_(count), memory_(new T[count + offset]), data_(memory_ + offset) {
        wipe();
    }
    Exact(const Exact& other) : Exact(other.count_, other.data_ - other.memory_) {
        std::memcpy(data_, other.data_, count_ * sizeof(T));
    }
    Exact& operator=(const Exact&) = delete;
    ~Exact() { delete[] memory_; }

    void wipe() { std::memset(static_cast<void*>(memory_), 0xff, (count_ + (data_ - memory_)) * sizeof(T)); }
    size_t size() const { return count_; }
    T* data() { return data_; }
    const T* data() const { return data_; }
    T& operator[](size_t i) { return data_[i]; }
    const T& operator[](size_t i) const { return data_[i]; }
    bool operator==(const Exact& other) const {
        return count_ == other.count_ && std::memcmp(data_, other.data_, count_ * sizeof(T)) == 0;
    }

  private:
    size_t count_;
    T *memory_, *data_;
};

inline thread_local std::mt19937 rng(5);
inline size_t below(size_t limit) { return rng() % limit; }
inline float normal() { return std::normal_distribution<float>()(rng); }

/// A brain float: the upper half of a float.
struct Bf16 {
    uint16_t bits;
    Bf16() = default;
    Bf16(float x) {
        uint32_t word;
        std::memcpy(&word, &x, 4);
        bits = x != x ? 0x7fc0 : static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
    }
    operator float() const {
        const uint32_t word = static_cast<uint32_t>(bits) << 16;
        float x;
        std::memcpy(&x, &word, 4);
        return x;
    }
};
#if defined(__aarch64__)
using Fp16 = __fp16;
#else
using Fp16 = _Float16;
#endif

template <class T>
constexpr Type kType = Type::fp32;
template <>
constexpr Type kType<Bf16> = Type::bf16;
template <>
constexpr Type kType<Fp16> = Type::fp16;
template <>
constexpr Type kType<int8_t> = Type::int8;

/// Elements of a head in a cache of T.
template <class T>
constexpr size_t stored_width(size_t dim) {
    return dim + (kType<T> == Type::int8 ? sizeof(float) : 0);
}

template <class T>
Exact<T> random(size_t count, size_t offset = 0, float scale = 1.0f) {
    Exact<T> x(count, offset);
    for (size_t i = 0; i < count; ++i) x[i] = static_cast<T>(normal() * scale);
    return x;
}

/// The same bits, or both not a number.
template <class T>
bool same(const Exact<T>& a, const Exact<T>& b) {
    for (size_t i = 0; i < a.size(); ++i) {
        const float x = static_cast<float>(a[i]), y = static_cast<float>(b[i]);
        if (std::memcmp(&a[i], &b[i], sizeof(T)) != 0 && !(x != x && y != y)) return false;
    }
    return a.size() == b.size();
}

inline float exp_of(float x) {
    return tested::first(tested::exp(tested::all(x)));
}
inline float silu_of(float x) { return x / (1.0f + exp_of(0.0f - x)); }

/// What `Activation` says.
inline float gated_of(const Activation& a, float gate, float up) {
    if (a.kind == Activation::Kind::swiglu) return silu_of(gate) * up;
    const auto most = [](float x, float limit) { return x > limit ? limit : x; };
    const float x = most(gate, a.gate_limit);
    const float factor = a.kind == Activation::Kind::silu ? a.alpha : std::fma(x * x, 0.0713548162726f, 1.5957691216057f);
    const float y = most(x / (1.0f + exp_of(0.0f - factor * x)), a.act_limit), z = most(up, a.up_limit);
    return y * ((z < -a.up_limit ? -a.up_limit : z) + a.up_shift);
}

inline const Activation kActivations[] = {
    {},
    {Activation::Kind::silu, 1.702f, 7.0f, Activation::kNone, 7.0f, 1.0f},
    {Activation::Kind::silu, 1.0f, Activation::kNone, 0.5f, 0.25f, 0.0f},
    {.kind = Activation::Kind::gelu_tanh},
};

/// 32 sums side by side, halves onto halves.
inline float folded(float (&sums)[32]) {
    for (int half = 16; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    return sums[0];
}

}  // namespace moeserve
