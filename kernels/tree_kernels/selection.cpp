// The nodes of highest score of dynamic trees, on a CPU.

#include <algorithm>
#include <cstdint>
#include <vector>

// Keeps the root and the `num_draft_tokens` other nodes of highest score of each tree, and up to
// `spine` further ones of at least `min_score`: in their order, or with `by_score` from the highest
// score to the lowest. Sources are written into line `lines[i]` of a table of `line_columns` columns
// for tree i; into line i if there are no lines.
extern "C" void best_nodes(const int32_t* tokens, const int32_t* parents, const int32_t* sources,
                           const float* scores, int64_t requests, int64_t columns,
                           int64_t num_draft_tokens, int64_t spine, float min_score,
                           int64_t by_score, int32_t* out_tokens, int32_t* out_parents,
                           int32_t* out_sources, const int64_t* lines, int64_t line_columns,
                           int32_t* out_tree_size) {
  const int64_t most = num_draft_tokens + spine + 1;
  std::vector<int64_t> order(columns);
  std::vector<int32_t> places(columns);
  for (int64_t request = 0; request < requests; ++request) {
    const int64_t line = request * columns, out = request * most;
    int32_t* own_sources = out_sources + (lines ? lines[request] : request) * line_columns;
    int64_t found = 0;
    for (int64_t column = 0; column < columns; ++column)
      if (column == 0 || scores[line + column] > 0.0f) order[found++] = column;
    if (by_score || found > num_draft_tokens + 1) {
      // The root is always kept. Of equal nodes the earlier one comes first.
      const int64_t sorted = std::min(found, most);
      std::partial_sort(order.begin() + 1, order.begin() + sorted, order.begin() + found,
                        [&](int64_t a, int64_t b) {
                          const float first = scores[line + a], second = scores[line + b];
                          return first != second ? first > second : a < b;
                        });
      int64_t kept = std::min(found, num_draft_tokens + 1);
      while (kept < sorted && scores[line + order[kept]] >= min_score) ++kept;
      found = kept;
      if (!by_score) std::sort(order.begin() + 1, order.begin() + found);
    }
    for (int64_t place = 0; place < most; ++place) {
      const bool node = place < found;
      const int64_t column = node ? order[place] : 0;
      if (node) places[column] = static_cast<int32_t>(place);
      out_tokens[out + place] = node ? tokens[line + column] : -1;
      out_parents[out + place] = node && column > 0 ? places[parents[line + column]] : -1;
      own_sources[place] = node ? sources[line + column] : 0;
    }
    out_tree_size[request] = static_cast<int32_t>(found);
  }
}
