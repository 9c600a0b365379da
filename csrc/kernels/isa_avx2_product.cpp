// Products with float and bf16 weights for CPUs with AVX2, FMA and F16C.
#define MOESERVE_ISA avx2
#include "kernels/vec_avx2.hpp"

#include "kernels/product.hpp"
