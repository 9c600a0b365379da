// Attention against its scalar specification, bit for bit: head widths that are no multiple of a vector's, contexts at the
// borders of blocks, tiles and cuts, windows, sections, latents, and not one byte of memory to spare.
#include <algorithm>
#include <thread>

#include "pool/pool.hpp"
#include "tests/exact.hpp"

#include "kernels/attention.hpp"

using namespace moeserve;

namespace moeserve {
const Kernels* kernels() {
    static const Kernels kernels = [] {
        Kernels table{};
        table.exp = [](const float* x, float* y, size_t) { *y = exp_of(*x); };
        table.attend = tested::attention::attend;
        table.merge_attention = tested::attention::merge_attention;
        return table;
    }();
    return &kernels;
}
}  // namespace moeserve

namespace {

struct Request {
    int64_t context, count;  // the last `count` positions are queries
};

/// Requests with paged contexts of fp32 numbers that type T can hold; KV slots that nobody wrote are NaN. Q: of queries.
template <class T, class Q = T>
struct Step {
    AttentionShape shape;
    bool latent;  // values are the first elements of keys
    std::vector<int32_t> starts, offsets{0};
    int64_t width = 1;
    Exact<int64_t> tables;
    Exact<float> q, k, v;
    Exact<Q> narrow_q;
    Exact<T> k_cache, v_cache;
    Exact<float> sinks;

    static int64_t blocks_of(const AttentionShape& shape, const Request& request) {
        return (request.context + shape.block_size - 1) / shape.block_size;
    }
    static size_t entries(const AttentionShape& shape, const std::vector<Request>& requests) {
        int64_t blocks = 0;
        for (const Request& request : requests) blocks += blocks_of(shape, request);
        return static_cast<size_t>(blocks * shape.block_size * shape.kv_heads);
    }
    static size_t width_of(int64_t dim) { return stored_width<T>(static_cast<size_t>(dim)); }
    static int64_t widest(const AttentionShape& shape, const std::vector<Request>& requests) {
        int64_t most = 0;
        for (const Request& request : requests) most = std::max(most, blocks_of(shape, request));
        return most;
    }
    static int64_t tokens(const std::vector<Request>& requests) {
        int64_t sum = 0;
        for (const Request& request : requests) sum += request.count;
        return sum;
    }

    Step(const AttentionShape& shape_, const std::vector<Request>& requests, size_t offset, bool latent_ = false)
        : shape(shape_),
          latent(latent_),
          width(widest(shape, requests)),
          tables(requests.size() * static_cast<size_t>(width)),
          q(random<float>(static_cast<size_t>(tokens(requests) * shape.heads * shape.dim), offset)),
          k(entries(shape, requests) * width_of(shape.dim), offset),
          v(latent ? 0 : entries(shape, requests) * width_of(shape.v_dim), 1 - offset),
          narrow_q(q.size(), 1 - offset),
          k_cache(k.size(), offset),
          v_cache(v.size(), 1 - offset),
          sinks(random<float>(static_cast<size_t>(shape.heads), offset)) {
        for (size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(narrow_q[i] = Q(q[i]));
        std::vector<int64_t> free(entries(shape, requests) / static_cast<size_t>(shape.kv_heads * shape.block_size));
        for (size_t i = 0; i < free.size(); ++i) free[i] = static_cast<int64_t>(i);
        std::shuffle(free.begin(), free.end(), rng);
        for (size_t r = 0; r < requests.size(); ++r) {
            starts.push_back(static_cast<int32_t>(requests[r].context - requests[r].count));
            offsets.push_back(static_cast<int32_t>(offsets.back() + requests[r].count));
            for (int64_t position = 0; position < requests[r].context; ++position) {
                int64_t& block = tables[r * static_cast<size_t>(width) + static_cast<size_t>(position / shape.block_size)];
                if (position % shape.block_size == 0) block = free.back(), free.pop_back();
                for (int64_t head = 0; head < shape.kv_heads; ++head) {
                    const int64_t entry = (block * shape.block_size + position % shape.block_size) * shape.kv_heads + head;
                    write(k, k_cache, entry, shape.dim);
                    if (!latent) write(v, v_cache, entry, shape.v_dim);
                }
            }
        }
    }

    static void write(Exact<float>& exact, Exact<T>& cache, int64_t entry, int64_t dim) {
        const size_t at = static_cast<size_t>(entry) * width_of(dim);
        for (size_t i = at; i < at + static_cast<size_t>(dim); ++i) {
            if constexpr (kType<T> == Type::int8) cache[i] = static_cast<T>(below(255) - 127);
            else exact[i] = static_cast<float>(cache[i] = T(normal()));
        }
        const float scale = below(9) ? std::abs(normal()) / 60 : 0.0f;
        if (kType<T> == Type::int8) std::memcpy(cache.data() + at + dim, &scale, sizeof scale);
    }
    size_t results() const { return static_cast<size_t>(offsets.back() * shape.heads * shape.v_dim); }

    AttentionCall call(float* out, bool extras) const {
        AttentionCall call{};
        call.shape = shape;
        call.tables = tables.data();
        call.table_width = width;
        call.q = q.data();
        call.q_stride = shape.heads * shape.dim;
        call.k = k_cache.data();
        call.k_bytes = static_cast<int64_t>(width_of(shape.dim) * sizeof(T));
        call.v = latent ? k_cache.data() : v_cache.data();
        call.v_bytes = latent ? call.k_bytes : static_cast<int64_t>(width_of(shape.v_dim) * sizeof(T));
        call.kv_type = kType<T>;
        call.out = out;
        call.soft_cap = extras ? 3.0f : 0.0f;
        call.sinks = extras ? sinks.data() : nullptr;
        return call;
    }

    Exact<float> reference(bool extras) const {
        Exact<float> out(results());
        AttentionCall call = this->call(out.data(), extras);
        if (kType<T> != Type::int8) {
            call.k = k.data(), call.v = latent ? k.data() : v.data(), call.kv_type = Type::fp32;
            call.k_bytes = 4 * shape.dim, call.v_bytes = 4 * (latent ? shape.dim : shape.v_dim);
        }
        for (size_t r = 0; r < starts.size(); ++r) {
            for (int32_t t = offsets[r]; t < offsets[r + 1]; ++t) {
                reference_attention(call, static_cast<int64_t>(r), t, starts[r] + t - offsets[r],
                                    out.data() + t * shape.heads * shape.v_dim);
            }
        }
        return out;
    }

    Exact<float> run(bool extras, size_t padding = 2) const {
        const auto rows = static_cast<size_t>(offsets.back());
        Exact<float> out((rows + padding) * static_cast<size_t>(shape.heads * shape.v_dim), 1), real(results());
        const AttentionPlan plan(shape, tables.data(), width, static_cast<int64_t>(starts.size()), starts.data(), offsets.data(),
                                 pool()->size());
        plan.run(call(out.data(), extras), static_cast<int64_t>(rows + padding));
        std::memcpy(real.data(), out.data(), real.size() * sizeof(float));
        for (size_t i = real.size(); i < out.size(); ++i) CHECK(out[i] == 0.0f);
        return real;
    }

    /// With queries and results of type Q.
    Exact<Q> run_narrow(bool extras) const {
        Exact<Q> out(results(), 1);
        const AttentionPlan plan(shape, tables.data(), width, static_cast<int64_t>(starts.size()), starts.data(), offsets.data(),
                                 pool()->size());
        AttentionCall call = this->call(nullptr, extras);
        call.q = narrow_q.data(), call.q_type = kType<Q>, call.out = out.data();
        plan.run(call, offsets.back());
        return out;
    }

    /// All queries of the last request as one piece, in scratch memory as small as it may be.
    void one_piece(const Exact<float>& expected) const {
        const int64_t count = offsets.back() - offsets.end()[-2], position = starts.back(), row = shape.heads * shape.v_dim;
        QueryBlock piece{};
        piece.request = static_cast<int64_t>(starts.size()) - 1, piece.token = offsets.end()[-2], piece.count = count;
        piece.position = position, piece.heads = shape.kv_heads;
        piece.begin = position / shape.section * shape.section;
        piece.first_cut = shape.first_seen(position) / kCut;
        piece.end_cut = (position + count - 1) / kCut + 1;
        Exact<float> out(results(), 1);
        Exact<float> scratch(static_cast<size_t>(shape.scratch_floats(shape.rows(piece))), 1);
        AttentionCall call = this->call(out.data(), false);
        call.pieces = &piece;
        call.scratch = scratch.data();
        call.scratch_size = static_cast<int64_t>(scratch.size());
        kernels()->attend(&call, 0, 1, 0);
        const size_t at = static_cast<size_t>(piece.token * row);
        CHECK(std::memcmp(out.data() + at, expected.data() + at, static_cast<size_t>(count * row) * sizeof(float)) == 0);
    }
};

template <class T, class Q = T>
void check(const AttentionShape& shape, const std::vector<Request>& requests, size_t offset, bool latent = false) {
    const Step<T, Q> step(shape, requests, offset, latent);
    for (bool extras : {false, true}) {
        const Exact<float> expected = step.reference(extras);
        for (size_t i = 0; i < expected.size(); ++i) CHECK(std::isfinite(expected[i]));
        CHECK(step.run(extras) == expected);
        Exact<Q> narrow(expected.size());
        for (size_t i = 0; i < narrow.size(); ++i) narrow[i] = Q(expected[i]);
        CHECK(step.run_narrow(extras) == narrow);
        if (!extras && requests.back().count <= shape.section) step.one_piece(expected);
    }
}

void widths_and_windows() {
    for (int64_t dim : {1, 3, 8, 16, 17, 40}) {
        for (int64_t window : {int64_t{1}, int64_t{63}, int64_t{65}, kEverything}) {
            const size_t offset = below(2);
            const std::vector<Request> requests{{1, 1}, {64, 1}, {65, 2}, {70, 70}, {129, 5}};
            check<float>({4, 2, dim, dim, 5, window}, requests, offset);
            check<Bf16>({3, 1, dim, dim, 16, window}, requests, offset);
            check<Fp16>({2, 2, dim, dim, 64, window}, requests, 1 - offset);
            check<int8_t, Bf16>({6, 2, dim, dim, 16, window}, requests, offset);
        }
    }
}

void values_of_other_widths() {
    for (int64_t dim : {3, 16, 40}) {
        const size_t offset = below(2);
        const std::vector<Request> requests{{1, 1}, {70, 70}, {129, 5}};
        for (int64_t v_dim : {1, 17, 24}) {
            check<float>({4, 2, dim, v_dim, 5, kEverything}, requests, offset);
            check<Bf16>({3, 1, dim, v_dim, 16, 65}, requests, offset);
            check<int8_t, Fp16>({6, 2, dim, v_dim, 16, kEverything}, requests, offset);
            if (v_dim > dim) continue;
            check<float>({4, 1, dim, v_dim, 16, kEverything}, requests, offset, true);
            check<Bf16>({17, 1, dim, v_dim, 5, 65}, requests, offset, true);
            check<Fp16, Bf16>({3, 1, dim, v_dim, 16, kEverything}, requests, offset, true);
        }
        for (int64_t heads : {16, 24, 48}) check<Bf16>({heads, 1, dim, 16, 16, kEverything}, {{70, 1}, {129, 1}}, offset, dim >= 16);
        check<Bf16>({32, 2, dim, dim, 16, 65}, {{129, 3}}, offset);
        check<Bf16>({2, 1, dim, dim, 16, kEverything, 32}, {{40, 40}, {129, 1}, {130, 2}}, offset);
        check<float>({2, 1, dim, dim, 16, 20, 50}, {{51, 3}, {250, 249}, {1100, 100}}, offset);
        check<int8_t, Bf16>({2, 1, dim, dim, 16, kEverything, 1100}, {{1101, 1}, {2300, 90}}, offset);
    }
}

void borders() {
    for (int64_t context : {15, 16, 17, 63, 127, 128, 192, 193}) {
        for (int64_t count : {int64_t{1}, std::min<int64_t>(context, 7), context}) {
            check<Bf16>({2, 1, 24, 24, 16, kEverything}, {{context, count}}, below(2));
            check<int8_t, Fp16>({2, 1, 24, 24, 16, kEverything}, {{context, count}}, below(2));
        }
    }
    for (int64_t context : {1023, 1024, 1025, 2049, 3100}) {
        for (int64_t window : {int64_t{1}, int64_t{1024}, int64_t{1100}, kEverything}) {
            check<Bf16>({2, 1, 8, 8, 48, window}, {{context, 1}, {40, 40}, {context, 3}}, below(2));
            check<int8_t, Bf16>({2, 1, 8, 8, 48, window}, {{context, 1}, {40, 40}, {context, 3}}, below(2));
        }
    }
}

/// Two threads attend at once: to the same cache, on the same workers.
void ubatches() {
    const Step<Bf16> step({4, 2, 16, 16, 16, kEverything}, {{1100, 1}, {90, 90}, {2100, 1}}, 1);
    const Exact<float> expected = step.reference(true);
    std::vector<std::thread> threads;
    for (int ubatch = 0; ubatch < 2; ++ubatch) {
        threads.emplace_back([&] {
            for (int i = 0; i < 4; ++i) CHECK(step.run(true, static_cast<size_t>(i)) == expected);
        });
    }
    for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char**) {
    for (int workers : {1, 2, 3}) {
        set_pool(std::make_shared<Pool>(std::vector<int>(static_cast<size_t>(workers), -1)));
        if (argc == 1) {  // with an argument: what threads share, and no more
            widths_and_windows();
            values_of_other_widths();
            borders();
        }
        ubatches();
    }
    std::puts("ok");
}
