// Verification of draft trees: follows the target's tokens from the root, on a CPU.

#include <cstdint>

static int32_t first_child(const int32_t* tokens, const int32_t* parents, int32_t tree_size,
                           int32_t node, int32_t token) {
  if (node < 0 || token < 0) return -1;
  for (int32_t child = node + 1; child < tree_size; ++child)
    if (parents[child] == node && tokens[child] == token) return child;
  return -1;
}

extern "C" void step(const int32_t* tokens, const int32_t* parents, const int32_t* tree_size,
                     int64_t requests, int64_t width, const int32_t* node, const int32_t* sampled,
                     int32_t* out) {
  for (int64_t request = 0; request < requests; ++request)
    out[request] = first_child(tokens + request * width, parents + request * width,
                               tree_size[request], node[request], sampled[request]);
}

extern "C" void walk(const int32_t* tokens, const int32_t* parents, const int32_t* tree_size,
                     int64_t requests, int64_t width, const int32_t* target, int64_t length,
                     int32_t* path, int32_t* emitted, int32_t* num_emitted) {
  for (int64_t request = 0; request < requests; ++request) {
    const int64_t line = request * width;
    int32_t node = tree_size[request] > 0 ? 0 : -1;
    int32_t count = 0;
    for (int64_t depth = 0; depth < length; ++depth) {
      const int32_t token = node < 0 ? -1 : target[line + node];
      path[request * length + depth] = node;
      emitted[request * length + depth] = token;
      count += node >= 0;
      node = first_child(tokens + line, parents + line, tree_size[request], node, token);
    }
    num_emitted[request] = count;
  }
}
