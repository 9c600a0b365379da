// Kernels for CPUs with AVX2 and VNNI's dot products of bytes; setup.py has the compiler's flags.
// Products with rows rounded to int8 use these instructions. All other kernels are those of AVX2.
#define MOESERVE_ISA avx2_vnni
#include "kernels/vec_avx2.hpp"

#include "kernels/int_product.hpp"
#include "kernels/table.hpp"

namespace moeserve {

extern const Kernels kAvx2, kAvx2Vnni;

static Kernels table() {
    Kernels kernels = kAvx2;
    kernels.name = "avx2_vnni";
    kernels.int_product = avx2_vnni::int_product;
    return kernels;
}

const Kernels kAvx2Vnni = table();

}  // namespace moeserve
