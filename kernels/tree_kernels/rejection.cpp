// Recursive rejection sampling of one level (RSD, arXiv 2402.14160, algorithm 3), on a CPU.
//
// Distributions are summed in double precision, block by block. Most are filtered (top-k, top-p):
// a block in which the target has no mass never gets any, so its values are not read or written
// again.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

constexpr int64_t kBlock = 256;
constexpr int kLanes = 16;  // partial sums, to use vector registers

static double sum_of(const float* values, int64_t count) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += values[i + lane];
  for (; i < count; ++i) lanes[i % kLanes] += values[i];
  double total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += lanes[lane];
  return total;
}

// A row of non-negative weights with the sum of each block.
struct Row {
  const float* values = nullptr;
  std::vector<double> sums;

  void read(const float* from, int64_t count) {
    values = from;
    sums.clear();
    for (int64_t start = 0; start < count; start += kBlock)
      sums.push_back(sum_of(from + start, std::min(kBlock, count - start)));
  }

  // A block without mass may never have been written.
  float at(int32_t token) const { return sums[token / kBlock] > 0 ? values[token] : 0.0f; }

  double mass() const {
    double total = 0;
    for (const double sum : sums) total += sum;
    return total;
  }
};

// The draft distribution without the rejected tokens.
struct Draft : Row {
  std::vector<int32_t> rejected;

  float at(int32_t token) const {
    const bool gone = std::find(rejected.begin(), rejected.end(), token) != rejected.end();
    return gone ? 0.0f : values[token];
  }

  void block(int64_t start, int64_t count, float* to) const {
    std::copy_n(values + start, count, to);
    for (const int32_t token : rejected)
      if (token >= start && token < start + count) to[token - start] = 0.0f;
  }

  void reject(int32_t token, int64_t vocab) {
    rejected.push_back(token);
    const int64_t start = token / kBlock * kBlock, count = std::min(kBlock, vocab - start);
    float left[kBlock];
    block(start, count, left);
    sums[token / kBlock] = sum_of(left, count);
  }
};

// The first token at which the running sum exceeds `wanted`; the last token with mass if, due to
// rounding, none does; -1 if there is no mass.
static int32_t draw(const Row& row, int64_t vocab, double wanted) {
  double before = 0;
  int64_t last = -1;
  for (int64_t start = 0; start < vocab; start += kBlock) {
    const double sum = row.sums[start / kBlock];
    if (sum <= 0) continue;
    const int64_t end = std::min(start + kBlock, vocab);
    const bool here = before + sum > wanted;
    double running = before;
    for (int64_t token = start; token < end; ++token) {
      if (!(row.values[token] > 0)) continue;
      last = token;
      running += row.values[token];
      if (here && running > wanted) return static_cast<int32_t>(token);
    }
    before += sum;
  }
  return static_cast<int32_t>(last);
}

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
  *token_out = draw(q, vocab, static_cast<double>(coins[num_children]) * q.mass());
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
