// Drives the pure parts of csrc/core under sanitizers, on hostile sizes, against the plainest code that says the same.
// Built and run by tests/ops/test_native.py. Buffers are exactly as large as they must be, so that any step outside shows.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "core/pairs.hpp"
#include "core/rows.hpp"
#include "core/weighted_sum.hpp"

using namespace moeserve;

namespace {

std::mt19937 rng(7);

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

size_t below(size_t limit) { return rng() % limit; }

void test_pairs(size_t num_pairs, uint32_t num_slots) {
    std::vector<int32_t> ids(num_pairs);
    for (auto& id : ids) id = static_cast<int32_t>(below(num_slots + 1)) - 1;
    check_ids(ids.data(), num_pairs, num_slots);
    std::vector<uint32_t> first(num_slots + 1), order(num_pairs);
    sort_pairs(ids.data(), num_pairs, num_slots, first.data(), order.data());
    uint32_t at = 0;
    for (uint32_t slot = 0; slot < num_slots; ++slot) {
        require(first[slot] == at, "a slot begins where the last one ended");
        for (uint32_t n = 0; n < num_pairs; ++n) {
            if (ids[n] == static_cast<int32_t>(slot)) require(order[at++] == n, "pairs of a slot keep their order");
        }
    }
    require(first[num_slots] == at, "the last entry counts all pairs that go anywhere");
    for (const int32_t bad : {static_cast<int32_t>(num_slots), -2, INT32_MIN, INT32_MAX}) {
        if (num_pairs == 0) break;
        ids[below(num_pairs)] = bad;
        bool refused = false;
        try {
            check_ids(ids.data(), num_pairs, num_slots);
        } catch (const std::out_of_range&) {
            refused = true;
        }
        require(refused, "an id that is no slot is refused");
    }
}

void test_rows(size_t rows, size_t count, size_t row_bytes) {
    std::vector<std::byte> from(rows * row_bytes), to(count * row_bytes);
    for (auto& byte : from) byte = static_cast<std::byte>(rng());
    std::vector<uint32_t> index(count);
    for (auto& i : index) i = static_cast<uint32_t>(below(rows));
    require(gather_rows(to.data(), from.data(), index.data(), count, row_bytes) == to.data() + to.size(), "end of rows");
    for (size_t j = 0; j < count; ++j) {
        require(!std::memcmp(&to[j * row_bytes], &from[index[j] * row_bytes], row_bytes), "gathered rows");
    }
    std::vector<std::byte> wide(rows * row_bytes * 3);
    spread_rows(wide.data() + row_bytes, 3 * row_bytes, from.data(), rows, row_bytes);
    for (size_t t = 0; t < rows; ++t) {
        require(!std::memcmp(&wide[(3 * t + 1) * row_bytes], &from[t * row_bytes], row_bytes), "spread rows");
    }
}

void test_sum(size_t tokens, size_t top_k, size_t dim, Element element) {
    const size_t row_bytes = dim * element_bytes(element);
    std::vector<std::unique_ptr<char[]>> storage;  // every row in an allocation of its own
    std::vector<const void*> rows;
    for (size_t n = 0; n < tokens * top_k; ++n) {
        storage.push_back(std::make_unique<char[]>(row_bytes));
        for (size_t i = 0; i < row_bytes; ++i) storage.back()[i] = static_cast<char>(rng());
        rows.push_back(storage.back().get());
    }
    std::vector<float> weights(tokens * top_k);
    for (auto& w : weights) w = static_cast<float>(below(1000)) / 500 - 1;
    std::vector<char> baseline(tokens * row_bytes, 1);
    weighted_sum(rows.data(), weights.data(), tokens, top_k, dim, element, baseline.data(), Isa::baseline);
    for (const Isa isa : {Isa::avx2, Isa::avx512}) {
        if (!has(isa)) continue;
        std::vector<char> out(tokens * row_bytes, 2);
        weighted_sum(rows.data(), weights.data(), tokens, top_k, dim, element, out.data(), isa);
        for (size_t i = 0; i < tokens * dim; ++i) {
            // Any bits go in, so some sums are NaN, whose sign and payload depend on the order of operands.
            if (element == Element::fp32) {
                float a, b;
                std::memcpy(&a, &baseline[4 * i], 4), std::memcpy(&b, &out[4 * i], 4);
                require(std::isnan(a) ? std::isnan(b) : !std::memcmp(&a, &b, 4), "fp32 bits of all instruction sets");
            } else {
                uint16_t a, b;
                std::memcpy(&a, &baseline[2 * i], 2), std::memcpy(&b, &out[2 * i], 2);
                const uint16_t infinite = element == Element::bf16 ? 0x7f80 : 0x7c00;
                require(a == b || ((a & 0x7fff) > infinite && (b & 0x7fff) > infinite), "16-bit bits of all sets");
            }
        }
    }
}

}  // namespace

int main() {
    for (const size_t num_pairs : {0, 1, 7, 64, 1000}) {
        for (const uint32_t num_slots : {1u, 2u, 13u, 257u}) test_pairs(num_pairs, num_slots);
    }
    for (const size_t row_bytes : {1, 2, 15, 64, 4096}) {
        test_rows(1, 0, row_bytes);
        test_rows(5, 33, row_bytes);
    }
    for (const Element element : {Element::fp32, Element::bf16, Element::fp16}) {
        for (const size_t dim : {1, 7, 8, 31, 32, 33, 127, 200}) {
            for (const size_t top_k : {0, 1, 2, 8}) {
                for (const size_t tokens : {0, 1, 5}) test_sum(tokens, top_k, dim, element);
            }
        }
    }
    std::puts("ok");
}
