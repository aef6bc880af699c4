// Growing draft trees best first from what tables and texts offer, on a CPU.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ngrams.h"

constexpr int64_t kTop = 8;                 // candidates of a row, and children kept of a node
constexpr int64_t kOffered = 2 * kTop + 1;  // a copy, a pair's row, a token's row
constexpr int32_t kAlone = -2;  // stands before a token whose row is a request's own
constexpr int64_t kPairStates = kTop + 2, kRowStates = kTop + 1;

struct Tables {
  const int32_t* matrix;
  int64_t vocab;
  const int32_t* pairs;
  int64_t pair_cells, pair_stride;  // cells of a slot's table; integers from one to the next, or 0
  const int32_t* history;
  int64_t length;
  const int32_t* lengths;
  const int32_t* index;
  int64_t cells;
  const float* priors;
};

struct Node {
  int32_t token, parent, origin;
  float score;
  int32_t suffix[kLongest];  // the last tokens up to this one; -1 before the text's beginning
};

// The token after the longest suffix that stood in the text before, and the suffix's length.
static int32_t copied(const Tables& tables, int64_t slot, const int32_t* suffix, int64_t* matched) {
  const int32_t* text = tables.history + slot * tables.length;
  const int32_t* index = tables.index + slot * tables.cells;
  for (int64_t n = kLongest; n >= 1; --n) {
    const int32_t* gram = suffix + kLongest - n;
    if (gram[0] < 0) continue;
    const int64_t place = index[cell_of(gram, n, tables.cells)];
    if (place < n || !std::equal(gram, gram + n, text + place - n)) continue;
    *matched = n;
    return text[place];
  }
  *matched = 0;
  return -1;
}

// What a slot's table holds of two tokens; nothing if it does not know them.
static const int32_t* looked_up(const Tables& tables, int64_t slot, int32_t before, int32_t token) {
  const int32_t key[2] = {before, token};
  const int32_t* cell = tables.pairs + slot * tables.pair_stride +
                        cell_of(key, 2, tables.pair_cells) * (kTop + 2);
  return cell[0] == before && cell[1] == token ? cell + 2 : nullptr;
}

static int64_t rank_in(const int32_t* row, int32_t token) {
  for (int64_t rank = 0; rank < kTop; ++rank)
    if (row[rank] == token) return rank + 1;
  return 0;
}

// The best children of a node, best first; equal ones in the order in which they are offered.
static int64_t children_of(const Tables& tables, int64_t slot, const Node& node, int32_t at,
                           Node* children) {
  static const int32_t kNothing[kTop] = {-1, -1, -1, -1, -1, -1, -1, -1};
  int64_t matched;
  int32_t offered[kOffered];
  offered[0] = copied(tables, slot, node.suffix, &matched);
  const int32_t before = node.suffix[kLongest - 2];
  const int32_t* own = node.token < 0 ? nullptr : looked_up(tables, slot, kAlone, node.token);
  const bool known = node.token >= 0 && node.token < tables.vocab;
  const int32_t* row = own != nullptr ? own : known ? tables.matrix + node.token * kTop : kNothing;
  const int32_t* pair = before < 0 ? nullptr : looked_up(tables, slot, before, node.token);
  const bool paired = pair != nullptr;
  const int32_t* likely = paired ? pair : kNothing;
  std::memcpy(offered + 1, likely, kTop * sizeof(int32_t));
  std::memcpy(offered + 1 + kTop, row, kTop * sizeof(int32_t));
  int64_t count = 0;
  for (int64_t i = 0; i < kOffered; ++i) {
    const int32_t token = offered[i];
    if (token < 0 || std::find(offered, offered + i, token) != offered + i) continue;
    const int64_t copy = matched == 0 ? 0 : token == offered[0] ? matched : kLongest + matched;
    const int64_t in_pair = paired ? rank_in(likely, token) : kTop + 1;
    const int64_t origin = (copy * kPairStates + in_pair) * kRowStates + rank_in(row, token);
    const float score = node.score * tables.priors[origin];
    if (!(score > 0.0f)) continue;
    int64_t place = count < kTop ? count++ : kTop;
    if (place == kTop && score <= children[kTop - 1].score) continue;
    place = std::min(place, kTop - 1);
    for (; place > 0 && children[place - 1].score < score; --place)
      children[place] = children[place - 1];
    Node& child = children[place];
    child.token = token;
    child.parent = at;
    child.origin = static_cast<int32_t>(origin);
    child.score = score;
    std::memcpy(child.suffix, node.suffix + 1, (kLongest - 1) * sizeof(int32_t));
    child.suffix[kLongest - 1] = token;
  }
  return count;
}

// Level after level; out arrays are [B, columns], whose columns beyond the last node are filled.
extern "C" void grow_trees(const int32_t* matrix, int64_t vocab, const int32_t* pairs,
                           int64_t pair_cells,
                           int64_t pair_stride, const int32_t* history, int64_t length,
                           const int32_t* lengths, const int32_t* index, int64_t cells,
                           const float* priors, const int64_t* slots, const int32_t* roots,
                           int64_t requests, int64_t width, int64_t depth, int64_t columns,
                           int32_t* tokens, int32_t* parents, int32_t* origins, float* scores) {
  const Tables tables{matrix, vocab, pairs, pair_cells, pair_stride, history, length, lengths, index, cells,
                      priors};
  std::vector<Node> level, next;
  std::vector<int64_t> order;
  Node children[kTop];
  for (int64_t request = 0; request < requests; ++request) {
    const int64_t slot = slots[request], end = lengths[slot];
    Node root{roots[request], -1, 0, 1.0f, {}};
    // The root is the text's last token.
    for (int64_t i = 0; i < kLongest; ++i) {
      const int64_t place = end - kLongest + i;
      root.suffix[i] = place < 0 ? -1 : history[slot * length + place];
    }
    root.suffix[kLongest - 1] = root.token;
    int64_t column = 0;
    auto put = [&](const Node& node) {
      const int64_t at = request * columns + column++;
      tokens[at] = node.token;
      parents[at] = node.parent;
      origins[at] = node.origin;
      scores[at] = node.score;
    };
    put(root);
    level.assign(1, root);
    int64_t first = 0;
    for (int64_t step = 0; step < depth; ++step) {
      next.clear();
      for (size_t i = 0; i < level.size(); ++i) {
        const int64_t count = children_of(tables, slot, level[i],
                                          static_cast<int32_t>(first + i), children);
        next.insert(next.end(), children, children + count);
      }
      if (static_cast<int64_t>(next.size()) > width) {
        order.resize(next.size());
        for (size_t i = 0; i < next.size(); ++i) order[i] = static_cast<int64_t>(i);
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
          return next[a].score > next[b].score;
        });
        order.resize(width);
        std::sort(order.begin(), order.end());
        for (int64_t i = 0; i < width; ++i) next[i] = next[order[i]];
        next.resize(width);
      }
      first = column;
      for (const Node& node : next) put(node);
      const int64_t end_of_level = first + (step == 0 ? std::min(kTop, width) : width);
      while (column < end_of_level) put(Node{-1, -1, 0, 0.0f, {}});
      level.swap(next);
    }
  }
}
