// The two halves of a decoder layer, in one call each (latent attention is in latent.cpp).
// moeserve/ops/native_layer.py is the only caller.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "bindings/attention_block.hpp"
#include "bindings/layer.hpp"
#include "bindings/rows.hpp"
#include "core/grouping.hpp"

namespace py = pybind11;

namespace moeserve {
namespace {

using Counts = py::array_t<int64_t, py::array::c_style>;

constexpr size_t kMostGuesses = 32;  // (token, expert) pairs; steps with more pairs use most experts anyway

/// Router, experts and combine of an MoE layer without expert parallelism. counts: rows of each
/// expert.
///
/// type: dtype of activations. logits: dtype of the router's logits, fp32 if it computes in fp32.
/// on_input: the weight of a token's only expert multiplies the expert's input instead of its
/// output. bias, expert_scale: see `RouteArgs`.
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
             Address x, size_t rows, Address y, const CachedLayer* cached) const {
        const size_t num_experts = route_.experts, top_k = route_.top_k, width = gate_up.depth, pairs = rows * top_k;
        if (static_cast<size_t>(counts.size()) != num_experts)
            throw std::invalid_argument("expected one count per expert");
        int64_t* counted = counts.mutable_data();
        py::gil_scoped_release unlocked;
        std::vector<size_t> expected;
        if (cached && next_ && pairs <= kMostGuesses) expected = next_->guess(x, rows);
        const size_t row_bytes = width * bytes_of(type_);
        const Arrays arrays({rows * num_experts * bytes_of(logits_), pairs * sizeof(int32_t), pairs * sizeof(float),
                             pairs * sizeof(int64_t), pairs * sizeof(int64_t), pairs * row_bytes, pairs * row_bytes,
                             on_input_ ? rows * row_bytes : 0});
        const RouteArgs route = choose(x, rows, arrays[0], arrays[1], arrays[2]);
        const Element element = type_ == Type::fp32 ? Element::fp32 : type_ == Type::bf16 ? Element::bf16 : Element::fp16;
        int64_t *order = at<int64_t>(arrays[3]), *place = at<int64_t>(arrays[4]);
        if (on_input_) {  // weigh the inputs: sums of one row each
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
                width, arrays[6], width, cached, expected);
        sum_pairs(element, rows, top_k, width, at<void>(arrays[6]), place, route.weights, at<void>(y));
    }

    /// Prefetch: while this block's experts compute, read from disk the experts that `next`, the
    /// next MoE block, would choose for the same rows. This works because a layer changes the
    /// residual stream only a little.
    void expect(const ExpertsBlock* next) { next_ = next; }

  private:
    /// Chooses experts. Returns the arguments with the addresses of ids and weights.
    RouteArgs choose(Address x, size_t rows, Address logits, Address ids, Address weights) const {
        linear(type_, router_.packing, router_.weights, router_.bias, x, router_.packing.depth, rows, logits, logits_);
        RouteArgs route = route_;
        route.logits = at<void>(logits);
        route.ids = at<int32_t>(ids);
        route.weights = at<float>(weights);
        over_rows(kernels()->route, route, rows, route.experts * (route.top_k / 2 + 4));
        return route;
    }

    std::vector<size_t> guess(Address x, size_t rows) const {
        const size_t pairs = rows * route_.top_k;
        const Arrays arrays({rows * route_.experts * bytes_of(logits_), pairs * sizeof(int32_t), pairs * sizeof(float)});
        const int32_t* ids = choose(x, rows, arrays[0], arrays[1], arrays[2]).ids;
        return {ids, ids + pairs};
    }

    Type type_, logits_;
    Matrix router_;
    RouteArgs route_{};  // arguments that are the same in every step
    bool on_input_;
    Activation activation_;
    const ExpertsBlock* next_ = nullptr;
};

}  // namespace

void gated_mlp(Type type, const Matrix& gate_up, const Matrix& down, const Activation& activation, Address x,
               size_t stride, size_t rows, Address y) {
    const size_t inner = down.packing.depth, into = activation.parts() * inner;
    const Arrays arrays({rows * into * bytes_of(type), rows * inner * bytes_of(type)});
    gate_up.times(type, x, stride, rows, arrays[0]);
    const ActMulArgs args{type, inner, at<void>(arrays[0]), into, activation, at<void>(arrays[1])};
    over_rows(kernels()->act_mul, args, rows, inner);
    down.times(type, arrays[1], inner, rows, y);
}

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
        .def("run", &ExpertsBlock::run)
        .def("expect", &ExpertsBlock::expect, py::keep_alive<1, 2>(), py::arg("next"));
    m.def("gated_mlp", &gated_mlp, Unlocked(), py::arg("type"), py::arg("gate_up"), py::arg("down"),
          py::arg("activation"), py::arg("x"), py::arg("stride"), py::arg("rows"), py::arg("y"));
}

}  // namespace moeserve
