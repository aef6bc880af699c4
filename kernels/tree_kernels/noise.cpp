// Uniform random numbers of a step (Philox 4x32-10, Salmon et al., SC 2011), on a CPU.

#include <algorithm>
#include <cstdint>

constexpr int64_t kLanes = 16;  // counters at a time, to use vector registers
constexpr float kScale = 1.0f / 2147483648.0f;
constexpr float kHalf = kScale / 2;
constexpr float kGreatest = 1.0f - 1.0f / 16777216.0f;

// The four numbers of each of kLanes counters from `first` on.
static void draw(uint64_t key, uint32_t first, uint32_t stream, uint32_t length, float* to) {
  uint32_t a[kLanes], b[kLanes], c[kLanes], d[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    a[lane] = first + static_cast<uint32_t>(lane);
    b[lane] = stream;
    c[lane] = length;
    d[lane] = 0;
  }
  uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const uint64_t left = uint64_t{a[lane]} * 0xD2511F53u;
      const uint64_t right = uint64_t{c[lane]} * 0xCD9E8D57u;
      a[lane] = static_cast<uint32_t>(right >> 32) ^ b[lane] ^ low;
      b[lane] = static_cast<uint32_t>(right);
      c[lane] = static_cast<uint32_t>(left >> 32) ^ d[lane] ^ high;
      d[lane] = static_cast<uint32_t>(left);
    }
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
  const auto uniform = [](uint32_t bits) {
    const float scaled = static_cast<float>(static_cast<int32_t>(bits >> 1)) * kScale + kHalf;
    return std::min(scaled, kGreatest);
  };
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    to[4 * lane] = uniform(a[lane]);
    to[4 * lane + 1] = uniform(b[lane]);
    to[4 * lane + 2] = uniform(c[lane]);
    to[4 * lane + 3] = uniform(d[lane]);
  }
}

extern "C" void uniform_numbers(const int64_t* seeds, const int64_t* lengths, int64_t requests,
                                int64_t stream, int64_t count, float* out, int64_t threads) {
  constexpr int64_t kStep = 4 * kLanes;
  const int64_t steps = (count + kStep - 1) / kStep;
#pragma omp parallel for num_threads(threads) if (requests * count > 100000)
  for (int64_t part = 0; part < requests * steps; ++part) {
    const int64_t request = part / steps, start = part % steps * kStep;
    float drawn[kStep];
    draw(static_cast<uint64_t>(seeds[request]), static_cast<uint32_t>(start / 4),
         static_cast<uint32_t>(stream), static_cast<uint32_t>(lengths[request]), drawn);
    std::copy_n(drawn, std::min(kStep, count - start), out + request * count + start);
  }
}
