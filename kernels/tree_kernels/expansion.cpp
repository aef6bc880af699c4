// Expansion of dynamic draft trees level by level, on a CPU.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "hashing.h"

constexpr int64_t kTop = 8;       // candidates in a row, and children of a node
constexpr int64_t kCopies = 3;    // copies of a node
constexpr int64_t kBuckets = 11;  // buckets of match lengths
constexpr int64_t kMaxMatch = 64;
constexpr int64_t kOffered = kCopies + 2 * kTop;
// Stored as the previous token: the request's own row of a single token.
constexpr int32_t kAlone = -2;
constexpr int64_t kBigramStates = kTop + 2, kRowStates = kTop + 1;
constexpr float kMinScore = 0.2f, kCap = 0.9999f;  // of the nodes of a spine
constexpr float kLeastParent = 1.0f / 1024;        // score of a node that has children

struct Tables {
  const int32_t* matrix;
  int64_t vocab;
  const int32_t* bigrams;
  int64_t bigram_cells;
  const int32_t* own;
  int64_t own_cells;   // cells of a slot's own table
  int64_t own_stride;  // integers from one slot's table to the next, 0 if there are none
  const int32_t* history;
  int64_t length;
  const int32_t* lengths;
  const int32_t* index;
  int64_t cells;
  const int32_t* memory;
  int64_t places;
  const float* priors;
};

// A place after a match; none if the length is 0.
struct Match {
  int64_t place = 0, length = 0;
};

struct Node {
  int32_t token, parent, source;
  float score;
  int32_t suffix[kLongest];  // the last tokens of the path; -1 before the beginning of the text
  Match own, memory;
};

struct Copy {
  int32_t token;
  int64_t state;
  Match own;
};

struct Copies {
  Copy items[kCopies];
  int64_t count = 0;
  int64_t rest = 0;  // the state of a candidate that is no copy
  int32_t remembered = -1;
};

// A request whose tree is expanded.
struct Request {
  const Tables& tables;
  int64_t slot, end;
  const int32_t* text;
  const int32_t* index;
};

static int64_t bucket_of(int64_t length) {
  static const int64_t kLengths[kBuckets] = {1, 2, 3, 4, 5, 6, 7, 10, 15, 23, 37};
  return std::upper_bound(kLengths, kLengths + kBuckets, length) - kLengths - 1;
}

// A place of the text with the token at `place`, which may lie beyond its end: there the text is
// continued with the period of the match, `end + depth - place`.
static int64_t place_in_text(int64_t place, int64_t end, int64_t depth) {
  if (place < end) return place;
  const int64_t period = std::max<int64_t>(end + depth - place, 1);
  return end - period + depth % period;
}

static Copies find_copies(const Request& request, const Node& node, int64_t depth) {
  const Tables& tables = request.tables;
  struct Found {
    int32_t token;
    int64_t place, length, order;
  };
  Found found[kLongest + 2];  // the longest match first
  int64_t count = 0;
  auto add = [&](const Found& match) {
    int64_t at = count++;
    for (; at > 0 && found[at - 1].order < match.order; --at) found[at] = found[at - 1];
    found[at] = match;
  };
  for (int64_t n = 1; n <= kLongest; ++n) {
    const int32_t* gram = node.suffix + kLongest - n;
    if (gram[0] < 0) break;
    const int64_t place = request.index[cell_of(gram, n, tables.cells)];
    if (place < n || !std::equal(gram, gram + n, request.text + place - n)) continue;
    add({request.text[place], place, n, 4 * n + 2});
  }
  if (node.own.length > 0) {
    const int64_t place = place_in_text(node.own.place, request.end, depth);
    if (place >= 0)
      add({request.text[place], node.own.place, node.own.length, 4 * node.own.length + 1});
  }
  Copies copies;
  if (node.memory.length > 0) copies.remembered = tables.memory[node.memory.place];
  if (copies.remembered >= 0)
    add({copies.remembered, -1, node.memory.length, 4 * node.memory.length});
  for (int64_t i = 0; i < count; ++i) {
    const bool is_own = found[i].place >= 0;
    Copy* same = std::find_if(copies.items, copies.items + copies.count,
                              [&](const Copy& copy) { return copy.token == found[i].token; });
    if (same == copies.items + copies.count) {
      if (copies.count == kCopies) continue;
      int64_t state = 1 + bucket_of(found[i].length) + (is_own ? 0 : kBuckets);
      if (copies.count == 0) copies.rest = state + 4 * kBuckets;
      else state += 2 * kBuckets;
      *same = {found[i].token, state, {}};
      ++copies.count;
    }
    if (is_own && same->own.length == 0) same->own = {found[i].place, found[i].length};
  }
  return copies;
}

// The row of a bigram in a table; null if the table does not contain it.
static const int32_t* find_row(const int32_t* table, int64_t cells, int32_t previous,
                               int32_t token) {
  const int32_t key[2] = {previous, token};
  const int32_t* cell = table + cell_of(key, 2, cells) * (kTop + 2);
  return cell[0] == previous && cell[1] == token ? cell + 2 : nullptr;
}

struct Rows {
  const int32_t* bigram;
  const int32_t* row;
  bool has_bigram;
};

static Rows rows_of(const Request& request, int32_t previous, int32_t token) {
  static const int32_t kNothing[kTop] = {-1, -1, -1, -1, -1, -1, -1, -1};
  const Tables& tables = request.tables;
  const int32_t* own = tables.own + request.slot * tables.own_stride;
  const int32_t* row = token < 0 ? nullptr : find_row(own, tables.own_cells, kAlone, token);
  if (row == nullptr)
    row = token >= 0 && token < tables.vocab ? tables.matrix + token * kTop : kNothing;
  const int32_t* bigram =
      previous < 0 ? nullptr : find_row(own, tables.own_cells, previous, token);
  if (bigram == nullptr && previous >= 0)
    bigram = find_row(tables.bigrams, tables.bigram_cells, previous, token);
  return {bigram == nullptr ? kNothing : bigram, row, bigram != nullptr};
}

static int64_t rank_in(const int32_t* row, int32_t token) {
  for (int64_t rank = 0; rank < kTop; ++rank)
    if (row[rank] == token) return rank + 1;
  return 0;
}

static int64_t source_of(const Rows& rows, int64_t state, int32_t token) {
  const int64_t in_bigram = rows.has_bigram ? rank_in(rows.bigram, token) : kTop + 1;
  return (state * kBigramStates + in_bigram) * kRowStates + rank_in(rows.row, token);
}

// The children of a node, best first; ties in the order of the candidates.
static int64_t children_of(const Request& request, const Node& node, int32_t at, int64_t depth,
                           Node* children) {
  const Tables& tables = request.tables;
  const Copies copies = find_copies(request, node, depth);
  const Rows rows = rows_of(request, node.suffix[kLongest - 2], node.token);
  int32_t offered[kOffered];
  for (int64_t i = 0; i < kCopies; ++i)
    offered[i] = i < copies.count ? copies.items[i].token : -1;
  std::memcpy(offered + kCopies, rows.bigram, kTop * sizeof(int32_t));
  std::memcpy(offered + kCopies + kTop, rows.row, kTop * sizeof(int32_t));
  int64_t count = 0;
  for (int64_t i = 0; i < kOffered; ++i) {
    const int32_t token = offered[i];
    if (token < 0 || std::find(offered, offered + i, token) != offered + i) continue;
    const int64_t source =
        source_of(rows, i < kCopies ? copies.items[i].state : copies.rest, token);
    const float score = node.score * tables.priors[source];
    if (!(score > 0.0f)) continue;
    int64_t place = count < kTop ? count++ : kTop;
    if (place == kTop && score <= children[kTop - 1].score) continue;
    place = std::min(place, kTop - 1);
    for (; place > 0 && children[place - 1].score < score; --place)
      children[place] = children[place - 1];
    Node& child = children[place];
    child.token = token;
    child.parent = at;
    child.source = static_cast<int32_t>(source);
    child.score = score;
    std::memcpy(child.suffix, node.suffix + 1, (kLongest - 1) * sizeof(int32_t));
    child.suffix[kLongest - 1] = token;
    child.own = child.memory = {};
    if (i < kCopies && copies.items[i].own.length > 0)
      child.own = {copies.items[i].own.place + 1,
                   std::min(copies.items[i].own.length + 1, kMaxMatch)};
    if (token == copies.remembered)
      child.memory = {(node.memory.place + 1) & (tables.places - 1),
                      std::min(node.memory.length + 1, kMaxMatch)};
  }
  return count;
}

// Continues the best node of the last level with copies, while they are likely enough.
template <typename Put>
static void extend_spine(const Request& request, const std::vector<Node>& level, int64_t first,
                         int64_t column, int64_t depth, int64_t room, Put put) {
  const Node* best = nullptr;
  for (const Node& node : level)
    if (node.own.length + node.memory.length > 0 && (best == nullptr || node.score > best->score))
      best = &node;
  if (best == nullptr) return;
  const Tables& tables = request.tables;
  const bool is_own = best->own.length >= best->memory.length;
  const int64_t length = is_own ? best->own.length : best->memory.length;
  int32_t previous = best->suffix[kLongest - 2], above = best->token;
  int32_t parent = static_cast<int32_t>(first + (best - level.data()));
  float score = best->score;
  for (int64_t step = 0; step < room; ++step) {
    int32_t token;
    if (is_own) {
      const int64_t place = place_in_text(best->own.place + step, request.end, depth + step);
      token = place < 0 ? -1 : request.text[place];
    } else {
      token = tables.memory[(best->memory.place + step) & (tables.places - 1)];
    }
    if (token < 0) return;
    const int64_t state =
        1 + bucket_of(std::min(length + step, kMaxMatch)) + (is_own ? 0 : kBuckets);
    const int64_t source = source_of(rows_of(request, previous, above), state, token);
    score *= std::min(tables.priors[source], kCap);
    if (!(score >= kMinScore)) return;
    put(token, parent, static_cast<int32_t>(source), score);
    parent = static_cast<int32_t>(column + step);
    previous = above;
    above = token;
  }
}

// What the expansion of a tree needs, kept from one to the next.
struct Scratch {
  std::vector<Node> level, next;
  std::vector<int64_t> order;
};

struct Shape {
  int64_t width, depth, spine, columns;
};

// One line of the results.
struct Line {
  int32_t* tokens;
  int32_t* parents;
  int32_t* sources;
  float* scores;
};

// Keeps the `width` nodes of highest score, in their order.
static void keep_best(std::vector<Node>& nodes, int64_t width, std::vector<int64_t>& order) {
  if (static_cast<int64_t>(nodes.size()) <= width) return;
  order.resize(nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) order[i] = static_cast<int64_t>(i);
  // The earlier of equal nodes first, so that the order is a total one.
  std::nth_element(order.begin(), order.begin() + width, order.end(), [&](int64_t a, int64_t b) {
    return nodes[a].score != nodes[b].score ? nodes[a].score > nodes[b].score : a < b;
  });
  order.resize(width);
  std::sort(order.begin(), order.end());
  for (int64_t i = 0; i < width; ++i) nodes[i] = nodes[order[i]];
  nodes.resize(width);
}

static void expand_tree(const Request& request, const Node& root, const Shape& shape,
                        const Line& line, Scratch& scratch) {
  auto& [level, next, order] = scratch;
  int64_t column = 0;
  auto put = [&](int32_t token, int32_t parent, int32_t source, float score) {
    line.tokens[column] = token;
    line.parents[column] = parent;
    line.sources[column] = source;
    line.scores[column++] = score;
  };
  put(root.token, -1, 0, 1.0f);
  level.assign(1, root);
  int64_t first = 0;
  Node children[kTop];
  for (int64_t depth = 0; depth < shape.depth; ++depth) {
    next.clear();
    for (size_t i = 0; i < level.size(); ++i) {
      if (level[i].score < kLeastParent) continue;
      const int64_t count =
          children_of(request, level[i], static_cast<int32_t>(first + i), depth, children);
      next.insert(next.end(), children, children + count);
    }
    keep_best(next, shape.width, order);
    first = column;
    for (const Node& node : next) put(node.token, node.parent, node.source, node.score);
    const int64_t room = depth == 0 ? std::min(kTop, shape.width) : shape.width;
    while (column < first + room) put(-1, -1, 0, 0.0f);
    level.swap(next);
  }
  extend_spine(request, level, first, column, shape.depth, shape.spine, put);
  while (column < shape.columns) put(-1, -1, 0, 0.0f);
}

// The results are [B, columns]; columns without a node are -1, -1, 0 and 0.
extern "C" void expand_trees(
    const int32_t* matrix, int64_t vocab, const int32_t* bigrams, int64_t bigram_cells,
    const int32_t* own, int64_t own_cells, int64_t own_stride, const int32_t* history,
    int64_t length, const int32_t* lengths, const int32_t* index, int64_t cells,
    const int32_t* memory, int64_t places, const float* priors, const int64_t* slots,
    const int32_t* roots, const int32_t* matches, int64_t requests, int64_t width, int64_t depth,
    int64_t spine, int64_t columns, int32_t* tokens, int32_t* parents, int32_t* sources,
    float* scores, int64_t threads) {
  const Tables tables{matrix, vocab,  bigrams, bigram_cells, own,    own_cells, own_stride, history,
                      length, lengths, index,   cells,        memory, places,    priors};
  const Shape shape{width, depth, spine, columns};
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (requests > 1)
  for (int64_t row = 0; row < requests; ++row) {
    static thread_local Scratch scratch;
    const int64_t slot = slots[row], at = row * columns;
    const Request request{tables, slot, lengths[slot], history + slot * length,
                          index + slot * cells};
    Node root{roots[row], -1, 0, 1.0f, {}, {}, {}};
    // The root is the last token of the text.
    for (int64_t i = 0; i < kLongest; ++i) {
      const int64_t place = request.end - kLongest + i;
      root.suffix[i] = place < 0 ? -1 : request.text[place];
    }
    root.suffix[kLongest - 1] = root.token;
    if (root.token >= 0) {
      root.own = {matches[4 * row], matches[4 * row + 1]};
      root.memory = {matches[4 * row + 2], matches[4 * row + 3]};
    }
    expand_tree(request, root, shape, {tokens + at, parents + at, sources + at, scores + at},
                scratch);
  }
}
