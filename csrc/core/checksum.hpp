// A checksum that is as fast as memory can be read, for weights in the packed cache on disk.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeserve {

/// Any change within one aligned 8-byte word changes the checksum for certain, other changes almost
/// certainly. It is not cryptographic.
uint64_t checksum(const uint8_t* bytes, size_t size);

}  // namespace moeserve
