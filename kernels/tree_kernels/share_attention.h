// Attention of some rows of a tree to a share of their keys.
//
// All rows read the context before the tree, so each of its keys is read once for them; the rest of a row's
// keys are those of its path. A row sums its keys in the order of their positions, as a text without branches
// does. Where keys are compared with a maximum, which floats are added in which lane, and where a product is
// rounded, is as in vLLM's kernels. How keys and values are stored and multiplied is left to `Products`, which
// is `VectorProducts` or `TileProducts`. Its `Session` is what a thread does before and after its items.

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
  const T* keys;
  const T* values;
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
  int64_t rows;  // a multiple of the rows that products compute at a time
  float* sums;   // [rows, head_size], followed by the maxima and the weights of the rows
};

// Memory that is allocated once, begins with a cache line and holds anything at first.
template <typename T>
class Room {
 public:
  T* of(int64_t count) {
    const size_t needed = count * sizeof(T) + kLine;
    if (memory_.size() < needed) memory_.resize(needed);
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory_.data());
    return reinterpret_cast<T*>(round_up(address, kLine));
  }

 private:
  static constexpr int64_t kLine = 64;
  std::vector<char> memory_;
};

// The memory of a thread.
struct Scratch {
  Room<float> query, wide, scores, tree_scores, tree_values, highest, lanes, factors;
  Room<BFloat16> narrow_query, weights, path_tile;
};

// An item with its layer and the context of its tree.
template <typename T>
struct Share {
  Share(const Layer<T>& layer, const Trees& trees, const Item& item)
      : layer(layer),
        item(item),
        blocks(trees.blocks + item.group->tree * trees.blocks_stride),
        size(layer.head_size),
        rows(item.rows),
        used((item.last_node - item.first_node) * layer.group),
        start(trees.starts[item.group->tree]),
        root(trees.root(item.group->tree)) {
    for (int64_t i = item.first_node; i < item.last_node; ++i) {
      const Node& node = item.group->nodes[i];
      earliest = std::min(earliest, node.first);
      latest = std::max(latest, node.first);
      end = std::max(end, node.last);
      nodes = std::max(nodes, node.index + 1);
    }
  }

  const Node& node(int64_t row) const {
    return item.group->nodes[item.first_node + row / layer.group];
  }
  const int32_t* path(const Node& node) const { return item.group->paths.data() + node.path; }

  // The offset of a row in the query or the output, in elements.
  int64_t offset(int64_t row, int64_t stride) const {
    return (start + node(row).index) * stride +
           (item.kv_head * layer.group + row % layer.group) * size;
  }

  // The positions before the tree that columns [at, at + kTile) have within [first, last).
  std::pair<int64_t, int64_t> context(int64_t at, int64_t first, int64_t last) const {
    return {std::max({at, first, earliest}), std::min({at + kTile, last, root})};
  }

  // The positions of a node's path that `columns` columns from `at` have within [first, last).
  std::pair<int64_t, int64_t> path(const Node& node, int64_t at, int64_t columns, int64_t first,
                                   int64_t last) const {
    return {std::max({at, first, root, node.first}), std::min({at + columns, last, node.last})};
  }

  const Layer<T>& layer;
  const Item& item;
  const int32_t* const blocks;
  const int64_t size, rows, used, start, root;
  int64_t earliest = std::numeric_limits<int64_t>::max(), latest = 0;  // first positions of nodes
  int64_t end = 0, nodes = 0;
};

// The scores of rows with a layer's soft cap.
static void cap(float* scores, int64_t stride, int64_t rows, int64_t columns, float soft_cap) {
  if (soft_cap == 0) return;
  const float inverse = 1.0f / soft_cap;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t t = 0; t < columns; t += kWidth) {
      float* at = scores + r * stride + t;
      store(at, tangent(load(at) * inverse) * soft_cap);
    }
}

// Attention of an item's rows to its share of their keys, without the division by the weights.
template <typename Products>
class ShareAttention {
  using T = typename Products::Element;

 public:
  ShareAttention(const Layer<T>& layer, const Trees& trees, const Item& item, Scratch& scratch)
      : share_(layer, trees, item),
        maxima_(item.sums + item.rows * layer.head_size),
        weights_(maxima_ + item.rows),
        highest_(scratch.highest.of(item.rows * kWidth)),
        lanes_(scratch.lanes.of(item.rows * kLanes)),
        factors_(scratch.factors.of(item.rows)),
        scratch_(scratch),
        products_(share_, scratch) {
    std::fill(item.sums, maxima_, 0.0f);
    for (int64_t r = 0; r < item.rows; ++r) {
      const bool has_sink = item.has_sinks && layer.sinks;
      maxima_[r] = has_sink ? layer.sinks[item.kv_head * layer.group + r % layer.group] : kLowest;
      weights_[r] = has_sink ? 1.0f : 0.0f;
    }
  }

  void run() {
    const Item& item = share_.item;
    const int64_t first = std::max(item.first, item.group->tile > 0 ? item.group->origin : share_.earliest);
    const int64_t last = std::min(item.last, share_.end);
    if (first >= last) return;
    products_.read_query();
    if (last > share_.root) products_.read_tree();
    const int64_t tile = item.group->tile > 0 ? item.group->tile : last - first;
    for (int64_t at = first; at < last; at += tile) attend(at, std::min(at + tile, last));
  }

 private:
  // Adds the keys at positions [first, last), which are compared with a running maximum at once.
  void attend(int64_t first, int64_t last) {
    const int64_t base = round_down(first, kTile), end = round_up(last, kTile);
    const int64_t rows = share_.rows, used = share_.used;
    float* const tiles = scratch_.scores.of(rows * (end - base));
    std::fill(highest_, highest_ + rows * kWidth, kHidden);
    for (int64_t at = base; at < end; at += kTile) {
      float* scores = tiles + rows * (at - base);
      const auto [from, to] = share_.context(at, first, last);
      if (from < to) products_.score(at, from, to, scores);
      if (at < std::max(first, share_.latest) || at + kTile > std::min(last, share_.root))
        finish_scores(at, first, last, scores);
      for (int64_t r = 0; r < used; ++r) {
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
    std::fill(lanes_, lanes_ + rows * kLanes, 0.0f);
    for (int64_t at = base; at < end; at += kTile) {
      float* scores = tiles + rows * (at - base);
      for (int64_t r = 0; r < used; ++r) weigh(scores + r * kTile, r);
      products_.add_values(at, first, last, scores);
    }
    for (int64_t r = 0; r < used; ++r)
      weights_[r] = std::fma(factors_[r], weights_[r], lane_sum(lanes_ + r * kLanes));
  }

  // Takes the scores of the rows' paths, and hides what a row does not attend to.
  void finish_scores(int64_t at, int64_t first, int64_t last, float* scores) const {
    for (int64_t r = 0; r < share_.used; ++r) {
      const Node& node = share_.node(r);
      const int32_t* nodes = share_.path(node);
      float* row = scores + r * kTile;
      const auto [from, to] = share_.path(node, at, kTile, first, last);
      for (int64_t p = from; p < to; ++p)
        row[p - at] = products_.tree_score(r, nodes[p - share_.root]);
      const auto column = [&](int64_t p) { return std::clamp<int64_t>(p - at, 0, kTile); };
      std::fill(row, row + column(std::max(first, node.first)), kHidden);
      std::fill(row + column(std::min(last, node.last)), row + kTile, kHidden);
    }
  }

  void raise_maxima() {
    const int64_t size = share_.size;
    for (int64_t r = 0; r < share_.used; ++r) {
      const float* highest = highest_ + r * kWidth;
      const float most = std::max(maxima_[r], *std::max_element(highest, highest + kWidth));
      const float fall = maxima_[r] - most;
      factors_[r] = 1.0f;
      if (!(fall < -kRise)) continue;
      factors_[r] = std::exp(fall);
      maxima_[r] = most;
      for (int64_t d = 0; d < size; ++d) share_.item.sums[r * size + d] *= factors_[r];
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

  const Share<T> share_;
  float *const maxima_, *const weights_;
  float *const highest_, *const lanes_, *const factors_;
  Scratch& scratch_;
  Products products_;
};
