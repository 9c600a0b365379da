// The work plan of attention for one step, and the call that computes it.
//
// A cut is 1,024 absolute positions of a context, a tile is 64. A block is some adjacent queries of
// one request, for some KV heads. It is normally one piece of work, which goes over all cuts in
// order. A block that would keep one thread busy for too long is split into one piece per cut,
// whose sums are merged in order afterwards. Splitting never changes the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/table.hpp"

namespace moeserve {

constexpr int64_t kTile = 64, kCut = 1024;
constexpr int64_t kEverything = int64_t{1} << 40;  // a window or section size that masks nothing

/// Adjacent queries of one request, for some KV heads. It has one row per (KV head, query, query
/// head of the KV head), in this order.
struct QueryBlock {
    int64_t request, token, count;  // tokens token .. token + count - 1 of the step
    int64_t position;               // of the first query
    int64_t begin;                  // first position of their section
    int64_t head, heads;            // first KV head and number of KV heads; 1 if KV heads share an entry
    int64_t first_cut, end_cut;
    int64_t partial = -1;  // index of its cuts' sums in `partials`; -1 if the block is not split
};

struct AttentionShape {
    int64_t heads, kv_heads, dim, v_dim;  // dim: width of keys; v_dim: width of values
    int64_t block_size, window;           // window: positions that a query sees, itself included
    int64_t section = kEverything;        // chunked attention: a query sees only its own section of this size
    int64_t shares = 1;                   // number of KV heads that share an entry

    // Always inlined, because kernels of different instruction sets must not share code.
    [[gnu::always_inline]] int64_t group() const { return heads / kv_heads; }
    [[gnu::always_inline]] int64_t rows(const QueryBlock& block) const { return block.heads * block.count * group(); }
    [[gnu::always_inline]] int64_t padded() const { return (dim + 15) / 16 * 16; }
    [[gnu::always_inline]] int64_t v_padded() const { return (v_dim + 15) / 16 * 16; }
    /// Floats between two values of a tile. Padded, so that wide values do not compete for the same
    /// cache lines.
    [[gnu::always_inline]] int64_t v_stride() const { return v_padded() > 256 ? v_padded() + 16 : v_padded(); }
    /// Floats of one row's sums: values, largest score, weight, and padding for alignment.
    [[gnu::always_inline]] int64_t sums() const { return v_padded() + 16; }
    /// Scratch floats of one piece: queries, sums of one cut and of all cuts, probabilities, a tile
    /// of keys and a tile of values.
    [[gnu::always_inline]] int64_t scratch_floats(int64_t rows) const {
        return rows * (padded() + 2 * sums() + kTile) + kTile * (padded() + v_stride());
    }
    /// The first position that a query at `position` sees.
    [[gnu::always_inline]] int64_t first_seen(int64_t position) const {
        const int64_t begin = position / section * section, first = position - window + 1;
        return first > begin ? first : begin;
    }
};

/// The arguments of the kernel. Addresses need only the alignment of their elements.
struct AttentionCall {
    AttentionShape shape;
    const int64_t* tables;  // [requests, table_width]: block tables
    int64_t table_width;
    const void* q;  // [tokens, heads, dim]; tokens are q_stride elements apart
    int64_t q_stride;
    Type q_type;  // also the type of the output
    const void *k, *v;         // [blocks, block_size, kv_heads] entries; an int8 entry ends with its scale, a float
    int64_t k_bytes, v_bytes;  // bytes between entries; in latent attention values are the first part of keys: v = k
    Type kv_type;
    void* out;           // [tokens, heads * v_dim]
    float soft_cap;      // scores become soft_cap * tanh(score / soft_cap); 0 for none
    const float* sinks;  // [heads]: a score that adds weight but no value; or nullptr
    const QueryBlock* pieces;
    int64_t num_pieces, threads;  // used to guess the next piece of a thread, for prefetching
    const QueryBlock* merges;
    float* partials;  // sums [cut][row] of each split block
    float* scratch;   // scratch_size floats per worker
    int64_t scratch_size;
};

class AttentionPlan {
  public:
    /// Request i has the queries of tokens offsets[i] .. offsets[i + 1] - 1, at positions
    /// starts[i], starts[i] + 1, ...
    AttentionPlan(AttentionShape shape, const int64_t* tables, int64_t table_width, int64_t requests,
                  const int32_t* starts, const int32_t* offsets, int threads);

    int64_t num_tokens() const { return num_tokens_; }
    int64_t num_pieces() const { return static_cast<int64_t>(pieces_.size()); }

    /// Fills in the call's shape and block tables.
    void describe(AttentionCall& call) const;

    /// Fills in the call's shape, tables, pieces and buffers, and computes it. Rows of `out` after
    /// the plan's tokens, up to `num_rows`, become zero.
    void run(AttentionCall call, int64_t num_rows) const;

  private:
    int64_t cost(const QueryBlock& block) const;
    int64_t scratch_floats() const;
    void make_blocks(int64_t requests, const int32_t* starts, const int32_t* offsets);
    void make_blocks_of(int64_t request, int64_t token, int64_t tokens, int64_t position);
    void cut_blocks(int threads);

    AttentionShape shape_;
    const int64_t* tables_;
    int64_t table_width_, num_tokens_;
    int64_t partials_ = 0;  // floats
    std::vector<QueryBlock> blocks_, pieces_, merges_;
};

/// Computes the result [heads, v_dim] of one token of a described call, in fp32 (the cache may be
/// int8). It is slow, for tests.
void reference_attention(const AttentionCall& call, int64_t request, int64_t token, int64_t position, float* out);

}  // namespace moeserve
