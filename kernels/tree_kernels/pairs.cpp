// Writing what followed pairs of tokens into their table, on a CPU.

#include <cstdint>
#include <cstring>

#include "ngrams.h"

extern "C" void update_pairs(int32_t* pairs, int64_t tables, int64_t cells, const int64_t* slots,
                             const int32_t* tokens, const int32_t* before,
                             const int32_t* candidates, int64_t rows, int64_t k) {
  for (int64_t row = 0; row < rows; ++row) {
    if (tokens[row] < 0 || before[row] == -1) continue;
    const int32_t pair[] = {before[row], tokens[row]};
    const int64_t table = tables > 1 ? slots[row] : 0;
    int32_t* cell = pairs + (table * cells + cell_of(pair, 2, cells)) * (2 + k);
    std::memcpy(cell, pair, sizeof(pair));
    std::memcpy(cell + 2, candidates + row * k, k * sizeof(int32_t));
  }
}
