// Tree attention over a paged KV cache, on a CPU.
//
// An item of work is some nodes of one tree, one KV head and a run of KV spans: blocks, or where a
// block has one token, as many tokens as a tile has columns. Its rows are the nodes times the query
// heads that share the KV head, so that scores and weighted sums are small matrix products in
// registers. Finally the runs of the same rows are merged by their maxima.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "floats.h"

#if defined(__AVX512F__)
constexpr int kWidth = 16;  // floats in a register
constexpr int kVectors = 4;
#else
constexpr int kWidth = 8;
constexpr int kVectors = 2;
#endif
constexpr int kTile = kWidth * kVectors;  // columns of a product in registers
constexpr int kRows = 4;                  // rows of a product in registers
constexpr int64_t kRowsAtOnce = 48;       // the scores of more would not fit into the L1 cache
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kScattered = 64;  // tokens of a span of blocks of one token; a multiple of kTile
constexpr float kHidden = -1e30f;  // finite, so that a run without a visible token does not give NaN
constexpr float kLeast = -126.0f;  // the smallest exponent of a normal float

typedef float Vector __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));

static Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
static void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }

// 2^x for x <= 0, flushed to 0 below the normal floats; relative error 2e-7. The polynomial is a minimax fit
// of 2^f over [-1, 0] that is exact at 0.
static Vector exp2(Vector x) {
  const Vector clamped = x < kLeast ? Vector{} + kLeast : x;
  const Integers whole = __builtin_convertvector(clamped, Integers);
  const Vector f = clamped - __builtin_convertvector(whole, Vector);
  Vector p = Vector{} + 1.090232257e-04f;
  p = p * f + 1.274748288e-03f;
  p = p * f + 9.579179666e-03f;
  p = p * f + 5.549075707e-02f;
  p = p * f + 2.402243678e-01f;
  p = p * f + 6.931470643e-01f;
  p = p * f + 1.0f;
  const Integers exponent = (whole + 127) << 23;
  Vector power;
  std::memcpy(&power, &exponent, sizeof power);
  return x < kLeast ? Vector{} : p * power;
}

// The hyperbolic tangent; relative error 3e-7. Near 0, where 1 - e would cancel, it is a polynomial.
static Vector tanh(Vector x) {
  const Vector size = x < 0 ? -x : x;
  const Vector e = exp2(size * -2.885390082f);
  const Vector far = (1.0f - e) / (1.0f + e);
  const Vector x2 = x * x;
  const Vector near =
      x + x * x2 * (-3.333333333e-01f + x2 * (1.333333333e-01f + x2 * -5.396825397e-02f));
  return size < 0.25f ? near : (x < 0 ? -far : far);
}

static float exp2(float x) { return exp2(Vector{} + x)[0]; }

// c [kRows, N * kWidth] = a [kRows, depth] times b [depth, N * kWidth], added to c if kAdd.
template <int N, bool kAdd>
static void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                     int64_t c_stride, int64_t depth) {
  Vector sum[kRows][N];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < N; ++j)
      sum[i][j] = kAdd ? load(c + i * c_stride + j * kWidth) : Vector{};
  for (int64_t d = 0; d < depth; ++d) {
    Vector left[kRows];
    for (int i = 0; i < kRows; ++i) left[i] = Vector{} + a[i * a_stride + d];
    for (int j = 0; j < N; ++j) {
      Vector right = load(b + d * b_stride + j * kWidth);
#if defined(__x86_64__)
      asm("" : "+v"(right));  // or GCC would load it again for each row, and loads are the bottleneck
#endif
      for (int i = 0; i < kRows; ++i) sum[i][j] += left[i] * right;
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < N; ++j) store(c + i * c_stride + j * kWidth, sum[i][j]);
}

// The same for any number of columns that is a multiple of kWidth.
template <bool kAdd>
static void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                     int64_t c_stride, int64_t depth, int64_t columns) {
  int64_t j = 0;
  for (; j + kTile <= columns; j += kTile)
    multiply<kVectors, kAdd>(a, a_stride, b + j, b_stride, c + j, c_stride, depth);
  for (; j < columns; j += kWidth)
    multiply<1, kAdd>(a, a_stride, b + j, b_stride, c + j, c_stride, depth);
}

struct Trees {
  int64_t count;
  const int64_t* starts;      // [count], the row of each tree's root in the batch
  const int64_t* tree_sizes;  // [count]
  const int64_t* lengths;     // [count], tokens of the context and the tree together
  const int32_t* blocks;      // [count, blocks_stride]
  int64_t blocks_stride;
  const uint8_t* masks;       // [count, max_tree_size, max_tree_size]
  int64_t max_tree_size;
  const int64_t* first_nodes;  // [count], the first node with a row in the batch; null for the roots

  int64_t first_node(int64_t tree) const { return first_nodes ? first_nodes[tree] : 0; }
};

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
  const float* sinks;  // [heads] times log2(e), or null
  float scale;         // of the tangent's argument with a soft cap, else times log2(e)
  float soft_cap;      // times log2(e), or 0

  bool is_scattered() const { return block_size == 1; }
  int64_t span() const { return is_scattered() ? kScattered : block_size; }
};

// The depth of a node is the number of its ancestors.
static int64_t depth_of(const Trees& trees, int64_t tree, int64_t node) {
  const uint8_t* sees = trees.masks + (tree * trees.max_tree_size + node) * trees.max_tree_size;
  int64_t seen = 0;
  for (int64_t j = 0; j < trees.tree_sizes[tree]; ++j) seen += sees[j];
  return seen - 1;
}

struct Item {
  int64_t tree, kv_head, first_node, last_node;
  int64_t origin;  // the position at which span 0 begins
  int64_t first_span, last_span;
  int64_t rows;  // a multiple of kRows
  float* sums;   // [rows, head_size], followed by the maxima and the weights of the rows

  int64_t used_rows(int64_t group) const { return (last_node - first_node) * group; }
};

// The offset of row r of an item in the query or the output, in elements.
template <typename T>
static int64_t row_offset(const Layer<T>& layer, const Trees& trees, const Item& item, int64_t r,
                          int64_t stride) {
  const int64_t token = trees.starts[item.tree] + item.first_node + r / layer.group;
  return token * stride + (item.kv_head * layer.group + r % layer.group) * layer.head_size;
}

// Widens the keys of `width` tokens, of which the first `count` exist, to the columns of a tile. Blocks
// of one token are read one after another.
template <typename T>
static void widen_keys(const Layer<T>& layer, const T* head, const int32_t* blocks, int64_t at,
                       int64_t width, int64_t count, float* wide) {
  const int64_t size = layer.head_size;
  if (!layer.is_scattered()) {
    for (int64_t d = 0; d < size; ++d) {
      const T* from = head + *blocks * layer.block_stride + d * layer.block_size + at;
      for (int64_t j = 0; j < width; ++j) wide[d * kTile + j] = widen(from[j]);
    }
    return;
  }
  for (int64_t j = 0; j < width; ++j) {
    if (at + j < count) {
      const T* from = head + blocks[at + j] * layer.block_stride;
      for (int64_t d = 0; d < size; ++d) wide[d * kTile + j] = widen(from[d]);
    } else {
      for (int64_t d = 0; d < size; ++d) wide[d * kTile + j] = 0.0f;
    }
  }
}

// Widens the values of `count` tokens, row by row.
template <typename T>
static void widen_values(const Layer<T>& layer, const T* head, const int32_t* blocks, int64_t at,
                         int64_t count, float* wide) {
  const int64_t size = layer.head_size;
  if (!layer.is_scattered()) {
    const T* from = head + *blocks * layer.block_stride + at * size;
    for (int64_t i = 0; i < count * size; ++i) wide[i] = widen(from[i]);
    return;
  }
  for (int64_t j = 0; j < count; ++j) {
    const T* from = head + blocks[at + j] * layer.block_stride;
    for (int64_t d = 0; d < size; ++d) wide[j * size + d] = widen(from[d]);
  }
}

// Online softmax: replaces the scores of a span by their exponentials relative to the rows' maxima
// so far, and rescales the sums of rows whose maximum rises.
static void soften(float* scores, int64_t span, int64_t columns, const Item& item, int64_t size) {
  float* maxima = item.sums + item.rows * size;
  float* weights = maxima + item.rows;
  for (int64_t r = 0; r < item.rows; ++r) {
    float* row = scores + r * span;
    Vector highest = Vector{} + maxima[r];
    for (int64_t t = 0; t < columns; t += kWidth) {
      const Vector score = load(row + t);
      highest = score > highest ? score : highest;
    }
    float maximum = highest[0];
    for (int i = 1; i < kWidth; ++i) maximum = std::max(maximum, highest[i]);
    if (maximum > maxima[r]) {
      const float factor = exp2(maxima[r] - maximum);
      for (int64_t d = 0; d < size; ++d) item.sums[r * size + d] *= factor;
      weights[r] *= factor;
      maxima[r] = maximum;
    }
    Vector total = {};
    for (int64_t t = 0; t < columns; t += kWidth) {
      const Vector weight = exp2(load(row + t) - maximum);
      store(row + t, weight);
      total += weight;
    }
    for (int i = 0; i < kWidth; ++i) weights[r] += total[i];
  }
}

// Hides what lies before a node's window from its scores of the `count` tokens of a span, of which
// those from `tree_start` on are nodes.
static void hide_before(const Trees& trees, const Item& item, int64_t node, int64_t window,
                        int64_t tree_start, int64_t count, float* row) {
  const int64_t beyond = depth_of(trees, item.tree, node) - window;  // the deepest hidden depth
  std::fill_n(row, std::clamp<int64_t>(tree_start + beyond + 1, 0, std::max<int64_t>(std::min(count, tree_start), 0)),
              kHidden);
  if (beyond < 0) return;
  for (int64_t t = std::max<int64_t>(tree_start, 0); t < count; ++t)
    if (depth_of(trees, item.tree, t - tree_start) <= beyond) row[t] = kHidden;
}

template <typename T>
static void attend_run(const Layer<T>& layer, const Trees& trees, const Item& item,
                       std::vector<float>& scratch) {
  const int64_t size = layer.head_size, span = layer.span(), rows = item.rows;
  const int64_t length = trees.lengths[item.tree], used = item.used_rows(layer.group);
  const uint8_t* mask =
      trees.masks + (item.tree * trees.max_tree_size + item.first_node) * trees.max_tree_size;
  scratch.resize(rows * size + kTile * size + rows * span);
  float* query = scratch.data();
  float* wide = query + rows * size;
  float* scores = wide + kTile * size;
  std::fill(item.sums, item.sums + rows * (size + 2), 0.0f);
  std::fill_n(item.sums + rows * size, rows, kHidden);
  std::fill(query, query + rows * size, 0.0f);
  for (int64_t r = 0; r < used; ++r) {
    const T* from = layer.query + row_offset(layer, trees, item, r, layer.query_stride);
    for (int64_t d = 0; d < size; ++d) query[r * size + d] = widen(from[d]) * layer.scale;
  }
  const T* keys = layer.keys + item.kv_head * layer.head_stride;
  const T* values = layer.values + item.kv_head * layer.head_stride;
  for (int64_t b = item.first_span; b < item.last_span; ++b) {
    const int64_t start = item.origin + b * span;
    const int32_t* blocks =
        trees.blocks + item.tree * trees.blocks_stride + start / layer.block_size;
    const int64_t count = std::min(span, length - start);
    const int64_t columns = (count + kWidth - 1) / kWidth * kWidth;
    // Tile by tile, so that the widened keys stay in the L1 cache.
    for (int64_t t = 0; t < columns; t += kTile) {
      const int64_t width = std::min<int64_t>(kTile, columns - t);
      widen_keys(layer, keys, blocks, t, width, count, wide);
      for (int64_t r = 0; r < rows; r += kRows)
        multiply<false>(query + r * size, size, wide, kTile, scores + r * span + t, span, size,
                        width);
    }
    if (layer.soft_cap > 0)
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t t = 0; t < columns; t += kWidth)
          store(scores + r * span + t, layer.soft_cap * tanh(load(scores + r * span + t)));
    const int64_t tree_start = length - trees.tree_sizes[item.tree] - start;
    for (int64_t r = 0; r < rows; ++r) {
      float* row = scores + r * span;
      if (r < used) {
        const uint8_t* sees = mask + r / layer.group * trees.max_tree_size;
        for (int64_t t = std::max<int64_t>(tree_start, 0); t < count; ++t)
          row[t] = sees[t - tree_start] ? row[t] : kHidden;
        if (layer.window > 0)
          hide_before(trees, item, item.first_node + r / layer.group, layer.window, tree_start,
                      count, row);
      }
      std::fill(row + count, row + columns, kHidden);
    }
    soften(scores, span, columns, item, size);
    for (int64_t t = 0; t < count; t += kTile) {
      const int64_t depth = std::min<int64_t>(kTile, count - t);
      widen_values(layer, values, blocks, t, depth, wide);
      for (int64_t r = 0; r < rows; r += kRows)
        multiply<true>(scores + r * span + t, span, wide, size, item.sums + r * size, size, depth,
                       size);
    }
  }
}

// Merges the runs of the same rows by their maxima and writes the rows.
template <typename T>
static void merge_runs(const Layer<T>& layer, const Trees& trees, const Item* runs,
                       const Item* end, std::vector<float>& scratch) {
  const int64_t size = layer.head_size, rows = runs->rows, used = runs->used_rows(layer.group);
  scratch.resize(size);
  float* row = scratch.data();
  for (int64_t r = 0; r < used; ++r) {
    const float* sink = layer.sinks ? layer.sinks + runs->kv_head * layer.group + r % layer.group
                                    : nullptr;
    float maximum = sink ? *sink : kHidden;
    for (const Item* run = runs; run < end; ++run)
      maximum = std::max(maximum, run->sums[rows * size + r]);
    float weight = sink ? exp2(*sink - maximum) : 0.0f;
    std::fill(row, row + size, 0.0f);
    for (const Item* run = runs; run < end; ++run) {
      const float factor = exp2(run->sums[rows * size + r] - maximum);
      weight += factor * run->sums[rows * (size + 1) + r];
      for (int64_t d = 0; d < size; ++d) row[d] += factor * run->sums[r * size + d];
    }
    T* to = layer.output + row_offset(layer, trees, *runs, r, layer.output_stride);
    for (int64_t d = 0; d < size; ++d) narrow(row[d] / weight, to[d]);
  }
}

template <typename T>
static void attend(const Layer<T>& layer, const Trees& trees, int64_t threads) {
  static thread_local std::vector<Item> items;
  static thread_local std::vector<int64_t> groups;  // where the runs of the same rows start
  static thread_local std::vector<float> results;
  items.clear();
  groups.clear();
  const int64_t most = std::max<int64_t>(kRowsAtOnce / layer.group, 1);
  int64_t pieces = 0;
  for (int64_t tree = 0; tree < trees.count; ++tree)
    pieces += (trees.tree_sizes[tree] - trees.first_node(tree) + most - 1) / most * layer.kv_heads;
  const int64_t wanted = (kItemsPerThread * threads + pieces - 1) / pieces;
  int64_t room = 0;
  for (int64_t tree = 0; tree < trees.count; ++tree) {
    const int64_t tree_size = trees.tree_sizes[tree];
    // Blocks before the root's window belong to the request no more.
    const int64_t root = trees.lengths[tree] - tree_size;
    const int64_t oldest = layer.window > 0 ? std::max<int64_t>(root - layer.window + 1, 0) : 0;
    const int64_t origin = layer.is_scattered() ? oldest : 0;
    const int64_t first = (oldest - origin) / layer.span();
    const int64_t spans =
        (trees.lengths[tree] - origin + layer.span() - 1) / layer.span() - first;
    const int64_t runs = std::min(spans, wanted);
    for (int64_t head = 0; head < layer.kv_heads; ++head)
      for (int64_t node = trees.first_node(tree); node < tree_size; node += most) {
        const int64_t last = std::min(node + most, tree_size);
        const int64_t rows = ((last - node) * layer.group + kRows - 1) / kRows * kRows;
        groups.push_back(items.size());
        for (int64_t run = 0; run < runs; ++run) {
          items.push_back({tree, head, node, last, origin, first + run * spans / runs,
                           first + (run + 1) * spans / runs, rows, nullptr});
          room += rows * (layer.head_size + 2);
        }
      }
  }
  groups.push_back(items.size());
  results.resize(room);
  float* place = results.data();
  for (Item& item : items) {
    item.sums = place;
    place += item.rows * (layer.head_size + 2);
  }
  // The vectors are thread-local, so other threads need pointers to this thread's.
  const Item* all = items.data();
  const int64_t* starts = groups.data();
  const int64_t num_items = items.size(), num_groups = groups.size() - 1;
#pragma omp parallel num_threads(threads)
  {
    static thread_local std::vector<float> scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_items; ++i) attend_run(layer, trees, all[i], scratch);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_groups; ++i)
      merge_runs(layer, trees, all + starts[i], all + starts[i + 1], scratch);
  }
}

struct Shape {
  int64_t block_stride, head_stride, kv_heads, group, head_size, block_size, window;
  const float* sinks;
  float scale, soft_cap;
};

template <typename T>
static void attend(const Trees* trees, const Shape* shape, const void* query, int64_t query_stride,
                   void* output, int64_t output_stride, const void* keys, const void* values,
                   int64_t threads) {
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
  attend(layer, *trees, threads);
}

#define EXPORT(NAME, TYPE)                                                                      \
  extern "C" void NAME(const Trees* trees, const Shape* shape, const void* query,               \
                       int64_t query_stride, void* output, int64_t output_stride,               \
                       const void* keys, const void* values, int64_t threads) {                 \
    attend<TYPE>(trees, shape, query, query_stride, output, output_stride, keys, values, threads); \
  }
EXPORT(attend_float32, float)
EXPORT(attend_bfloat16, BFloat16)
EXPORT(attend_float16, Float16)
