// Products with float and bf16 weights for CPUs with AVX-512.
#define MOESERVE_ISA avx512
#include "kernels/vec_avx512.hpp"

#include "kernels/product.hpp"
