#include "core/checksum.hpp"

#include <bit>
#include <cstring>

namespace moeserve {
namespace {

constexpr size_t kLanes = 8;  // independent multiplications, so that they overlap
constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;

/// A bijection in each argument, so that a difference is never lost. The rotation brings high bits
/// back down.
uint64_t mix(uint64_t sum, uint64_t word) { return std::rotl(sum ^ word, 29) * kOdd; }

}  // namespace

uint64_t checksum(const uint8_t* bytes, size_t size) {
    uint64_t sums[kLanes], words[kLanes];
    for (size_t i = 0; i < kLanes; ++i) sums[i] = kOdd * (i + 1);
    const auto take_words = [&] {
        for (size_t i = 0; i < kLanes; ++i) sums[i] = mix(sums[i], words[i]);
    };
    const size_t rest = size % sizeof words;
    for (const uint8_t* end = bytes + size - rest; bytes < end; bytes += sizeof words) {
        std::memcpy(words, bytes, sizeof words);
        take_words();
    }
    if (rest) {
        std::memset(words, 0, sizeof words);
        std::memcpy(words, bytes, rest);
        take_words();
    }
    uint64_t total = mix(kOdd, size);
    for (const uint64_t sum : sums) total = mix(total, sum);
    return total;
}

}  // namespace moeserve
