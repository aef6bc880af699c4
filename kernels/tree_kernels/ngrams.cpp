// The texts of requests and the index of their n-grams, on a CPU.

#include <cstdint>

#include "hashing.h"

extern "C" void extend(int32_t* history, int64_t length, int32_t* lengths, int32_t* index,
                       int64_t cells, const int64_t* slots, int64_t requests,
                       const int32_t* tokens, int64_t columns) {
  for (int64_t request = 0; request < requests; ++request) {
    const int64_t slot = slots[request];
    int32_t* text = history + slot * length;
    int32_t* found = index + slot * cells;
    const int32_t* added = tokens + request * columns;
    int64_t end = lengths[slot];
    for (int64_t column = 0; column < columns && end < length; ++column) {
      if (added[column] < 0) continue;
      text[end] = added[column];
      for (int64_t n = 1; n <= kLongest && n <= end; ++n)
        found[cell_of(text + end - n, n, cells)] = static_cast<int32_t>(end);
      if (end >= kAtRoot)
        found[cell_of(text + end - kAtRoot, kAtRoot, cells)] = static_cast<int32_t>(end);
      ++end;
    }
    lengths[slot] = static_cast<int32_t>(end);
  }
}

extern "C" void previous_tokens(const int32_t* history, int64_t length, const int32_t* lengths,
                             const int64_t* slots, int64_t requests, int32_t* tokens) {
  for (int64_t request = 0; request < requests; ++request) {
    const int64_t slot = slots[request], place = lengths[slot] - 2;
    tokens[request] = place < 0 ? -1 : history[slot * length + place];
  }
}
