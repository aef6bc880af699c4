// Expansion of dynamic draft trees level by level, on a CPU.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "hashing.h"

constexpr int64_t kTop = 8;                 // candidates in a row, and children of a node
constexpr int64_t kOffered = 2 * kTop + 1;  // an n-gram match, a bigram's row and a token's row
// Stored as the previous token: the request's own row of a single token.
constexpr int32_t kAlone = -2;
constexpr int64_t kBigramStates = kTop + 2, kRowStates = kTop + 1;

struct Tables {
  const int32_t* matrix;
  int64_t vocab;
  const int32_t* bigrams;
  int64_t bigram_cells;   // cells of a slot's table
  int64_t bigram_stride;  // integers from one slot's table to the next, 0 if all share one
  const int32_t* history;
  int64_t length;
  const int32_t* lengths;
  const int32_t* index;
  int64_t cells;
  const float* priors;
};

struct Node {
  int32_t token, parent, source;
  float score;
  int32_t suffix[kLongest];  // the last tokens of the path; -1 before the beginning of the text
};

// The token that followed the longest suffix when it last occurred in the text; -1 if there is
// none. `matched` is the length of the suffix, 0 if there is none.
static int32_t match_ngrams(const Tables& tables, int64_t slot, const int32_t* suffix,
                            int64_t* matched) {
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

// The row of a bigram in a slot's table; null if the table does not contain it.
static const int32_t* find_row(const Tables& tables, int64_t slot, int32_t previous,
                               int32_t token) {
  const int32_t key[2] = {previous, token};
  const int32_t* cell = tables.bigrams + slot * tables.bigram_stride +
                        cell_of(key, 2, tables.bigram_cells) * (kTop + 2);
  return cell[0] == previous && cell[1] == token ? cell + 2 : nullptr;
}

static int64_t rank_in(const int32_t* row, int32_t token) {
  for (int64_t rank = 0; rank < kTop; ++rank)
    if (row[rank] == token) return rank + 1;
  return 0;
}

// The children of a node, best first; ties in the order of the candidates.
static int64_t children_of(const Tables& tables, int64_t slot, const Node& node, int32_t at,
                           Node* children) {
  static const int32_t kNothing[kTop] = {-1, -1, -1, -1, -1, -1, -1, -1};
  int64_t matched;
  int32_t offered[kOffered];
  offered[0] = match_ngrams(tables, slot, node.suffix, &matched);
  const int32_t previous = node.suffix[kLongest - 2];
  const int32_t* own = node.token < 0 ? nullptr : find_row(tables, slot, kAlone, node.token);
  const bool known = node.token >= 0 && node.token < tables.vocab;
  const int32_t* row = own != nullptr ? own : known ? tables.matrix + node.token * kTop : kNothing;
  const int32_t* bigram = previous < 0 ? nullptr : find_row(tables, slot, previous, node.token);
  const bool has_bigram = bigram != nullptr;
  const int32_t* likely = has_bigram ? bigram : kNothing;
  std::memcpy(offered + 1, likely, kTop * sizeof(int32_t));
  std::memcpy(offered + 1 + kTop, row, kTop * sizeof(int32_t));
  int64_t count = 0;
  for (int64_t i = 0; i < kOffered; ++i) {
    const int32_t token = offered[i];
    if (token < 0 || std::find(offered, offered + i, token) != offered + i) continue;
    const int64_t state = matched == 0 ? 0 : token == offered[0] ? matched : kLongest + matched;
    const int64_t in_bigram = has_bigram ? rank_in(likely, token) : kTop + 1;
    const int64_t source = (state * kBigramStates + in_bigram) * kRowStates + rank_in(row, token);
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
  }
  return count;
}

// The results are [B, columns]; columns without a node are -1, -1, 0 and 0.
extern "C" void expand_trees(const int32_t* matrix, int64_t vocab, const int32_t* bigrams,
                             int64_t bigram_cells, int64_t bigram_stride, const int32_t* history,
                             int64_t length, const int32_t* lengths, const int32_t* index,
                             int64_t cells, const float* priors, const int64_t* slots,
                             const int32_t* roots, int64_t requests, int64_t width, int64_t depth,
                             int64_t columns, int32_t* tokens, int32_t* parents, int32_t* sources,
                             float* scores) {
  const Tables tables{matrix, vocab,   bigrams, bigram_cells, bigram_stride, history,
                      length, lengths, index,   cells,        priors};
  std::vector<Node> level, next;
  std::vector<int64_t> order;
  Node children[kTop];
  for (int64_t request = 0; request < requests; ++request) {
    const int64_t slot = slots[request], end = lengths[slot];
    Node root{roots[request], -1, 0, 1.0f, {}};
    // The root is the last token of the text.
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
      sources[at] = node.source;
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
