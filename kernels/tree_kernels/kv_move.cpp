// KV compaction in paged KV caches, on a CPU: all caches of one layout in one call.

#include <cstdint>
#include <vector>

// A row's elements are [parts, dims], and the tokens of a block [block_size / tokens, tokens].
struct Layout {
  int64_t heads, block_size, tokens, parts, dims;
  int64_t block_stride, head_stride, group_stride, token_stride, part_stride, dim_stride;  // in elements
};

// Rows are copied as integers T of the element size, so that all values are copied bit by bit.
template <typename T>
static void move(const int64_t* caches, int64_t num_caches, const Layout& layout,
                 const int64_t* slots, const int32_t* path, int64_t requests, int64_t width,
                 int64_t length) {
  static thread_local std::vector<T> rows;
  const int64_t size = layout.parts * layout.dims;
  rows.resize(length * size);
  for (int64_t c = 0; c < num_caches; ++c)
    for (int64_t request = 0; request < requests; ++request) {
      const int64_t* slot_of = slots + request * width;
      const int32_t* accepted = path + request * length;
      for (int64_t head = 0; head < layout.heads; ++head) {
        T* cache = reinterpret_cast<T*>(caches[c]) + head * layout.head_stride;
        const auto row_of = [&](int64_t node) {
          const int64_t offset = slot_of[node] % layout.block_size;
          return cache + slot_of[node] / layout.block_size * layout.block_stride +
                 offset / layout.tokens * layout.group_stride +
                 offset % layout.tokens * layout.token_stride;
        };
        // The moves of a request overlap, so all its rows are read before any is written.
        for (int64_t d = 1; d < length; ++d) {
          if (accepted[d] <= 0 || accepted[d] == d) continue;
          const T* from = row_of(accepted[d]);
          T* row = rows.data() + d * size;
          for (int64_t part = 0; part < layout.parts; ++part, from += layout.part_stride)
            for (int64_t i = 0; i < layout.dims; ++i) *row++ = from[i * layout.dim_stride];
        }
        for (int64_t d = 1; d < length; ++d) {
          if (accepted[d] <= 0 || accepted[d] == d) continue;
          T* to = row_of(d);
          const T* row = rows.data() + d * size;
          for (int64_t part = 0; part < layout.parts; ++part, to += layout.part_stride)
            for (int64_t i = 0; i < layout.dims; ++i) to[i * layout.dim_stride] = *row++;
        }
      }
    }
}

#define EXPORT(NAME, TYPE)                                                                    \
  extern "C" void NAME(const int64_t* caches, int64_t num_caches, const Layout* layout,       \
                       const int64_t* slots, const int32_t* path, int64_t requests,           \
                       int64_t width, int64_t length) {                                       \
    move<TYPE>(caches, num_caches, *layout, slots, path, requests, width, length);            \
  }
EXPORT(move_1, uint8_t)
EXPORT(move_2, uint16_t)
EXPORT(move_4, uint32_t)
EXPORT(move_8, uint64_t)
