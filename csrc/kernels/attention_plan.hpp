// How the queries of one step are cut into pieces of attention, and the call that computes them.
//
// A cut is 1,024 absolute positions of a context, a tile 64. A piece works on neighbouring queries of one request, for
// some KV heads, over some cuts in order. A block of queries that alone would keep a thread busy for too long becomes a
// piece for each cut, whose sums are then merged in order. How blocks are split never shows in the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/table.hpp"

namespace moeserve {

constexpr int64_t kTile = 64, kCut = 1024;
constexpr int64_t kEverything = int64_t{1} << 40;  // a window, or a section, that hides nothing

/// Neighbouring queries of one request, for some KV heads. One row per (KV head, query, query head of it), in this order.
struct QueryBlock {
    int64_t request, token, count;  // tokens token .. token + count - 1 of the step
    int64_t position;               // of the first one
    int64_t begin;                  // of their section
    int64_t head, heads;            // KV heads; a single one where several share an entry
    int64_t first_cut, end_cut;
    int64_t partial = -1;  // where its cuts' sums begin in `partials`; -1: one piece computes it all
};

struct AttentionShape {
    int64_t heads, kv_heads, dim, v_dim;  // widths of keys and of values
    int64_t block_size, window;           // window: positions that a query sees, itself included
    int64_t section = kEverything;        // positions come in sections of so many; a query sees no other than its own
    int64_t shares = 1;                   // so many of the KV heads have one entry together

    // Always inline: kernels of every instruction set share these.
    [[gnu::always_inline]] int64_t group() const { return heads / kv_heads; }
    [[gnu::always_inline]] int64_t rows(const QueryBlock& block) const { return block.heads * block.count * group(); }
    [[gnu::always_inline]] int64_t padded() const { return (dim + 15) / 16 * 16; }
    [[gnu::always_inline]] int64_t v_padded() const { return (v_dim + 15) / 16 * 16; }
    /// From one value of a tile to the next: wide ones at such distances would compete for the same lines of a cache.
    [[gnu::always_inline]] int64_t v_stride() const { return v_padded() > 256 ? v_padded() + 16 : v_padded(); }
    /// Sums of one row: values, largest score, weight, and room that keeps rows aligned.
    [[gnu::always_inline]] int64_t sums() const { return v_padded() + 16; }
    /// Of one piece of so many rows: queries, running sums of a cut and of all, probabilities; a tile of keys and one
    /// of values.
    [[gnu::always_inline]] int64_t scratch_floats(int64_t rows) const {
        return rows * (padded() + 2 * sums() + kTile) + kTile * (padded() + v_stride());
    }
    /// The first position that a query sees.
    [[gnu::always_inline]] int64_t first_seen(int64_t position) const {
        const int64_t begin = position / section * section, first = position - window + 1;
        return first > begin ? first : begin;
    }
};

/// Everything that a kernel reads and writes. Addresses need no alignment beyond that of an element.
struct AttentionCall {
    AttentionShape shape;
    const int64_t* tables;  // [requests, table_width]: block tables
    int64_t table_width;
    const void* q;  // [tokens, heads, dim]; tokens are q_stride elements apart
    int64_t q_stride;
    Type q_type;  // of the output as well
    const void *k, *v;         // [blocks, block_size, kv_heads]: entries; in int8 a float follows the numbers, their scale
    int64_t k_bytes, v_bytes;  // from one entry to the next; latents are the first numbers of keys: v is k, and so are these
    Type kv_type;
    void* out;           // [tokens, heads * v_dim]
    float soft_cap;      // scores become soft_cap * tanh(score / soft_cap); 0: they stay
    const float* sinks;  // [heads]: a score that takes weight and gives no value; or nullptr
    const QueryBlock* pieces;
    int64_t num_pieces, threads;  // to guess what a thread will do next
    const QueryBlock* merges;
    float* partials;  // sums [cut][row] of each block that was split
    float* scratch;   // scratch_size floats per worker
    int64_t scratch_size;
};

class AttentionPlan {
  public:
    /// Request i has queries for tokens offsets[i] .. offsets[i + 1] - 1, at positions starts[i], starts[i] + 1, ...
    AttentionPlan(AttentionShape shape, const int64_t* tables, int64_t table_width, int64_t requests,
                  const int32_t* starts, const int32_t* offsets, int threads);

    int64_t num_tokens() const { return num_tokens_; }
    int64_t num_pieces() const { return static_cast<int64_t>(pieces_.size()); }

    /// Fills in what the call's queries see: shape and tables.
    void describe(AttentionCall& call) const;

    /// Computes `call`, whose shape, tables, pieces and buffers it fills in. Rows of `out` beyond the plan's tokens,
    /// up to `num_rows`, become zero.
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

/// The fp32 result [heads, v_dim] of one token of a described call, all of it fp32 but for a cache that may
/// be int8. Slow: for tests.
void reference_attention(const AttentionCall& call, int64_t request, int64_t token, int64_t position, float* out);

}  // namespace moeserve
