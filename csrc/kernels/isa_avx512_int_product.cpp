// Products with rows rounded to int8 for CPUs with AVX-512.
#define MOESERVE_ISA avx512
#include "kernels/vec_avx512.hpp"

#include "kernels/int_product.hpp"
