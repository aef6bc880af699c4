// Depths and ancestor masks of trees, on a CPU. In breadth-first order a parent comes before its
// children, so one pass is enough.

#include <cstdint>
#include <cstring>

extern "C" void depths(const int32_t* parents, const int32_t* tree_size, int64_t requests,
                       int64_t width, int32_t* out) {
  std::memset(out, 0, requests * width * sizeof(int32_t));
  for (int64_t request = 0; request < requests; ++request) {
    const int32_t* above = parents + request * width;
    int32_t* depth = out + request * width;
    for (int64_t node = 0; node < tree_size[request]; ++node)
      depth[node] = above[node] < 0 ? 0 : depth[above[node]] + 1;
  }
}

extern "C" void tree_mask(const int32_t* parents, const int32_t* tree_size, int64_t requests,
                          int64_t width, uint8_t* out) {
  std::memset(out, 0, requests * width * width);
  for (int64_t request = 0; request < requests; ++request) {
    const int32_t* above = parents + request * width;
    uint8_t* mask = out + request * width * width;
    for (int64_t node = 0; node < tree_size[request]; ++node) {
      uint8_t* row = mask + node * width;
      if (above[node] >= 0) std::memcpy(row, mask + above[node] * width, node);
      row[node] = 1;
    }
  }
}
