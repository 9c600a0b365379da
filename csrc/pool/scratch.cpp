#include "pool/scratch.hpp"

#include <memory>
#include <new>

namespace moeserve {
namespace {

struct Free {
    void operator()(uint8_t* memory) const { operator delete[](memory, std::align_val_t{64}); }
};

struct Buffer {
    std::unique_ptr<uint8_t[], Free> memory;
    size_t bytes = 0;
};

thread_local Buffer buffers[static_cast<int>(Scratch::count)];

}  // namespace

uint8_t* scratch(Scratch name, size_t bytes) {
    Buffer& buffer = buffers[static_cast<int>(name)];
    if (buffer.bytes < bytes) {
        buffer.memory.reset();
        buffer.bytes = 0;
        buffer.memory.reset(static_cast<uint8_t*>(operator new[](bytes, std::align_val_t{64})));
        buffer.bytes = bytes;
    }
    return buffer.memory.get();
}

}  // namespace moeserve
