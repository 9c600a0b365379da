// The token selection of sparse attention. moeserve/ops/native_latent.py is the only caller.
#include <algorithm>
#include <stdexcept>

#include "bindings/bindings.hpp"
#include "bindings/rows.hpp"
#include "core/top_k.hpp"
#include "kernels/index_args.hpp"
#include "pool/scratch.hpp"

namespace moeserve {
namespace {

/// Selects tokens for the queries of one request. The first query sees `first` tokens before its
/// own. at_once: number of queries that share the loads of keys, for which `scores` has room.
void index_select(Type type, Address keys, size_t dim, Address slots, size_t first, size_t queries, size_t heads, Address q,
                  Address weights, size_t top_k, size_t at_once, Address scores, Address out) {
    if (top_k > first + 1 || !at_once) throw std::invalid_argument("cannot choose more tokens than there are");
    const pybind11::gil_scoped_release unlocked;
    const std::shared_ptr<Pool> threads = pool();
    for (size_t start = 0; start < queries; start += at_once) {
        const size_t count = std::min(at_once, queries - start), seen = first + start;
        IndexScoresArgs args{type, count, heads, dim, at<float>(q) + start * heads * dim, at<float>(weights) + start * heads,
                             at<void>(keys), at<int64_t>(slots), seen + count, at<float>(scores), nullptr};
        const size_t floats = args.scratch_floats() * threads->size();
        args.scratch = reinterpret_cast<float*>(scratch(Scratch::layer, floats * sizeof(float)));
        threads->share(args.pieces(), 1, {kernels()->index_scores, &args});
        over_rows(count, args.length, [&](size_t begin, size_t end) {
            for (size_t m = begin; m < end; ++m) {
                int64_t* chosen = at<int64_t>(out) + (start + m) * top_k;
                take_largest(args.scores + m * args.length, seen + m + 1, top_k, args.slots, chosen);
            }
        });
    }
}

}  // namespace

void bind_selected(pybind11::module_& m) { m.def("index_select", &index_select); }

}  // namespace moeserve
