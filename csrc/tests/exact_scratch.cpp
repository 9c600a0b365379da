// As pool/scratch.cpp, but with not a byte more than asked for, and all bits set at first.
#include "pool/scratch.hpp"

#include <vector>

namespace moeserve {

uint8_t* scratch(Scratch name, size_t bytes) {
    thread_local std::vector<uint8_t> buffers[static_cast<int>(Scratch::count)];
    std::vector<uint8_t>& buffer = buffers[static_cast<int>(name)];
    if (buffer.size() != bytes) buffer = std::vector<uint8_t>(bytes, 0xff);
    return buffer.data();
}

}  // namespace moeserve
