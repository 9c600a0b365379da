// A head for multi-token prediction: all guesses behind a step in one call on a thread of its own, with the bits of
// separate calls. The engine's loop needs the interpreter's lock meanwhile. moeserve/runner/speculation/native_head.py is
// the only caller.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>

#include "bindings/attention_block.hpp"
#include "bindings/bindings.hpp"
#include "pool/background.hpp"

namespace py = pybind11;

namespace moeserve {
namespace {

/// The layer, and what is around it. Norms are addresses of fp32 weights.
struct HeadWeights {
    Type type;
    float eps;
    Address embedding, embed_norm, hidden_norm, attn_norm, mlp_norm, norm;
    Matrix merge;
    const AttentionBlock* attention;
    Matrix gate_up, down;
    Activation activation;
    Matrix logits;
    Address cos, sin;  // fp32 [positions, dim / 2]
    bool rotates;      // or the first angles are everyone's
};

/// Where tokens, blocks and parameters of requests lie, by slot; where keys and values do.
struct HeadTables {
    Address tokens;
    int64_t width;
    Address blocks;
    int64_t max_blocks;
    AttentionShape shape;
    Address k, v;
    Type kv_type;
    Address traits, temperature, seed, token_hash;
    uint16_t random;
};

/// A step whose tokens are sampled. Row r computed positions starts[r] + 0 .. of the request in slots[r] as the step's
/// tokens offsets[r] .. offsets[r + 1] - 1. last: the tokens of rows that sample whose next ones are the last known ones.
struct HeadStep {
    std::vector<int32_t> slots, starts, offsets;
    std::vector<int64_t> last;
    Address hidden;
    size_t stride, num_drafts;
};

class DraftHead {
  public:
    DraftHead(const HeadWeights& weights, const HeadTables& tables) : weights_(weights), tables_(tables) {}

    /// Reads a step's tokens and, if there are drafts to make, returns them, [sampling rows, num_drafts].
    std::vector<int32_t> guess(const HeadStep& step) const {
        const size_t tokens = static_cast<size_t>(step.offsets.back()), count = step.last.size();
        const size_t k = step.num_drafts, row = width() * bytes_of(weights_.type), vocabulary = weights_.logits.packing.columns;
        const size_t draws = count * (vocabulary * (sizeof(float) + bytes_of(weights_.type)) + 64);
        const Arrays arrays({tokens * row, count * row, k ? draws : 0}, Scratch::guesses);
        std::vector<int64_t> slots_T, positions_T;
        std::vector<int32_t> ids_T;
        for (size_t r = 0; r < step.slots.size(); ++r) {
            for (int32_t t = 0; t < step.offsets[r + 1] - step.offsets[r]; ++t) {
                slots_T.push_back(step.slots[r]), positions_T.push_back(step.starts[r] + t);
                ids_T.push_back(token(slots_T.back(), positions_T.back() + 1));
            }
        }
        const std::vector<int64_t> slots_R(step.slots.begin(), step.slots.end());
        pass(slots_R, step.starts, step.offsets, slots_T, positions_T, ids_T, step.hidden, step.stride, arrays[0]);
        return k && count ? draft(step, slots_T, positions_T, arrays[0], arrays[1], arrays[2]) : std::vector<int32_t>{};
    }

  private:
    std::vector<int32_t> draft(const HeadStep& step, const std::vector<int64_t>& slots_T, const std::vector<int64_t>& positions_T,
                               Address hidden_T, Address hidden, Address scores) const {
        const size_t count = step.last.size(), k = step.num_drafts, row = width() * bytes_of(weights_.type);
        std::vector<int32_t> drafts(count * k), starts(count), offsets(count + 1), ids(count);
        std::vector<int64_t> slots(count), known(count), positions(count);
        for (size_t s = 0; s < count; ++s) {
            const auto last = static_cast<size_t>(step.last[s]);
            slots[s] = slots_T[last], known[s] = positions_T[last] + 2;
            std::memcpy(at<char>(hidden) + s * row, at<char>(hidden_T) + last * row, row);
        }
        std::iota(offsets.begin(), offsets.end(), 0);
        for (size_t i = 0; i < k; ++i) {
            if (i) {
                for (size_t s = 0; s < count; ++s) {
                    positions[s] = std::min(known[s] - 2 + static_cast<int64_t>(i), tables_.width - 2);
                    starts[s] = static_cast<int32_t>(positions[s]);
                }
                pass(slots, starts, offsets, slots, positions, ids, hidden, width(), hidden);
            }
            for (size_t s = 0; s < count; ++s) {
                positions[s] = std::min(known[s] + static_cast<int64_t>(i), tables_.width - 1);
            }
            draw(slots, positions, hidden, scores, ids);
            for (size_t s = 0; s < count; ++s) drafts[s * k + i] = ids[s];
        }
        return drafts;
    }

    size_t width() const { return weights_.merge.packing.columns; }
    int32_t token(int64_t slot, int64_t position) const { return at<int32_t>(tables_.tokens)[slot * tables_.width + position]; }

    /// One token each: hidden states behind the last norm, rows of `out`, which may be those of `hidden`.
    void pass(const std::vector<int64_t>& slots_R, const std::vector<int32_t>& starts_R, const std::vector<int32_t>& offsets_R1,
              const std::vector<int64_t>& slots_T, const std::vector<int64_t>& positions_T, const std::vector<int32_t>& ids_T,
              Address hidden, size_t stride, Address out) const {
        const Type type = weights_.type;
        const size_t rows = ids_T.size(), wide = width(), row = wide * bytes_of(type);
        const auto dim = static_cast<size_t>(tables_.shape.dim), half = dim / 2;
        const Arrays arrays({rows * row, rows * row, 2 * rows * row, rows * row, rows * row, rows * dim * sizeof(float),
                             rows * dim * sizeof(float)}, Scratch::drafts);
        for (size_t t = 0; t < rows; ++t) {
            std::memcpy(at<char>(arrays[0]) + t * row, at<char>(weights_.embedding) + ids_T[t] * row, row);
        }
        norm(arrays[0], wide, weights_.embed_norm, rows, arrays[1]);
        norm(hidden, stride, weights_.hidden_norm, rows, arrays[0]);
        for (size_t t = 0; t < rows; ++t) {
            std::memcpy(at<char>(arrays[2]) + 2 * t * row, at<char>(arrays[1]) + t * row, row);
            std::memcpy(at<char>(arrays[2]) + (2 * t + 1) * row, at<char>(arrays[0]) + t * row, row);
        }
        weights_.merge.times(type, arrays[2], 2 * wide, rows, arrays[3]);  // the residual stream
        norm(arrays[3], wide, weights_.attn_norm, rows, arrays[0]);
        for (size_t t = 0; t < rows; ++t) {
            const size_t from = weights_.rotates ? static_cast<size_t>(positions_T[t]) * half : 0;
            const float *cos = at<float>(weights_.cos) + from, *sin = at<float>(weights_.sin) + from;
            float *to_cos = at<float>(arrays[5]) + t * dim, *to_sin = at<float>(arrays[6]) + t * dim;
            for (size_t i = 0; i < half; ++i) {
                to_cos[i] = to_cos[half + i] = cos[i];
                to_sin[i] = -sin[i], to_sin[half + i] = sin[i];
            }
        }
        std::vector<int64_t> places_T(rows);
        for (size_t t = 0; t < rows; ++t) {
            const int64_t block = at<int32_t>(tables_.blocks)[slots_T[t] * tables_.max_blocks + positions_T[t] / tables_.shape.block_size];
            places_T[t] = block * tables_.shape.block_size + positions_T[t] % tables_.shape.block_size;
        }
        const int64_t longest = *std::max_element(positions_T.begin(), positions_T.end()) / tables_.shape.block_size + 1;
        std::vector<int64_t> blocks_RN;
        for (int64_t slot : slots_R) {
            const int32_t* blocks = at<int32_t>(tables_.blocks) + slot * tables_.max_blocks;
            blocks_RN.insert(blocks_RN.end(), blocks, blocks + longest);
        }
        const AttentionPlan plan(tables_.shape, blocks_RN.data(), longest, static_cast<int64_t>(slots_R.size()),
                                 starts_R.data(), offsets_R1.data(), pool()->size());
        weights_.attention->run(plan, arrays[0], wide, rows, arrays[5], arrays[6], reinterpret_cast<Address>(places_T.data()),
                                tables_.k, tables_.v, tables_.kv_type, arrays[1]);
        add_norm(arrays[1], arrays[3], weights_.mlp_norm, rows, arrays[1]);
        gated_mlp(type, weights_.gate_up, weights_.down, weights_.activation, arrays[1], wide, rows, arrays[4]);
        add_norm(arrays[4], arrays[3], weights_.norm, rows, out);
    }

    void norm(Address x, size_t stride, Address weight, size_t rows, Address out) const {
        const NormArgs args{weights_.type, width(), at<void>(x), stride, nullptr, 0, at<float>(weight), weights_.eps,
                            at<void>(out), nullptr};
        over_rows(kernels()->rms_norm, args, rows, width());
    }

    void add_norm(Address x, Address residual, Address weight, size_t rows, Address out) const {
        const NormArgs args{weights_.type, width(), at<void>(x), width(), at<void>(residual), width(), at<float>(weight),
                            weights_.eps, at<void>(out), at<void>(residual)};
        over_rows(kernels()->rms_norm, args, rows, width());
    }

    /// What the sampler would choose; some token where fp32 logarithms could decide between two.
    void draw(const std::vector<int64_t>& slots, const std::vector<int64_t>& positions, Address hidden, Address scores,
              std::vector<int32_t>& ids) const {
        const size_t rows = slots.size(), columns = weights_.logits.packing.columns;
        const Address rounded = scores + rows * columns * sizeof(float);
        weights_.logits.times(weights_.type, hidden, width(), rows, weights_.type == Type::fp32 ? scores : rounded);
        if (weights_.type == Type::bf16) {
            for (size_t i = 0; i < rows * columns; ++i) {
                at<uint32_t>(scores)[i] = static_cast<uint32_t>(at<uint16_t>(rounded)[i]) << 16;
            }
        }
        std::vector<float> peak(rows);
        std::vector<int64_t> column(rows);
        std::vector<uint8_t> status(rows);
        const DrawArgs args{columns, at<float>(scores), columns, slots.data(), positions.data(), at<uint16_t>(tables_.traits),
                            at<float>(tables_.temperature), at<uint64_t>(tables_.seed), 0, tables_.random,
                            at<int32_t>(tables_.token_hash), nullptr, nullptr, 0, peak.data(), column.data(), status.data()};
        over_rows(kernels()->draw, args, rows, columns);
        for (size_t s = 0; s < rows; ++s) ids[s] = static_cast<int32_t>(std::max<int64_t>(column[s], 0));
    }

    HeadWeights weights_;
    HeadTables tables_;
};

/// The head and its thread.
class BackgroundHead {
  public:
    using Ints = py::array_t<int32_t, py::array::c_style>;
    using Places = py::array_t<int64_t, py::array::c_style>;

    BackgroundHead(const HeadWeights& weights, const HeadTables& tables, py::object keep)
        : keep_(std::move(keep)), head_(weights, tables) {}

    /// Begins to read a step, whose hidden states' owner is `keep`; it must have one token or more.
    void start(const Ints& slots, const Ints& starts, const Ints& offsets, const Places& last,
               Address hidden, size_t stride, size_t num_drafts, py::object keep) {
        const auto list = [](const auto& array) { return std::vector(array.data(), array.data() + array.size()); };
        wait_for_it();
        hidden_ = std::move(keep);
        background_.start([this, step = HeadStep{list(slots), list(starts), list(offsets), list(last), hidden,
                                                 stride, num_drafts}] {
            drafts_ = head_.guess(step);
        });
    }

    /// Waits for the step that was started last; returns its drafts, one row's after the other.
    Ints wait() {
        wait_for_it();
        hidden_ = py::none();
        return Ints(static_cast<py::ssize_t>(drafts_.size()), drafts_.data());
    }

  private:
    void wait_for_it() {
        py::gil_scoped_release unlocked;
        background_.wait();
    }

    py::object keep_, hidden_;  // owners of all memory that the thread reads; it ends before they may
    DraftHead head_;
    std::vector<int32_t> drafts_;
    Background background_;
};

HeadWeights make_weights(Type type, float eps, const std::vector<Address>& norms, Address embedding, const Matrix& merge,
                         const AttentionBlock* attention, const Matrix& gate_up, const Matrix& down,
                         const Activation& activation, const Matrix& logits, Address cos, Address sin, bool rotates) {
    if (type == Type::fp16 || norms.size() != 5) throw std::invalid_argument("five norms, and bf16 or fp32, please");
    return {type, eps, embedding, norms[0], norms[1], norms[2], norms[3], norms[4], merge, attention, gate_up, down,
            activation, logits, cos, sin, rotates};
}

HeadTables make_tables(Address tokens, int64_t width, Address blocks, int64_t max_blocks, int64_t block_size,
                       std::optional<int64_t> window, std::optional<int64_t> section, const std::vector<int64_t>& heads,
                       Address k, Address v, Type kv_type, const std::vector<Address>& columns, Address token_hash,
                       uint16_t random) {
    if (heads.size() != 4 || columns.size() != 3) throw std::invalid_argument("four sizes of heads and three columns, please");
    const AttentionShape shape{heads[0], heads[1], heads[2], heads[3], block_size, window.value_or(kEverything),
                               section.value_or(kEverything)};
    return {tokens, width, blocks, max_blocks, shape, k, v, kv_type, columns[0], columns[1], columns[2], token_hash, random};
}

}  // namespace

void bind_draft_head(py::module_& m) {
    py::class_<HeadWeights>(m, "HeadWeights")
        .def(py::init(&make_weights), py::kw_only(), py::arg("type"), py::arg("eps"), py::arg("norms"), py::arg("embedding"),
             py::arg("merge"), py::arg("attention"), py::arg("gate_up"), py::arg("down"), py::arg("activation"),
             py::arg("logits"), py::arg("cos"), py::arg("sin"), py::arg("rotates"));
    py::class_<HeadTables>(m, "HeadTables")
        .def(py::init(&make_tables), py::kw_only(), py::arg("tokens"), py::arg("width"), py::arg("blocks"),
             py::arg("max_blocks"), py::arg("block_size"), py::arg("window"), py::arg("section"), py::arg("heads"),
             py::arg("k"), py::arg("v"), py::arg("kv_type"), py::arg("columns"), py::arg("token_hash"), py::arg("random"));
    py::class_<BackgroundHead>(m, "DraftHead")
        .def(py::init<const HeadWeights&, const HeadTables&, py::object>(), py::arg("weights"), py::arg("tables"),
             py::arg("keep"))
        .def("start", &BackgroundHead::start, py::kw_only(), py::arg("slots"), py::arg("starts"), py::arg("offsets"),
             py::arg("last"), py::arg("hidden"), py::arg("stride"), py::arg("num_drafts"),
             py::arg("keep"))
        .def("wait", &BackgroundHead::wait);
}

}  // namespace moeserve
