// Counting what became of the candidates of each origin, on a CPU.

#include <algorithm>
#include <cstdint>
#include <vector>

// Count, for each origin, the nodes whose parent was accepted and those that were accepted.
extern "C" void count_trees(const int32_t* tokens, const int32_t* parents, const int32_t* origins,
                            const int32_t* path, int64_t requests, int64_t nodes, int64_t depth,
                            int64_t tree_stride, int32_t* tried, int32_t* hit,
                            const float* expected, float* priors, int64_t weight) {
  std::vector<char> on(nodes);
  for (int64_t request = 0; request < requests; ++request) {
    std::fill(on.begin(), on.end(), 0);
    for (int64_t i = 0; i < depth; ++i) {
      const int32_t node = path[request * depth + i];
      if (node >= 0 && node < nodes) on[node] = 1;
    }
    for (int64_t node = 1; node < nodes; ++node) {
      const int64_t at = request * nodes + node;
      if (tokens[at] < 0 || !on[parents[at]]) continue;
      const int32_t origin = origins[request * tree_stride + node];
      ++tried[origin];
      hit[origin] += on[node];
    }
  }
  // What was never tried stays as expected.
  for (int64_t request = 0; request < requests; ++request)
    for (int64_t node = 1; node < nodes; ++node) {
      const int32_t origin = origins[request * tree_stride + node];
      const float prior = expected[origin] * static_cast<float>(weight);
      priors[origin] = (prior + static_cast<float>(hit[origin])) /
                       static_cast<float>(weight + tried[origin]);
    }
}
