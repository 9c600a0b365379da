// The cache of experts on disk: each visit has the file's bytes of exactly the experts that it wants, once.
#include "pool/expert_cache.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <random>
#include <stdexcept>
#include <thread>

#include "check.hpp"

using namespace moeserve;

namespace {

constexpr size_t kExperts = 9;
const size_t kBytes[] = {64, 4096, 5120, (1 << 20) + 320};  // of an expert of each layer: up to two reads

uint8_t byte_at(size_t offset) { return static_cast<uint8_t>(offset * 2654435761u >> 13); }

/// A file without a name whose bytes tell their place, up to `size`.
int file_of(size_t size) {
    char name[] = "/tmp/moeserve-experts-XXXXXX";
    const int file = mkstemp(name);
    CHECK(file >= 0 && unlink(name) == 0);
    std::vector<uint8_t> bytes(size);
    for (size_t i = 0; i < size; ++i) bytes[i] = byte_at(i);
    CHECK(write(file, bytes.data(), size) == static_cast<ssize_t>(size));
    return file;
}

struct Layers {
    explicit Layers(size_t slots, size_t missing = 0) {
        size_t end = 192;
        for (const size_t bytes : kBytes) offsets.push_back(end), end += kExperts * bytes;
        const int file = file_of(end - missing);
        cache = std::make_unique<ExpertCache>(file, "a file");
        close(file);
        for (size_t layer = 0; layer < offsets.size(); ++layer) cache->add(offsets[layer], kExperts, kBytes[layer]);
        cache->open(slots * cache->slot_bytes());
    }

    void visit(size_t layer, std::mt19937& random) {
        std::vector<size_t> counts(kExperts), seen(kExperts), expected;
        for (size_t& count : counts) count = random() % 3 == 0;
        for (size_t i = random() % 4; i > 0; --i) expected.push_back(random() % (kExperts + 1));
        cache->visit(layer, counts, expected, [&](const std::vector<ExpertCache::Held>& some) {
            for (const auto& [expert, unit] : some) {
                ++seen[expert];
                const uint8_t* bytes = cache->memory() + unit * ExpertCache::kUnit;
                const size_t first = offsets[layer] + expert * kBytes[layer];
                for (size_t i = 0; i < kBytes[layer]; i += i % 64 ? 1 : 61) CHECK(bytes[i] == byte_at(first + i));
                CHECK(bytes[kBytes[layer] - 1] == byte_at(first + kBytes[layer] - 1));
            }
        });
        CHECK(seen == counts);
    }

    std::vector<size_t> offsets;
    std::unique_ptr<ExpertCache> cache;
};

void random_visits(size_t slots) {
    Layers layers(slots);
    std::mt19937 random(static_cast<unsigned>(slots));
    for (size_t step = 0; step < 200; ++step) layers.visit(step % 4, random);
    const auto stats = layers.cache->take_stats();
    CHECK(stats.hits + stats.misses > 400 && stats.read_bytes > 0);
    CHECK(layers.cache->take_stats().hits == 0);
}

void two_callers() {
    Layers layers(5);
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 2; ++seed) {
        threads.emplace_back([&layers, seed] {
            std::mt19937 random(seed);
            for (size_t step = 0; step < 100; ++step) layers.visit(step % 4, random);
        });
    }
    for (std::thread& thread : threads) thread.join();
}

/// What is short is never computed with; the cache ends while guesses are on their way.
void short_file() {
    Layers layers(6, 1);
    const std::vector<size_t> one{1, 0, 0, 0, 0, 0, 0, 0, 0}, last{1, 0, 0, 0, 0, 0, 0, 0, 1};
    size_t calls = 0;
    const auto count = [&](const std::vector<ExpertCache::Held>& some) { calls += some.size(); };
    layers.cache->visit(3, one, {}, count);
    CHECK(calls == 1);
    for (int turn = 0; turn < 2; ++turn) {
        try {
            layers.cache->visit(3, last, {}, [](const std::vector<ExpertCache::Held>& some) { CHECK(some[0].expert == 0); });
            CHECK(false);
        } catch (const std::runtime_error&) {
        }
    }
    Layers(6).cache->visit(2, one, {0, 1, 2, 3, 4}, count);
}

}  // namespace

int main() {
    for (size_t slots : {1, 2, 3, 7, 20, 100}) random_visits(slots);
    two_callers();
    short_file();
    std::puts("ok");
}
