// Tree attention over a paged KV cache, on a CPU.
//
// An item of work is some nodes of one tree, one KV head and a share of the keys. Its rows are the nodes times
// the query heads that share the KV head, so that scores and weighted sums are small matrix products. Finally
// the shares of the same rows are merged.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "share_attention.h"
#include "tile_products.h"
#include "vector_products.h"

constexpr int64_t kRowsAtOnce = 48;  // the weights and sums of more would not fit into the L1 cache
constexpr int64_t kItemsPerThread = 4;

// Merges the shares of the same rows into the first, one after another, and writes the rows.
template <typename T>
static void write_rows(const Layer<T>& layer, const Trees& trees, const Item* item, const Item* end) {
  const Share<T> first(layer, trees, *item);
  const int64_t size = layer.head_size, rows = item->rows;
  for (int64_t r = 0; r < first.used; ++r) {
    float* row = item->sums + r * size;
    float maximum = item->sums[rows * size + r], weight = item->sums[rows * (size + 1) + r];
    for (const Item* share = item + 1; share < end; ++share) {
      const float other = share->sums[rows * size + r];
      const float other_weight = share->sums[rows * (size + 1) + r];
      const bool falls = maximum > other;  // the share's weights fall, or those before it
      const float factor = std::exp(falls ? other - maximum : maximum - other);
      weight = falls ? std::fma(factor, other_weight, weight) : std::fma(factor, weight, other_weight);
      maximum = std::max(maximum, other);
      const float* more = share->sums + r * size;
      for (int64_t d = 0; d < size; d += kWidth) {
        const Vector before = load(row + d), added = load(more + d);
        store(row + d, falls ? before + factor * added : added + factor * before);
      }
    }
    const float inverse = 1.0f / weight;
    T* to = layer.output + first.offset(r, layer.output_stride);
    for (int64_t d = 0; d < size; ++d) narrow(inverse * row[d], to[d]);
  }
}

// The items of all rows; those of the same rows follow each other. `starts` is where others begin.
static void list_items(const std::vector<RowGroup>& groups, int64_t kv_heads, int64_t most_nodes,
                       int64_t heads, int64_t rows_at_a_time, std::vector<Item>& items,
                       std::vector<int64_t>& starts) {
  for (const RowGroup& group : groups) {
    const int64_t nodes = group.nodes.size();
    const int64_t parts = (nodes + most_nodes - 1) / most_nodes;
    for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head)
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = part * nodes / parts, last = (part + 1) * nodes / parts;
        const int64_t rows = round_up((last - first) * heads, rows_at_a_time);
        starts.push_back(items.size());
        for (size_t share = 0; share <= group.cuts.size(); ++share)
          items.push_back({&group, kv_head, first, last, share == 0 ? 0 : group.cuts[share - 1],
                           share < group.cuts.size() ? group.cuts[share]
                                                     : std::numeric_limits<int64_t>::max(),
                           share == 0, rows, nullptr});
      }
  }
  starts.push_back(items.size());
}

template <typename Products, typename T>
static void attend(const Layer<T>& layer, const Trees& trees, const DecodeOrder& order,
                   int64_t threads) {
  const int64_t most_nodes = std::max<int64_t>(kRowsAtOnce / layer.group, 1);
  int64_t parts = 0;
  for (int64_t tree = 0; tree < trees.count; ++tree) {
    const int64_t nodes = trees.tree_sizes[tree] - trees.first_node(tree);
    parts += (nodes + most_nodes - 1) / most_nodes * layer.kv_heads;
  }
  const int64_t shares = threads > 1 ? (kItemsPerThread * threads + parts - 1) / parts : 1;
  const std::vector<RowGroup> groups = group_rows(trees, order, layer.window, threads, shares);
  static thread_local std::vector<Item> items;
  static thread_local std::vector<int64_t> starts;
  static thread_local std::vector<float> results;
  items.clear();
  starts.clear();
  list_items(groups, layer.kv_heads, most_nodes, layer.group, Products::kRowsAtATime, items, starts);
  int64_t room = 0;
  for (const Item& item : items) room += item.rows * (layer.head_size + 2);
  results.resize(room);
  float* place = results.data();
  for (Item& item : items) {
    item.sums = place;
    place += item.rows * (layer.head_size + 2);
  }
  // The vectors are thread-local, so other threads need pointers to this thread's.
  const Item* all = items.data();
  const int64_t* begins = starts.data();
  const int64_t num_items = items.size(), num_rows = starts.size() - 1;
#pragma omp parallel num_threads(threads)
  {
    static thread_local Scratch scratch;
    {
      const typename Products::Session session(layer);
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < num_items; ++i)
        ShareAttention<Products>(layer, trees, all[i], scratch).run();
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_rows; ++i)
      write_rows(layer, trees, all + begins[i], all + begins[i + 1]);
  }
}

struct Shape {
  int64_t block_stride, head_stride, kv_heads, group, head_size, block_size, window;
  const float* sinks;
  float scale, soft_cap;
};

template <typename Products>
static void attend(const Trees* trees, const Shape* shape, const DecodeOrder* order,
                   const void* query, int64_t query_stride, void* output, int64_t output_stride,
                   const void* keys, const void* values, int64_t threads) {
  using T = typename Products::Element;
  const Layer<T> layer{static_cast<const T*>(query),
                       query_stride,
                       static_cast<T*>(output),
                       output_stride,
                       static_cast<const T*>(keys),
                       static_cast<const T*>(values),
                       shape->block_stride,
                       shape->head_stride,
                       shape->kv_heads,
                       shape->group,
                       shape->head_size,
                       shape->block_size,
                       shape->window,
                       shape->sinks,
                       shape->scale,
                       shape->soft_cap};
  attend<Products>(layer, *trees, *order, threads);
}

#define EXPORT(NAME, PRODUCTS)                                                                       \
  extern "C" void NAME(const Trees* trees, const Shape* shape, const DecodeOrder* order,             \
                       const void* query, int64_t query_stride, void* output,                        \
                       int64_t output_stride, const void* keys, const void* values,                  \
                       int64_t threads) {                                                            \
    attend<PRODUCTS>(trees, shape, order, query, query_stride, output, output_stride, keys, values,  \
                     threads);                                                                       \
  }
EXPORT(attend_float32, VectorProducts<float>)
EXPORT(attend_bfloat16, VectorProducts<BFloat16>)
EXPORT(attend_float16, VectorProducts<Float16>)
#if defined(HAS_TILES)
EXPORT(attend_tiles, TileProducts)
#endif
