// Kernels for CPUs with AVX-512 with dot products of BF16 and (VNNI) of bytes; setup.py has the
// compiler's flags. Attention and products use these instructions. All other kernels are those of
// AVX-512.
#define MOESERVE_ISA avx512_bf16
#include "kernels/vec_avx512.hpp"

#include "kernels/attention.hpp"
#include "kernels/table.hpp"

namespace moeserve {
namespace avx512_bf16 {

void product(const ProductArgs& args, size_t begin, size_t end, int worker);
void int_product(const ProductArgs& args, size_t begin, size_t end, int worker);

}  // namespace avx512_bf16

void use_avx512_bf16(Kernels& kernels) {
    kernels.name = "avx512_bf16";
    kernels.pairs = avx512_bf16::kDots;
    kernels.product = avx512_bf16::product;
    kernels.int_product = avx512_bf16::int_product;
    kernels.attend = avx512_bf16::attention::attend;
    kernels.merge_attention = avx512_bf16::attention::merge_attention;
}

}  // namespace moeserve
