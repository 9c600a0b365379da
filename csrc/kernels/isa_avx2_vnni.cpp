// Kernels for CPUs with AVX2 and (AVX-VNNI) dot products of bytes, without AVX-512; setup.py has
// the compiler's flags. Products with rows rounded to int8 use these instructions. All other
// kernels are those of AVX2.
#define MOESERVE_ISA avx2_vnni
#include "kernels/vec_avx2.hpp"

#include "kernels/int_product.hpp"
#include "kernels/table.hpp"

namespace moeserve {

void use_avx2_vnni(Kernels& kernels) {
    kernels.name = "avx2_vnni";
    kernels.int_product = avx2_vnni::int_product;
}

}  // namespace moeserve
