// A latent attention block in one call, with the bits of separate calls.
// moeserve/ops/native_latent.py is the only caller.
#include <pybind11/stl.h>

#include <optional>

#include "bindings/layer.hpp"
#include "bindings/rows.hpp"
#include "kernels/attention_plan.hpp"

namespace py = pybind11;

namespace moeserve {
namespace {

/// Computes, in this order: the query projection (through a low-rank one and its norm, if `narrow`
/// is given), latents and their norm, RoPE and cache write, absorbed attention between the heads'
/// projections and, if given, the output projection.
class LatentBlock {
  public:
    LatentBlock(Type type, const std::optional<Matrix>& narrow, Address narrow_norm, const Matrix& queries,
                const Matrix& latents, const HeadMatrices& up, const HeadMatrices& down,
                const std::optional<Matrix>& out, size_t nope, size_t rope, Address norm, float eps, float scale)
        : narrow_(narrow), queries_(queries), latents_(latents), up_(up), down_(down), out_(out),
          narrow_norm_(narrow_norm) {
        if (rope > QkNormRopeCacheArgs::kMaxDim) throw std::invalid_argument("heads wider than 1024");
        if (up.heads != down.heads) throw std::invalid_argument("expected products of equally many heads");
        rule_.type = type;
        rule_.heads = up.heads;
        rule_.nope = nope;
        rule_.rope = rope;
        rule_.rank = down.packing.depth;
        rule_.norm = at<float>(norm);
        rule_.eps = eps;
        rule_.scale = scale;
    }

    void run(const AttentionPlan& plan, Address x, size_t stride, size_t rows, Address cos, Address sin,
             Address slot_mapping, Address cache, Address y) const {
        const Type type = rule_.type;
        const size_t heads = rule_.heads, entry = rule_.rank + rule_.rope, values = down_.packing.columns;
        const size_t width = heads * (rule_.nope + rule_.rope), row = rows * bytes_of(type);
        const size_t narrow = narrow_ ? narrow_->packing.columns : 0;
        const Arrays arrays({row * narrow, row * narrow, row * width, row * entry, row * heads * rule_.nope,
                             row * heads * entry, row * heads * rule_.rank, row * heads * values});
        make_queries(x, stride, rows, arrays);
        latents_.times(type, x, stride, rows, arrays[3]);
        LatentRopeCacheArgs norm_rope = rule_;
        norm_rope.real = static_cast<size_t>(plan.num_tokens());
        norm_rope.q = at<void>(arrays[2]);
        norm_rope.q_stride = width;
        norm_rope.kv = at<void>(arrays[3]);
        norm_rope.kv_stride = entry;
        norm_rope.cos = at<float>(cos);
        norm_rope.sin = at<float>(sin);
        norm_rope.slot_mapping = at<int64_t>(slot_mapping);
        norm_rope.cache = at<void>(cache);
        norm_rope.q_nope = at<void>(arrays[4]);
        norm_rope.latent_q = at<void>(arrays[5]);
        over_rows(kernels()->latent_rope_cache, norm_rope, rows, width + entry);
        head_products(type, up_.packing, up_.weights, heads, arrays[4], heads * rule_.nope, rule_.nope, rows, arrays[5],
                      heads * entry, entry);
        attend(plan, arrays[5], cache, rows, arrays[6]);
        head_products(type, down_.packing, down_.weights, heads, arrays[6], heads * rule_.rank, rule_.rank, rows,
                      out_ ? arrays[7] : y, heads * values, values);
        if (out_) out_->times(type, arrays[7], heads * values, rows, y);
    }

  private:
    void make_queries(Address x, size_t stride, size_t rows, const Arrays& arrays) const {
        const Type type = rule_.type;
        if (!narrow_) return queries_.times(type, x, stride, rows, arrays[2]);
        const size_t narrow = narrow_->packing.columns;
        narrow_->times(type, x, stride, rows, arrays[0]);
        const NormArgs norm{type, narrow, at<void>(arrays[0]), narrow, nullptr, 0, at<float>(narrow_norm_), rule_.eps,
                            at<void>(arrays[1]), nullptr};
        over_rows(kernels()->rms_norm, norm, rows, narrow);
        queries_.times(type, arrays[1], narrow, rows, arrays[2]);
    }

    void attend(const AttentionPlan& plan, Address q, Address cache, size_t rows, Address out) const {
        const size_t entry = rule_.rank + rule_.rope;
        AttentionCall call{};
        call.q = at<void>(q);
        call.q_stride = static_cast<int64_t>(rule_.heads * entry);
        call.q_type = call.kv_type = rule_.type;
        call.k = call.v = at<void>(cache);
        call.k_bytes = call.v_bytes = static_cast<int64_t>(entry * bytes_of(rule_.type));
        call.out = at<void>(out);
        plan.run(call, static_cast<int64_t>(rows));
    }

    std::optional<Matrix> narrow_;
    Matrix queries_, latents_;
    HeadMatrices up_, down_;
    std::optional<Matrix> out_;
    Address narrow_norm_;
    LatentRopeCacheArgs rule_{};  // arguments that are the same in every step
};

}  // namespace

void bind_latent(py::module_& m) {
    py::class_<HeadMatrices>(m, "HeadMatrices")
        .def(py::init<Packing, Address, size_t>(), py::arg("packing"), py::arg("weights"), py::arg("heads"));
    py::class_<LatentBlock>(m, "LatentBlock")
        .def(py::init<Type, const std::optional<Matrix>&, Address, const Matrix&, const Matrix&, const HeadMatrices&,
                      const HeadMatrices&, const std::optional<Matrix>&, size_t, size_t, Address, float, float>(),
             py::arg("type"), py::arg("narrow"), py::arg("narrow_norm"), py::arg("queries"), py::arg("latents"),
             py::arg("up"), py::arg("down"), py::arg("out"), py::arg("nope"), py::arg("rope"), py::arg("norm"),
             py::arg("eps"), py::arg("scale"))
        .def("run", &LatentBlock::run, Unlocked());
}

}  // namespace moeserve
