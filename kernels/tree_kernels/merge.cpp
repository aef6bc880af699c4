// The union of two draft trees under one root (Lyanna's verification fusion), on a CPU.

#include <algorithm>
#include <cstdint>
#include <vector>

// The children of each node, as lists in ascending order.
struct Children {
  std::vector<int32_t> first, next;

  explicit Children(int64_t columns) : first(columns, -1), next(columns, -1) {}

  // Nodes are added in descending order.
  void add(int32_t parent, int32_t node) {
    next[node] = first[parent];
    first[parent] = node;
  }
};

// Nodes of the first tree keep their columns as places; node j > 0 of the second has the place
// `width - 1 + j` unless the first tree has the same path.
extern "C" void merge_trees(const int32_t* first_tokens, const int32_t* first_parents,
                            const int32_t* first_tree_size, const int32_t* second_tokens,
                            const int32_t* second_parents, const int32_t* second_tree_size,
                            int64_t requests, int64_t width, int64_t second_width,
                            int32_t* out_tokens, int32_t* out_parents, int32_t* out_tree_size) {
  const int64_t columns = width + second_width - 1;
  std::vector<int32_t> tokens(columns), parents(columns), place(second_width), queue(columns);
  for (int64_t request = 0; request < requests; ++request) {
    const int32_t* our_tokens = first_tokens + request * width;
    const int32_t* our_parents = first_parents + request * width;
    const int32_t* their_tokens = second_tokens + request * second_width;
    const int32_t* their_parents = second_parents + request * second_width;
    Children ours(columns), all(columns);
    for (int32_t node = first_tree_size[request] - 1; node > 0; --node) {
      if (our_parents[node] >= 0) ours.add(our_parents[node], node);
      tokens[node] = our_tokens[node];
    }
    tokens[0] = our_tokens[0];
    place[0] = 0;
    // Breadth-first: a parent's place is known before its children's.
    for (int32_t node = 1; node < second_tree_size[request]; ++node) {
      const int32_t above = place[std::max(their_parents[node], 0)];
      int32_t same = ours.first[above];
      while (same >= 0 && our_tokens[same] != their_tokens[node]) same = ours.next[same];
      place[node] = same >= 0 ? same : static_cast<int32_t>(width) - 1 + node;
      tokens[place[node]] = their_tokens[node];
      parents[place[node]] = above;
    }
    // Children of `first` come before those of `second`.
    for (int32_t node = second_tree_size[request] - 1; node > 0; --node)
      if (place[node] >= width) all.add(parents[place[node]], place[node]);
    for (int32_t node = first_tree_size[request] - 1; node > 0; --node)
      if (our_parents[node] >= 0) all.add(our_parents[node], node);
    int32_t* merged_tokens = out_tokens + request * columns;
    int32_t* merged_parents = out_parents + request * columns;
    int32_t count = 1;
    queue[0] = 0;
    merged_tokens[0] = tokens[0];
    merged_parents[0] = -1;
    for (int32_t node = 0; node < count; ++node)
      for (int32_t child = all.first[queue[node]]; child >= 0; child = all.next[child]) {
        queue[count] = child;
        merged_tokens[count] = tokens[child];
        merged_parents[count++] = node;
      }
    out_tree_size[request] = count;
    std::fill(merged_tokens + count, merged_tokens + columns, -1);
    std::fill(merged_parents + count, merged_parents + columns, -1);
  }
}
