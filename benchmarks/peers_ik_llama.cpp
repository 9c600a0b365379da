// What peers_engine.py needs of ik_llama.cpp, without its structs: the engine compiles this file against the headers of the
// sources that it is given, and loads the result.

#include <algorithm>
#include <cstdint>

#include "llama.h"

namespace {

struct Row {
    int32_t token, position, sequence, wanted;
};

}  // namespace

extern "C" {

/// Returns null if the model cannot be loaded. repack: weights are copied into the order of the fastest kernels, as by -rtr.
/// Flash attention and fused experts are on by default.
llama_context* ik_open(const char* path, int threads, int context_length, int batch, int sequences, bool repack) {
    llama_backend_init();
    llama_model_params of_model = llama_model_default_params();
    of_model.repack_tensors = repack;
    of_model.use_mmap = !repack;
    llama_model* model = llama_model_load_from_file(path, of_model);
    if (model == nullptr) return nullptr;
    llama_context_params options = llama_context_default_params();
    options.n_ctx = static_cast<uint32_t>(context_length);
    options.n_batch = options.n_ubatch = static_cast<uint32_t>(batch);
    options.n_seq_max = static_cast<uint32_t>(sequences);
    options.n_threads = options.n_threads_batch = static_cast<uint32_t>(threads);
    return llama_init_from_model(model, options);
}

void ik_clear(llama_context* context) { llama_kv_cache_clear(context); }

/// Decodes rows, and writes the most likely next token of each wanted one. Returns what llama_decode returns.
int ik_forward(llama_context* context, int count, const Row* rows, int32_t* next) {
    llama_batch batch = llama_batch_init(count, 0, 1);
    batch.n_tokens = count;
    for (int i = 0; i < count; ++i) {
        batch.token[i] = rows[i].token;
        batch.pos[i] = rows[i].position;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = rows[i].sequence;
        batch.logits[i] = static_cast<int8_t>(rows[i].wanted);
    }
    const int status = llama_decode(context, batch);
    const int vocabulary = llama_n_vocab(llama_get_model(context));
    for (int i = 0; i < count && status == 0; ++i) {
        if (!rows[i].wanted) continue;
        const float* logits = llama_get_logits_ith(context, i);
        *next++ = static_cast<int32_t>(std::max_element(logits, logits + vocabulary) - logits);
    }
    llama_batch_free(batch);
    return status;
}

}  // extern "C"
