// Paged attention: a plan per step and KV group, run once per layer.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>

#include "bindings/bindings.hpp"
#include "kernels/attention_plan.hpp"

namespace py = pybind11;

namespace moeserve {
namespace {

using Ints = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

AttentionPlan make_plan(Address tables, int64_t table_width, int64_t block_size, std::optional<int64_t> window,
                        std::optional<int64_t> section, const Ints& starts, const Ints& offsets, int64_t heads,
                        int64_t kv_heads, int64_t dim, int64_t v_dim) {
    if (offsets.size() != starts.size() + 1) throw std::invalid_argument("expected one offset more than starts");
    if (kv_heads < 1 || heads % kv_heads != 0) throw std::invalid_argument("expected whole groups of heads");
    const AttentionShape shape{heads,      kv_heads, dim, v_dim, block_size, window.value_or(kEverything),
                               section.value_or(kEverything)};
    return AttentionPlan(shape, at<int64_t>(tables), table_width, starts.size(), starts.data(), offsets.data(),
                         pool()->size());
}

AttentionCall make_call(Address q, int64_t q_stride, Type q_type, Address k, int64_t k_bytes, Address v,
                        int64_t v_bytes, Type kv_type, Address out, float soft_cap, Address sinks) {
    AttentionCall call{};
    call.q = at<void>(q);
    call.q_stride = q_stride;
    call.q_type = q_type;
    call.k = at<void>(k);
    call.k_bytes = k_bytes;
    call.v = at<void>(v);
    call.v_bytes = v_bytes;
    call.kv_type = kv_type;
    call.out = at<void>(out);
    call.soft_cap = soft_cap;
    call.sinks = at<float>(sinks);
    return call;
}

}  // namespace

void bind_attention(py::module_& m) {
    using Plan = AttentionPlan;
    const auto run = [](const Plan& self, Address q, int64_t q_stride, Type q_type, Address k, int64_t k_bytes, Address v,
                        int64_t v_bytes, Type kv_type, Address out, int64_t num_rows, float soft_cap, Address sinks) {
        self.run(make_call(q, q_stride, q_type, k, k_bytes, v, v_bytes, kv_type, out, soft_cap, sinks), num_rows);
    };
    const auto reference = [](const Plan& self, int64_t request, int64_t token, int64_t position, Address q,
                              int64_t q_stride, Address k, int64_t k_bytes, Address v, int64_t v_bytes, Type kv_type,
                              Address out, float soft_cap, Address sinks) {
        AttentionCall call = make_call(q, q_stride, Type::fp32, k, k_bytes, v, v_bytes, kv_type, out, soft_cap, sinks);
        self.describe(call);
        reference_attention(call, request, token, position, at<float>(out));
    };
    py::class_<Plan>(m, "AttentionPlan")
        .def(py::init(&make_plan), py::arg("tables"), py::arg("table_width"), py::arg("block_size"), py::arg("window"),
             py::arg("section"), py::arg("starts"), py::arg("offsets"), py::arg("heads"), py::arg("kv_heads"),
             py::arg("dim"), py::arg("v_dim"))
        .def_property_readonly("num_tokens", &Plan::num_tokens)
        .def_property_readonly("num_pieces", &Plan::num_pieces)
        .def("run", run, Unlocked(), py::arg("q"), py::arg("q_stride"), py::arg("q_type"), py::arg("k"),
             py::arg("k_bytes"), py::arg("v"), py::arg("v_bytes"), py::arg("kv_type"), py::arg("out"),
             py::arg("num_rows"), py::arg("soft_cap"), py::arg("sinks"))
        .def("reference", reference, Unlocked(), py::arg("request"), py::arg("token"), py::arg("position"),
             py::arg("q"), py::arg("q_stride"), py::arg("k"), py::arg("k_bytes"), py::arg("v"), py::arg("v_bytes"),
             py::arg("kv_type"), py::arg("out"), py::arg("soft_cap"), py::arg("sinks"));
}

}  // namespace moeserve
