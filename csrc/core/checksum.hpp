// A checksum as fast as memory can be read, for weights that come back from a disk.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeserve {

/// Damage within one aligned word of 8 bytes always changes it, any other damage all but certainly. Not against forgery.
uint64_t checksum(const uint8_t* bytes, size_t size);

}  // namespace moeserve
