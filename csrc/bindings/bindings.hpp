// The Python bindings of csrc/, one file per part. Tensors are passed as addresses. The Python
// callers check shapes, dtypes and contiguity.
#pragma once

#include <pybind11/pybind11.h>

namespace moeserve {

using Address = uintptr_t;
using Unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

void bind_attention(pybind11::module_& m);
void bind_draft_head(pybind11::module_& m);
void bind_latent(pybind11::module_& m);
void bind_layer(pybind11::module_& m);
void bind_pool(pybind11::module_& m);
void bind_products(pybind11::module_& m);
void bind_recurrence(pybind11::module_& m);
void bind_recurrent_block(pybind11::module_& m);
void bind_rows(pybind11::module_& m);
void bind_selected(pybind11::module_& m);

}  // namespace moeserve
