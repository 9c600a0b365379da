// The row kernels as functions, for the fused calls (layer.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "bindings/bindings.hpp"
#include "core/weighted_sum.hpp"
#include "kernels/table.hpp"

namespace moeserve {

constexpr size_t kWorthSharing = 1 << 17;  // elements; they take about 25 us, which waking other threads may take as well

/// Calls rows(begin, end) for [0, count), with `width` elements each, on the pool's threads if that
/// is worth it. Small calls do not release the GIL, because acquiring it again may take longer than
/// the call.
template <class Rows>
void over_rows(size_t count, size_t width, const Rows& rows) {
    if (count * width < kWorthSharing) return rows(size_t{0}, count);
    std::optional<pybind11::gil_scoped_release> unlocked;
    if (PyGILState_Check()) unlocked.emplace();
    const auto run = [](void* context, size_t begin, size_t end, int) {
        if (begin < end) (*static_cast<const Rows*>(context))(begin, end);
    };
    pool()->split(count, Work{run, const_cast<Rows*>(&rows)});
}

template <class Args>
void over_rows(void (*kernel)(const Args&, size_t, size_t), const Args& args, size_t count, size_t width) {
    over_rows(count, width, [&](size_t begin, size_t end) { kernel(args, begin, end); });
}

/// Throws std::invalid_argument if the rule cannot choose `top_k` of `experts` experts.
void check_route(const RouteRule& rule, size_t experts, size_t top_k);

/// Computes out[t] = sum over k, in order, of weights[t * top_k + k] * y[place[t * top_k + k]].
/// place -1 adds zero.
void sum_pairs(Element element, size_t tokens, size_t top_k, size_t dim, const void* y, const int64_t* place,
               const float* weights, void* out);

}  // namespace moeserve
