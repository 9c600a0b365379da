// An attention block in one call. It computes the same bits as separate calls of its parts.
#pragma once

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "bindings/layer.hpp"
#include "bindings/rows.hpp"
#include "kernels/attention_plan.hpp"

namespace moeserve {

/// Bytes of one head's entry in the KV cache: int8 entries have a scale.
inline int64_t entry_bytes(Type type, size_t dim) {
    return static_cast<int64_t>(type == Type::int8 ? dim + sizeof(float) : dim * bytes_of(type));
}

/// QKV projection, QK-norm, RoPE and KV write, attention and, if `out` is given, the output
/// projection.
class AttentionBlock {
  public:
    AttentionBlock(Type type, const Matrix& qkv, const std::optional<Matrix>& out, size_t heads, size_t kv_heads,
                   size_t dim, size_t v_dim, Address norms, bool norm_last, bool norm_values, float eps, float clip,
                   float scale, Address sinks, float soft_cap)
        : qkv_(qkv), out_(out), sinks_(sinks), soft_cap_(soft_cap) {
        if (std::max(dim, v_dim) > QkNormRopeCacheArgs::kMaxDim) throw std::invalid_argument("heads wider than 1024");
        rule_.type = type;
        rule_.heads = heads;
        rule_.kv_heads = kv_heads;
        rule_.dim = dim;
        rule_.v_dim = v_dim;
        rule_.norms = at<float>(norms);
        rule_.norm_last = norm_last;
        rule_.norm_values = norm_values;
        rule_.eps = eps;
        rule_.clip = clip;
        rule_.scale = scale;
    }

    void run(const AttentionPlan& plan, Address x, size_t stride, size_t rows, Address cos, Address sin,
             Address slot_mapping, Address k, Address v, Type kv_type, Address y) const {
        const Type type = rule_.type;
        const size_t q_width = rule_.heads * rule_.dim, out_width = rule_.heads * rule_.v_dim, all = rule_.columns();
        const size_t element = bytes_of(type);
        const Arrays arrays({rows * all * element, rows * q_width * element, rows * out_width * element});
        qkv_.times(type, x, stride, rows, arrays[0]);
        QkNormRopeCacheArgs norm_rope = rule_;
        norm_rope.kv_type = kv_type;
        norm_rope.real = static_cast<size_t>(plan.num_tokens());
        norm_rope.qkv = at<void>(arrays[0]);
        norm_rope.stride = all;
        norm_rope.cos = at<float>(cos);
        norm_rope.sin = at<float>(sin);
        norm_rope.slot_mapping = at<int64_t>(slot_mapping);
        norm_rope.k = at<void>(k);
        norm_rope.v = at<void>(v);
        norm_rope.q = at<void>(arrays[1]);
        over_rows(kernels()->qk_norm_rope_cache, norm_rope, rows, all);
        AttentionCall call{};
        call.q = norm_rope.q;
        call.q_stride = static_cast<int64_t>(q_width);
        call.q_type = type;
        call.kv_type = kv_type;
        call.k = norm_rope.k;
        call.k_bytes = entry_bytes(kv_type, rule_.dim);
        call.v = norm_rope.v;
        call.v_bytes = entry_bytes(kv_type, rule_.v_dim);
        call.sinks = at<float>(sinks_);
        call.soft_cap = soft_cap_;
        call.out = at<void>(out_ ? arrays[2] : y);
        plan.run(call, static_cast<int64_t>(rows));
        if (out_) out_->times(type, arrays[2], out_width, rows, y);
    }

  private:
    Matrix qkv_;
    std::optional<Matrix> out_;
    QkNormRopeCacheArgs rule_{};  // arguments that are the same in every step
    Address sinks_;
    float soft_cap_;
};

}  // namespace moeserve
