// A decoder layer's two halves in one call each (latent attention is in latent.cpp).
// moeserve/ops/native_layer.py is the only caller.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "bindings/layer.hpp"
#include "bindings/rows.hpp"
#include "core/grouping.hpp"
#include "kernels/attention_plan.hpp"

namespace py = pybind11;

namespace moeserve {
namespace {

using Counts = py::array_t<int64_t, py::array::c_style>;

/// Of one head in a cache: int8 ones have a scale.
int64_t entry_bytes(Type type, size_t dim) {
    return static_cast<int64_t>(type == Type::int8 ? dim + sizeof(float) : dim * bytes_of(type));
}

/// Projection, QK-norm, RoPE and KV write, attention and, if it is given, the product behind it.
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
    QkNormRopeCacheArgs rule_{};  // what is the same in every step
    Address sinks_;
    float soft_cap_;
};

/// Router, experts and the weighted sum of a layer whose rows stay here. counts: rows of each expert.
///
/// type: of rows; logits: the router's own, fp32 if it computes in fp32. on_input: one expert's weight multiplies its rows
/// before it sees them. bias, expert_scale: as `RouteArgs` has them.
class ExpertsBlock {
  public:
    ExpertsBlock(Type type, const Matrix& router, Type logits, size_t top_k, const RouteRule& rule, bool on_input,
                 Address bias, Address expert_scale, const Activation& activation)
        : type_(type), logits_(logits), router_(router), on_input_(on_input), activation_(activation) {
        check_route(rule, router.packing.columns, top_k);
        if (on_input && top_k != 1) throw std::invalid_argument("weights multiply the input of one expert per token");
        route_.type = logits;
        route_.experts = route_.stride = router.packing.columns;
        route_.top_k = top_k;
        route_.rule = rule;
        route_.bias = at<float>(bias);
        route_.expert_scale = at<float>(expert_scale);
    }

    void run(const Packing& gate_up, const Packing& down, Address weights, size_t expert_bytes, bool biased, Counts counts,
             Address x, size_t rows, Address y) const {
        const size_t num_experts = route_.experts, top_k = route_.top_k, width = gate_up.depth, pairs = rows * top_k;
        if (static_cast<size_t>(counts.size()) != num_experts)
            throw std::invalid_argument("one count per expert, please");
        int64_t* counted = counts.mutable_data();
        py::gil_scoped_release unlocked;
        const size_t row_bytes = width * bytes_of(type_);
        const Arrays arrays({rows * num_experts * bytes_of(logits_), pairs * sizeof(int32_t), pairs * sizeof(float),
                             pairs * sizeof(int64_t), pairs * sizeof(int64_t), pairs * row_bytes, pairs * row_bytes,
                             on_input_ ? rows * row_bytes : 0});
        linear(type_, router_.packing, router_.weights, router_.bias, x, width, rows, arrays[0], logits_);
        RouteArgs route = route_;
        route.logits = at<void>(arrays[0]);
        route.ids = at<int32_t>(arrays[1]);
        route.weights = at<float>(arrays[2]);
        over_rows(kernels()->route, route, rows, num_experts * (top_k / 2 + 4));
        const Element element = type_ == Type::fp32 ? Element::fp32 : type_ == Type::bf16 ? Element::bf16 : Element::fp16;
        int64_t *order = at<int64_t>(arrays[3]), *place = at<int64_t>(arrays[4]);
        if (on_input_) {  // a sum of one row each
            std::iota(place, place + rows, int64_t{0});
            sum_pairs(element, rows, 1, width, at<void>(x), place, route.weights, at<void>(arrays[7]));
            std::fill_n(route.weights, rows, 1.0f);
            x = arrays[7];
        }
        group_pairs(route.ids, pairs, num_experts, counted, order, place);
        over_rows(pairs, row_bytes, [&](size_t begin, size_t end) {
            copy_rows(at<char>(x), order, static_cast<int64_t>(top_k), row_bytes, begin, end, at<char>(arrays[5]));
        });
        experts(type_, gate_up, down, weights, expert_bytes, activation_, biased, {counted, counted + num_experts}, arrays[5],
                width, arrays[6], width);
        sum_pairs(element, rows, top_k, width, at<void>(arrays[6]), place, route.weights, at<void>(y));
    }

  private:
    Type type_, logits_;
    Matrix router_;
    RouteArgs route_{};  // what is the same in every step
    bool on_input_;
    Activation activation_;
};

/// down(act(gate) * up), or down(act(up)): an MLP that every row passes.
void gated_mlp(Type type, const Matrix& gate_up, const Matrix& down, const Activation& activation, Address x,
               size_t stride, size_t rows, Address y) {
    const size_t inner = down.packing.depth, into = activation.parts() * inner;
    const Arrays arrays({rows * into * bytes_of(type), rows * inner * bytes_of(type)});
    gate_up.times(type, x, stride, rows, arrays[0]);
    const ActMulArgs args{type, inner, at<void>(arrays[0]), into, activation, at<void>(arrays[1])};
    over_rows(kernels()->act_mul, args, rows, inner);
    down.times(type, arrays[1], inner, rows, y);
}

}  // namespace

void bind_layer(py::module_& m) {
    py::class_<Matrix>(m, "Matrix")
        .def(py::init<Packing, Address, Address>(), py::arg("packing"), py::arg("weights"), py::arg("bias"))
        .def_property_readonly("columns", [](const Matrix& self) { return self.packing.columns; })
        .def_property_readonly("depth", [](const Matrix& self) { return self.packing.depth; });
    py::class_<AttentionBlock>(m, "AttentionBlock")
        .def(py::init<Type, const Matrix&, const std::optional<Matrix>&, size_t, size_t, size_t, size_t, Address, bool,
                      bool, float, float, float, Address, float>(),
             py::arg("type"), py::arg("qkv"), py::arg("out"), py::arg("heads"), py::arg("kv_heads"), py::arg("dim"),
             py::arg("v_dim"), py::arg("norms"), py::arg("norm_last"), py::arg("norm_values"), py::arg("eps"),
             py::arg("clip"), py::arg("scale"), py::arg("sinks"), py::arg("soft_cap"))
        .def("run", &AttentionBlock::run, Unlocked());
    py::class_<ExpertsBlock>(m, "ExpertsBlock")
        .def(py::init<Type, const Matrix&, Type, size_t, const RouteRule&, bool, Address, Address, const Activation&>(),
             py::arg("type"), py::arg("router"), py::arg("logits"), py::arg("top_k"), py::arg("rule"),
             py::arg("on_input"), py::arg("bias"), py::arg("expert_scale"), py::arg("activation"))
        .def("run", &ExpertsBlock::run);
    m.def("gated_mlp", &gated_mlp, Unlocked(), py::arg("type"), py::arg("gate_up"), py::arg("down"),
          py::arg("activation"), py::arg("x"), py::arg("stride"), py::arg("rows"), py::arg("y"));
}

}  // namespace moeserve
