// Functions of vectors. The bits of a lane do not depend on other lanes. Include after a vec_*.hpp.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include <cstdint>

namespace moeserve::MOESERVE_ISA {

/// e^x, within 2 units in the last place; exactly 0 from -104 down (-infinity included), infinity
/// above 88.7, NaN for NaN. Range reduction by ln 2 in two parts, then a polynomial of degree 6
/// (Cephes' expf, Moshier 1992).
MOESERVE_INLINE f32 exp(f32 x) {
    x = max(all(-104.0f), min(all(89.0f), x));  // these two return their second operand if one is NaN
    const f32 n = nearest(mul(x, all(1.44269504088896341f)));
    f32 r = fnma(n, all(0.693359375f), x);
    r = fnma(n, all(-2.12194440e-4f), r);
    f32 p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), all(1.0f));
    return times_power_of_two(p, n);
}

/// x / (1 + e^-x).
MOESERVE_INLINE f32 silu(f32 x) { return div(x, add(all(1.0f), exp(sub(zero(), x)))); }

/// While this object lives, the thread treats denormals as 0, as operands and as results. States
/// that decay fast have many denormals, and arithmetic with one takes a hundred cycles.
class FlushSubnormals {
  public:
    FlushSubnormals() : saved_(mode()) { set_mode(saved_ | kFlush); }
    ~FlushSubnormals() { set_mode(saved_); }
    FlushSubnormals(const FlushSubnormals&) = delete;
    FlushSubnormals& operator=(const FlushSubnormals&) = delete;

  private:
#if defined(__x86_64__)
    static constexpr uint64_t kFlush = 0x8040;  // bits of MXCSR: results, operands
    static uint64_t mode() { return _mm_getcsr(); }
    static void set_mode(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#else
    static constexpr uint64_t kFlush = 1 << 24;  // a bit of FPCR: results and operands
    static uint64_t mode() {
        uint64_t mode;
        asm volatile("mrs %0, fpcr" : "=r"(mode));
        return mode;
    }
    static void set_mode(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#endif
    const uint64_t saved_;
};

}  // namespace moeserve::MOESERVE_ISA
