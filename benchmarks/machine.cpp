// What this machine can do at this moment: bytes read per second, and operations per second by dot products of bf16
// pairs or by fp32 multiply-adds, whichever is faster (the latter on Intel's cores; ../docs/decisions/0031), best of some tries.
//     c++ -O3 -march=native -pthread machine.cpp -o machine && ./machine 2        (2 threads) -> {"read_gb_s": 31.4, "gflop_s": 330.1}

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;

/// Best rate of `tries`, in units of 1e9 per second: all threads do their `work`, `amount` together.
double rate(int threads, int tries, double amount, const std::function<void(int)>& work) {
    double best = 0;
    for (int t = 0; t < tries; ++t) {
        const auto begun = Clock::now();
        std::vector<std::thread> others;
        for (int i = 1; i < threads; ++i) others.emplace_back(work, i);
        work(0);
        for (auto& other : others) other.join();
        const double seconds = std::chrono::duration<double>(Clock::now() - begun).count();
        best = amount / seconds / 1e9 > best ? amount / seconds / 1e9 : best;
    }
    return best;
}

volatile uint64_t kept_sum;
volatile float kept_dot;

constexpr size_t kAhead = 1024;  // words: what is further is asked for, as kernels do

void read(const uint64_t* words, size_t count) {
    uint64_t sums[64] = {};  // independent, so that the compiler keeps them in vectors
    for (size_t i = 0; i + 64 <= count; i += 64) {
        for (size_t line = 0; line < 64; line += 8) __builtin_prefetch(words + i + kAhead + line, 0, 2);
        for (size_t lane = 0; lane < 64; ++lane) sums[lane] ^= words[i + lane];
    }
    for (uint64_t sum : sums) kept_sum = kept_sum + sum;
}

constexpr size_t kLargePage = 2 << 20;
constexpr int kChains = 12;  // more than latency times units of any processor so far, and they fit in 16 registers

#ifdef __AVX512BF16__
constexpr double kFlopsPerDots = kChains * 64;
void dots(long steps) {
    const auto x = (__m512bh)_mm512_set1_epi32(0x3f803f80), y = (__m512bh)_mm512_set1_epi32(0x3c003c00);
    __m512 sums[kChains];
    for (auto& sum : sums) sum = _mm512_set1_ps(kept_dot);  // volatile: the compiler must not take all chains for one
    for (long i = 0; i < steps; ++i) {
        for (auto& sum : sums) sum = _mm512_dpbf16_ps(sum, x, y);
    }
    for (const auto& sum : sums) kept_dot = _mm512_cvtss_f32(sum);
}
#endif

#ifdef __AVX512F__
constexpr double kFlopsPerAdds = kChains * 32;
void multiply_adds(long steps) {
    const auto x = _mm512_set1_ps(0.5f), y = _mm512_set1_ps(0.0078125f);
    __m512 sums[kChains];
    for (auto& sum : sums) sum = _mm512_set1_ps(kept_dot);
    for (long i = 0; i < steps; ++i) {
        for (auto& sum : sums) sum = _mm512_fmadd_ps(sum, x, y);
    }
    for (const auto& sum : sums) kept_dot = _mm512_cvtss_f32(sum);
}
#else
constexpr int kLanes = 8;
constexpr double kFlopsPerAdds = kChains * kLanes * 2;
void multiply_adds(long steps) {
    float sums[kChains][kLanes];
    for (auto& chain : sums) {
        for (float& sum : chain) sum = kept_dot;
    }
    const float x = 0.5f, y = 0.0078125f;
    for (long i = 0; i < steps; ++i) {
        for (auto& chain : sums) {
            for (float& sum : chain) sum = __builtin_fmaf(sum, x, y);
        }
    }
    for (const auto& chain : sums) {
        for (float sum : chain) kept_dot = sum;
    }
}
#endif

}  // namespace

int main(int count, char** words) {
    const int threads = count > 1 ? std::atoi(words[1]) : 1;
    if (threads < 1) return std::fprintf(stderr, "usage: machine THREADS\n"), 2;
    const size_t share = (size_t{512} << 20) / sizeof(uint64_t) / threads;  // more than caches hold
    const size_t bytes = share * threads * sizeof(uint64_t);
    auto* memory = static_cast<uint64_t*>(std::aligned_alloc(kLargePage, (bytes + kLargePage - 1) / kLargePage * kLargePage));
#ifdef __linux__
    madvise(memory, bytes, MADV_HUGEPAGE);  // as the weights are
#endif
    std::fill_n(memory, share * threads, 1);
    const double read_rate = rate(threads, 8, double(bytes), [&](int i) { read(memory + share * i, share); });
    constexpr long kSteps = 5'000'000;
    double flop_rate = rate(threads, 4, kFlopsPerAdds * kSteps * threads, [](int) { multiply_adds(kSteps); });
#ifdef __AVX512BF16__
    flop_rate = std::max(flop_rate, rate(threads, 4, kFlopsPerDots * kSteps * threads, [](int) { dots(kSteps); }));
#endif
    std::printf("{\"read_gb_s\": %.1f, \"gflop_s\": %.1f}\n", read_rate, flop_rate);
}
