// Products with rows rounded to int8 for CPUs with AVX-512 with dot products of BF16 and (VNNI) of bytes.
#define MOESERVE_ISA avx512_bf16
#include "kernels/vec_avx512.hpp"

#include "kernels/int_product.hpp"
