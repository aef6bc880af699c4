// Products with keys and values in float32, in vector registers.
//
// Each head of a block of keys is [head_size, block_size], of values [block_size, head_size].

#pragma once

#include <algorithm>
#include <cstdint>

#include "share_attention.h"

template <typename T>
class VectorProducts {
 public:
  using Element = T;
  static constexpr int64_t kRowsAtATime = kRows;

  struct Session {
    explicit Session(const Layer<T>&) {}
  };

  VectorProducts(const Share<T>& share, Scratch& scratch)
      : share_(share),
        query_(scratch.query.of(share.rows * share.size)),
        wide_(scratch.wide.of(kTile * share.size)),
        scratch_(scratch) {}

  void read_query() {
    const int64_t size = share_.size;
    std::fill(query_, query_ + share_.rows * size, 0.0f);
    for (int64_t r = 0; r < share_.used; ++r) {
      const T* from = share_.layer.query + share_.offset(r, share_.layer.query_stride);
      for (int64_t d = 0; d < size; ++d) query_[r * size + d] = widen(from[d]) * share_.layer.scale;
    }
  }

  // Scores and values of the tree's nodes, from which each row takes those of its path.
  void read_tree() {
    const int64_t nodes = share_.nodes;
    tree_stride_ = round_up(nodes, kTile);
    tree_scores_ = scratch_.tree_scores.of(share_.rows * tree_stride_);
    tree_values_ = scratch_.tree_values.of(nodes * share_.size);
    for (int64_t i = 0; i < nodes; i += kTile) {
      const int64_t count = std::min<int64_t>(kTile, nodes - i);
      widen_keys(share_.root + i, count, wide_);
      score(count, tree_scores_ + i, tree_stride_);
    }
    widen_values(share_.root, nodes, tree_values_);
  }

  float tree_score(int64_t row, int64_t node) const { return tree_scores_[row * tree_stride_ + node]; }

  // Scores [rows, kTile] of all rows and the keys at positions [from, to), the first column at `at`. The other
  // columns get any scores.
  void score(int64_t at, int64_t from, int64_t to, float* scores) {
    widen_keys(from, to - from, wide_ + (from - at));
    score(to - at, scores, kTile);
  }

  // Adds the values at columns [at, at + kTile) within [first, last), weighted by [rows, kTile].
  void add_values(int64_t at, int64_t first, int64_t last, const float* weights) {
    const int64_t size = share_.size;
    float* const sums = share_.item.sums;
    const auto [from, to] = share_.context(at, first, last);
    if (from < to) {
      widen_values(from, to - from, wide_);
      for (int64_t r = 0; r < share_.rows; r += kRows)
        multiply<true>(weights + r * kTile + (from - at), kTile, wide_, size, sums + r * size, size,
                       to - from, size);
    }
    if (std::min(at + kTile, last) <= share_.root) return;
    for (int64_t r = 0; r < share_.used; ++r) {
      const Node& node = share_.node(r);
      const auto [begin, end] = share_.path(node, at, kTile, first, last);
      if (begin < end)
        add_path(weights + r * kTile + (begin - at), share_.path(node) + (begin - share_.root),
                 end - begin, sums + r * size);
    }
  }

 private:
  static void widen_rows(const T* from, int64_t from_stride, float* wide, int64_t stride,
                         int64_t rows, int64_t columns) {
    if (columns == kTile) {
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < kTile; ++j) wide[i * stride + j] = widen(from[i * from_stride + j]);
    } else {
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) wide[i * stride + j] = widen(from[i * from_stride + j]);
    }
  }

  // Widens the keys at positions [at, at + count) to columns of a tile, [head_size, kTile].
  void widen_keys(int64_t at, int64_t count, float* wide) const {
    const Layer<T>& layer = share_.layer;
    const T* head = layer.keys + share_.item.kv_head * layer.head_stride;
    if (layer.block_size == 1) {
      for (int64_t j = 0; j < count; ++j) {
        const T* from = head + share_.blocks[at + j] * layer.block_stride;
        for (int64_t d = 0; d < layer.head_size; ++d) wide[d * kTile + j] = widen(from[d]);
      }
      return;
    }
    for (int64_t run; count > 0; at += run, wide += run, count -= run) {
      const int64_t offset = at % layer.block_size;
      run = std::min(count, layer.block_size - offset);
      widen_rows(head + share_.blocks[at / layer.block_size] * layer.block_stride + offset,
                 layer.block_size, wide, kTile, layer.head_size, run);
    }
  }

  // Widens the values at positions [at, at + count), [count, head_size].
  void widen_values(int64_t at, int64_t count, float* wide) const {
    const Layer<T>& layer = share_.layer;
    const T* head = layer.values + share_.item.kv_head * layer.head_stride;
    for (int64_t run; count > 0; at += run, wide += run * layer.head_size, count -= run) {
      const int64_t offset = at % layer.block_size;
      run = std::min(count, layer.block_size - offset);
      const T* from = head + share_.blocks[at / layer.block_size] * layer.block_stride +
                      offset * layer.head_size;
      for (int64_t i = 0; i < run * layer.head_size; ++i) wide[i] = widen(from[i]);
    }
  }

  // Scores of all rows and `columns` keys, which have been widened.
  void score(int64_t columns, float* scores, int64_t stride) const {
    const int64_t width = round_up(columns, kWidth), size = share_.size;
    for (int64_t r = 0; r < share_.rows; r += kRows)
      multiply<false>(query_ + r * size, size, wide_, kTile, scores + r * stride, stride, size, width);
    cap(scores, stride, share_.rows, width, share_.layer.soft_cap);
  }

  // Adds values of a path's nodes to a row's sums, in the order of their depths.
  void add_path(const float* weights, const int32_t* path, int64_t count, float* sums) const {
    const int64_t size = share_.size;
    for (int64_t d = 0; d < size; d += kWidth) {
      Vector sum = load(sums + d);
      for (int64_t i = 0; i < count; ++i) sum += weights[i] * load(tree_values_ + path[i] * size + d);
      store(sums + d, sum);
    }
  }

  const Share<T>& share_;
  float *const query_, *const wide_;
  Scratch& scratch_;
  float *tree_scores_ = nullptr, *tree_values_ = nullptr;
  int64_t tree_stride_ = 0;
};
