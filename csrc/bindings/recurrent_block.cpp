// A recurrent block with one decay per head in one call. moeserve/ops/native_recurrent_block.py is
// the only caller.
#include <pybind11/stl.h>

#include <optional>

#include "bindings/layer.hpp"
#include "bindings/tile_plan.hpp"

namespace py = pybind11;

namespace moeserve {
namespace {

/// Projection, convolution, decays, recurrence, output gate and norm and, if given, the output
/// projection. With `gates` it is a gated delta net: the projection's columns are queries, keys,
/// values and output gates, those of `gates` are beta and dt. Without `gates` it is Mamba-2: the
/// columns are output gates, x, B, C and dt, with keys B, queries C and values dt * x.
class RecurrentBlock {
  public:
    RecurrentBlock(Type type, const Matrix& inputs, const std::optional<Matrix>& gates, const std::optional<Matrix>& out,
                   size_t groups, size_t heads, size_t d, size_t v, size_t num_inputs, Address conv, Address conv_bias,
                   Address decay, Address dt_bias, float least, float most, Address unit_q, Address unit_k,
                   float unit_eps, Address skip, Address norm, size_t norm_width, float eps, Address places)
        : type_(type), inputs_(inputs), gates_(gates), out_(out), groups_(groups), heads_(heads), d_(d), v_(v),
          num_inputs_(num_inputs), conv_(conv), conv_bias_(conv_bias), unit_{unit_q, unit_k}, unit_eps_(unit_eps),
          skip_(skip) {
        if (!groups || heads % groups || !norm_width || width() % norm_width)
            throw std::invalid_argument("expected whole groups of heads and whole norms");
        decays_.type = norm_.type = type;
        decays_.heads = heads;
        decays_.bias = at<float>(dt_bias);
        decays_.decay = at<float>(decay);
        decays_.least = least;
        decays_.most = most;
        norm_.parts = width() / norm_width;
        norm_.width = norm_width;
        norm_.weight = at<float>(norm);
        norm_.weight_stride = gates ? 0 : norm_width;
        norm_.eps = eps;
        norm_.gate_first = !gates;
        norm_.places = at<int64_t>(places);
    }

    void run(const TilePlan& plan, Address x, size_t stride, size_t rows, Address conv_rows, Address borders,
             Address states, Address keys, Address updates, Address sums, Address y) const {
        const size_t element = bytes_of(type_), columns = inputs_.packing.columns, both = 2 * groups_ * d_;
        const size_t convolved = width() + both, fp32 = rows * sizeof(float);
        const Arrays arrays({rows * columns * element, gates_ ? rows * 2 * heads_ * element : 0, fp32 * convolved,
                             fp32 * heads_, fp32 * heads_, fp32 * (gates_ ? both : width()), fp32 * width(),
                             rows * width() * element});
        inputs_.times(type_, x, stride, rows, arrays[0]);
        if (gates_) gates_->times(type_, x, stride, rows, arrays[1]);
        const size_t from = gates_ ? 0 : width();
        CausalConvArgs conv{plan.tiles(), type_, convolved, num_inputs_, at<char>(arrays[0]) + from * element, columns,
                            at<float>(conv_), at<float>(conv_bias_), true, at<float>(conv_rows), at<float>(borders),
                            at<float>(arrays[2]), nullptr};
        compute(kernels()->causal_conv, conv, plan, rows, convolved, plan.num_tokens() * convolved);
        RecurrenceArgs args{};
        args.plan = plan.tiles();
        args.groups = groups_, args.heads = heads_, args.d = d_, args.v = v_, args.decays = 1;
        args.states = at<float>(states), args.keys = at<float>(keys);
        args.updates = at<float>(updates), args.sums = at<float>(sums);
        args.out = at<float>(arrays[6]);
        if (gates_) {
            prepare_delta(arrays, rows, args);
        } else {
            prepare_mamba(arrays, rows, columns, args);
        }
        recur(args, plan, rows);
        if (skip_) add_skipped(at<float>(arrays[2]), convolved, rows, args.out);
        GatedNormArgs norm = norm_;
        norm.gate = at<char>(arrays[0]) + (gates_ ? convolved : 0) * element;
        norm.stride = columns;
        norm.x = args.out;
        norm.out = at<void>(out_ ? arrays[7] : y);
        over_rows(kernels()->gated_norm, norm, rows, 2 * width());
        if (out_) out_->times(type_, arrays[7], width(), rows, y);
    }

  private:
    size_t width() const { return heads_ * v_; }

    /// Normalizes queries and keys to length 1, and computes decays and betas.
    void prepare_delta(const Arrays& arrays, size_t rows, RecurrenceArgs& args) const {
        const size_t part = groups_ * d_, convolved = width() + 2 * part;
        const float* convolution = at<float>(arrays[2]);
        float* unit = at<float>(arrays[5]);
        over_rows(rows, 2 * part, [&](size_t begin, size_t end) {
            for (size_t r = 2 * begin; r < 2 * end; ++r) {  // a token's queries, then its keys
                const NormArgs args{Type::fp32, d_, convolution + r / 2 * convolved + r % 2 * part, d_, nullptr, 0,
                                    at<float>(unit_[r % 2]), unit_eps_, unit + r * part, nullptr};
                kernels()->rms_norm(args, 0, groups_);
            }
        });
        DecayArgs decays = decays_;
        decays.beta = at<void>(arrays[1]);
        decays.dt = at<char>(arrays[1]) + heads_ * bytes_of(type_);
        decays.stride = 2 * heads_;
        decays.log_decay = at<float>(arrays[3]);
        decays.betas = at<float>(arrays[4]);
        over_rows(kernels()->decays, decays, rows, 8 * heads_);
        args.q = unit, args.k = unit + part, args.q_stride = args.k_stride = 2 * part;
        args.values = convolution + 2 * part, args.v_stride = convolved;
        args.log_decay = decays.log_decay, args.beta = decays.betas;
        args.decay_stride = args.beta_stride = heads_;
    }

    /// Computes decays and time steps, and multiplies the values by the time steps.
    void prepare_mamba(const Arrays& arrays, size_t rows, size_t columns, RecurrenceArgs& args) const {
        const size_t part = groups_ * d_, convolved = width() + 2 * part;
        const float* convolution = at<float>(arrays[2]);
        float *steps = at<float>(arrays[4]), *values = at<float>(arrays[5]);
        DecayArgs decays = decays_;
        decays.dt = at<char>(arrays[0]) + (columns - heads_) * bytes_of(type_);
        decays.stride = columns;
        decays.log_decay = at<float>(arrays[3]);
        decays.steps = steps;
        over_rows(kernels()->decays, decays, rows, 8 * heads_);
        over_rows(rows, width(), [&](size_t begin, size_t end) {
            for (size_t n = begin * heads_; n < end * heads_; ++n) {
                const float* x = convolution + n / heads_ * convolved + n % heads_ * v_;
                for (size_t i = 0; i < v_; ++i) values[n * v_ + i] = x[i] * steps[n];
            }
        });
        args.k = convolution + width(), args.q = args.k + part, args.q_stride = args.k_stride = convolved;
        args.values = values, args.v_stride = width();
        args.log_decay = decays.log_decay, args.decay_stride = heads_;
    }

    void add_skipped(const float* convolution, size_t convolved, size_t rows, float* out) const {
        const float* skip = at<float>(skip_);
        over_rows(rows, width(), [&](size_t begin, size_t end) {
            for (size_t n = begin * heads_; n < end * heads_; ++n) {
                const float* x = convolution + n / heads_ * convolved + n % heads_ * v_;
                for (size_t i = 0; i < v_; ++i) out[n * v_ + i] += skip[n % heads_] * x[i];
            }
        });
    }

    Type type_;
    Matrix inputs_;
    std::optional<Matrix> gates_, out_;
    size_t groups_, heads_, d_, v_, num_inputs_;
    Address conv_, conv_bias_, unit_[2];
    float unit_eps_;
    Address skip_;
    DecayArgs decays_{};  // arguments that are the same in every step, like the next member
    GatedNormArgs norm_{};
};

}  // namespace

void bind_recurrent_block(py::module_& m) {
    py::class_<RecurrentBlock>(m, "RecurrentBlock")
        .def(py::init<Type, const Matrix&, const std::optional<Matrix>&, const std::optional<Matrix>&, size_t, size_t,
                      size_t, size_t, size_t, Address, Address, Address, Address, float, float, Address, Address, float,
                      Address, Address, size_t, float, Address>(),
             py::kw_only(), py::arg("type"), py::arg("inputs"), py::arg("gates"), py::arg("out"), py::arg("groups"),
             py::arg("heads"), py::arg("d"), py::arg("v"), py::arg("num_inputs"), py::arg("conv"), py::arg("conv_bias"),
             py::arg("decay"), py::arg("dt_bias"), py::arg("least"), py::arg("most"), py::arg("unit_q"),
             py::arg("unit_k"), py::arg("unit_eps"), py::arg("skip"), py::arg("norm"), py::arg("norm_width"),
             py::arg("eps"), py::arg("places"))
        .def("run", &RecurrentBlock::run, Unlocked());
}

}  // namespace moeserve
