// An MTP head: computes all draft tokens after a step in one call, on a thread of its own without
// the GIL. The bits are those of separate calls. moeserve/runner/speculation/native_head.py is the
// only caller.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "bindings/attention_block.hpp"
#include "bindings/bindings.hpp"
#include "pool/background.hpp"

namespace py = pybind11;

namespace moeserve {
namespace {

/// The decoder layer of the head, and its other weights. Norms are addresses of fp32 weights.
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
    bool rotates;      // otherwise all tokens use the first angles
};

/// Addresses of the requests' tokens, block tables and parameters (by slot), and of the KV cache.
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

/// The rows of a step. Row r has tokens offsets[r] .. offsets[r + 1] - 1 of the request in
/// slots[r], at positions starts[r], starts[r] + 1, ...
struct Rows {
    std::vector<int32_t> slots, starts, offsets;

    size_t tokens() const { return static_cast<size_t>(offsets.back()); }

    /// Calls each(token, its slot, its position).
    template <class Each>
    void for_tokens(const Each& each) const {
        for (size_t r = 0; r < slots.size(); ++r) {
            for (int32_t t = offsets[r]; t < offsets[r + 1]; ++t) {
                each(static_cast<size_t>(t), int64_t{slots[r]}, int64_t{starts[r]} + t - offsets[r]);
            }
        }
    }
};

/// A step after sampling. last: for each row that samples, the index of the token before its last
/// known one.
struct HeadStep {
    Rows rows;
    std::vector<int64_t> last;
    Address hidden;
    size_t stride, num_drafts;
};

class DraftHead {
  public:
    DraftHead(const HeadWeights& weights, const HeadTables& tables)
        : weights_(weights), tables_(tables), width_(weights.merge.packing.columns), row_(width_ * bytes_of(weights.type)) {}

    /// Processes a step's tokens and returns its drafts, num_drafts for each row that samples.
    std::vector<int32_t> guess(const HeadStep& step) const {
        const size_t count = step.last.size(), drafting = step.num_drafts ? count : 0;
        const size_t scores = weights_.logits.packing.columns * (sizeof(float) + bytes_of(weights_.type));
        const Arrays arrays({step.rows.tokens() * row_, count * row_, drafting * scores}, Scratch::guesses);
        std::vector<int32_t> ids(step.rows.tokens());
        std::vector<int64_t> slots(step.rows.tokens()), positions(step.rows.tokens());
        step.rows.for_tokens([&](size_t t, int64_t slot, int64_t position) {
            slots[t] = slot, positions[t] = position;
            ids[t] = at<int32_t>(tables_.tokens)[slot * tables_.width + position + 1];
        });
        pass(step.rows, ids, step.hidden, step.stride, arrays[0]);
        if (!drafting) return {};
        Rows rows{std::vector<int32_t>(count), std::vector<int32_t>(count), std::vector<int32_t>(count + 1)};
        std::iota(rows.offsets.begin(), rows.offsets.end(), 0);
        std::vector<int64_t> known;
        for (size_t s = 0; s < count; ++s) {
            const auto last = static_cast<size_t>(step.last[s]);
            rows.slots[s] = static_cast<int32_t>(slots[last]);
            known.push_back(positions[last] + 2);
            std::memcpy(at<char>(arrays[1]) + s * row_, at<char>(arrays[0]) + last * row_, row_);
        }
        return drafts(rows, known, step.num_drafts, arrays[1], arrays[2]);
    }

  private:
    /// Computes the next drafts of rows with one token each. `known`: tokens of the requests.
    /// Positions are limited to those of the request.
    std::vector<int32_t> drafts(Rows& rows, const std::vector<int64_t>& known, size_t num_drafts, Address hidden,
                                Address scores) const {
        const size_t count = known.size();
        std::vector<int32_t> found(count * num_drafts), ids(count);
        for (size_t i = 0; i < num_drafts; ++i) {
            for (size_t s = 0; s < count; ++s) {
                rows.starts[s] = static_cast<int32_t>(std::min<int64_t>(known[s] - 2 + i, tables_.width - 2));
            }
            if (i) pass(rows, ids, hidden, width_, hidden);
            std::vector<int64_t> slots(rows.slots.begin(), rows.slots.end()), positions;
            for (int64_t tokens : known) positions.push_back(std::min<int64_t>(tokens + i, tables_.width - 1));
            draw(slots, positions, hidden, scores, ids);
            for (size_t s = 0; s < count; ++s) found[s * num_drafts + i] = ids[s];
        }
        return found;
    }

    /// Computes hidden states after the last norm. `hidden`: those of the previous tokens. `out`
    /// may be `hidden`.
    void pass(const Rows& rows, const std::vector<int32_t>& ids, Address hidden, size_t stride, Address out) const {
        const size_t count = ids.size(), angles = count * static_cast<size_t>(tables_.shape.dim) * sizeof(float);
        const Arrays arrays({count * row_, count * row_, 2 * count * row_, count * row_, angles, angles,
                             count * sizeof(int64_t)}, Scratch::drafts);
        const Address x = arrays[0], y = arrays[1], residual = arrays[3];
        for (size_t t = 0; t < count; ++t) {
            std::memcpy(at<char>(x) + t * row_, at<char>(weights_.embedding) + static_cast<size_t>(ids[t]) * row_, row_);
        }
        norm(x, width_, weights_.embed_norm, count, y);
        norm(hidden, stride, weights_.hidden_norm, count, x);
        for (size_t t = 0; t < count; ++t) {
            std::memcpy(at<char>(arrays[2]) + 2 * t * row_, at<char>(y) + t * row_, row_);
            std::memcpy(at<char>(arrays[2]) + (2 * t + 1) * row_, at<char>(x) + t * row_, row_);
        }
        weights_.merge.times(weights_.type, arrays[2], 2 * width_, count, residual);
        norm(residual, width_, weights_.attn_norm, count, x);
        attend(rows, x, count, arrays[4], arrays[5], arrays[6], y);
        add_norm(y, residual, weights_.mlp_norm, count, y);
        gated_mlp(weights_.type, weights_.gate_up, weights_.down, weights_.activation, y, width_, count, x);
        add_norm(x, residual, weights_.norm, count, out);
    }

    void attend(const Rows& rows, Address x, size_t count, Address cos, Address sin, Address places, Address y) const {
        const auto dim = static_cast<size_t>(tables_.shape.dim), half = dim / 2;
        const int64_t size = tables_.shape.block_size;
        int64_t longest = 0;
        rows.for_tokens([&](size_t t, int64_t slot, int64_t position) {
            const size_t from = weights_.rotates ? static_cast<size_t>(position) * half : 0;
            for (size_t i = 0; i < dim; ++i) {
                at<float>(cos)[t * dim + i] = at<float>(weights_.cos)[from + i % half];
                at<float>(sin)[t * dim + i] = at<float>(weights_.sin)[from + i % half] * (i < half ? -1.0f : 1.0f);
            }
            at<int64_t>(places)[t] = blocks_of(slot)[position / size] * size + position % size;
            longest = std::max(longest, position / size + 1);
        });
        std::vector<int64_t> blocks;
        for (int32_t slot : rows.slots) blocks.insert(blocks.end(), blocks_of(slot), blocks_of(slot) + longest);
        const AttentionPlan plan(tables_.shape, blocks.data(), longest, static_cast<int64_t>(rows.slots.size()),
                                 rows.starts.data(), rows.offsets.data(), pool()->size());
        weights_.attention->run(plan, x, width_, count, cos, sin, places, tables_.k, tables_.v, tables_.kv_type, y);
    }

    const int32_t* blocks_of(int64_t slot) const { return at<int32_t>(tables_.blocks) + slot * tables_.max_blocks; }

    void norm(Address x, size_t stride, Address weight, size_t rows, Address out) const {
        const NormArgs args{weights_.type, width_, at<void>(x), stride, nullptr, 0, at<float>(weight), weights_.eps,
                            at<void>(out), nullptr};
        over_rows(kernels()->rms_norm, args, rows, width_);
    }

    void add_norm(Address x, Address residual, Address weight, size_t rows, Address out) const {
        const NormArgs args{weights_.type, width_, at<void>(x), width_, at<void>(residual), width_, at<float>(weight),
                            weights_.eps, at<void>(out), at<void>(residual)};
        over_rows(kernels()->rms_norm, args, rows, width_);
    }

    /// Sets ids to the tokens that the sampler would choose, or to 0 if the choice depends on
    /// rounding of fp32 logarithms.
    void draw(const std::vector<int64_t>& slots, const std::vector<int64_t>& positions, Address hidden, Address scores,
              std::vector<int32_t>& ids) const {
        const size_t rows = slots.size(), columns = weights_.logits.packing.columns;
        const bool narrow = weights_.type == Type::bf16;
        const Address rounded = scores + rows * columns * sizeof(float);
        weights_.logits.times(weights_.type, hidden, width_, rows, narrow ? rounded : scores);
        for (size_t i = 0; narrow && i < rows * columns; ++i) {
            at<uint32_t>(scores)[i] = static_cast<uint32_t>(at<uint16_t>(rounded)[i]) << 16;
        }
        std::vector<float> peak(rows);
        std::vector<int64_t> column(rows);
        std::vector<uint8_t> status(rows);
        const DrawArgs args{columns, at<float>(scores), columns, slots.data(), positions.data(),
                            at<uint16_t>(tables_.traits), at<float>(tables_.temperature), at<uint64_t>(tables_.seed), 0,
                            tables_.random, at<int32_t>(tables_.token_hash), nullptr, nullptr, 0, peak.data(),
                            column.data(), status.data()};
        over_rows(kernels()->draw, args, rows, columns);
        for (size_t s = 0; s < rows; ++s) ids[s] = static_cast<int32_t>(std::max<int64_t>(column[s], 0));
    }

    HeadWeights weights_;
    HeadTables tables_;
    size_t width_, row_;  // elements and bytes of a hidden state
};

/// The MTP head and its thread.
class BackgroundHead {
  public:
    using Ints = py::array_t<int32_t, py::array::c_style>;
    using Places = py::array_t<int64_t, py::array::c_style>;

    BackgroundHead(const HeadWeights& weights, const HeadTables& tables, py::object keep)
        : keep_(std::move(keep)), head_(weights, tables) {}

    /// Starts to process a step with at least one token. `keep` owns its hidden states.
    void start(const Ints& slots, const Ints& starts, const Ints& offsets, const Places& last,
               Address hidden, size_t stride, size_t num_drafts, py::object keep) {
        const auto list = [](const auto& array) { return std::vector(array.data(), array.data() + array.size()); };
        wait_for_it();
        hidden_ = std::move(keep);
        const Rows rows{list(slots), list(starts), list(offsets)};
        background_.start(
            [this, step = HeadStep{rows, list(last), hidden, stride, num_drafts}] { drafts_ = head_.guess(step); });
    }

    /// Waits for the step that was started last. Returns its drafts, row by row.
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

    py::object keep_, hidden_;  // own all memory that the thread reads, so they must outlive it
    DraftHead head_;
    std::vector<int32_t> drafts_;
    Background background_;
};

HeadWeights make_weights(Type type, float eps, const std::vector<Address>& norms, Address embedding, const Matrix& merge,
                         const AttentionBlock* attention, const Matrix& gate_up, const Matrix& down,
                         const Activation& activation, const Matrix& logits, Address cos, Address sin, bool rotates) {
    if (type == Type::fp16 || norms.size() != 5) throw std::invalid_argument("expected five norms, and bf16 or fp32");
    return {type, eps, embedding, norms[0], norms[1], norms[2], norms[3], norms[4], merge, attention, gate_up, down,
            activation, logits, cos, sin, rotates};
}

HeadTables make_tables(Address tokens, int64_t width, Address blocks, int64_t max_blocks, int64_t block_size,
                       std::optional<int64_t> window, std::optional<int64_t> section, const std::vector<int64_t>& heads,
                       Address k, Address v, Type kv_type, const std::vector<Address>& columns, Address token_hash,
                       uint16_t random) {
    if (heads.size() != 4 || columns.size() != 3) throw std::invalid_argument("expected four sizes of heads and three columns");
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
