// The thread pool, and the choice of the instruction set.
#include "pool/pool.hpp"

#include <pybind11/stl.h>

#include "bindings/bindings.hpp"
#include "kernels/table.hpp"

namespace py = pybind11;

namespace moeserve {

void bind_pool(py::module_& m) {
    m.def(
        "set_threads", [](const std::vector<int>& cpus) { set_pool(std::make_shared<Pool>(cpus)); }, Unlocked(),
        py::arg("cpus"));
    m.def("num_threads", [] { return pool()->size(); });
    m.def("supported_isas", &supported_isas);
    m.def("use_isa", &use_isa, py::arg("name"));
    m.def("serving_isa", [] { return kernels() ? std::string(kernels()->name) : std::string(); });
    py::enum_<Type>(m, "Type")
        .value("float32", Type::fp32)
        .value("bfloat16", Type::bf16)
        .value("float16", Type::fp16)
        .value("int8", Type::int8)
        .value("int4", Type::int4)
        .value("fp8", Type::fp8)
        .value("fp4", Type::fp4)
        .value("bf12", Type::bf12);
    m.def(
        "exp", [](Address x, Address y, size_t count) { kernels()->exp(at<float>(x), at<float>(y), count); },
        Unlocked(), py::arg("x"), py::arg("y"), py::arg("count"));
}

}  // namespace moeserve
