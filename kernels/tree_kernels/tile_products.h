// Products of bfloat16 matrices by AMX tiles, with keys and values as vLLM's AMX kernels store them.
//
// A head of a block of keys is [block_size / 16, head_size / 2, 16, 2], 16 tokens and 2 adjacent elements last;
// of values [head_size / 16, block_size / 2, 16, 2], 16 elements and 2 adjacent tokens last. Either is a row of
// AMX tiles, which the instructions take as they are. A product adds 32 terms at a time to a float32 sum.

#pragma once

// All processors with AMX have AVX-512, whose registers are as wide as a tile has columns.
#if defined(__AVX512F__) && __has_include(<amxbf16intrin.h>)
#define HAS_TILES

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "share_attention.h"

#define TILES __attribute__((target("amx-tile,amx-bf16")))

class TileProducts {
 public:
  using Element = BFloat16;
  static constexpr int64_t kRowsAtATime = 16;

  // Configures a thread's tiles while it computes: 0 to 2 have 16 rows, 3 and 4 those of a node's heads, at
  // most 16 of them.
  class Session {
   public:
    TILES explicit Session(const Layer<BFloat16>& layer) {
      Configuration tiles{};
      tiles.palette = 1;
      for (int tile = 0; tile < 5; ++tile) {
        tiles.row_bytes[tile] = 64;
        tiles.rows[tile] = tile < 3 ? 16 : static_cast<uint8_t>(std::min<int64_t>(layer.group, 16));
      }
      // GCC's intrinsic says that it reads a part of the configuration only, and the rest may not be stored.
      asm volatile("ldtilecfg %0" : : "m"(tiles));
    }
    TILES ~Session() { _tile_release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  TileProducts(const Share<BFloat16>& share, Scratch& scratch)
      : share_(share),
        query_(scratch.narrow_query.of(share.rows * share.size)),
        weights_(scratch.weights.of(share.rows * kTile)),
        path_tile_(scratch.path_tile.of(kElements)),
        scratch_(scratch) {}

  void read_query() {
    const int64_t size = share_.size;
    for (int64_t r = 0; r < share_.used; ++r)
      std::memcpy(query_ + r * size,
                  share_.layer.query + share_.offset(r, share_.layer.query_stride),
                  size * sizeof(BFloat16));
    std::memset(query_ + share_.used * size, 0, (share_.rows - share_.used) * size * sizeof(BFloat16));
  }

  // Scores of the tree's nodes, from which each row takes those of its path.
  void read_tree() {
    const int64_t first = round_down(share_.root, kColumns);
    tree_stride_ = round_up(share_.root + share_.nodes - first, kColumns);
    tree_scores_ = scratch_.tree_scores.of(share_.rows * tree_stride_);
    for (int64_t at = 0; at < tree_stride_; at += kColumns)
      score_tile(first + at, tree_scores_ + at, tree_stride_);
    scale_and_cap(tree_scores_, tree_stride_, tree_stride_);
    tree_scores_ += share_.root - first;
  }

  float tree_score(int64_t row, int64_t node) const { return tree_scores_[row * tree_stride_ + node]; }

  // Scores [rows, kTile] of all rows and the keys at positions [from, to), the first column at `at`. The other
  // columns get any scores.
  void score(int64_t at, int64_t from, int64_t to, float* scores) {
    const int64_t first = round_down(from, kColumns);
    for (int64_t p = first; p < to; p += kColumns) score_tile(p, scores + (p - at), kTile);
    scale_and_cap(scores + (first - at), kTile, round_up(to - first, kColumns));
  }

  // Adds the values at columns [at, at + kTile) within [first, last), weighted by [rows, kTile].
  void add_values(int64_t at, int64_t first, int64_t last, const float* weights) {
    for (int64_t r = 0; r < share_.used; ++r)
      for (int64_t t = 0; t < kTile; ++t) narrow(weights[r * kTile + t], weights_[r * kTile + t]);
    // A key outside of a row's has a weight of 0, so all of a group's values are added, as the engine adds them.
    const int64_t from = std::max(at, round_down(std::max(first, share_.earliest), kTokens));
    const int64_t to = std::min(at + kTile, last), alike = std::min(to, round_down(share_.root, kTokens));
    if (from < alike) add_context(at, from, round_up(alike, kTokens));
    for (int64_t p = std::max(from, round_down(share_.root, kTokens)); p < to; p += kTokens)
      for (int64_t r = 0; r < share_.used; r += share_.layer.group)
        if (share_.node(r).first < p + kTokens && p < share_.node(r).last)
          add_path(r, p, first, last, weights_ + r * kTile + (p - at));
  }

 private:
  static constexpr int64_t kColumns = 16;  // of a tile
  static constexpr int64_t kTokens = 32;   // of a tile of values
  static constexpr int64_t kElements = 512;
  static_assert(kWidth == kColumns && kTile % kTokens == 0);

  struct Configuration {
    uint8_t palette, start_row, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };

  // The key tiles of the 16 tokens at a position, [head_size / 32] of them.
  const BFloat16* keys(int64_t at) const {
    const Layer<BFloat16>& layer = share_.layer;
    return layer.keys + share_.item.kv_head * layer.head_stride +
           share_.blocks[at / layer.block_size] * layer.block_stride +
           at % layer.block_size * layer.head_size;
  }

  // The value tile of the 32 tokens at a position and 16 of the elements.
  const BFloat16* values(int64_t at, int64_t element) const {
    const Layer<BFloat16>& layer = share_.layer;
    return layer.values + share_.item.kv_head * layer.head_stride +
           share_.blocks[at / layer.block_size] * layer.block_stride + element * layer.block_size +
           at % layer.block_size * kColumns;
  }

  // Scores of all rows and the 16 keys at a position.
  TILES void score_tile(int64_t at, float* scores, int64_t stride) const {
    const BFloat16* const tiles = keys(at);
    finish_stores();
    for (int64_t r = 0; r < share_.rows; r += kRowsAtATime) {
      _tile_zero(2);
      for (int64_t d = 0; d < share_.size; d += 32) {
        _tile_loadd(0, query_ + r * share_.size + d, share_.size * sizeof(BFloat16));
        _tile_loadd(1, tiles + d * kColumns, 64);
        _tile_dpbf16ps(2, 0, 1);
      }
      _tile_stored(2, scores + r * stride, stride * sizeof(float));
    }
  }

  void scale_and_cap(float* scores, int64_t stride, int64_t columns) const {
    for (int64_t r = 0; r < share_.used; ++r)
      for (int64_t t = 0; t < columns; ++t) scores[r * stride + t] *= share_.layer.scale;
    cap(scores, stride, share_.used, columns, share_.layer.soft_cap);
  }

  // Adds the values at positions [from, to), all of which lie before the tree.
  TILES void add_context(int64_t at, int64_t from, int64_t to) const {
    const int64_t size = share_.size;
    finish_stores();
    for (int64_t d = 0; d < size; d += kColumns)
      for (int64_t r = 0; r < share_.rows; r += kRowsAtATime) {
        float* const sums = share_.item.sums + r * size + d;
        _tile_loadd(2, sums, size * sizeof(float));
        for (int64_t p = from; p < to; p += kTokens) {
          _tile_loadd(0, weights_ + r * kTile + (p - at), kTile * sizeof(BFloat16));
          _tile_loadd(1, values(p, d), 64);
          _tile_dpbf16ps(2, 0, 1);
        }
        _tile_stored(2, sums, size * sizeof(float));
      }
  }

  // Adds to the rows of a node the values of 32 positions, those of the tree being its path's.
  TILES void add_path(int64_t row, int64_t at, int64_t first, int64_t last, const BFloat16* weights) const {
    const Node& node = share_.node(row);
    const int32_t* const path = share_.path(node);
    const auto [begin, end] = share_.path(node, at, kTokens, first, last);
    bool is_chain = true;  // whose values are in their places
    for (int64_t p = begin; p < end; ++p) is_chain &= path[p - share_.root] == p - share_.root;
    const int64_t size = share_.size;
    for (int64_t d = 0; d < size; d += kColumns) {
      const BFloat16* tile = values(at, d);
      if (!is_chain) {
        std::memcpy(path_tile_, tile, kElements * sizeof(BFloat16));
        for (int64_t p = begin; p < end; ++p) {
          const int64_t from = share_.root + path[p - share_.root], group = round_down(from, kTokens);
          copy_token(values(group, d), from - group, path_tile_, p - at);
        }
        tile = path_tile_;
      }
      finish_stores();
      for (int64_t head = 0; head < share_.layer.group; head += kRowsAtATime) {
        float* const sums = share_.item.sums + (row + head) * size + d;
        _tile_loadd(4, sums, size * sizeof(float));
        _tile_loadd(3, weights + head * kTile, kTile * sizeof(BFloat16));
        _tile_loadd(1, tile, 64);
        _tile_dpbf16ps(4, 3, 1);
        _tile_stored(4, sums, size * sizeof(float));
      }
    }
  }

  // GCC's intrinsics do not say that they read memory, so it could store what they read after them.
  static void finish_stores() { asm volatile("" : : : "memory"); }

  static void copy_token(const BFloat16* from, int64_t token, BFloat16* to, int64_t place) {
    from += token / 2 * kTokens + token % 2;
    to += place / 2 * kTokens + place % 2;
    for (int64_t i = 0; i < kColumns; ++i) to[2 * i] = from[2 * i];
  }

  const Share<BFloat16>& share_;
  BFloat16 *const query_, *const weights_, *const path_tile_;
  Scratch& scratch_;
  float* tree_scores_ = nullptr;
  int64_t tree_stride_ = 0;
};

#endif
