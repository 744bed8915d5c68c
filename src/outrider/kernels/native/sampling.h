// From a row of logits to a token: what core/sampling.py does, with the same tokens and the same log-probabilities, fast.
//
//   shaped row = bias, min_tokens, mask, penalties (float64, rounded to float32 once)
//   cut        = min_p, top_k, top_p: each keeps a head of the order (value descending, token ascending), so that all
//                three together are one last kept key, found without sorting the vocabulary
//   race       = argmax over the kept of value + T * gumbel(seed, position, token). Noise is made only where it can
//                still win: it is at most 22.9, and a block of 64 tokens is left out when its maximum is too far behind
//
// Letters: V vocabulary, T temperature.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "noise.h"

namespace outrider {

// No token can be drawn: broken logits, or everything is kept out. Python's outrider.core.sampling.DrawError.
class DrawError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct ShapingSettings {
  double temperature = 0, top_p = 1, min_p = 0;
  std::int64_t top_k = 0;
  double repetition_penalty = 1, frequency_penalty = 0, presence_penalty = 0;
  std::vector<std::pair<std::int32_t, double>> bias;
  std::int64_t min_tokens = 0;
  std::vector<std::int32_t> ends;
  std::uint64_t seed = 0;
  std::int64_t prompt_length = 0;
  int logprobs = -1;  // -1 none, k: the drawn token's and the k likeliest
};

// Where in its text a row stands.
struct Moment {
  std::int64_t position = 0;           // of the token to be drawn: committed tokens + path
  std::span<const std::int32_t> path;  // guessed tokens since the committed ones
  std::span<const std::uint32_t> mask;  // allowed tokens, bit t % 32 of word t / 32
  bool masked = false;
};

struct Drawn {
  std::int32_t token = 0;
  double logprob = 0;                                // of the plain logits; only if settings.logprobs >= 0
  std::vector<std::pair<std::int32_t, double>> top;  // likeliest first
};

// A row of a draft: output i stands for token known[i] of the target, or for token i if `known` is empty.
struct DraftRow {
  std::span<const float> logits;
  std::span<const std::int32_t> known;
  std::int64_t vocabulary;    // of the target
  std::vector<float>& space;  // for such rows alone: tokens that the draft does not know stay impossible in it
  bool ascending = false;     // `known` ascends: the order of equal logits is the same in both numberings

  std::span<const float> wide() const;  // over the target's vocabulary, if `known` says that it is another
};

// The tokens that a draft considers at T > 0, ascending by its own number: those of the law whose shaped logit is less
// than kFar * T behind the highest. What is left out has a few hundredths of the mass, and most of the noise.
struct Near {
  std::vector<std::int32_t> tokens;  // of the target
  std::vector<float> values;
  double highest;
};

struct Top {
  std::vector<std::int32_t> tokens;
  std::vector<float> logprobs;
};

struct DraftLaw {
  std::vector<std::int32_t> tokens;  // of the target
  std::vector<double> q;             // positive, sum to one
};

// One per sequence: its parameters, and how often each token has occurred if penalties ask for it.
class NativeShaping {
 public:
  explicit NativeShaping(ShapingSettings settings);

  const ShapingSettings& settings() const { return settings_; }
  bool penalised() const;
  bool adjusts(const Moment& moment) const;  // whether logits are changed before the draw

  // The committed tokens, of which the first `known()` have been counted. Only needed if penalised().
  std::int64_t known() const { return known_; }
  void append(std::int32_t token);
  void forget();

  // row [V]. All throw DrawError.
  Drawn draw(std::span<const float> row, const Moment& moment) const;
  void law(std::span<const float> row, const Moment& moment, double* out) const;  // out [V]
  Top top(std::span<const float> row, std::int64_t k, const Moment& moment) const;
  // The same tokens for a draft's row, each with the log of how sure the draft is of it. At T = 0 that is the softmax of
  // its logits. Above, what the target adds to its logits is known, the same noise: with it added to the draft's, the
  // softmax of the sums tells how sure a draw is. It is shared out over the 16 that come in first. Tokens far behind the
  // highest do not take part (Near), so there may be fewer than k.
  std::vector<std::pair<std::int32_t, double>> ranked(const DraftRow& row, std::int64_t k, const Moment& moment) const;
  // What a draft draws guesses from under rejection: the law, of the near tokens alone; a point mass at T = 0.
  DraftLaw draft_law(const DraftRow& row, const Moment& moment) const;

 private:
  struct Entry {
    std::int32_t token, written;  // `written`: how often in the output
  };
  void adjust(std::span<const float> row, const Moment& moment, float* out) const;
  double bias_of(std::int32_t token) const;
  float penalised_logit(double logit, std::int32_t token, std::int64_t written) const;
  Near near(const DraftRow& row, const Moment& moment) const;
  Near near(std::span<const float> logits, std::span<const std::int32_t> known, const Moment& moment) const;

  ShapingSettings settings_;
  std::vector<Entry> entries_;
  std::unordered_map<std::int32_t, std::size_t> index_;
  std::int64_t known_ = 0;
};

// By plain logits. row [V]. Throw DrawError.
Top top(std::span<const float> row, std::int64_t k);
void log_softmax(std::span<const float> row, std::span<const std::int64_t> tokens, double* out);

// At most `count` different tokens drawn from q one after the other: the best of log q + noise. q [V]
std::vector<std::int32_t> draw_children(std::span<const double> q, std::int64_t count, const Place& place);
// The same of a law's own tokens: their indices in it.
std::vector<std::int32_t> draw_children(const DraftLaw& law, std::int64_t count, const Place& place);

// Gumbel noise of tokens 0 ... out.size() - 1.
void gumbels(const Place& place, std::span<double> out);

}  // namespace outrider
