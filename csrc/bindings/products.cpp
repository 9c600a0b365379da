// GEMMs with packed weights. moeserve/ops/native_layer.py, moe/experts/native.py and
// loader/packed_cache.py are the only callers.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <stdexcept>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "bindings/products.hpp"
#include "core/checksum.hpp"
#include "core/ggml_blocks.hpp"
#include "kernels/pack.hpp"
#include "kernels/table.hpp"
#include "pool/scratch.hpp"

namespace py = pybind11;

namespace moeserve {
namespace {

using Counts = py::array_t<int64_t, py::array::c_style>;

constexpr size_t kMostRows = 192;            // rows of a part; a multiple of the tiles of every instruction set
constexpr size_t kPartBytes = 384 << 10;     // bytes of a part's rows, so that they stay in a core's L2 cache
constexpr size_t kMostCompressed = 1 << 20;  // limit of inputs, because an Escape has only so many bits for a place
constexpr size_t kTilesStep = 6;             // rows of a part are a multiple of this if there are several parts
constexpr size_t kSummed = 2 << 20;          // bytes of a part with its own checksum: a huge page
constexpr size_t kTakes = 64;                // about how often a worker takes tasks

/// The most rows of a part for which dot products of pairs are not slower than multiply-adds. On
/// Intel's cores a dot product takes two cycles on one port, while two ports do a multiply-add per
/// cycle each. With few rows, memory is the bottleneck, so this does not matter.
size_t dot_rows() {
    if (!kernels()->pairs) return 0;
#if defined(__x86_64__)
    static const bool intel = __builtin_cpu_is("intel");
    if (intel) return 4;
#endif
    return SIZE_MAX;
}

size_t most_rows(Type type, const Packing& packing) {
    const size_t row = packing.depth * (packing.ints.on || (type == Type::bf16 && dot_rows() == SIZE_MAX) ? 2 : 4);
    return std::clamp(kPartBytes / row / 12 * 12, size_t{12}, kMostRows);
}

/// Splits rows [first, first + count) of an expert into nearly equal parts of at most `most` rows.
void divide(size_t expert, size_t first, size_t count, size_t most, std::vector<Part>& parts) {
    const size_t number = (count + most - 1) / most;
    const size_t each = number > 1 ? (count + number - 1) / number + kTilesStep - 1 : count;
    const size_t step = number > 1 ? each / kTilesStep * kTilesStep : count;
    for (size_t begin = 0; begin < count; begin += step) parts.push_back({expert, first + begin, std::min(step, count - begin)});
}

/// Computes a GEMM over all parts on the threads of the pool. Threads take tasks as they finish,
/// because tasks differ in bytes and rows, and cores may be busy otherwise.
void multiply(ProductArgs args, const std::vector<Part>& parts) {
    args.parts = parts.data();
    for (const Part& part : parts) args.most_rows = std::max(args.most_rows, part.count);
    const std::shared_ptr<Pool> threads = pool();
    const size_t num_threads = static_cast<size_t>(threads->size());
    std::vector<size_t> held(num_threads * (64 / sizeof(size_t)), ~size_t{0});
    args.held = held.data();
    const auto run = [](void* context, size_t begin, size_t end, int worker) {
        const ProductArgs& product = *static_cast<const ProductArgs*>(context);
        const auto kernel = product.ints.on ? kernels()->int_product : kernels()->product;
        kernel(product, begin, end, worker);
    };
    const size_t tasks = parts.size() * args.units();
    threads->share(tasks, tasks / (num_threads * kTakes), Work{run, &args});
}

ProductArgs product_args(Type type, const Packing& packing, const uint8_t* weights) {
    ProductArgs args{};
    args.type = args.y_type = type;
    args.weights = weights;
    args.weight_type = packing.type;
    args.depth = packing.depth;
    args.columns = packing.columns;
    args.num_blocks = packing.num_blocks();
    args.block_bytes = packing.block_bytes();
    args.group = packing.group;
    args.zero_points = packing.zero_points;
    args.dot_rows = dot_rows();
    args.ints = packing.ints;
    return args;
}

}  // namespace

/// Computes y [rows, columns] = x [rows, depth] times one packed matrix. bias: fp32, padded to
/// whole blocks, or null.
void linear(Type type, const Packing& packing, Address weights, Address bias, Address x, size_t x_stride, size_t rows,
            Address y, Type y_type) {
    ProductArgs args = product_args(type, packing, at<uint8_t>(weights));
    args.y_type = y_type;
    args.bias = at<float>(bias);
    args.x = at<void>(x);
    args.x_stride = x_stride;
    args.y = at<void>(y);
    args.y_stride = packing.columns;
    std::vector<Part> parts;
    divide(0, 0, rows, most_rows(type, packing), parts);
    multiply(args, parts);
}

/// Computes y[t, h] = W[h] x[t, h] with contiguous packed matrices. Strides are from token to
/// token, steps from head to head.
void head_products(Type type, const Packing& packing, Address weights, size_t heads, Address x, size_t x_stride,
                   size_t x_step, size_t rows, Address y, size_t y_stride, size_t y_step) {
    ProductArgs args = product_args(type, packing, at<uint8_t>(weights));
    args.expert_bytes = packing.bytes();
    args.x = at<void>(x);
    args.x_stride = x_stride;
    args.x_step = x_step;
    args.y = at<void>(y);
    args.y_stride = y_stride;
    args.y_step = y_step;
    std::vector<Part> parts;
    for (size_t head = 0; head < heads; ++head) divide(head, 0, rows, most_rows(type, packing), parts);
    multiply(args, parts);
}

/// Computes experts over rows that are sorted by physical expert. An expert's weights are: gate and
/// up in alternating blocks (packed like `gate_up`), or up alone if the activation has no gate;
/// then `down`; then, if biased, the biases of all these blocks. cached: the cache that has the
/// experts instead of `weights`, or null. expected: experts of the next layer to prefetch.
void experts(Type type, const Packing& gate_up, const Packing& down, Address weights, size_t expert_bytes,
             const Activation& activation, bool biased, const std::vector<size_t>& counts, Address x, size_t x_stride,
             Address y, size_t y_stride, const CachedLayer* cached, const std::vector<size_t>& expected) {
    std::vector<size_t> first_rows(counts.size() + 1);
    std::partial_sum(counts.begin(), counts.end(), first_rows.begin() + 1);
    if (cached) weights = reinterpret_cast<Address>(cached->cache->memory()), expert_bytes = ExpertCache::kUnit;
    const size_t element = type == Type::fp32 ? 4 : 2;
    uint8_t* hidden = scratch(Scratch::hidden, first_rows.back() * gate_up.columns * element);
    const size_t into_bytes = activation.parts() * gate_up.bytes();
    const float* bias = biased ? at<float>(weights + into_bytes + down.bytes()) : nullptr;

    ProductArgs first = product_args(type, gate_up, at<uint8_t>(weights));
    first.acts = true;
    first.num_blocks *= activation.parts();
    first.expert_bytes = expert_bytes;
    first.activation = activation;
    first.bias = bias;
    first.x = at<void>(x);
    first.x_stride = x_stride;
    first.y = hidden;
    first.y_stride = gate_up.columns;

    ProductArgs second = product_args(type, down, at<uint8_t>(weights) + into_bytes);
    second.expert_bytes = expert_bytes;
    if (biased) second.bias = bias + first.num_blocks * Packing::kBlock;
    second.x = hidden;
    second.x_stride = down.depth;
    second.y = at<void>(y);
    second.y_stride = y_stride;

    const auto compute = [&](const std::vector<ExpertCache::Held>& some) {
        std::vector<Part> into, back;
        for (const auto& [expert, place] : some) {
            divide(place, first_rows[expert], counts[expert], most_rows(type, gate_up), into);
            divide(place, first_rows[expert], counts[expert], most_rows(type, down), back);
        }
        multiply(first, into);
        multiply(second, back);
    };
    if (cached) return cached->cache->visit(cached->layer, counts, expected, compute);
    std::vector<ExpertCache::Held> all(counts.size());
    for (size_t expert = 0; expert < counts.size(); ++expert) all[expert] = {expert, expert};
    compute(all);
}

namespace {

/// Packs a matrix, block n to `to` + n * step. Returns the result of `pack`. all_threads: use the
/// pool, so that its other callers wait.
bool pack_all(const Packing& packing, const Unpacked& from, uint8_t* to, size_t step, bool all_threads) {
    struct Job {
        const Packing& packing;
        const Unpacked& from;
        uint8_t* to;
        size_t step;
        std::atomic<bool> fits{true};
    } job{packing, from, to, step};
    if (!all_threads) return pack(packing, from, to, step, 0, packing.num_blocks());
    const auto run = [](void* context, size_t begin, size_t end, int) {
        Job& job = *static_cast<Job*>(context);
        if (!pack(job.packing, job.from, job.to, job.step, begin, end)) job.fits = false;
    };
    pool()->share(packing.num_blocks(), 4, Work{run, &job});
    return job.fits;
}

/// The checksum of the checksums of all parts, computed by the pool. It is the same for any number
/// of threads.
uint64_t checksum_all(Address address, size_t bytes) {
    struct Job {
        const uint8_t* bytes;
        size_t size;
        std::vector<uint64_t> sums;
    } job{at<uint8_t>(address), bytes, std::vector<uint64_t>((bytes + kSummed - 1) / kSummed)};
    const auto run = [](void* context, size_t begin, size_t end, int) {
        Job& job = *static_cast<Job*>(context);
        for (size_t i = begin; i < end; ++i) {
            job.sums[i] = checksum(job.bytes + i * kSummed, std::min(kSummed, job.size - i * kSummed));
        }
    };
    pool()->share(job.sums.size(), 1, Work{run, &job});
    return checksum(reinterpret_cast<const uint8_t*>(job.sums.data()), job.sums.size() * sizeof(uint64_t));
}

/// Asks for huge pages, if the kernel gives them only on demand, because decoding reads weights
/// faster with them.
void advise_huge_pages([[maybe_unused]] Address address, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
    constexpr uintptr_t kPage = 4096;
    const uintptr_t begin = (address + kPage - 1) / kPage * kPage, end = (address + bytes) / kPage * kPage;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // may be refused
#endif
}

/// Throws std::invalid_argument if integer GEMMs do not support these arguments.
void check_ints(const Packing& p) {
    const IntForm& form = p.ints;
    const auto expect = [](bool right, const char* otherwise) {
        if (!right) throw std::invalid_argument(std::string("with rows of int8, ") + otherwise);
    };
    const bool halves = p.group == 16;
    expect(form.codes || p.type == Type::int4 || p.type == Type::int8, "weights are int4, int8 or codes");
    expect(p.group % 32 == 0 || halves, "groups are of 16 or 32 n inputs");
    expect(p.group || form.bits == 8, "weights of less than 8 bits come in groups of inputs");
    expect(!(form.mins || form.supers) || halves || p.group == 32,
           "minima and scales of scales are for groups of 16 or 32 inputs");
    expect(!form.mins || !form.codes, "minima are for integers");
    expect(!form.supers || p.depth % 256 == 0, "scales of scales come for 256 inputs each");
    expect(p.type != Type::int4 || form.bits == 4, "int4 has 4 bits");
    bool known = false;
    switch (form.bits) {  // as in int_tiles_of (kernels/int_product.hpp)
        case 2: known = !form.codes && form.supers == halves; break;
        case 3: known = form.supers && (form.codes || halves); break;
        case 4: known = !(halves && form.supers); break;
        case 5: known = !form.codes && !halves; break;
        case 6: known = !form.codes && halves && form.supers && !form.mins; break;
        case 8: known = !form.codes && !form.supers; break;
        default: break;
    }
    expect(known, "no kernel has values of so many bits in such groups, with or without scales of scales");
    expect(!p.zero_points || (p.type == Type::int4 && !form.mins), "zero points are for int4 without minima");
}

Packing packing_of(Type type, size_t depth, size_t columns, size_t group, bool zero_points, size_t int_bits, Type scales,
                   bool mins, bool supers, const std::vector<int>& codes, float factor) {
    if (!depth || !columns) throw std::invalid_argument("a packed matrix has inputs and outputs");
    if (int_bits) {
        if (codes.size() > 16) throw std::invalid_argument("a table of codes has up to 16 numbers");
        IntForm form{true, int_bits, scales, mins, supers, !codes.empty(), factor};
        std::copy(codes.begin(), codes.end(), form.table.begin());
        const Packing packing{type, depth, columns, group, zero_points, form};
        check_ints(packing);
        return packing;
    }
    if (mins) throw std::invalid_argument("weights with minima need rows of int8");
    if (!codes.empty()) throw std::invalid_argument("codes need rows of int8");
    const bool nibbles = type == Type::int4 || type == Type::fp4, bytes = type == Type::int8 || type == Type::fp8;
    if (nibbles && !group) throw std::invalid_argument("weights of 4 bits come in groups of inputs");
    if (group && (group % 8 || !(nibbles || bytes))) {
        throw std::invalid_argument("groups of 8 n inputs are for weights of 4 and 8 bits");
    }
    if (type == Type::bf12 && (depth % 8 || depth >= kMostCompressed)) {
        throw std::invalid_argument("weights in 12 bits have 8 n inputs, and less than 2^20");
    }
    if (type == Type::bf12 && !kernels()->pairs) throw std::invalid_argument("weights in 12 bits need AVX512-BF16");
    if (zero_points && type != Type::int4) throw std::invalid_argument("zero points are for int4");
    return {type, depth, columns, group, zero_points};
}

void bind_expert_cache(py::module_& m) {
    py::class_<CachedLayer>(m, "CachedLayer");
    py::class_<ExpertCache, std::shared_ptr<ExpertCache>>(m, "ExpertCache")
        .def(py::init<int, std::string>(), py::arg("descriptor"), py::arg("name"))
        .def(
            "add",
            [](std::shared_ptr<ExpertCache> self, size_t offset, size_t num_experts, size_t expert_bytes) {
                return CachedLayer{self, self->add(offset, num_experts, expert_bytes)};
            },
            py::arg("offset"), py::arg("num_experts"), py::arg("expert_bytes"))
        .def("open", &ExpertCache::open, Unlocked(), py::arg("bytes"))
        .def_property_readonly("slot_bytes", &ExpertCache::slot_bytes)
        .def_property_readonly("num_slots", &ExpertCache::num_slots)
        .def("take_stats", [](ExpertCache& self) {
            const auto stats = self.take_stats();
            return py::make_tuple(stats.hits, stats.misses, stats.stall_ns / 1000, stats.read_bytes);
        });
}

/// Decodes rows of a ggml type, and returns whether all scales and mins are finite. Throws
/// std::invalid_argument for a type without a decoder.
bool decode_ggml(const std::string& name, Address raw, size_t rows, size_t blocks, Address grid, const GgmlRows& to) {
    const GgmlType type = ggml_type(name);
    if (!type.decode) throw std::invalid_argument("no decoder for " + name);
    bool finite = true;
    for (size_t row = 0; row < rows; ++row) {
        finite &= type.decode(at<uint8_t>(raw) + row * blocks * type.block_bytes, blocks, at<uint8_t>(grid), to, row);
    }
    return finite;
}

}  // namespace

void bind_products(py::module_& m) {
    py::class_<Packing>(m, "Packing")
        .def(py::init(&packing_of), py::arg("type"), py::arg("depth"), py::arg("columns"), py::arg("group") = 0,
             py::arg("zero_points") = false, py::arg("int_bits") = 0, py::arg("scales") = Type::fp32,
             py::arg("mins") = false, py::arg("supers") = false, py::arg("codes") = std::vector<int>(),
             py::arg("factor") = 1.0f)
        .def_property_readonly("block_bytes", &Packing::block_bytes)
        .def_property_readonly("bytes", &Packing::bytes);
    m.def(
        "pack",
        [](const Packing& packing, Address weights, size_t stride, Address scales, Address zero_points, Address mins,
           Address supers, Address min_supers, Address to, size_t step, bool all_threads) {
            const Unpacked from{at<void>(weights),  stride,           at<float>(scales),    at<float>(zero_points),
                                at<float>(mins),    at<float>(supers), at<float>(min_supers)};
            return pack_all(packing, from, at<uint8_t>(to), step, all_threads);
        },
        Unlocked(), py::arg("packing"), py::arg("weights"), py::arg("stride"), py::arg("scales"), py::arg("zero_points"),
        py::arg("mins"), py::arg("supers"), py::arg("min_supers"), py::arg("to"), py::arg("step"), py::arg("all_threads"));
    m.def(
        "linear",
        [](Type type, const Packing& packing, Address weights, Address bias, Address x, size_t x_stride, size_t rows,
           Address y) { linear(type, packing, weights, bias, x, x_stride, rows, y, type); },
        Unlocked(), py::arg("type"), py::arg("packing"), py::arg("weights"), py::arg("bias"), py::arg("x"),
        py::arg("x_stride"), py::arg("rows"), py::arg("y"));
    m.def("head_products", &head_products, Unlocked(), py::arg("type"), py::arg("packing"), py::arg("weights"),
          py::arg("heads"), py::arg("x"), py::arg("x_stride"), py::arg("x_step"), py::arg("rows"), py::arg("y"),
          py::arg("y_stride"), py::arg("y_step"));
    m.def(
        "experts",
        [](Type type, const Packing& gate_up, const Packing& down, Address weights, size_t expert_bytes,
           const Activation& activation, bool biased, const Counts& counts, Address x, size_t x_stride, Address y,
           size_t y_stride, const CachedLayer* cached) {
            const std::vector<size_t> rows(counts.data(), counts.data() + counts.size());
            py::gil_scoped_release unlocked;
            experts(type, gate_up, down, weights, expert_bytes, activation, biased, rows, x, x_stride, y, y_stride, cached);
        },
        py::arg("type"), py::arg("gate_up"), py::arg("down"), py::arg("weights"), py::arg("expert_bytes"),
        py::arg("activation"), py::arg("biased"), py::arg("counts"), py::arg("x"), py::arg("x_stride"), py::arg("y"),
        py::arg("y_stride"), py::arg("cached") = py::none());
    bind_expert_cache(m);
    m.def("advise_huge_pages", &advise_huge_pages, py::arg("address"), py::arg("bytes"));
    m.def("checksum", &checksum_all, Unlocked(), py::arg("address"), py::arg("bytes"));
    m.def("decodes_ggml", [](const std::string& name) { return ggml_type(name).decode != nullptr; }, py::arg("type"));
    m.def(
        "decode_ggml",
        [](const std::string& type, Address raw, size_t rows, size_t blocks, Address grid, Address values,
           size_t values_stride, Address scales, Address mins, size_t scales_stride, Address supers, Address min_supers,
           size_t supers_stride, int offset, float factor) {
            const GgmlRows to{at<int8_t>(values), values_stride, at<float>(scales), at<float>(mins), scales_stride,
                              at<float>(supers), at<float>(min_supers), supers_stride, offset, factor};
            return decode_ggml(type, raw, rows, blocks, grid, to);
        },
        Unlocked(), py::arg("type"), py::arg("raw"), py::arg("rows"), py::arg("blocks"), py::arg("grid"),
        py::arg("values"), py::arg("values_stride"), py::arg("scales"), py::arg("mins"), py::arg("scales_stride"),
        py::arg("supers"), py::arg("min_supers"), py::arg("supers_stride"), py::arg("offset"), py::arg("factor"));
    m.def(
        "product_reference",
        [](Address x, size_t rows, size_t depth, Address w, size_t columns, Address y) {
            product_reference(at<float>(x), rows, depth, at<float>(w), columns, at<float>(y));
        },
        Unlocked(), py::arg("x"), py::arg("rows"), py::arg("depth"), py::arg("w"), py::arg("columns"), py::arg("y"));
    m.def(
        "int_product_reference",
        [](Address x, size_t rows, size_t depth, Address w, size_t columns, size_t group, Address scales, Address mins,
           Address y) {
            int_product_reference(at<float>(x), rows, depth, at<int8_t>(w), columns, group, at<float>(scales),
                                  at<float>(mins), at<float>(y));
        },
        Unlocked(), py::arg("x"), py::arg("rows"), py::arg("depth"), py::arg("w"), py::arg("columns"), py::arg("group"),
        py::arg("scales"), py::arg("mins"), py::arg("y"));
}

}  // namespace moeserve
