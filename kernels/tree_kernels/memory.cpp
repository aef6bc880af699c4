// The memory of finished texts, on a CPU.

#include <algorithm>
#include <cstdint>

#include "hashing.h"

constexpr int64_t kNgrams[] = {4, 8, 16};
constexpr int64_t kWrap = (int64_t{1} << 31) - 1;  // positions are counted modulo 2^31

extern "C" void append(int32_t* memory, int64_t places, int32_t* index, int32_t* end,
                       int64_t cells, const int32_t* history, const int32_t* lengths,
                       int64_t length, int64_t requests, const int64_t* slots,
                       const int32_t* starts, int64_t context) {
  int64_t position = *end;
  for (int64_t request = 0; request < requests; ++request) {
    const int64_t slot = slots[request];
    const int32_t* text = history + slot * length;
    // A text that is longer than the ring leaves its end there.
    const int64_t last = lengths[slot];
    const int64_t first =
        std::max({starts[slot] - context, int64_t{0}, last - places + 1});
    if (starts[slot] >= last) continue;
    for (int64_t at = first; at < last; ++at) {
      memory[position & (places - 1)] = text[at];
      int32_t* row = index;
      for (const int64_t n : kNgrams) {
        if (at - first >= n)
          row[cell_of(text + at - n, n, cells)] = static_cast<int32_t>(position);
        row += cells;
      }
      position = (position + 1) & kWrap;
    }
    memory[position & (places - 1)] = -1;
    position = (position + 1) & kWrap;
  }
  *end = static_cast<int32_t>(position);
}
