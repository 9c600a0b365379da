#include "kernels/attention_plan.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

namespace moeserve {
namespace {

constexpr int64_t kRows = 128;             // rows of a block, unless a single query has more
constexpr int64_t kFewRows = 8;            // least rows of a block, because each block loads the keys and values again
constexpr int64_t kPartials = 16ll << 20;  // most floats of partial sums; if they are used up, blocks are not split

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Buffers per calling thread, because two micro-batches may call at the same time.
float* kept_memory(size_t floats) {
    struct Free {
        void operator()(float* p) const { ::operator delete(p, std::align_val_t{64}); }
    };
    thread_local std::unique_ptr<float, Free> memory;
    thread_local size_t size = 0;
    if (floats > size) {
        memory.reset();
        size = 0;
        memory.reset(static_cast<float*>(::operator new(floats * sizeof(float), std::align_val_t{64})));
        size = floats;
    }
    return memory.get();
}

size_t bytes_of(Type type) { return type == Type::fp32 ? 4 : 2; }

}  // namespace

AttentionPlan::AttentionPlan(AttentionShape shape, const int64_t* tables, int64_t table_width, int64_t requests,
                             const int32_t* starts, const int32_t* offsets, int threads)
    : shape_(shape), tables_(tables), table_width_(table_width), num_tokens_(offsets[requests]) {
    make_blocks(requests, starts, offsets);
    cut_blocks(threads);
}

/// Blocks with the longest contexts of a request come first. Threads take pieces in this order, so
/// short ones fill the gaps at the end.
void AttentionPlan::make_blocks(int64_t requests, const int32_t* starts, const int32_t* offsets) {
    const int64_t section = shape_.section;
    for (int64_t request = 0; request < requests; ++request) {
        const int64_t first = starts[request], tokens = offsets[request + 1] - offsets[request], end = first + tokens;
        for (int64_t part = (end - 1) / section * section; part + section > first; part -= section) {
            const int64_t from = std::max(first, part), to = std::min(end, part + section);
            make_blocks_of(request, offsets[request] + from - first, to - from, from);
        }
    }
}

/// Makes the blocks of adjacent queries in one section.
void AttentionPlan::make_blocks_of(int64_t request, int64_t token, int64_t tokens, int64_t position) {
    const int64_t most = std::max<int64_t>(1, kRows / shape_.group());
    for (int64_t i = ceil_div(tokens, most) - 1; i >= 0; --i) {
        QueryBlock block{};
        block.request = request;
        block.token = token + i * most;
        block.count = std::min(most, tokens - i * most);
        block.position = position + i * most;
        block.begin = position / shape_.section * shape_.section;
        block.first_cut = shape_.first_seen(block.position) / kCut;
        block.end_cut = (block.position + block.count - 1) / kCut + 1;
        blocks_.push_back(block);
    }
}

/// The cost of a block, in rows times tiles. Loading a tile costs as much as a few rows.
int64_t AttentionPlan::cost(const QueryBlock& block) const {
    const int64_t first = shape_.first_seen(block.position) / kTile;
    const int64_t tiles = (block.position + block.count - 1) / kTile + 1 - first;
    return tiles * block.heads * (block.count * shape_.group() + 8);
}

void AttentionPlan::cut_blocks(int threads) {
    // If there are few blocks, short ones are split by KV heads and long ones by cuts.
    int64_t parts = 0, total = 0, most = shape_.kv_heads;
    for (const QueryBlock& block : blocks_) parts += block.end_cut - block.first_cut;
    while (threads > 1 && most > 1 && parts * ceil_div(shape_.kv_heads, most) < 2 * threads) most = (most + 1) / 2;
    // Then split by the query heads of a KV head, because latent attention has a single KV head.
    int64_t rows = 0;
    for (const QueryBlock& block : blocks_) rows = std::max(rows, block.count * shape_.group());
    for (; threads > 1 && most == 1 && parts * shape_.kv_heads < 2 * threads; rows /= 2) {
        if (shape_.group() % 2 != 0 || rows < 2 * kFewRows) break;
        shape_.kv_heads *= 2;
        shape_.shares *= 2;
    }
    std::vector<QueryBlock> whole;
    whole.reserve(blocks_.size());
    for (QueryBlock block : blocks_) {
        const int64_t fit = std::max<int64_t>(1, kRows / (block.count * shape_.group()));
        const int64_t step = std::min(most, fit);
        for (block.head = 0; block.head < shape_.kv_heads; block.head += step) {
            block.heads = std::min(step, shape_.kv_heads - block.head);
            total += cost(block);
            whole.push_back(block);
        }
    }
    for (QueryBlock& block : whole) {
        const int64_t cuts = block.end_cut - block.first_cut;
        const int64_t floats = cuts * shape_.rows(block) * shape_.sums();
        if (threads == 1 || cuts == 1 || cost(block) * 4 * threads <= total || partials_ + floats > kPartials) {
            pieces_.push_back(block);
            continue;
        }
        block.partial = partials_;
        partials_ += floats;
        merges_.push_back(block);
        for (int64_t cut = block.first_cut; cut < block.end_cut; ++cut) {
            QueryBlock piece = block;
            piece.first_cut = cut;
            piece.end_cut = cut + 1;
            piece.partial = block.partial + (cut - block.first_cut) * shape_.rows(block) * shape_.sums();
            pieces_.push_back(piece);
        }
    }
    blocks_.clear();
}

void AttentionPlan::run(AttentionCall call, int64_t num_rows) const {
    const int64_t row_bytes = shape_.heads * shape_.v_dim * static_cast<int64_t>(bytes_of(call.q_type));
    std::memset(static_cast<char*>(call.out) + num_tokens_ * row_bytes, 0,
                static_cast<size_t>((num_rows - num_tokens_) * row_bytes));
    describe(call);
    const std::shared_ptr<Pool> threads = pool();
    call.pieces = pieces_.data();
    call.num_pieces = num_pieces();
    call.threads = threads->size();
    call.merges = merges_.data();
    call.scratch_size = scratch_floats();
    call.scratch = kept_memory(static_cast<size_t>(call.scratch_size * threads->size() + partials_));
    call.partials = call.scratch + call.scratch_size * threads->size();
    const Kernels& kernel = *kernels();
    threads->share(pieces_.size(), 1, {kernel.attend, &call});
    threads->share(merges_.size(), 1, {kernel.merge_attention, &call});
}

void AttentionPlan::describe(AttentionCall& call) const {
    call.shape = shape_;
    call.tables = tables_;
    call.table_width = table_width_;
}

int64_t AttentionPlan::scratch_floats() const {
    int64_t rows = 1;
    for (const QueryBlock& piece : pieces_) rows = std::max(rows, shape_.rows(piece));
    return ceil_div(shape_.scratch_floats(rows), 1024) * 1024;
}

}  // namespace moeserve
