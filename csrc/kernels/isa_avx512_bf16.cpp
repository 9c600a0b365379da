// Kernels for CPUs with AVX-512 with dot products of BF16 and (VNNI) of bytes; setup.py has the compiler's flags.
// Attention and products use these instructions. All other kernels are those of AVX-512.
#define MOESERVE_ISA avx512_bf16
#include "kernels/vec_avx512.hpp"

#include "kernels/attention.hpp"
#include "kernels/table.hpp"

namespace moeserve {

extern const Kernels kAvx512, kAvx512Bf16;

namespace avx512_bf16 {

void product(const ProductArgs& args, size_t begin, size_t end, int worker);
void int_product(const ProductArgs& args, size_t begin, size_t end, int worker);

static Kernels table() {
    Kernels kernels = kAvx512;
    kernels.name = "avx512_bf16";
    kernels.pairs = kDots;
    kernels.product = product;
    kernels.int_product = int_product;
    kernels.attend = attention::attend;
    kernels.merge_attention = attention::merge_attention;
    return kernels;
}

}  // namespace avx512_bf16

const Kernels kAvx512Bf16 = avx512_bf16::table();

}  // namespace moeserve
