// Attention of some rows of a tree to a share of their keys.
//
// All rows read the context before the tree, so each of its keys is read once for them; the rest of a row's
// keys are those of its path. A row sums its keys in the order of their positions, as a text without branches
// does. Where keys are compared with a maximum, which floats are added in which lane, and where a product is
// rounded, is as in vLLM's kernels.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "floats.h"
#include "row_groups.h"
#include "vectors.h"

constexpr float kHidden = -std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kRise = 8.0f;  // a maximum that rises by no more is kept: the weights remain small enough

template <typename T>
struct Layer {
  const T* query;
  int64_t query_stride;
  T* output;
  int64_t output_stride;
  const T* keys;    // each head of a block is [head_size, block_size]
  const T* values;  // each head of a block is [block_size, head_size]
  int64_t block_stride, head_stride, kv_heads, group, head_size, block_size;
  int64_t window;      // number of positions that a node attends to; 0 for all
  const float* sinks;  // [heads], or null
  float scale;
  float soft_cap;  // or 0
};

struct Item {
  const RowGroup* group;
  int64_t kv_head, first_node, last_node;
  int64_t first, last;  // the positions of its share
  bool has_sinks;
  int64_t rows;  // a multiple of kRows
  float* sums;   // [rows, head_size], followed by the maxima and the weights of the rows

  const Node& node(int64_t r, int64_t heads) const { return group->nodes[first_node + r / heads]; }
};

// Floats that are allocated once and hold anything at first.
class Floats {
 public:
  float* of(int64_t count) {
    if (static_cast<int64_t>(memory_.size()) < count) memory_.resize(count);
    return memory_.data();
  }

 private:
  std::vector<float> memory_;
};

// The memory of a thread.
struct Scratch {
  Floats query, wide, scores, tree_scores, tree_values, highest, lanes, factors;
};

// The offset of row r of an item in the query or the output, in elements.
template <typename T>
static int64_t row_offset(const Layer<T>& layer, const Trees& trees, const Item& item, int64_t r,
                          int64_t stride) {
  const int64_t token = trees.starts[item.group->tree] + item.node(r, layer.group).index;
  return token * stride + (item.kv_head * layer.group + r % layer.group) * layer.head_size;
}

template <typename T>
static void widen_rows(const T* from, int64_t from_stride, float* wide, int64_t stride, int64_t rows,
                       int64_t columns) {
  if (columns == kTile) {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < kTile; ++j) wide[i * stride + j] = widen(from[i * from_stride + j]);
  } else {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) wide[i * stride + j] = widen(from[i * from_stride + j]);
  }
}

// Widens the keys at positions [at, at + count) to columns of a tile, [head_size, kTile].
template <typename T>
static void widen_keys(const Layer<T>& layer, const Item& item, const int32_t* blocks, int64_t at,
                       int64_t count, float* wide) {
  const T* head = layer.keys + item.kv_head * layer.head_stride;
  if (layer.block_size == 1) {
    for (int64_t j = 0; j < count; ++j) {
      const T* from = head + blocks[at + j] * layer.block_stride;
      for (int64_t d = 0; d < layer.head_size; ++d) wide[d * kTile + j] = widen(from[d]);
    }
    return;
  }
  for (int64_t run; count > 0; at += run, wide += run, count -= run) {
    const int64_t offset = at % layer.block_size;
    run = std::min(count, layer.block_size - offset);
    widen_rows(head + blocks[at / layer.block_size] * layer.block_stride + offset, layer.block_size,
               wide, kTile, layer.head_size, run);
  }
}

// Widens the values at positions [at, at + count), [count, head_size].
template <typename T>
static void widen_values(const Layer<T>& layer, const Item& item, const int32_t* blocks, int64_t at,
                         int64_t count, float* wide) {
  const T* head = layer.values + item.kv_head * layer.head_stride;
  for (int64_t run; count > 0; at += run, wide += run * layer.head_size, count -= run) {
    const int64_t offset = at % layer.block_size;
    run = std::min(count, layer.block_size - offset);
    const T* from = head + blocks[at / layer.block_size] * layer.block_stride + offset * layer.head_size;
    for (int64_t i = 0; i < run * layer.head_size; ++i) wide[i] = widen(from[i]);
  }
}

// Adds values of a path's nodes to a row's sums, in the order of their depths.
static void add_path(const float* weights, const int32_t* path, int64_t count, const float* values,
                     int64_t size, float* sums) {
  for (int64_t d = 0; d < size; d += kWidth) {
    Vector sum = load(sums + d);
    for (int64_t i = 0; i < count; ++i) sum += weights[i] * load(values + path[i] * size + d);
    store(sums + d, sum);
  }
}

// Attention of an item's rows to its share of their keys, without the division by the weights.
template <typename T>
class ShareAttention {
 public:
  ShareAttention(const Layer<T>& layer, const Trees& trees, const Item& item, Scratch& scratch)
      : layer_(layer),
        item_(item),
        blocks_(trees.blocks + item.group->tree * trees.blocks_stride),
        size_(layer.head_size),
        rows_(item.rows),
        used_((item.last_node - item.first_node) * layer.group),
        root_(trees.root(item.group->tree)),
        maxima_(item.sums + item.rows * layer.head_size),
        weights_(maxima_ + item.rows),
        query_(scratch.query.of(rows_ * size_)),
        wide_(scratch.wide.of(kTile * size_)),
        highest_(scratch.highest.of(rows_ * kWidth)),
        lanes_(scratch.lanes.of(rows_ * kLanes)),
        factors_(scratch.factors.of(rows_)),
        scratch_(scratch) {
    for (int64_t i = item.first_node; i < item.last_node; ++i) {
      const Node& node = item.group->nodes[i];
      earliest_ = std::min(earliest_, node.first);
      latest_ = std::max(latest_, node.first);
      end_ = std::max(end_, node.last);
      nodes_ = std::max(nodes_, node.index + 1);
    }
    start(trees);
  }

  void run() {
    const RowGroup& group = *item_.group;
    const int64_t first = std::max(item_.first, group.tile > 0 ? group.origin : earliest_);
    const int64_t last = std::min(item_.last, end_);
    if (first >= last) return;
    if (last > root_) read_tree();
    const int64_t tile = group.tile > 0 ? group.tile : last - first;
    for (int64_t at = first; at < last; at += tile) attend(at, std::min(at + tile, last));
  }

 private:
  void start(const Trees& trees) {
    std::fill(query_, query_ + rows_ * size_, 0.0f);
    std::fill(item_.sums, item_.sums + rows_ * size_, 0.0f);
    for (int64_t r = 0; r < rows_; ++r) {
      const bool has_sink = item_.has_sinks && layer_.sinks;
      maxima_[r] = has_sink ? layer_.sinks[item_.kv_head * layer_.group + r % layer_.group] : kLowest;
      weights_[r] = has_sink ? 1.0f : 0.0f;
    }
    for (int64_t r = 0; r < used_; ++r) {
      const T* from = layer_.query + row_offset(layer_, trees, item_, r, layer_.query_stride);
      float* to = query_ + r * size_;
      for (int64_t d = 0; d < size_; ++d) to[d] = widen(from[d]) * layer_.scale;
    }
  }

  // Scores and values of the tree's nodes, from which each row takes those of its path.
  void read_tree() {
    tree_stride_ = round_up(nodes_, kTile);
    tree_scores_ = scratch_.tree_scores.of(rows_ * tree_stride_);
    tree_values_ = scratch_.tree_values.of(nodes_ * size_);
    for (int64_t i = 0; i < nodes_; i += kTile) {
      const int64_t count = std::min<int64_t>(kTile, nodes_ - i);
      widen_keys(layer_, item_, blocks_, root_ + i, count, wide_);
      score(count, tree_scores_ + i, tree_stride_);
    }
    widen_values(layer_, item_, blocks_, root_, nodes_, tree_values_);
  }

  // Scores of all rows and `columns` keys, which have been widened.
  void score(int64_t columns, float* scores, int64_t stride) const {
    const int64_t width = round_up(columns, kWidth);
    for (int64_t r = 0; r < rows_; r += kRows)
      multiply<false>(query_ + r * size_, size_, wide_, kTile, scores + r * stride, stride, size_,
                      width);
    if (layer_.soft_cap == 0) return;
    const float inverse = 1.0f / layer_.soft_cap;
    for (int64_t r = 0; r < rows_; ++r)
      for (int64_t t = 0; t < width; t += kWidth) {
        float* at = scores + r * stride + t;
        store(at, tangent(load(at) * inverse) * layer_.soft_cap);
      }
  }

  // Adds the keys at positions [first, last), which are compared with a running maximum at once.
  void attend(int64_t first, int64_t last) {
    const int64_t base = round_down(first, kTile), end = round_up(last, kTile);
    float* const tiles = scratch_.scores.of(rows_ * (end - base));
    std::fill(highest_, highest_ + rows_ * kWidth, kHidden);
    for (int64_t at = base; at < end; at += kTile) {
      float* scores = tiles + rows_ * (at - base);
      const auto [from, to] = context(at, first, last);
      if (from < to) {
        widen_keys(layer_, item_, blocks_, from, to - from, wide_ + (from - at));
        score(to - at, scores, kTile);
      }
      if (at < std::max(first, latest_) || at + kTile > std::min(last, root_))
        finish_scores(at, first, last, scores);
      for (int64_t r = 0; r < used_; ++r) {
        float* highest = highest_ + r * kWidth;
        Vector most = load(highest);
        for (int t = 0; t < kTile; t += kWidth) {
          const Vector each = load(scores + r * kTile + t);
          most = each > most ? each : most;
        }
        store(highest, most);
      }
    }
    raise_maxima();
    std::fill(lanes_, lanes_ + rows_ * kLanes, 0.0f);
    for (int64_t at = base; at < end; at += kTile) {
      float* scores = tiles + rows_ * (at - base);
      for (int64_t r = 0; r < used_; ++r) weigh(scores + r * kTile, r);
      add_values(at, first, last, scores);
    }
    for (int64_t r = 0; r < used_; ++r) {
      weights_[r] = std::fma(factors_[r], weights_[r], lane_sum(lanes_ + r * kLanes));
    }
  }

  // The positions before the tree that columns [at, at + kTile) have within [first, last).
  std::pair<int64_t, int64_t> context(int64_t at, int64_t first, int64_t last) const {
    return {std::max({at, first, earliest_}), std::min({at + kTile, last, root_})};
  }

  // The positions of a row's path that columns [at, at + kTile) have within [first, last).
  std::pair<int64_t, int64_t> path(const Node& node, int64_t at, int64_t first, int64_t last) const {
    return {std::max({at, first, root_, node.first}), std::min({at + kTile, last, node.last})};
  }

  // Takes the scores of the rows' paths, and hides what a row does not attend to.
  void finish_scores(int64_t at, int64_t first, int64_t last, float* scores) const {
    for (int64_t r = 0; r < used_; ++r) {
      const Node& node = item_.node(r, layer_.group);
      const int32_t* nodes = item_.group->paths.data() + node.path;
      float* row = scores + r * kTile;
      const auto [from, to] = path(node, at, first, last);
      for (int64_t p = from; p < to; ++p)
        row[p - at] = tree_scores_[r * tree_stride_ + nodes[p - root_]];
      const auto column = [&](int64_t p) { return std::clamp<int64_t>(p - at, 0, kTile); };
      std::fill(row, row + column(std::max(first, node.first)), kHidden);
      std::fill(row + column(std::min(last, node.last)), row + kTile, kHidden);
    }
  }

  void raise_maxima() {
    for (int64_t r = 0; r < used_; ++r) {
      const float* highest = highest_ + r * kWidth;
      const float most = std::max(maxima_[r], *std::max_element(highest, highest + kWidth));
      const float fall = maxima_[r] - most;
      factors_[r] = 1.0f;
      if (!(fall < -kRise)) continue;
      factors_[r] = std::exp(fall);
      maxima_[r] = most;
      for (int64_t d = 0; d < size_; ++d) item_.sums[r * size_ + d] *= factors_[r];
    }
  }

  // Replaces a row's scores by their weights, and adds these by lanes.
  void weigh(float* row, int64_t r) {
    float* const lanes = lanes_ + r * kLanes;
    const float maximum = maxima_[r];
    for (int t = 0; t < kTile; t += kWidth) {
      const Vector weight = exponential(load(row + t) - maximum);
      store(row + t, weight);
      store(lanes + t % kLanes, load(lanes + t % kLanes) + weight);
    }
  }

  void add_values(int64_t at, int64_t first, int64_t last, const float* weights) {
    const auto [from, to] = context(at, first, last);
    if (from < to) {
      widen_values(layer_, item_, blocks_, from, to - from, wide_);
      for (int64_t r = 0; r < rows_; r += kRows)
        multiply<true>(weights + r * kTile + (from - at), kTile, wide_, size_,
                       item_.sums + r * size_, size_, to - from, size_);
    }
    if (std::min(at + kTile, last) <= root_) return;
    for (int64_t r = 0; r < used_; ++r) {
      const Node& node = item_.node(r, layer_.group);
      const auto [begin, end] = path(node, at, first, last);
      if (begin < end)
        add_path(weights + r * kTile + (begin - at),
                 item_.group->paths.data() + node.path + (begin - root_), end - begin,
                 tree_values_, size_, item_.sums + r * size_);
    }
  }

  const Layer<T>& layer_;
  const Item& item_;
  const int32_t* const blocks_;
  const int64_t size_, rows_, used_, root_;
  float *const maxima_, *const weights_;
  float *const query_, *const wide_, *const highest_, *const lanes_, *const factors_;
  Scratch& scratch_;
  float *tree_scores_ = nullptr, *tree_values_ = nullptr;
  int64_t earliest_ = std::numeric_limits<int64_t>::max(), latest_ = 0;  // first positions of nodes
  int64_t end_ = 0, nodes_ = 0, tree_stride_ = 0;
};
