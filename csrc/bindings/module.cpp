// The Python module. Tensors are passed as addresses; the Python callers check shapes, dtypes and
// contiguity.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bindings.hpp"
#include "core/weighted_sum.hpp"
#include "shm/channel.hpp"
#include "shm/exchange.hpp"
#include "shm/gather.hpp"
#include "shm/region.hpp"

namespace py = pybind11;
using namespace moeserve;

namespace {

using Counts = py::array_t<int64_t, py::array::c_style>;

void raise_as_peer_lost(std::exception_ptr thrown) {
    try {
        if (thrown) std::rethrow_exception(thrown);
    } catch (const Lost& lost) {
        py::object type = py::module_::import("moeserve.errors").attr("PeerLost");
        py::object error = type(lost.what(), py::tuple(py::cast(lost.missing)));
        PyErr_SetObject(type.ptr(), error.ptr());
    }
}

void bind_core(py::module_& m) {
    py::enum_<Element>(m, "Element")
        .value("float32", Element::fp32)
        .value("bfloat16", Element::bf16)
        .value("float16", Element::fp16);
    py::enum_<Isa>(m, "Isa")
        .value("baseline", Isa::baseline)
        .value("avx2", Isa::avx2)
        .value("avx512", Isa::avx512)
        .def_property_readonly("supported", [](Isa isa) { return has(isa); });
    m.def("best_isa", &best_isa);
    m.def(
        "weighted_sum",
        [](const std::vector<Address>& rows, Address weights, size_t tokens, size_t top_k, size_t dim, Element element,
           Address out, Isa isa) {
            if (rows.size() != tokens * top_k) throw std::invalid_argument("expected one row per (token, k)");
            py::gil_scoped_release unlocked;
            weighted_sum(reinterpret_cast<const void* const*>(rows.data()), at<float>(weights), tokens, top_k, dim,
                         element, at<void>(out), isa);
        },
        py::arg("rows"), py::arg("weights"), py::arg("tokens"), py::arg("top_k"), py::arg("dim"), py::arg("element"),
        py::arg("out"), py::arg("isa"));
}

void bind_shm(py::module_& m) {
    py::class_<Region, std::shared_ptr<Region>>(m, "Region", py::buffer_protocol())
        .def(py::init<size_t>(), py::arg("bytes"))
        .def_property_readonly("fd", &Region::fd)
        .def_buffer([](Region& region) {
            return py::buffer_info(reinterpret_cast<uint8_t*>(region.data()), static_cast<py::ssize_t>(region.bytes()));
        });
    py::class_<Channel, std::shared_ptr<Channel>>(m, "Channel")
        .def(py::init<int, std::vector<int>, int, std::vector<int>, std::shared_ptr<Region>, std::vector<int>>(),
             py::arg("index"), py::arg("ranks"), py::arg("ubatch"), py::arg("sockets"), py::arg("own"), py::arg("regions"))
        .def("leave", &Channel::leave);
    py::class_<Shape>(m, "Shape")
        .def(py::init<size_t, size_t, size_t, size_t, size_t>(), py::kw_only(), py::arg("experts_per_rank"),
             py::arg("max_tokens"), py::arg("top_k"), py::arg("x_row_bytes"), py::arg("y_row_bytes"));
    py::class_<Exchange>(m, "Exchange")
        .def(py::init<std::shared_ptr<Channel>, Shape>(), py::arg("channel"), py::arg("shape"))
        .def_static("region_bytes", &Exchange::region_bytes, py::arg("num_ranks"), py::arg("shape"))
        .def_readonly_static("TURNS", &Exchange::kBuffers)
        .def_property_readonly("y_capacity", &Exchange::y_capacity)
        .def("y_offset", &Exchange::y_offset, py::arg("buffer"))
        .def("arrived_ns", &Exchange::arrived_ns, py::arg("buffer"))
        .def(
            "dispatch",
            [](Exchange& self, Address ids, size_t tokens, size_t top_k, Address x) {
                return self.dispatch(at<int32_t>(ids), tokens, top_k, at<void>(x));
            },
            Unlocked(), py::arg("ids"), py::arg("tokens"), py::arg("top_k"), py::arg("x"))
        .def(
            "await_rows",
            [](Exchange& self, int buffer, double timeout_s, Counts counts_and_ends, Address out, size_t room) {
                if (static_cast<size_t>(counts_and_ends.size()) != 2 * self.num_experts()) {
                    throw std::invalid_argument("expected one count and one end per expert");
                }
                int64_t* counts = counts_and_ends.mutable_data();
                py::gil_scoped_release unlocked;
                const size_t rows = self.await_rows(buffer, timeout_s, counts, counts + self.num_experts());
                if (rows <= room) self.take_rows(buffer, at<void>(out));
                return rows;
            },
            py::arg("buffer"), py::arg("timeout_s"), py::arg("counts_and_ends").noconvert(), py::arg("out"), py::arg("room"))
        .def(
            "take_rows", [](const Exchange& self, int buffer, Address out) { self.take_rows(buffer, at<void>(out)); },
            Unlocked(), py::arg("buffer"), py::arg("out"))
        .def("combine", &Exchange::combine, Unlocked(), py::arg("buffer"))
        .def(
            "await_sums",
            [](Exchange& self, int buffer, double timeout_s, Address weights, Element element, size_t dim, Address out) {
                self.await_sums(buffer, timeout_s, at<float>(weights), element, dim, at<void>(out));
            },
            Unlocked(), py::arg("buffer"), py::arg("timeout_s"), py::arg("weights"), py::arg("element"), py::arg("dim"),
            py::arg("out"))
        .def("leave", &Exchange::leave);
    py::class_<Gather>(m, "Gather")
        .def(py::init<std::shared_ptr<Channel>, size_t>(), py::arg("channel"), py::arg("part_bytes"))
        .def_static("region_bytes", &Gather::region_bytes, py::arg("part_bytes"))
        .def(
            "columns",
            [](Gather& self, Address x, size_t rows, size_t row_bytes, Address out, double timeout_s) {
                self.columns(at<void>(x), rows, row_bytes, at<void>(out), timeout_s);
            },
            Unlocked(), py::arg("x"), py::arg("rows"), py::arg("row_bytes"), py::arg("out"), py::arg("timeout_s"))
        .def(
            "rows",
            [](Gather& self, Address x, const std::vector<size_t>& counts, size_t row_bytes, Address out,
               double timeout_s) { self.rows(at<void>(x), counts, row_bytes, at<void>(out), timeout_s); },
            Unlocked(), py::arg("x"), py::arg("counts"), py::arg("row_bytes"), py::arg("out"), py::arg("timeout_s"))
        .def("leave", &Gather::leave);
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    m.doc() = "Native parts of moeserve (csrc/).";
    py::register_exception_translator(&raise_as_peer_lost);
    bind_core(m);
    bind_attention(m);
    bind_pool(m);
    bind_products(m);
    bind_layer(m);
    bind_draft_head(m);
    bind_latent(m);
    bind_recurrence(m);
    bind_recurrent_block(m);
    bind_rows(m);
    bind_selected(m);
    bind_shm(m);
}
