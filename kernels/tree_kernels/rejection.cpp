// Recursive rejection sampling of one level (RSD, arXiv 2402.14160, algorithm 3), on a CPU.
//
// Distributions are summed in double precision, block by block.

#include <limits>

#include "weights.h"

struct Scratch {
  Row target;
  Draft draft;
  std::vector<float> residual;
};

// `draft` is null for a node without children.
static void reject_one(const float* target, const float* draft, const int32_t* children,
                       int64_t num_children, const float* coins, int64_t vocab, Scratch& scratch,
                       int32_t* accepted, int32_t* token_out) {
  Row& q = scratch.target;
  Draft& p = scratch.draft;
  q.read(target, vocab);
  // After a target without mass, or of NaN, nothing is accepted.
  if (!(q.mass() > 0)) draft = nullptr;
  p.rejected.clear();
  bool is_read = false;
  for (int64_t child = 0; child < num_children; ++child) {
    const int32_t token = children[child];
    if (draft == nullptr || token < 0 || token >= vocab) continue;
    if (!is_read) p.read(draft, vocab);
    is_read = true;
    const float q_mass = static_cast<float>(q.mass());
    const float p_mass =
        std::max(static_cast<float>(p.mass()), std::numeric_limits<float>::min());
    bool taken = coins[child] * (p.at(token) / p_mass) < q.at(token) / q_mass;
    if (!taken) {
      // q <- max(q - p, 0), both normalised.
      scratch.residual.resize(vocab);
      float* residual = scratch.residual.data();
      float p_block[kBlock];
      for (int64_t start = 0; start < vocab; start += kBlock) {
        double& sum = q.sums[start / kBlock];
        if (sum <= 0) continue;
        const int64_t count = std::min(kBlock, vocab - start);
        p.block(start, count, p_block);
        for (int64_t i = 0; i < count; ++i) {
          const float difference = q.values[start + i] / q_mass - p_block[i] / p_mass;
          residual[start + i] = difference > 0.0f ? difference : 0.0f;
        }
        sum = sum_of(residual + start, count);
      }
      q.values = residual;
      p.reject(token, vocab);
      // The residual is empty if q equals p: only rounding can have rejected the child.
      taken = q.mass() <= 0;
    }
    if (taken) {
      *accepted = static_cast<int32_t>(child);
      *token_out = token;
      return;
    }
  }
  *accepted = -1;
  const double wanted = static_cast<double>(coins[num_children]) * q.mass();
  *token_out = std::max(draw(q, vocab, wanted), 0);
}

extern "C" void reject_step(const float* target, const float* draft, const int64_t* target_rows,
                            const int64_t* draft_rows, const int32_t* children, const float* coins,
                            int64_t requests, int64_t num_children, int64_t vocab,
                            int32_t* accepted, int32_t* tokens, int64_t threads) {
#pragma omp parallel num_threads(threads) if (requests > 1)
  {
    static thread_local Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t request = 0; request < requests; ++request)
      reject_one(target + target_rows[request] * vocab,
                 draft_rows[request] < 0 ? nullptr : draft + draft_rows[request] * vocab,
                 children + request * num_children, num_children,
                 coins + request * (num_children + 1), vocab, scratch, accepted + request,
                 tokens + request);
  }
}
