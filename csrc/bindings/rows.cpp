// Elementwise and row-wise kernels. moeserve/ops/native_rows.py is the only caller.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/rows.hpp"
#include "core/bitmask.hpp"
#include "core/grouping.hpp"
#include "kernels/row_args.hpp"

namespace py = pybind11;

namespace moeserve {
namespace {

template <class T>
using Column = py::array_t<T, py::array::c_style>;
using Counts = Column<int64_t>;

void bind_dense(py::module_& m) {
    m.def("rms_norm", [](Type type, size_t rows, size_t width, Address x, size_t stride, Address weight, float eps,
                         Address out) {
        const NormArgs args{type, width, at<void>(x), stride, nullptr, 0, at<float>(weight), eps, at<void>(out), nullptr};
        over_rows(kernels()->rms_norm, args, rows, width);
    });
    m.def("add_rms_norm", [](Type type, size_t rows, size_t width, Address x, size_t stride, Address residual,
                             size_t residual_stride, Address weight, float eps, Address out, Address total) {
        const NormArgs args{type,           width, at<void>(x), stride, at<void>(residual), residual_stride,
                            at<float>(weight), eps, at<void>(out), at<void>(total)};
        over_rows(kernels()->rms_norm, args, rows, width);
    });
    py::enum_<Activation::Kind>(m, "ActivationKind")
        .value("swiglu", Activation::Kind::swiglu)
        .value("silu", Activation::Kind::silu)
        .value("gelu_tanh", Activation::Kind::gelu_tanh)
        .value("relu2", Activation::Kind::relu2);
    py::class_<Activation>(m, "Activation")
        .def(py::init([](Activation::Kind kind, float alpha, float gate_limit, float act_limit, float up_limit,
                         float up_shift) { return Activation{kind, alpha, gate_limit, act_limit, up_limit, up_shift}; }),
             py::kw_only(), py::arg("kind"), py::arg("alpha"), py::arg("gate_limit"), py::arg("act_limit"),
             py::arg("up_limit"), py::arg("up_shift"));
    m.def("act_mul", [](Type type, size_t rows, size_t width, Address x, size_t stride, const Activation& activation,
                        Address out) {
        const ActMulArgs args{type, width, at<void>(x), stride, activation, at<void>(out)};
        over_rows(kernels()->act_mul, args, rows, width);
    });
    m.def("sigmoid_gate", [](Type type, size_t rows, Address x, size_t stride, Address out) {
        over_rows(kernels()->sigmoid, SigmoidArgs{type, at<void>(x), stride, at<float>(out)}, rows, 16);
    });
    m.def("qk_norm_rope_cache", [](Type type, size_t rows, size_t real, size_t heads, size_t kv_heads, size_t dim,
                                   size_t v_dim, Address qkv, size_t stride, Address normed, Address norms,
                                   bool norm_last, bool norm_values, float eps, float clip,
                                   Address cos, Address sin, float scale, Address slot_mapping, Address k, Address v,
                                   Type kv_type, Address q) {
        if (std::max(dim, v_dim) > QkNormRopeCacheArgs::kMaxDim) throw std::invalid_argument("heads wider than 1024");
        const QkNormRopeCacheArgs args{type, kv_type, heads, kv_heads, dim, v_dim, real, at<void>(qkv), stride,
                                       at<float>(normed), at<float>(norms), norm_last, norm_values, eps, clip,
                                       at<float>(cos), at<float>(sin), scale, at<int64_t>(slot_mapping), at<void>(k),
                                       at<void>(v), at<void>(q)};
        over_rows(kernels()->qk_norm_rope_cache, args, rows, args.columns());
    });
    m.def("latent_rope_cache", [](Type type, size_t rows, size_t real, size_t heads, size_t nope, size_t rope, size_t rank,
                                  Address q, size_t q_stride, Address kv, size_t kv_stride, Address norm, float eps,
                                  Address cos, Address sin, float scale, Address slot_mapping, Address cache,
                                  Address q_nope, Address latent_q) {
        if (rope > QkNormRopeCacheArgs::kMaxDim) throw std::invalid_argument("heads wider than 1024");
        const LatentRopeCacheArgs args{type, heads, nope, rope, rank, real, at<void>(q), q_stride, at<void>(kv), kv_stride,
                                       at<float>(norm), eps, at<float>(cos), at<float>(sin), scale,
                                       at<int64_t>(slot_mapping), at<void>(cache), at<void>(q_nope), at<void>(latent_q)};
        over_rows(kernels()->latent_rope_cache, args, rows, heads * (nope + rope) + rank + rope);
    });
}

void bind_routing(py::module_& m) {
    py::enum_<RouteRule::Score>(m, "RouteScore")
        .value("softmax", RouteRule::Score::softmax)
        .value("softmax_selected", RouteRule::Score::softmax_selected)
        .value("sigmoid", RouteRule::Score::sigmoid)
        .value("sparsemixer", RouteRule::Score::sparsemixer);
    py::class_<RouteRule>(m, "RouteRule")
        .def(py::init([](RouteRule::Score score, size_t groups, size_t kept_groups, size_t group_scores,
                         bool renormalize, float epsilon, float floor, float scale, float jitter) {
                 return RouteRule{score, groups, kept_groups, group_scores, renormalize, epsilon, floor, scale, jitter};
             }),
             py::kw_only(), py::arg("score"), py::arg("groups"), py::arg("kept_groups"), py::arg("group_scores"),
             py::arg("renormalize"), py::arg("epsilon"), py::arg("floor"), py::arg("scale"), py::arg("jitter"));
    m.def("route", [](Type type, size_t rows, size_t experts, size_t top_k, Address logits, size_t stride,
                      const RouteRule& rule, Address bias, Address expert_scale, Address ids, Address weights) {
        check_route(rule, experts, top_k);
        const RouteArgs args{type, experts, top_k, at<void>(logits), stride, rule, at<float>(bias),
                             at<float>(expert_scale), at<int32_t>(ids), at<float>(weights)};
        over_rows(kernels()->route, args, rows, experts * (top_k / 2 + 4));
    });
    m.def("group_pairs", [](Address ids, size_t num_pairs, Counts counts, Address order, Address place) {
        return group_pairs(at<int32_t>(ids), num_pairs, static_cast<size_t>(counts.size()), counts.mutable_data(),
                           at<int64_t>(order), at<int64_t>(place));
    }, py::arg(), py::arg(), py::arg().noconvert(), py::arg(), py::arg());
    m.def("copy_rows", [](Address from, size_t from_rows, Address index, int64_t divisor, size_t count, size_t row_bytes,
                          Address out) {
        const auto* rows = at<int64_t>(index);
        for (size_t j = 0; j < count; ++j) {
            if (rows[j] >= 0 && static_cast<size_t>(rows[j] / divisor) < from_rows) continue;
            throw std::out_of_range("row " + std::to_string(rows[j] / divisor) + " of " + std::to_string(from_rows));
        }
        over_rows(count, row_bytes, [&](size_t begin, size_t end) {
            copy_rows(at<char>(from), rows, divisor, row_bytes, begin, end, at<char>(out));
        });
    });
    m.def("sum_pairs", [](Element element, size_t tokens, size_t top_k, size_t dim, Address y, Address place,
                          Address weights, Address out) {
        sum_pairs(element, tokens, top_k, dim, at<void>(y), at<int64_t>(place), at<float>(weights), at<void>(out));
    });
}

void bind_sampling(py::module_& m) {
    m.def("argmax", [](size_t rows, size_t width, Address x, size_t stride, Address peak, Address column) {
        const ArgmaxArgs args{width, at<float>(x), stride, at<float>(peak), at<int64_t>(column)};
        over_rows(kernels()->argmax, args, rows, width);
    });
    m.def("apply_bitmask", [](size_t count, size_t width, Address x, size_t rows, size_t stride, Address index,
                              Address bits, size_t words) {
        const auto* row = at<int64_t>(index);
        for (size_t c = 0; c < count; ++c) {
            if (row[c] >= 0 && static_cast<size_t>(row[c]) < rows) continue;
            throw std::out_of_range("row " + std::to_string(row[c]) + " of " + std::to_string(rows));
        }
        over_rows(count, width, [&](size_t begin, size_t end) {
            for (size_t c = begin; c < end; ++c) {
                apply_bitmask(at<float>(x) + static_cast<size_t>(row[c]) * stride, width, at<uint32_t>(bits) + c * words);
            }
        });
    });
    m.def("race", [](size_t rows, size_t width, Address x, size_t stride, Address low, Address high, Address token_hash,
                     Address blocks, Address column) {
        const RaceArgs args{width, at<float>(x), stride, at<int32_t>(low), at<int32_t>(high), at<int32_t>(token_hash),
                            at<int64_t>(blocks), at<int64_t>(column)};
        over_rows(kernels()->race, args, rows, width);
    });
    m.def("draw", [](size_t width, Address x, size_t stride, const Column<int64_t>& slots, const Column<int64_t>& positions,
                     const Column<uint16_t>& traits, const Column<float>& temperature, const Column<uint64_t>& seed,
                     uint16_t not_here, uint16_t random, Address token_hash, const std::optional<Column<int64_t>>& mask_of,
                     const std::optional<Column<int32_t>>& bits, Address peak, Address column, Address status) {
        const size_t words = bits ? static_cast<size_t>(bits->shape(1)) : 0;
        const auto rows = static_cast<size_t>(slots.size());
        const DrawArgs args{width, at<float>(x), stride, slots.data(), positions.data(), traits.data(),
                            temperature.data(), seed.data(), not_here, random, at<int32_t>(token_hash),
                            mask_of ? mask_of->data() : nullptr,
                            bits ? reinterpret_cast<const uint32_t*>(bits->data()) : nullptr, words,
                            at<float>(peak), at<int64_t>(column), at<uint8_t>(status)};
        over_rows(kernels()->draw, args, rows, width);
    });
}

}  // namespace

void check_route(const RouteRule& rule, size_t experts, size_t top_k) {
    const size_t size = rule.groups ? experts / rule.groups : 0;
    if (experts > RouteArgs::kMaxExperts || !rule.groups || experts % rule.groups || rule.kept_groups > rule.groups ||
        (rule.kept_groups < rule.groups && size < rule.group_scores) || !top_k || top_k > rule.kept_groups * size) {
        throw std::invalid_argument("cannot choose " + std::to_string(top_k) + " of " + std::to_string(experts) +
                                    " experts in " + std::to_string(rule.kept_groups) + " of " +
                                    std::to_string(rule.groups) + " groups");
    }
}

void sum_pairs(Element element, size_t tokens, size_t top_k, size_t dim, const void* y, const int64_t* place,
               const float* weights, void* out) {
    const size_t row_bytes = dim * element_bytes(element);
    const std::vector<char> nothing(row_bytes);
    std::vector<const void*> rows(tokens * top_k);
    for (size_t n = 0; n < rows.size(); ++n) {
        rows[n] = place[n] < 0 ? nothing.data() : static_cast<const char*>(y) + static_cast<size_t>(place[n]) * row_bytes;
    }
    over_rows(tokens, top_k * dim, [&](size_t begin, size_t end) {
        weighted_sum(rows.data() + begin * top_k, weights + begin * top_k, end - begin, top_k, dim, element,
                     static_cast<char*>(out) + begin * row_bytes, best_isa());
    });
}

void bind_rows(py::module_& m) {
    bind_dense(m);
    bind_routing(m);
    bind_sampling(m);
}

}  // namespace moeserve
