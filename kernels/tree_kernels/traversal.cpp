// Traversal verification (arXiv 2505.12398, algorithm 2) of a batch of trees, on a CPU.
//
// Distributions are summed in double precision, block by block. A node's distributions are not read
// before its first child is tried, and a child that cannot be accepted is rejected with all that is
// below it.

#include "weights.h"

// A node on the path from the root to the node that is being tried.
struct Level {
  Row target;
  Draft draft;
  std::vector<float> residual;
  int64_t node;
  int64_t tried;  // the last child that was tried; 0 if there is none, the width to try no more
  float weight;

  void read(const float* q, const float* p, int64_t vocab) {
    target.read(q, vocab);
    draft.read(p, vocab);
    draft.rejected.clear();
  }

  // The draft's mass, as a divisor: children that were not drawn leave none.
  double draft_mass() const {
    const double mass = draft.mass();
    return mass > 0 ? mass : 1.0;
  }

  // The weight of a child: min(1, weight q / p).
  float of_child(int32_t token) const {
    const double wanted = weight * static_cast<double>(target.at(token)) * draft_mass();
    const double drawn = draft.at(token) * target.mass();
    if (wanted >= drawn) return wanted > 0 ? 1.0f : 0.0f;
    return static_cast<float>(wanted / drawn);
  }

  // A child was rejected: q <- max(weight q - p, 0), and p loses the child's token.
  void reject(int32_t token, int64_t vocab) {
    const float q_scale = static_cast<float>(weight / target.mass());
    const float p_scale = static_cast<float>(1.0 / draft_mass());
    residual.resize(vocab);
    float p_block[kBlock];
    const auto each_block = [&](auto&& value) {
      for (int64_t start = 0; start < vocab; start += kBlock) {
        double& sum = target.sums[start / kBlock];
        if (sum <= 0) continue;
        const int64_t count = std::min(kBlock, vocab - start);
        draft.block(start, count, p_block);
        for (int64_t i = 0; i < count; ++i) residual[start + i] = value(start + i, p_block[i]);
        if (token >= start && token < start + count) residual[token] = 0.0f;
        sum = sum_of(residual.data() + start, count);
      }
    };
    const std::vector<double> before = target.sums;
    const float* q = target.values;
    each_block([&](int64_t i, float p) {
      const float difference = q[i] * q_scale - p * p_scale;
      return difference > 0.0f ? difference : 0.0f;
    });
    target.values = residual.data();
    draft.reject(token, vocab);
    const double mass = target.mass();
    if (mass > 0) {
      weight = static_cast<float>(mass / (mass + (1.0 - weight)));
    } else if (weight < 1.0f) {
      weight = 0.0f;
    } else {
      // q equals p, so only rounding can have rejected the child; the next token is another one.
      target.sums = before;
      each_block([](int64_t, float p) { return p; });
    }
  }
};

struct Request {
  const int32_t* tokens;
  const int32_t* parents;
  const int64_t* target_rows;
  const int64_t* draft_rows;
  const float* coins;
  int32_t* out;
};

static void traverse_one(const float* target, const float* draft, int64_t vocab, int64_t width,
                         const Request& request, std::vector<Level>& path) {
  const auto enter = [&](size_t depth, int64_t node, float weight) {
    if (path.size() <= depth) path.resize(depth + 1);
    path[depth].node = node;
    path[depth].tried = 0;
    path[depth].weight = weight;
  };
  const auto target_after = [&](int64_t node) {
    return target + request.target_rows[node] * vocab;
  };
  const auto is_child = [&](int64_t node, int32_t token) {
    for (int64_t child = 1; child < width; ++child)
      if (request.parents[child] == node && request.tokens[child] == token) return true;
    return false;
  };
  size_t depth = 0;
  enter(0, 0, 1.0f);
  for (;;) {
    Level& here = path[depth];
    const int64_t p_row = request.draft_rows[here.node];
    int64_t child = width;
    if (here.weight > 0.0f && p_row >= 0)
      for (child = std::max(here.tried, here.node) + 1; child < width; ++child)
        if (request.parents[child] == here.node && request.tokens[child] >= 0) break;
    if (child < width) {
      if (here.tried == 0) here.read(target_after(here.node), draft + p_row * vocab, vocab);
      // After a target without mass, or of NaN, nothing is accepted.
      here.tried = here.target.mass() > 0 ? child : width;
      if (here.tried == width) continue;
      const float weight = here.of_child(request.tokens[child]);
      if (weight > 0.0f)
        enter(++depth, child, weight);  // `here` may have moved
      else
        here.reject(request.tokens[child], vocab);
    } else if (depth == 0 || request.coins[here.node] < here.weight) {
      break;
    } else {
      const int64_t rejected = here.node;
      path[--depth].reject(request.tokens[rejected], vocab);
    }
  }
  std::fill_n(request.out, width, -1);
  Level& last = path[depth];
  if (last.tried == 0) last.target.read(target_after(last.node), vocab);
  const double wanted = static_cast<double>(request.coins[0]) * last.target.mass();
  int32_t drawn = draw(last.target, vocab, wanted);
  // Without mass, the first token that is no child's.
  if (drawn < 0)
    while (is_child(last.node, ++drawn)) {
    }
  request.out[last.node] = drawn;
  for (; depth > 0; --depth)
    request.out[path[depth - 1].node] = request.tokens[path[depth].node];
}

extern "C" void traverse(const float* target, const float* draft, const int64_t* target_rows,
                         const int64_t* draft_rows, const int32_t* tokens, const int32_t* parents,
                         const float* coins, int64_t requests, int64_t width, int64_t vocab,
                         int32_t* out, int64_t threads) {
#pragma omp parallel num_threads(threads) if (requests > 1)
  {
    static thread_local std::vector<Level> path;
#pragma omp for schedule(dynamic, 1)
    for (int64_t row = 0; row < requests; ++row) {
      const int64_t at = row * width;
      traverse_one(target, draft, vocab, width,
                   {tokens + at, parents + at, target_rows + at, draft_rows + at, coins + at,
                    out + at},
                   path);
    }
  }
}
