// Thread-local scratch memory that is reused.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeserve {

enum class Scratch : int { product, hidden, layer, recurrence, drafts, guesses, count };

/// Returns at least `bytes` bytes of the calling thread, aligned to 64. They are valid until it
/// asks for more under this name.
uint8_t* scratch(Scratch name, size_t bytes);

}  // namespace moeserve
