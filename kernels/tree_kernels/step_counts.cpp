// The counters of a decode step, on a CPU.

#include <algorithm>
#include <cstdint>

extern "C" void count_step(const bool* counted, const int32_t* tokens, const int32_t* parents,
                           const int32_t* path, int64_t requests, int64_t width, int64_t length,
                           int64_t* sums) {
  for (int64_t request = 0; request < requests; ++request) {
    if (!counted[request]) continue;
    const int32_t* above = parents + request * width;
    int64_t drafted = -1;
    for (int64_t node = 0; node < width; ++node) drafted += tokens[request * width + node] >= 0;
    int64_t emitted = 0;
    for (int64_t depth = 0; depth < length; ++depth) {
      const int32_t node = path[request * length + depth];
      if (node < 0) continue;
      ++emitted;
      // A node after its parent's first child has a sibling before it.
      sums[5] += node > 0 && std::find(above, above + node, above[node]) != above + node;
      sums[6] += node != depth;
    }
    sums[0] += 1;
    sums[1] += emitted;
    sums[2] += drafted > 0;
    sums[3] += drafted;
    sums[4] += emitted - 1;
  }
}
