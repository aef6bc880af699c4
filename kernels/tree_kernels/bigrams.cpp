// The update of the bigram table, on a CPU.

#include <cstdint>
#include <cstring>

#include "hashing.h"

extern "C" void update_bigrams(int32_t* bigrams, int64_t tables, int64_t cells, const int64_t* slots,
                             const int32_t* tokens, const int32_t* previous,
                             const int32_t* candidates, int64_t rows, int64_t k) {
  for (int64_t row = 0; row < rows; ++row) {
    if (tokens[row] < 0 || previous[row] == -1) continue;
    const int32_t bigram[] = {previous[row], tokens[row]};
    const int64_t table = tables > 1 ? slots[row] : 0;
    int32_t* cell = bigrams + (table * cells + cell_of(bigram, 2, cells)) * (2 + k);
    std::memcpy(cell, bigram, sizeof(bigram));
    std::memcpy(cell + 2, candidates + row * k, k * sizeof(int32_t));
  }
}
