// Moving rows of paged KV caches, on a CPU: all caches of one layout in one call.

#include <cstdint>
#include <vector>

struct Layout {
  int64_t heads, block_size, head_dim;
  int64_t block_stride, head_stride, offset_stride, dim_stride;  // in elements
};

// Rows move as bits, whatever they hold: T is an unsigned integer of the elements' size.
template <typename T>
static void move(const int64_t* caches, int64_t num_caches, const Layout& layout,
                 const int64_t* src, const int64_t* dst, int64_t requests, int64_t moves) {
  static thread_local std::vector<T> rows;
  rows.resize(moves * layout.head_dim);
  for (int64_t c = 0; c < num_caches; ++c)
    for (int64_t request = 0; request < requests; ++request)
      for (int64_t head = 0; head < layout.heads; ++head) {
        T* cache = reinterpret_cast<T*>(caches[c]) + head * layout.head_stride;
        const auto row_of = [&](int64_t slot) {
          return cache + slot / layout.block_size * layout.block_stride +
                 slot % layout.block_size * layout.offset_stride;
        };
        const int64_t* come = src + request * moves;
        const int64_t* go = dst + request * moves;
        // The moves of a request overlap: all its rows are read before any is written.
        for (int64_t m = 0; m < moves; ++m) {
          if (come[m] < 0 || go[m] < 0) continue;
          const T* from = row_of(come[m]);
          for (int64_t d = 0; d < layout.head_dim; ++d)
            rows[m * layout.head_dim + d] = from[d * layout.dim_stride];
        }
        for (int64_t m = 0; m < moves; ++m) {
          if (come[m] < 0 || go[m] < 0) continue;
          T* to = row_of(go[m]);
          for (int64_t d = 0; d < layout.head_dim; ++d)
            to[d * layout.dim_stride] = rows[m * layout.head_dim + d];
        }
      }
}

#define EXPORT(NAME, TYPE)                                                                     \
  extern "C" void NAME(const int64_t* caches, int64_t num_caches, const Layout* layout,        \
                       const int64_t* src, const int64_t* dst, int64_t requests, int64_t moves) { \
    move<TYPE>(caches, num_caches, *layout, src, dst, requests, moves);                        \
  }
EXPORT(move_1, uint8_t)
EXPORT(move_2, uint16_t)
EXPORT(move_4, uint32_t)
EXPORT(move_8, uint64_t)
