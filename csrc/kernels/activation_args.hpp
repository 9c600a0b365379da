// The parameters of an MLP's activation, for row kernels and GEMMs.
#pragma once

#include <cstddef>
#include <limits>

namespace moeserve {

/// act(gate) * (up + up_shift), with limits of gate, act(gate) and the magnitude of up; or act(up),
/// without a gate. `Activation` in moeserve/ops/rules.py documents the fields.
struct Activation {
    enum class Kind : int { swiglu, silu, gelu_tanh, relu2 };  // swiglu: silu(gate) * up; ignores all other fields
    static constexpr float kNone = std::numeric_limits<float>::infinity();

    Kind kind = Kind::swiglu;
    float alpha = 1, gate_limit = kNone, act_limit = kNone, up_limit = kNone, up_shift = 0;

    /// The number of projections before it: gate and up, or up alone.
    [[gnu::always_inline]] size_t parts() const { return kind == Kind::relu2 ? 1 : 2; }
};

}  // namespace moeserve
