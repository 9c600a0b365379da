// A scalar reference of paged attention, for fp32 caches and int8 caches with scales. It specifies
// the bits: the kernels of every instruction set must agree exactly.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/attention_plan.hpp"

namespace moeserve {
namespace {

float exp_one(float x) {
    float y;
    kernels()->exp(&x, &y, 1);
    return y;
}

/// Adds numbers as 16 sums (of columns j, j + 16, ...), which are then folded in halves.
float sum_of_tile(const float* p) {
    float part[16] = {};
    for (int64_t j = 0; j < kTile; ++j) part[j % 16] += p[j];
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) part[i] += part[i + half];
    return part[0];
}

struct Sums {
    std::vector<float> values;
    float largest = -std::numeric_limits<float>::infinity(), weight = 0;
};

class Row {
  public:
    Row(const AttentionCall& call, int64_t request, int64_t token, int64_t position, int64_t head)
        : call_(call),
          table_(call.tables + request * call.table_width),
          q_(static_cast<const float*>(call.q) + token * call.q_stride + head * call.shape.dim),
          position_(position),
          head_(head) {}

    /// Computes the fp32 result of one query, [v_dim].
    std::vector<float> attend() const {
        const int64_t dim = call_.shape.v_dim, first = call_.shape.first_seen(position_);
        Sums total{std::vector<float>(dim)};
        for (int64_t cut = first / kCut; cut <= position_ / kCut; ++cut) {
            Sums sums{std::vector<float>(dim)};
            const int64_t end = std::min(position_ + 1, (cut + 1) * kCut);
            int64_t tile = std::max(first, cut * kCut) / kTile * kTile;
            for (; tile < end; tile += kTile) add_tile(tile, first, sums);
            if (sums.weight == 0) continue;
            const float largest = std::max(total.largest, sums.largest);
            const float old = exp_one(total.largest - largest), fresh = exp_one(sums.largest - largest);
            total.largest = largest;
            total.weight = total.weight * old + sums.weight * fresh;
            for (int64_t d = 0; d < dim; ++d)
                total.values[d] = std::fma(sums.values[d], fresh, total.values[d] * old);
        }
        if (call_.sinks != nullptr) {
            const float largest = std::max(total.largest, call_.sinks[head_]), old = exp_one(total.largest - largest);
            total.weight = total.weight * old + exp_one(call_.sinks[head_] - largest);
            for (float& value : total.values) value *= old;
        }
        for (float& value : total.values) value = value / total.weight + 0.0f;
        return total.values;
    }

  private:
    /// Returns the address of the head's key or value at a position.
    const char* stored(const void* cache, int64_t bytes, int64_t position) const {
        const int64_t size = call_.shape.block_size, kv_slot = table_[position / size] * size + position % size;
        return static_cast<const char*>(cache) + (kv_slot * call_.shape.kv_heads + head_ / call_.shape.group()) / call_.shape.shares * bytes;
    }
    float element(const char* head, int64_t d) const {
        return call_.kv_type == Type::int8 ? static_cast<int8_t>(head[d]) : float_at(head + 4 * d);
    }
    float scale(const char* head, int64_t dim) const {
        return call_.kv_type == Type::int8 ? float_at(head + dim) : 1.0f;
    }
    static float float_at(const char* p) {
        float x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }

    float score(int64_t position) const {
        const char* key = stored(call_.k, call_.k_bytes, position);
        float sum = 0;
        for (int64_t d = 0; d < call_.shape.dim; ++d) sum = std::fma(q_[d], element(key, d), sum);
        sum *= scale(key, call_.shape.dim);
        if (call_.soft_cap == 0) return sum;
        return call_.soft_cap * (1.0f - 2.0f / (exp_one(2.0f * (sum / call_.soft_cap)) + 1.0f));
    }

    void add_tile(int64_t tile, int64_t first, Sums& sums) const {
        float p[kTile];
        const int64_t from = std::max(tile, first) - tile, to = std::min(tile + kTile, position_ + 1) - tile;
        std::fill(p, p + kTile, -std::numeric_limits<float>::infinity());
        for (int64_t j = from; j < to; ++j) p[j] = score(tile + j);
        const float before = sums.largest;
        sums.largest = std::max(before, *std::max_element(p, p + kTile));
        const float base = std::max(sums.largest, -std::numeric_limits<float>::max());
        for (float& x : p) x = exp_one(x - base);
        const float factor = before == sums.largest ? 1.0f : exp_one(before - sums.largest);
        sums.weight = sums.weight * factor + sum_of_tile(p);
        for (float& value : sums.values) value *= factor;
        for (int64_t j = from; j < to; ++j) {
            const char* value = stored(call_.v, call_.v_bytes, tile + j);
            const float weight = p[j] * scale(value, call_.shape.v_dim);
            for (int64_t d = 0; d < call_.shape.v_dim; ++d) sums.values[d] = std::fma(weight, element(value, d), sums.values[d]);
        }
    }

    const AttentionCall& call_;
    const int64_t* table_;
    const float* q_;
    const int64_t position_, head_;
};

}  // namespace

void reference_attention(const AttentionCall& call, int64_t request, int64_t token, int64_t position, float* out) {
    for (int64_t head = 0; head < call.shape.heads; ++head) {
        const std::vector<float> row = Row(call, request, token, position, head).attend();
        std::copy(row.begin(), row.end(), out + head * call.shape.v_dim);
    }
}

}  // namespace moeserve
