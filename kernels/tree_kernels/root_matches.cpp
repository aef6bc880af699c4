// The longest matches at the root, on a CPU.

#include <algorithm>
#include <cstdint>

#include "hashing.h"

constexpr int64_t kMaxMatch = 64;
constexpr int64_t kOwn[] = {1, 2, 3, 4, 5, 6, kAtRoot};
constexpr int64_t kMemory[] = {4, 8, 16};

extern "C" void root_matches(const int32_t* history, int64_t length, const int32_t* lengths,
                             const int32_t* index, int64_t cells, const int32_t* memory,
                             int64_t places, const int32_t* memory_index, int64_t memory_cells,
                             int64_t requests, const int64_t* slots, int32_t* out) {
  for (int64_t request = 0; request < requests; ++request) {
    const int64_t slot = slots[request], end = lengths[slot];
    const int32_t* text = history + slot * length;
    int32_t* found = out + 4 * request;
    std::fill(found, found + 4, 0);
    // How far the text before `place` in `other` agrees with the end of the request's text.
    auto compare = [&](const int32_t* other, int64_t mask, int64_t place) {
      const int64_t most = std::min({kMaxMatch, end, place});
      int64_t same = 0;
      while (same < most && other[(place - 1 - same) & mask] == text[end - 1 - same]) ++same;
      return same;
    };
    for (const int64_t n : kOwn) {
      if (n > end) break;
      const int64_t place = index[slot * cells + cell_of(text + end - n, n, cells)];
      const int64_t same = compare(text, -1, place);
      if (same < 1 || same < found[1]) continue;
      found[0] = static_cast<int32_t>(place);
      found[1] = static_cast<int32_t>(same);
    }
    const int32_t* row = memory_index;
    for (const int64_t n : kMemory) {
      if (n > end) break;
      const int64_t place = row[cell_of(text + end - n, n, memory_cells)];
      const int64_t same = compare(memory, places - 1, place);
      row += memory_cells;
      if (same < kMemory[0] || same < found[3]) continue;
      found[2] = static_cast<int32_t>(place & (places - 1));
      found[3] = static_cast<int32_t>(same);
    }
  }
}
