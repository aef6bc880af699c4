// Static trees filled from the adjacency matrix, and their compaction, on a CPU.

#include <cstdint>

extern "C" void gather(const int32_t* matrix, int64_t vocab, int64_t k, const int32_t* roots,
                       int64_t requests, const int32_t* parents, const int32_t* ranks,
                       int64_t tree_size, int32_t* out) {
  for (int64_t request = 0; request < requests; ++request) {
    int32_t* tokens = out + request * tree_size;
    tokens[0] = roots[request];
    for (int64_t node = 1; node < tree_size; ++node) {
      const int64_t above = tokens[parents[node]];
      tokens[node] = above >= 0 && above < vocab ? matrix[above * k + ranks[node]] : -1;
    }
  }
}

// `places` is scratch space for the nodes of one request.
extern "C" void compact(const int32_t* tokens, const int32_t* parents, int64_t parents_stride,
                        int64_t requests, int64_t width, int32_t* out_tokens, int32_t* out_parents,
                        int32_t* out_tree_size, int32_t* out_columns, int32_t* places) {
  for (int64_t request = 0; request < requests; ++request) {
    const int32_t* line = tokens + request * width;
    const int32_t* above = parents + request * parents_stride;
    int32_t* kept_tokens = out_tokens + request * width;
    int32_t* kept_parents = out_parents + request * width;
    int32_t* kept_columns = out_columns + request * width;
    int32_t count = 0;
    for (int64_t node = 0; node < width; ++node) {
      if (line[node] == -1) continue;
      places[node] = count;
      kept_columns[count] = static_cast<int32_t>(node);
      kept_tokens[count] = line[node];
      kept_parents[count++] = above[node] < 0 ? -1 : places[above[node]];
    }
    out_tree_size[request] = count;
    for (int64_t node = count; node < width; ++node) {
      kept_tokens[node] = kept_parents[node] = -1;
      kept_columns[node] = 0;
    }
  }
}
