// Recurrent layers. A step has one plan of tiles, which every layer uses.
// moeserve/ops/native_recurrence.py is the only caller.
#include <stdexcept>

#include "bindings/tile_plan.hpp"

namespace py = pybind11;

namespace moeserve {
namespace {

void run_causal_conv(const TilePlan& plan, Type type, size_t num_rows, size_t channels, size_t inputs, Address x,
                     size_t stride, Address weight, Address bias, bool silu, Address rows, Address borders, Address out) {
    CausalConvArgs args{plan.tiles(), type, channels, inputs, at<void>(x), stride, at<float>(weight), at<float>(bias),
                        silu, at<float>(rows), at<float>(borders), at<float>(out), nullptr};
    compute(kernels()->causal_conv, args, plan, num_rows, channels, plan.num_tokens() * channels);
}

void run_recurrence(const TilePlan& plan, size_t num_rows, size_t groups, size_t heads, size_t d, size_t v, size_t decays,
                    Address q, size_t q_stride, Address k, size_t k_stride, Address values, size_t v_stride,
                    Address log_decay, size_t decay_stride, Address beta, size_t beta_stride, Address states,
                    Address keys, Address updates, Address sums, Address out) {
    if (!groups || heads % groups) throw std::invalid_argument("expected whole groups of heads");
    RecurrenceArgs args{};
    args.plan = plan.tiles();
    args.groups = groups, args.heads = heads, args.d = d, args.v = v, args.decays = decays;
    args.q = at<float>(q), args.q_stride = q_stride;
    args.k = at<float>(k), args.k_stride = k_stride;
    args.values = at<float>(values), args.v_stride = v_stride;
    args.log_decay = at<float>(log_decay), args.decay_stride = decay_stride;
    args.beta = at<float>(beta), args.beta_stride = beta_stride;
    args.states = at<float>(states), args.keys = at<float>(keys);
    args.updates = at<float>(updates), args.sums = at<float>(sums);
    args.out = at<float>(out);
    recur(args, plan, num_rows);
}

void run_selective_scan(const TilePlan& plan, size_t num_rows, size_t channels, size_t state, Address x, Address dt,
                        Address a, Address b, Address c, Address skip, Address states, Address xs, Address dts, Address bs,
                        Address out) {
    SelectiveScanArgs args{plan.tiles(), channels, state, at<float>(x), at<float>(dt), at<float>(a), at<float>(b),
                           at<float>(c), at<float>(skip), at<float>(states), at<float>(xs), at<float>(dts), at<float>(bs),
                           at<float>(out), nullptr};
    compute(kernels()->selective_scan, args, plan, num_rows, channels, plan.num_tokens() * channels * state);
}

}  // namespace

void bind_recurrence(py::module_& m) {
    py::class_<TilePlan>(m, "TilePlan")
        .def(py::init<Address, size_t, size_t, const TilePlan::Ints&, const TilePlan::Ints&>())
        .def_property_readonly("num_tokens", &TilePlan::num_tokens)
        .def("causal_conv", &run_causal_conv)
        .def("recurrence", &run_recurrence)
        .def("selective_scan", &run_selective_scan);
}

}  // namespace moeserve
