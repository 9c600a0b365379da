// The GEMMs as functions, for the fused calls (layer.cpp).
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "bindings/bindings.hpp"
#include "kernels/product_args.hpp"
#include "pool/expert_cache.hpp"

namespace moeserve {

void linear(Type type, const Packing& packing, Address weights, Address bias, Address x, size_t x_stride, size_t rows,
            Address y, Type y_type);

void head_products(Type type, const Packing& packing, Address weights, size_t heads, Address x, size_t x_stride,
                   size_t x_step, size_t rows, Address y, size_t y_stride, size_t y_step);

/// An MoE layer whose experts are in a file.
struct CachedLayer {
    std::shared_ptr<ExpertCache> cache;
    size_t layer;
};

void experts(Type type, const Packing& gate_up, const Packing& down, Address weights, size_t expert_bytes,
             const Activation& activation, bool biased, const std::vector<size_t>& counts, Address x, size_t x_stride,
             Address y, size_t y_stride, const CachedLayer* cached, const std::vector<size_t>& expected = {});

}  // namespace moeserve
