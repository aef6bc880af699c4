// The rows of trees, in groups whose keys are summed in the same shares.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "vectors.h"

struct Trees {
  int64_t count;
  const int64_t* starts;      // [count], the row of each tree's root in the batch
  const int64_t* tree_sizes;  // [count]
  const int64_t* lengths;     // [count], tokens of the context and the tree together
  const int32_t* blocks;      // [count, blocks_stride]
  int64_t blocks_stride;
  int64_t num_masks;     // trees after so many have one node
  const uint8_t* masks;  // [num_masks, max_tree_size, max_tree_size]
  int64_t max_tree_size;
  const int64_t* first_nodes;  // [count], the first node with a row in the batch; null for the roots
  const int64_t* requests;      // [count], the places of the trees' requests in `step_lengths`
  int64_t num_requests;
  const int64_t* step_lengths;  // [num_requests], tokens up to a tree's root

  int64_t first_node(int64_t tree) const { return first_nodes ? first_nodes[tree] : 0; }
  int64_t root(int64_t tree) const { return lengths[tree] - tree_sizes[tree]; }  // its position
};

// How an engine's kernel sums the keys of a row when it decodes one token of each request.
struct DecodeOrder {
  int64_t unit;         // tokens that it reads at a time; 0 if no engine is followed
  int64_t least_share;  // the fewest tokens that a thread takes over from another; 0 if it takes none
  int64_t tile;         // tokens that are compared with a running maximum at once
  int64_t window;       // positions of which shares are made; 0 for all
};

constexpr int64_t kTileTokens = 4096;  // a tile if no engine is followed

struct Node {
  int64_t index;
  int64_t first, last;  // positions that it attends to
  int64_t path;         // where its ancestors' and its own index begin in the group's `paths`
};

// Nodes of one tree. The key at position `root + i` of a node is that of the i-th node of its path.
struct RowGroup {
  int64_t tree;
  std::vector<int64_t> cuts;  // the positions between shares
  int64_t tile, origin;       // tiles are counted from `origin`; a tile of 0 is a whole share
  std::vector<Node> nodes;
  std::vector<int32_t> paths;
};

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static inline int64_t round_down(int64_t n, int64_t to) { return n / to * to; }

// The first of the last `window` positions of a text; 0 is no window.
static inline int64_t first_seen(int64_t length, int64_t window) {
  return window > 0 ? std::max<int64_t>(length - window, 0) : 0;
}

// Where the engine's threads share the keys of each request, `depth` steps of plain decoding from here.
// Its threads take the requests in order, and each reads about as much as another.
static std::vector<std::vector<int64_t>> plain_cuts(const Trees& trees, const DecodeOrder& order,
                                                    int64_t depth, int64_t threads) {
  std::vector<std::vector<int64_t>> cuts(trees.num_requests);
  if (threads == 1 || order.least_share == 0) return cuts;
  const auto begin = [&](int64_t i) {
    return round_down(first_seen(trees.step_lengths[i] + depth, order.window), order.unit);
  };
  const auto end = [&](int64_t i) { return round_up(trees.step_lengths[i] + depth, order.unit); };
  int64_t total = 0;
  for (int64_t i = 0; i < trees.num_requests; ++i) total += end(i) - begin(i);
  const int64_t fair = round_up(total / threads, order.unit);
  int64_t thread = 0, left = fair;
  bool is_busy = false;
  for (int64_t i = 0; i < trees.num_requests; ++i) {
    int64_t at = begin(i);
    while (end(i) - at > left + order.least_share && thread < threads - 1) {
      if (left >= order.least_share || !is_busy) {
        at += std::min(std::max(left, order.least_share), end(i) - at);
        cuts[i].push_back(at);
      }
      ++thread;
      left = fair;
      is_busy = false;
    }
    left -= end(i) - at;
    if (left < 0) left -= order.least_share;
    is_busy = true;
  }
  return cuts;
}

// Shares of a tree's keys for rows that follow no engine.
static std::vector<int64_t> even_cuts(int64_t first, int64_t last, int64_t unit, int64_t shares) {
  const int64_t units = (last - first + unit - 1) / unit;
  std::vector<int64_t> cuts;
  for (int64_t share = 1; share < std::min(shares, units); ++share)
    cuts.push_back(first + share * units / std::min(shares, units) * unit);
  return cuts;
}

static Node node_of(const Trees& trees, int64_t tree, int64_t index, int64_t window,
                    std::vector<int32_t>& path) {
  static constexpr uint8_t kItself = 1;
  const uint8_t* sees =
      tree < trees.num_masks
          ? trees.masks + (tree * trees.max_tree_size + index) * trees.max_tree_size
          : &kItself;
  const uint8_t* end = sees + index + 1;
  path.clear();
  for (const uint8_t* at = sees; at < end; ++at) {
    at = static_cast<const uint8_t*>(std::memchr(at, 1, end - at));
    if (at == nullptr) break;
    path.push_back(static_cast<int32_t>(at - sees));
  }
  const int64_t last = trees.root(tree) + static_cast<int64_t>(path.size());
  return {index, first_seen(last, window), last, 0};
}

// All rows of the trees. Rows with fewer keys than a tile and the same cuts are one group.
//
// `shares` is the number of shares of each tree's keys if no engine is followed.
static std::vector<RowGroup> group_rows(const Trees& trees, const DecodeOrder& order,
                                        int64_t window, int64_t threads, int64_t shares) {
  std::vector<RowGroup> groups;
  std::vector<std::vector<std::vector<int64_t>>> cuts_by_depth;
  std::vector<int32_t> path;
  for (int64_t tree = 0; tree < trees.count; ++tree) {
    const size_t first_group = groups.size();
    for (int64_t index = trees.first_node(tree); index < trees.tree_sizes[tree]; ++index) {
      Node node = node_of(trees, tree, index, window, path);
      RowGroup key{tree, {}, 0, 0, {}, {}};
      if (order.unit == 0) {
        const int64_t first = round_down(first_seen(trees.root(tree) + 1, window), kTile);
        if (shares > 1) key.cuts = even_cuts(first, trees.lengths[tree], kTile, shares);
        key.tile = kTileTokens;
        key.origin = first;
      } else {
        while (cuts_by_depth.size() < path.size())
          cuts_by_depth.push_back(plain_cuts(trees, order, cuts_by_depth.size(), threads));
        key.cuts = cuts_by_depth[path.size() - 1][trees.requests[tree]];
        const int64_t first = round_down(node.first, order.unit);
        int64_t at = first, longest = 0;
        for (const int64_t cut : key.cuts) {
          longest = std::max(longest, cut - at);
          at = std::max(at, cut);
        }
        if (std::max(longest, node.last - at) > order.tile) {
          key.tile = order.tile;
          key.origin = first;
        }
      }
      size_t at = first_group;
      while (at < groups.size() && (groups[at].cuts != key.cuts || groups[at].tile != key.tile ||
                                    groups[at].origin != key.origin))
        ++at;
      if (at == groups.size()) groups.push_back(std::move(key));
      RowGroup& group = groups[at];
      node.path = static_cast<int64_t>(group.paths.size());
      group.paths.insert(group.paths.end(), path.begin(), path.end());
      group.nodes.push_back(node);
    }
  }
  return groups;
}
