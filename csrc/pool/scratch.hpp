// Memory that a thread uses over and over.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeserve {

enum class Scratch : int { product, hidden, layer, recurrence, drafts, guesses, count };

/// At least `bytes` bytes of the calling thread's own, aligned to 64; they stay until it asks for more under this name.
uint8_t* scratch(Scratch name, size_t bytes);

}  // namespace moeserve
