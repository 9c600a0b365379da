// Common parts of the calls that fuse half a decoder layer. They are fused because the interpreter
// takes longer between small calls than the calls themselves.
#pragma once

#include <initializer_list>
#include <vector>

#include "bindings/products.hpp"
#include "kernels/table.hpp"
#include "pool/scratch.hpp"

namespace moeserve {

inline size_t bytes_of(Type type) { return type == Type::fp32 ? 4 : 2; }

/// Arrays of these sizes in the calling thread's scratch memory, valid until it uses the same name
/// again.
class Arrays {
  public:
    explicit Arrays(std::initializer_list<size_t> sizes, Scratch name = Scratch::layer) {
        for (size_t bytes : sizes) {
            starts_.push_back(total_);
            total_ += (bytes + 63) / 64 * 64;
        }
        memory_ = scratch(name, total_);
    }
    Address operator[](size_t i) const { return reinterpret_cast<Address>(memory_ + starts_[i]); }

  private:
    std::vector<size_t> starts_;
    size_t total_ = 0;
    uint8_t* memory_;
};

/// A packed matrix with its address. bias: 0 for none.
struct Matrix {
    Packing packing;
    Address weights, bias;

    void times(Type type, Address x, size_t stride, size_t rows, Address y) const {
        linear(type, packing, weights, bias, x, stride, rows, y, type);
    }
};

/// Packed matrices of all heads, contiguous.
struct HeadMatrices {
    Packing packing;
    Address weights;
    size_t heads;
};

/// Computes a dense MLP: down(act(gate) * up), or down(act(up)).
void gated_mlp(Type type, const Matrix& gate_up, const Matrix& down, const Activation& activation, Address x,
               size_t stride, size_t rows, Address y);

}  // namespace moeserve
