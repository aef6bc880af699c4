// Acceptance statistics of candidates by their source, on a CPU.

#include <algorithm>
#include <cstdint>
#include <vector>

// Counts, for each source, the nodes whose parent was accepted, and those that were accepted too;
// halves both counts of a source that was tried more than `most_tried` times.
extern "C" void count_trees(const int32_t* tokens, const int32_t* parents, const int32_t* sources,
                            const int32_t* path, int64_t requests, int64_t width, int64_t depth,
                            int64_t tree_stride, int32_t* tried, int32_t* hit,
                            const float* expected, float* priors, int64_t weight,
                            int64_t most_tried) {
  std::vector<char> on(width);
  for (int64_t request = 0; request < requests; ++request) {
    std::fill(on.begin(), on.end(), 0);
    for (int64_t i = 0; i < depth; ++i) {
      const int32_t node = path[request * depth + i];
      if (node >= 0 && node < width) on[node] = 1;
    }
    for (int64_t node = 1; node < width; ++node) {
      const int64_t at = request * width + node;
      const int32_t parent = parents[at];
      if (tokens[at] < 0 || parent < 0 || parent >= width || !on[parent]) continue;
      const int32_t source = sources[request * tree_stride + node];
      ++tried[source];
      hit[source] += on[node];
    }
  }
  // Only the priors of these sources can have changed.
  for (int64_t request = 0; request < requests; ++request)
    for (int64_t node = 1; node < width; ++node) {
      const int32_t source = sources[request * tree_stride + node];
      if (tried[source] > most_tried) {
        tried[source] >>= 1;
        hit[source] >>= 1;
      }
      const float prior = expected[source] * static_cast<float>(weight);
      priors[source] = (prior + static_cast<float>(hit[source])) /
                       static_cast<float>(weight + tried[source]);
    }
}
