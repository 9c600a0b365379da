// The activation of an MLP, for row kernels and products.
#pragma once

#include <cstddef>
#include <limits>

namespace moeserve {

/// act(gate) * (up + up_shift): gate, act(gate) and the magnitude of up are limited. Or act(up), without gates.
/// `Activation` in moeserve/ops/rules.py says what each of these means.
struct Activation {
    enum class Kind : int { swiglu, silu, gelu_tanh, relu2 };  // swiglu: silu(gate) * up, and nothing of the rest
    static constexpr float kNone = std::numeric_limits<float>::infinity();

    Kind kind = Kind::swiglu;
    float alpha = 1, gate_limit = kNone, act_limit = kNone, up_limit = kNone, up_shift = 0;

    /// The products in front of it: gate and up, or up alone.
    [[gnu::always_inline]] size_t parts() const { return kind == Kind::relu2 ? 1 : 2; }
};

}  // namespace moeserve
