#include "sampling.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>

#include "linear/isa.h"
#include "noise.h"
#include "sampling_kernels.h"

namespace outrider {
namespace {

constexpr float kLowest = std::numeric_limits<float>::lowest();  // below it only -inf, which is never drawn
constexpr float kImpossible = -std::numeric_limits<float>::infinity();
constexpr std::int64_t kRunners = 16;  // draws over which a draft's confidence is shared out
constexpr double kFar = 8;  // of temperature: exp(-8) = 3e-4 of the likeliest token's chance
constexpr double kHighestNoise = 22.88;  // gumbel(0xFFFFFFFF) = 22.874

const SamplingKernels& kernels() {
#if defined(__x86_64__)
  static const SamplingKernels& chosen = isa() == Isa::avx512  ? sampling_avx512
                                         : isa() == Isa::portable ? sampling_portable
                                                                  : sampling_avx2;
  return chosen;
#else
  return sampling_portable;
#endif
}

struct Portion {
  std::uint64_t key, mass;  // of a token: its place in the order, its share in units of 2**-44 of the likeliest token's
};

// Buffers that grow to the vocabulary once.
struct Workspace {
  std::vector<float> maxima, adjusted_maxima, adjusted, values;
  std::vector<std::uint64_t> keys;
  std::vector<double> terms;
  std::vector<Portion> portions;
};

Workspace& workspace() {
  thread_local Workspace space;
  return space;
}

std::string grouped(std::int64_t number) {  // 49152 -> 49,152
  std::string digits = std::to_string(number);
  for (auto at = static_cast<std::int64_t>(digits.size()) - 3; at > 0; at -= 3)
    digits.insert(static_cast<std::size_t>(at), ",");
  return digits;
}

std::string shortest(double number) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), number).ptr};
}

// A row and the maxima of its blocks. The last block, if it is not whole, is a copy filled up with -inf.
class Row {
 public:
  Row(std::span<const float> values, std::vector<float>& maxima)
      : data_(values.data()), size_(static_cast<std::int64_t>(values.size())), blocks_((size_ + kBlock - 1) / kBlock) {
    maxima.resize(static_cast<std::size_t>(blocks_));
    maxima_ = maxima;
    const std::int64_t whole = size_ / kBlock;
    broken_ = kernels().maxima(data_, whole, maxima.data());
    if (whole < blocks_) {
      std::fill(std::begin(tail_), std::end(tail_), kImpossible);
      std::copy(data_ + whole * kBlock, data_ + size_, tail_);
      broken_ |= kernels().maxima(tail_, 1, maxima.data() + whole);
    }
    for (const float maximum : maxima_) highest_ = std::max(highest_, maximum);
  }
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;

  std::int64_t size() const { return size_; }
  std::int64_t blocks() const { return blocks_; }
  const float* data() const { return data_; }
  float operator[](std::int64_t token) const { return data_[token]; }
  const float* block(std::int64_t b) const { return (b + 1) * kBlock <= size_ ? data_ + b * kBlock : tail_; }
  std::span<const float> maxima() const { return maxima_; }
  float highest() const { return highest_; }
  bool broken() const { return broken_; }  // holds NaN or +inf
  bool empty() const { return highest_ == kImpossible; }

 private:
  const float* data_;
  std::int64_t size_, blocks_;
  std::span<const float> maxima_;
  float tail_[kBlock];
  float highest_ = kImpossible;
  bool broken_ = false;
};

void check(const Row& row, std::int64_t position) {
  const std::string where = position < 0 ? "" : " for position " + std::to_string(position);
  if (row.broken()) {
    for (const bool infinite : {false, true})
      for (std::int64_t token = 0; token < row.size(); ++token)
        if (infinite ? row[token] == -kImpossible : std::isnan(row[token]))
          throw DrawError("the model's logit of token " + std::to_string(token) + where + " is " +
                          (infinite ? "+inf" : "NaN"));
  }
  if (row.empty()) throw DrawError("all " + grouped(row.size()) + " of the model's logits" + where + " are -inf");
}

// The order (value descending, token ascending) as the order of whole numbers.
std::uint64_t key(float value, std::int64_t token) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value + 0.0f);  // -0 is 0
  const std::uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
  return std::uint64_t{~ascending} << 32 | static_cast<std::uint64_t>(token);
}
std::int32_t token_of(std::uint64_t key) { return static_cast<std::int32_t>(key & 0xFFFFFFFF); }
float value_of(std::uint64_t key) {
  const std::uint32_t ascending = ~static_cast<std::uint32_t>(key >> 32);
  return std::bit_cast<float>(ascending >> 31 ? ascending & 0x7FFFFFFFu : ~ascending);
}

// The kept tokens: values from `floor` on, keys up to `last`.
struct Cut {
  float floor = kLowest;
  std::uint64_t last = std::numeric_limits<std::uint64_t>::max();
  bool all() const { return floor == kLowest && last == std::numeric_limits<std::uint64_t>::max(); }
};

// Keys of all tokens whose value is at least `floor`, by token.
void collect(const Row& row, float floor, std::vector<std::uint64_t>& keys) {
  keys.clear();
  for (std::int64_t b = 0; b < row.blocks(); ++b) {
    if (row.maxima()[static_cast<std::size_t>(b)] < floor) continue;
    const float* values = row.block(b);
    for (std::uint64_t mask = kernels().at_least(values, floor); mask; mask &= mask - 1) {
      const int at = std::countr_zero(mask);
      keys.push_back(key(values[at], b * kBlock + at));
    }
  }
}

// The first k keys of the order, in no order; fewer if fewer reach `floor`. Returns whether one may have been left out.
bool select(const Row& row, std::int64_t k, float floor, std::vector<std::uint64_t>& keys) {
  const float wanted = floor;
  if (k < row.blocks()) {  // the k-th largest maximum is a bound: k blocks hold a token that reaches it
    std::vector<float>& maxima = workspace().values;
    maxima.assign(row.maxima().begin(), row.maxima().end());
    std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<>());
    floor = std::max(floor, maxima[static_cast<std::size_t>(k - 1)]);
  }
  collect(row, floor, keys);
  if (static_cast<std::int64_t>(keys.size()) <= k) return floor > wanted;
  std::nth_element(keys.begin(), keys.begin() + (k - 1), keys.end());
  keys.resize(static_cast<std::size_t>(k));
  return true;
}

// terms[i] = exp((value of keys[i] - highest) / T). Returns their sum in the fixed order, if the keys come by token.
double terms_of(std::span<const std::uint64_t> keys, double highest, double temperature, std::vector<double>& terms) {
  std::vector<float>& values = workspace().values;
  values.resize(keys.size());
  terms.resize(keys.size());
  std::transform(keys.begin(), keys.end(), values.begin(), value_of);
  kernels().exps(values.data(), static_cast<std::int64_t>(keys.size()), highest, temperature, terms.data());
  double lanes[kLanes] = {};
  for (std::size_t i = 0; i < keys.size(); ++i) lanes[token_of(keys[i]) % kLanes] += terms[i];
  for (int half = kLanes / 2; half; half /= 2)
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  return lanes[0];
}

// The last key before which there is less mass than `bound`, given the mass `before` all of these. By halving, no sort.
std::uint64_t last_within(std::span<Portion> portions, std::uint64_t before, double bound) {
  auto first = portions.begin(), end = portions.end();
  const auto by_key = [](const Portion& a, const Portion& b) { return a.key < b.key; };
  while (end - first > 1) {
    const auto middle = first + (end - first) / 2;
    std::nth_element(first, middle, end, by_key);
    std::uint64_t upper = 0;
    for (auto p = first; p != middle; ++p) upper += p->mass;
    if (static_cast<double>(before + upper) < bound) {  // then `middle` is kept
      before += upper;
      first = middle;
    } else {
      end = middle;
    }
  }
  return first->key;
}

// The last of `keys` before which there is less than top_p of the mass `whole`, or nothing if it may not be among them.
std::optional<std::uint64_t> cut_by_mass(std::span<const std::uint64_t> keys, double highest, double temperature,
                                         double top_p, std::optional<double> whole = {}) {
  constexpr std::size_t kSlices = 1024;
  std::vector<double>& terms = workspace().terms;
  std::vector<Portion>& portions = workspace().portions;
  terms_of(keys, highest, temperature, terms);
  const std::vector<float>& values = workspace().values;
  // Slices of equal width in value: only the tokens of the one in which the bound falls need an order.
  const double lowest = *std::min_element(values.begin(), values.end());
  const double scale = lowest < highest ? (kSlices - 1) / (highest - lowest) : 0;
  const auto slice = [&](std::size_t i) { return static_cast<std::size_t>((highest - values[i]) * scale); };
  const auto mass = [&](std::size_t i) {
    return std::bit_cast<std::uint64_t>(terms[i] * fixed::mass + 0x1p52) & fixed::fraction;
  };
  std::array<std::uint64_t, kSlices> slices{};
  for (std::size_t i = 0; i < keys.size(); ++i) slices[slice(i)] += mass(i);
  const std::uint64_t sum = std::accumulate(slices.begin(), slices.end(), std::uint64_t{0});
  const double bound = top_p * whole.value_or(static_cast<double>(sum));
  if (static_cast<double>(sum) < bound) return {};
  std::uint64_t before = 0, through = 0;
  std::size_t chosen = 0;
  for (std::size_t s = 0; s < kSlices && static_cast<double>(through) < bound; through += slices[s++])
    if (slices[s]) before = through, chosen = s;
  portions.clear();
  for (std::size_t i = 0; i < keys.size(); ++i)
    if (slice(i) == chosen) portions.push_back({keys[i], mass(i)});
  return last_within(portions, before, bound);
}

// The mass of all values from `floor` on. Blocks so low that each of their masses rounds to 0 are left out.
std::uint64_t mass_of(const Row& row, float floor, double highest, double temperature) {
  std::uint64_t sum = 0;
  const double nothing = highest - 32 * temperature;  // exp(-32) < 2**-45
  for (std::int64_t b = 0; b < row.blocks(); ++b) {
    const float maximum = row.maxima()[static_cast<std::size_t>(b)];
    if (maximum >= floor && maximum >= nothing) sum += kernels().mass(row.block(b), kBlock, floor, highest, temperature);
  }
  return sum;
}

float at_or_above(double x) {  // the smallest float that is not below x
  if (x <= kLowest) return kLowest;
  const float nearest = static_cast<float>(x);
  return nearest < x ? std::nextafter(nearest, -kImpossible) : nearest;
}

Cut find_cut(const Row& row, const ShapingSettings& settings) {
  const double highest = row.highest(), temperature = settings.temperature;
  Cut cut;
  if (settings.min_p > 0)
    cut.floor = at_or_above(highest + temperature * fixed::log(std::max(settings.min_p, 0x1p-1022)));
  std::vector<std::uint64_t>& keys = workspace().keys;
  const bool nucleus = settings.top_p < 1;
  if (settings.top_k > 0) {
    const bool left_out = select(row, settings.top_k, cut.floor, keys);
    if (nucleus)
      cut.last = cut_by_mass(keys, highest, temperature, settings.top_p).value();
    else if (left_out)
      cut.last = *std::max_element(keys.begin(), keys.end());
  } else if (nucleus) {
    const double whole = static_cast<double>(mass_of(row, cut.floor, highest, temperature));
    // Mostly enough mass lies near the top.
    for (const float floor : {std::max(cut.floor, at_or_above(highest - 8 * temperature)), cut.floor}) {
      collect(row, floor, keys);
      if (const auto last = cut_by_mass(keys, highest, temperature, settings.top_p, whole)) {
        cut.last = *last;
        break;
      }
    }
  }
  if (cut.last != std::numeric_limits<std::uint64_t>::max()) cut.floor = std::max(cut.floor, value_of(cut.last));
  return cut;
}

std::int32_t argmax(const Row& row) {
  const auto maxima = row.maxima();
  const std::int64_t b = std::find(maxima.begin(), maxima.end(), row.highest()) - maxima.begin();
  const float* values = row.block(b);
  return static_cast<std::int32_t>(b * kBlock + (std::find(values, values + kBlock, row.highest()) - values));
}

// A word below which the noise is surely under `noise`: a table of exp(-exp(-noise)) in steps, rounded down.
class Thresholds {
 public:
  Thresholds() {
    for (int i = 0; i < kSteps; ++i) {
      const double word = std::exp(-std::exp(-(kFirst + static_cast<double>(i) / kPerUnit))) * 0x1p32 - 4.0;
      words_[static_cast<std::size_t>(i)] = static_cast<std::uint32_t>(std::max(word, 0.0));
    }
  }
  std::uint32_t operator()(double noise) const {
    const double step = (noise - kFirst) * kPerUnit;
    return step > 0 ? words_[static_cast<std::size_t>(std::min(step, kSteps - 1.0))] : 0;
  }

 private:
  static constexpr double kFirst = -4;
  static constexpr int kPerUnit = 32, kSteps = 27 * kPerUnit;
  std::array<std::uint32_t, kSteps> words_;
};

// The words of all tokens at one place, made block by block when they are first asked for. This thread's latest place is
// kept: one buffer stays in the caches.
class Noise {
 public:
  static Noise& at(const Place& place, std::int64_t blocks) {
    thread_local Noise latest;
    if (!latest.is(place) || latest.blocks_ < blocks) latest.reset(place, blocks);
    return latest;
  }

  const std::uint32_t* block(std::int64_t b) {
    std::uint32_t* words = words_.data() + b * kBlock;
    std::uint64_t& known = known_[static_cast<std::size_t>(b / 64)];
    if (const std::uint64_t bit = std::uint64_t{1} << (b % 64); !(known & bit)) {
      kernels().words(place_, static_cast<std::uint32_t>(b), words);
      known |= bit;
    }
    return words;
  }

 private:
  bool is(const Place& place) const {
    return place_.seed == place.seed && place_.position == place.position && place_.stream == place.stream;
  }
  void reset(const Place& place, std::int64_t blocks) {
    place_ = place;
    blocks_ = blocks;
    words_.resize(static_cast<std::size_t>(std::max(blocks * kBlock, std::ssize(words_))));
    known_.assign(static_cast<std::size_t>((blocks + 63) / 64), 0);
  }

  Place place_{};
  std::int64_t blocks_ = 0;
  std::vector<std::uint32_t> words_;
  std::vector<std::uint64_t> known_;
};

struct Runner {
  double score;
  std::int32_t token;
  bool operator<(const Runner& other) const {  // comes in earlier; the worst is on top of a heap
    return score != other.score ? score > other.score : token < other.token;
  }
};

// The k best of value + T * noise among the kept. The winners do not depend on what is left out: only tokens that
// cannot be among them are.
class Race {
 public:
  Race(const Row& row, const Cut& cut, double temperature, const Place& place, std::int64_t k)
      : row_(row), cut_(cut), temperature_(temperature), noise_(Noise::at(place, row.blocks())), k_(static_cast<std::size_t>(k)) {
    const auto maxima = row.maxima();
    const std::int64_t best = std::find(maxima.begin(), maxima.end(), row.highest()) - maxima.begin();
    visit(best);  // a high bar from the start
    for (std::int64_t b = 0; b < row.blocks(); ++b)
      if (b != best) visit(b);
  }

  std::vector<Runner>& winners() { return winners_; }

 private:
  void visit(std::int64_t b) {
    static const Thresholds thresholds;
    const float maximum = row_.maxima()[static_cast<std::size_t>(b)];
    if (maximum < cut_.floor) return;
    const double needed = noise_needed(maximum);
    if (needed > kHighestNoise) return;
    const std::uint32_t* words = noise_.block(b);
    const float* values = row_.block(b);
    for (std::uint64_t mask = kernels().words_at_least(words, thresholds(needed)); mask; mask &= mask - 1) {
      const int bit = std::countr_zero(mask);
      const int at = 4 * (bit % kGroups) + bit / kGroups;
      const float value = values[at];
      const std::int64_t token = b * kBlock + at;
      if (!(value >= cut_.floor) || key(value, token) > cut_.last) continue;
      if (const double own = noise_needed(value); own > kHighestNoise || words[bit] < thresholds(own)) continue;
      enter({value + temperature_ * gumbel(words[bit]), static_cast<std::int32_t>(token)});
    }
  }

  // A bound that the noise of a token of this value must reach, or it surely loses.
  double noise_needed(float value) const {
    if (!full_) return -4;
    const double slack = 1e-14 * (std::abs(bar_) + std::abs(value));  // over what value + T * noise may round to
    return (bar_ - value - slack) / temperature_ - 1e-9;
  }

  void enter(Runner runner) {
    if (full_) {
      if (!(runner < winners_.front())) return;
      std::pop_heap(winners_.begin(), winners_.end());
      winners_.back() = runner;
    } else {
      winners_.push_back(runner);
    }
    std::push_heap(winners_.begin(), winners_.end());
    full_ = winners_.size() == k_;
    if (full_) bar_ = winners_.front().score;
  }

  const Row& row_;
  const Cut& cut_;
  const double temperature_;
  Noise& noise_;
  const std::size_t k_;
  std::vector<Runner> winners_;
  double bar_ = 0;  // the score to beat, once there are k
  bool full_ = false;
};

Top best(const Row& row, std::int64_t k) {
  Top out;
  if (k <= 0) return out;
  std::vector<std::uint64_t>& keys = workspace().keys;
  select(row, k, kLowest, keys);
  std::sort(keys.begin(), keys.end());
  const double normaliser = fixed::log(kernels().exps(row.data(), row.size(), row.highest(), 1.0, nullptr));
  for (const std::uint64_t k : keys) {
    out.tokens.push_back(token_of(k));
    out.logprobs.push_back(static_cast<float>((double{row[token_of(k)]} - row.highest()) - normaliser));
  }
  return out;
}

}  // namespace

NativeShaping::NativeShaping(ShapingSettings settings) : settings_(std::move(settings)) {
  std::sort(settings_.bias.begin(), settings_.bias.end());
}

bool NativeShaping::penalised() const {
  return settings_.repetition_penalty != 1 || settings_.frequency_penalty != 0 || settings_.presence_penalty != 0;
}

void NativeShaping::append(std::int32_t token) {
  const auto [at, fresh] = index_.try_emplace(token, entries_.size());
  if (fresh) entries_.push_back({token, 0});
  if (known_++ >= settings_.prompt_length) ++entries_[at->second].written;
}

void NativeShaping::forget() {
  entries_.clear();
  index_.clear();
  known_ = 0;
}

bool NativeShaping::adjusts(const Moment& moment) const {
  return moment.masked || !settings_.bias.empty() || penalised() ||
         (moment.position - settings_.prompt_length < settings_.min_tokens && !settings_.ends.empty());
}

double NativeShaping::bias_of(std::int32_t token) const {
  const auto at = std::lower_bound(settings_.bias.begin(), settings_.bias.end(), token,
                                   [](const auto& entry, std::int32_t wanted) { return entry.first < wanted; });
  return at != settings_.bias.end() && at->first == token ? at->second : 0.0;
}

float NativeShaping::penalised_logit(double logit, std::int32_t token, std::int64_t written) const {
  double value = settings_.bias.empty() ? logit : logit + bias_of(token);
  value = value > 0 ? value / settings_.repetition_penalty : value * settings_.repetition_penalty;
  if (written) {
    value -= settings_.frequency_penalty * static_cast<double>(written);
    value -= settings_.presence_penalty;
  }
  return static_cast<float>(value);
}

void NativeShaping::adjust(std::span<const float> row, const Moment& moment, float* out) const {
  const auto size = static_cast<std::int64_t>(row.size());
  const auto inside = [size](std::int32_t token) { return token >= 0 && token < size; };
  std::copy(row.begin(), row.end(), out);
  for (const auto& [token, bias] : settings_.bias)
    if (inside(token)) out[token] = static_cast<float>(row[static_cast<std::size_t>(token)] + bias);
  if (penalised()) {
    for (const Entry& entry : entries_)
      if (inside(entry.token))
        out[entry.token] = penalised_logit(row[static_cast<std::size_t>(entry.token)], entry.token, entry.written);
    for (const std::int32_t token : moment.path) {
      if (!inside(token)) continue;
      const auto at = index_.find(token);
      const std::int64_t written = (at == index_.end() ? 0 : entries_[at->second].written) +
                                   std::count(moment.path.begin(), moment.path.end(), token);
      out[token] = penalised_logit(row[static_cast<std::size_t>(token)], token, written);
    }
  }
  const bool early = moment.position - settings_.prompt_length < settings_.min_tokens;
  if (early)
    for (const std::int32_t token : settings_.ends)
      if (inside(token)) out[token] = kImpossible;
  if (moment.masked)
    for (std::int64_t first = 0; first < size; first += 32) {
      const auto word = static_cast<std::size_t>(first / 32);
      const std::uint32_t allowed = word < moment.mask.size() ? moment.mask[word] : 0;
      if (allowed == 0xFFFFFFFF) continue;
      for (std::int64_t token = first; token < std::min(first + 32, size); ++token)
        if (!(allowed >> (token - first) & 1)) out[token] = kImpossible;
    }
}

namespace {

void check_adjusted(const Row& row, const ShapingSettings& settings, const Moment& moment) {
  if (row.broken())
    for (std::int64_t token = 0; token < row.size(); ++token)
      if (row[token] == -kImpossible)
        throw DrawError("the logit of token " + std::to_string(token) + " for position " +
                        std::to_string(moment.position) + " is infinite after bias and penalties: repetition_penalty " +
                        shortest(settings.repetition_penalty) + " is too small");
  if (!row.empty()) return;
  const bool ends = moment.position - settings.prompt_length < settings.min_tokens && !settings.ends.empty();
  std::string causes = moment.masked ? "the mask (grammar)" : "";
  if (ends) causes += std::string(causes.empty() ? "" : " and ") + "min_tokens (it keeps out the ends of text)";
  throw DrawError("no token is left for position " + std::to_string(moment.position) + ": kept out by " +
                  (causes.empty() ? "logits of -inf" : causes));
}

}  // namespace

// Calls `body(plain, shaped)`; the two are the same row where nothing is to be adjusted.
template <typename Body>
static auto with_shaped(std::span<const float> values, const Moment& moment, const ShapingSettings& settings,
                        bool adjusts, const auto& adjust, const Body& body) {
  Workspace& space = workspace();
  const Row plain(values, space.maxima);
  check(plain, moment.position);
  if (!adjusts) return body(plain, plain);
  space.adjusted.resize(values.size());
  adjust(space.adjusted.data());
  const Row shaped(space.adjusted, space.adjusted_maxima);
  check_adjusted(shaped, settings, moment);
  return body(plain, shaped);
}

Drawn NativeShaping::draw(std::span<const float> row, const Moment& moment) const {
  return with_shaped(
      row, moment, settings_, adjusts(moment), [&](float* out) { adjust(row, moment, out); },
      [&](const Row& plain, const Row& shaped) {
        Drawn drawn;
        if (settings_.temperature == 0) {
          drawn.token = argmax(shaped);
        } else {
          const Place place{settings_.seed, static_cast<std::uint64_t>(moment.position), stream::target};
          Race race(shaped, find_cut(shaped, settings_), settings_.temperature, place, 1);
          drawn.token = race.winners().front().token;
        }
        if (settings_.logprobs < 0) return drawn;
        const double highest = plain.highest();
        const double normaliser = fixed::log(kernels().exps(plain.data(), plain.size(), highest, 1.0, nullptr));
        const auto logprob = [&](std::int32_t token) { return (plain[token] - highest) - normaliser; };
        drawn.logprob = logprob(drawn.token);
        if (settings_.logprobs > 0) {
          std::vector<std::uint64_t>& keys = workspace().keys;
          select(plain, settings_.logprobs, kLowest, keys);
          std::sort(keys.begin(), keys.end());
          for (const std::uint64_t k : keys) drawn.top.emplace_back(token_of(k), logprob(token_of(k)));
        }
        return drawn;
      });
}

void NativeShaping::law(std::span<const float> row, const Moment& moment, double* out) const {
  with_shaped(
      row, moment, settings_, adjusts(moment), [&](float* adjusted) { adjust(row, moment, adjusted); },
      [&](const Row&, const Row& shaped) {
        const double highest = shaped.highest(), temperature = settings_.temperature;
        const Cut cut = temperature == 0 ? Cut{} : find_cut(shaped, settings_);
        if (temperature != 0 && cut.all()) {
          const double total = kernels().exps(shaped.data(), shaped.size(), highest, temperature, out);
          for (std::int64_t token = 0; token < shaped.size(); ++token) out[token] /= total;
          return;
        }
        std::fill(out, out + shaped.size(), 0.0);
        if (temperature == 0) {
          out[argmax(shaped)] = 1;
          return;
        }
        std::vector<std::uint64_t>& keys = workspace().keys;
        collect(shaped, cut.floor, keys);
        std::erase_if(keys, [&](std::uint64_t k) { return k > cut.last; });
        std::vector<double>& terms = workspace().terms;
        const double total = terms_of(keys, highest, temperature, terms);
        for (std::size_t i = 0; i < keys.size(); ++i) out[token_of(keys[i])] = terms[i] / total;
      });
}

Top NativeShaping::top(std::span<const float> row, std::int64_t k, const Moment& moment) const {
  return with_shaped(
      row, moment, settings_, adjusts(moment), [&](float* out) { adjust(row, moment, out); },
      [&](const Row&, const Row& shaped) {
        const double highest = shaped.highest(), temperature = settings_.temperature;
        if (temperature == 0) return best(shaped, k);
        Top out;
        if (k <= 0) return out;
        const Cut cut = find_cut(shaped, settings_);
        double total = 0;
        if (cut.all()) {
          total = kernels().exps(shaped.data(), shaped.size(), highest, temperature, nullptr);
        } else {
          std::vector<std::uint64_t>& keys = workspace().keys;
          collect(shaped, cut.floor, keys);
          std::erase_if(keys, [&](std::uint64_t key) { return key > cut.last; });
          total = terms_of(keys, highest, temperature, workspace().terms);
        }
        const double normaliser = fixed::log(total);
        const Place place{settings_.seed, static_cast<std::uint64_t>(moment.position), stream::target};
        Race race(shaped, cut, temperature, place, k);
        std::sort(race.winners().begin(), race.winners().end());
        for (const Runner& runner : race.winners()) {
          out.tokens.push_back(runner.token);
          out.logprobs.push_back(
              static_cast<float>((double{shaped[runner.token]} - highest) / temperature - normaliser));
        }
        return out;
      });
}

std::span<const float> DraftRow::wide() const {
  if (known.empty()) return logits;
  if (space.empty()) space.assign(static_cast<std::size_t>(vocabulary), kImpossible);
  for (std::size_t i = 0; i < logits.size(); ++i) space[static_cast<std::size_t>(known[i])] = logits[i];
  return space;
}

std::vector<std::pair<std::int32_t, double>> NativeShaping::ranked(const DraftRow& row, std::int64_t k,
                                                                   const Moment& moment) const {
  std::vector<std::pair<std::int32_t, double>> out;
  if (settings_.temperature == 0) {
    const bool plain = !adjusts(moment);
    const Top best = plain ? outrider::top(row.logits, k) : top(row.wide(), k, moment);
    const bool own = plain && !row.known.empty();  // numbered as the draft does
    for (std::size_t i = 0; i < best.tokens.size(); ++i) {
      const std::int32_t token = best.tokens[i];
      out.emplace_back(own ? row.known[static_cast<std::size_t>(token)] : token, best.logprobs[i]);
    }
    return out;
  }
  if (k <= 0) return out;
  const Near near = this->near(row, moment);
  const auto size = std::ssize(near.tokens);
  std::vector<double>& noise = workspace().terms;
  noise.resize(near.tokens.size());
  kernels().gumbels_of({settings_.seed, static_cast<std::uint64_t>(moment.position), stream::target}, near.tokens.data(),
                       size, noise.data());
  std::vector<Runner> runners;
  runners.reserve(near.tokens.size());
  for (std::size_t i = 0; i < near.tokens.size(); ++i)
    runners.push_back({near.values[i] + settings_.temperature * noise[i], near.tokens[i]});
  const auto end = runners.begin() + std::min(size, std::max(k, kRunners));
  std::partial_sort(runners.begin(), end, runners.end());
  double total = 0;
  for (auto runner = runners.begin(); runner != end; ++runner) total += std::exp(runner->score - runners.front().score);
  for (auto runner = runners.begin(); runner != end && std::ssize(out) < k; ++runner)
    out.emplace_back(runner->token, runner->score - runners.front().score - std::log(total));
  return out;
}

Near NativeShaping::near(const DraftRow& row, const Moment& moment) const {
  if (!row.known.empty() && row.ascending && !adjusts(moment)) {
    try {
      return near(row.logits, row.known, moment);
    } catch (const DrawError&) {  // told once more in the target's tokens
    }
  }
  return near(row.wide(), {}, moment);
}

Near NativeShaping::near(std::span<const float> logits, std::span<const std::int32_t> known, const Moment& moment) const {
  return with_shaped(
      logits, moment, settings_, adjusts(moment), [&](float* out) { adjust(logits, moment, out); },
      [&](const Row&, const Row& shaped) {
        Near near{{}, {}, shaped.highest()};
        Cut cut = settings_.temperature == 0 ? Cut{} : find_cut(shaped, settings_);
        cut.floor = std::max(cut.floor, at_or_above(near.highest - kFar * settings_.temperature));
        std::vector<std::uint64_t>& keys = workspace().keys;
        collect(shaped, cut.floor, keys);
        for (const std::uint64_t key : keys) {
          if (key > cut.last) continue;
          const std::int32_t token = token_of(key);
          near.tokens.push_back(known.empty() ? token : known[static_cast<std::size_t>(token)]);
          near.values.push_back(value_of(key));
        }
        return near;
      });
}

DraftLaw NativeShaping::draft_law(const DraftRow& row, const Moment& moment) const {
  Near near = this->near(row, moment);
  if (settings_.temperature == 0) {
    const auto first = std::max_element(near.values.begin(), near.values.end()) - near.values.begin();
    return {{near.tokens[static_cast<std::size_t>(first)]}, {1.0}};
  }
  DraftLaw law{std::move(near.tokens), std::vector<double>(near.values.size())};
  const double total = kernels().exps(near.values.data(), std::ssize(near.values), near.highest, settings_.temperature, law.q.data());
  for (double& q : law.q) q /= total;
  return law;
}

Top top(std::span<const float> row, std::int64_t k) {
  const Row plain(row, workspace().maxima);
  check(plain, -1);
  return best(plain, k);
}

void log_softmax(std::span<const float> row, std::span<const std::int64_t> tokens, double* out) {
  const Row plain(row, workspace().maxima);
  check(plain, -1);
  const double normaliser = fixed::log(kernels().exps(plain.data(), plain.size(), plain.highest(), 1.0, nullptr));
  for (std::size_t i = 0; i < tokens.size(); ++i)
    out[i] = (double{plain[tokens[i]]} - plain.highest()) - normaliser;
}

namespace {

// The places of the `count` largest sums of log q and noise, largest first: a draw without replacement (Kool et al. 2019).
std::vector<std::int32_t> first_of(std::span<const double> q, std::int64_t count, std::vector<double>& sums) {
  kernels().add_logs(q.data(), std::ssize(q), sums.data());
  std::vector<Runner> best;
  for (std::size_t at = 0; at < q.size() && count > 0; ++at) {
    const Runner runner{sums[at], static_cast<std::int32_t>(at)};
    const bool full = std::ssize(best) == count;
    if (sums[at] == -std::numeric_limits<double>::infinity() || (full && !(runner < best.front()))) continue;
    if (full) {
      std::pop_heap(best.begin(), best.end());
      best.pop_back();
    }
    best.push_back(runner);
    std::push_heap(best.begin(), best.end());
  }
  std::sort(best.begin(), best.end());
  std::vector<std::int32_t> places;
  for (const Runner& runner : best) places.push_back(runner.token);
  return places;
}

}  // namespace

std::vector<std::int32_t> draw_children(std::span<const double> q, std::int64_t count, const Place& place) {
  std::vector<double>& sums = workspace().terms;
  sums.resize(q.size());
  gumbels(place, sums);
  return first_of(q, count, sums);
}

std::vector<std::int32_t> draw_children(const DraftLaw& law, std::int64_t count, const Place& place) {
  std::vector<double>& sums = workspace().terms;
  sums.resize(law.q.size());
  kernels().gumbels_of(place, law.tokens.data(), std::ssize(law.tokens), sums.data());
  return first_of(law.q, count, sums);
}

void gumbels(const Place& place, std::span<double> out) {
  kernels().gumbels(place, static_cast<std::int64_t>(out.size()), out.data());
}

}  // namespace outrider
