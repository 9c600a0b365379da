// Recurrent layers: a plan of tiles per step, run by every layer. moeserve/ops/native_recurrence.py is the only caller.
#include <pybind11/numpy.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/rows.hpp"
#include "kernels/recurrence_args.hpp"
#include "pool/scratch.hpp"

namespace py = pybind11;

namespace moeserve {
namespace {

using Ints = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

/// The tiles of a step's tokens, request by request.
class TilePlan {
  public:
    TilePlan(Address blocks, size_t table_width, size_t block_size, const Ints& starts, const Ints& offsets)
        : per_block_(block_size / kStateTile), num_tokens_(offsets.at(offsets.size() - 1)) {
        if (offsets.size() != starts.size() + 1) throw std::invalid_argument("one offset more than starts, please");
        for (py::ssize_t row = 0; row < starts.size(); ++row) {
            const int64_t* table = at<int64_t>(blocks) + row * table_width;
            const size_t begin = offsets.at(row), end = offsets.at(row + 1);
            size_t position = starts.at(row);
            for (size_t token = begin, count; token < end; token += count, position += count) {
                const size_t tile = position / kStateTile, first = position % kStateTile;
                count = std::min(kStateTile - first, end - token);
                if (tile / per_block_ >= table_width) throw std::out_of_range("a position beyond its row's blocks");
                tiles_.push_back({token, count, first, table[tile / per_block_], int64_t(tile % per_block_), -1, -1});
                if (!tile) continue;
                tiles_.back().before_block = table[(tile - 1) / per_block_];
                tiles_.back().before_place = int64_t((tile - 1) % per_block_);
            }
            if (begin < end) runs_.push_back(tiles_.size());
        }
    }

    StateTiles tiles() const { return {tiles_.data(), runs_.data(), runs_.size() - 1, per_block_}; }
    size_t num_tokens() const { return num_tokens_; }

  private:
    size_t per_block_, num_tokens_;
    std::vector<StateTile> tiles_;
    std::vector<size_t> runs_{0};
};

/// Computes all pieces of a call, on the pool's threads if so many elements are worth it, and zeroes rows behind its tokens.
template <class Args>
void compute(void (*kernel)(void*, size_t, size_t, int), Args& args, const TilePlan& plan, size_t num_rows, size_t width,
             size_t elements) {
    std::memset(args.out + plan.num_tokens() * width, 0, (num_rows - plan.num_tokens()) * width * sizeof(float));
    const bool alone = elements < kWorthSharing;
    const std::shared_ptr<Pool> threads = pool();
    const size_t floats = args.scratch_floats() * (alone ? 1 : threads->size());
    args.scratch = reinterpret_cast<float*>(scratch(Scratch::layer, floats * sizeof(float)));
    if (alone) return kernel(&args, 0, args.pieces(), 0);
    py::gil_scoped_release unlocked;
    threads->share(args.pieces(), 1, {kernel, &args});
}

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
    if (!groups || heads % groups) throw std::invalid_argument("whole groups of heads, please");
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
    // Where there are fewer heads than would keep all threads busy, some share the values of one.
    const size_t wanted = 2 * pool()->size(), there = std::max<size_t>(args.plan.num_runs * heads, 1);
    const size_t parts = pool()->size() == 1 ? 1 : std::max<size_t>((wanted + there - 1) / there, 1);
    args.columns = std::max<size_t>(RecurrenceArgs::padded((v + parts - 1) / parts), 64);
    args.columns = std::min(args.columns, RecurrenceArgs::padded(v));
    compute(kernels()->recurrence, args, plan, num_rows, heads * v, plan.num_tokens() * heads * d * v);
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
        .def(py::init<Address, size_t, size_t, const Ints&, const Ints&>())
        .def_property_readonly("num_tokens", &TilePlan::num_tokens)
        .def("causal_conv", &run_causal_conv)
        .def("recurrence", &run_recurrence)
        .def("selective_scan", &run_selective_scan);
}

}  // namespace moeserve
