// What calls have in common that join the steps of half a decoder layer: between small calls, the interpreter takes
// longer than they do.
#pragma once

#include <initializer_list>
#include <vector>

#include "bindings/products.hpp"
#include "kernels/table.hpp"
#include "pool/scratch.hpp"

namespace moeserve {

inline size_t bytes_of(Type type) { return type == Type::fp32 ? 4 : 2; }

/// Arrays of so many bytes in the calling thread's memory, until it asks again.
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

/// A packed matrix and where it lies; bias 0: none.
struct Matrix {
    Packing packing;
    Address weights, bias;

    void times(Type type, Address x, size_t stride, size_t rows, Address y) const {
        linear(type, packing, weights, bias, x, stride, rows, y, type);
    }
};

/// Packed matrices of heads, side by side.
struct HeadMatrices {
    Packing packing;
    Address weights;
    size_t heads;
};

/// down(act(gate) * up), or down(act(up)): an MLP that every row passes.
void gated_mlp(Type type, const Matrix& gate_up, const Matrix& down, const Activation& activation, Address x,
               size_t stride, size_t rows, Address y);

}  // namespace moeserve
