#include "growth.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace outrider {
namespace {

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;  // sets the noise of nodes at one depth apart

struct Node {
  int parent;         // in the order of finding
  std::int32_t token;
  double confidence;  // log, of the whole path
  int depth;
  int fed = -1;       // in the order of feeding
};

struct Child {
  std::int32_t token;
  double confidence;  // log, given its parent
};

// At T > 0 the chance that a token which the draft drew stands: nearer to one than the draft's own for it, because the
// target was taught to the draft. Only the shape of trees hangs on it.
double standing(double q) { return std::sqrt(q); }

// What is asked of one row of logits, by any thread, and the answer.
struct Question {
  std::size_t tree;
  int node;           // whose children are wanted
  int count;          // of children, at most
  double confidence;  // log, of the node
  const float* logits;
  std::vector<std::int32_t> path;
  std::vector<Child> children;
  std::vector<double> law;
};

class Tree {
 public:
  Tree(const Sprout& sprout, const Plan& plan) : sprout_(sprout), plan_(plan) {
    nodes.push_back({-1, sprout.pending.back(), 0.0, 0, 0});
    fed_tokens.push_back(nodes[0].token);
    fed_parents.push_back(-1);
    fed_nodes.push_back(0);
  }

  std::vector<Node> nodes;
  std::vector<std::int32_t> fed_tokens, fed_parents;
  std::vector<int> fed_nodes;
  std::vector<std::pair<int, std::vector<double>>> laws;
  int fresh = 0;     // fed nodes before this level

  // Children that a node of the next level may have.
  int allowed() const { return sprout_.rejection ? std::min(plan_.width, left()) : plan_.width; }

  std::vector<std::int32_t> path(int node) const {
    std::vector<std::int32_t> tokens;
    for (; node > 0; node = nodes[node].parent) tokens.push_back(nodes[node].token);
    std::reverse(tokens.begin(), tokens.end());
    return tokens;
  }

  void add(Question& question) {
    const Node& parent = nodes[question.node];
    const double confidence = parent.confidence;
    const int depth = parent.depth + 1;
    // a prefix of what was drawn one after the other is a draw of fewer; who else drew first decides nothing about it
    const int room = sprout_.rejection ? left() : std::numeric_limits<int>::max();
    if (std::ssize(question.children) > room) question.children.resize(static_cast<std::size_t>(room));
    for (const Child& child : question.children) {
      const double own = confidence + child.confidence;
      if (!sprout_.rejection && own < least()) continue;
      nodes.push_back({question.node, child.token, own, depth});
    }
    if (sprout_.rejection && !question.children.empty()) laws.emplace_back(question.node, std::move(question.law));
  }

  // Feeds the best of the nodes of depth `level`. Returns whether there are any that are worth a forward.
  bool choose(int level) {
    fresh = static_cast<int>(fed_nodes.size());
    if (level >= sprout_.depth) return false;
    std::vector<int> found;
    for (int i = static_cast<int>(nodes.size()) - 1; i > 0 && nodes[i].depth == level; --i) found.push_back(i);
    std::reverse(found.begin(), found.end());
    // under rejection too: what grows behind a guess may hang on it, if only the guess itself stays in the tree
    std::stable_sort(found.begin(), found.end(), [this](int a, int b) { return better(a, b); });
    if (static_cast<int>(found.size()) > plan_.width) found.resize(static_cast<std::size_t>(plan_.width));
    if (!worth(found)) found.clear();
    for (const int node : found) {
      nodes[node].fed = static_cast<int>(fed_nodes.size());
      fed_nodes.push_back(node);
      fed_tokens.push_back(nodes[node].token);
      fed_parents.push_back(nodes[nodes[node].parent].fed);
    }
    return !found.empty();
  }

  Grown grown() {
    std::vector<int> kept(nodes.size() - 1);
    std::iota(kept.begin(), kept.end(), 1);
    if (static_cast<int>(kept.size()) > sprout_.guesses) {
      // a parent is never less likely than its child and comes before it, so the first of this order are a tree
      std::stable_sort(kept.begin(), kept.end(), [this](int a, int b) { return better(a, b); });
      kept.resize(static_cast<std::size_t>(sprout_.guesses));
      std::sort(kept.begin(), kept.end());
    }
    Grown out;
    std::vector<int> place(nodes.size(), -1);
    const auto put = [&](int node) {
      place[node] = static_cast<int>(out.tokens.size());
      out.tokens.push_back(nodes[node].token);
      out.parents.push_back(node ? place[nodes[node].parent] : -1);
      out.chances.push_back(static_cast<float>(std::exp(nodes[node].confidence)));
    };
    put(0);
    for (const int node : kept) put(node);
    for (auto& [node, law] : laws) {
      if (place[node] >= 0) out.laws.emplace_back(place[node], std::move(law));
    }
    return out;
  }

 private:
  int left() const { return sprout_.guesses - (static_cast<int>(nodes.size()) - 1); }
  bool better(int a, int b) const { return nodes[a].confidence > nodes[b].confidence; }
  double least() const { return plan_.least > 0 ? std::log(plan_.least) : -std::numeric_limits<double>::infinity(); }

  // Whether children of `found`, best first, may enter the tree, and are reached often enough to pay for a forward.
  bool worth(const std::vector<int>& found) const {
    if (found.empty() || (sprout_.rejection && left() <= 0)) return false;
    double reached = 0;
    for (const int node : found) reached += std::exp(nodes[node].confidence);
    if (reached < plan_.reach) return false;
    if (sprout_.rejection) return true;
    const double best = nodes[found[0]].confidence;
    const auto ahead = std::count_if(nodes.begin() + 1, nodes.end(), [best](const Node& n) { return n.confidence >= best; });
    return ahead < sprout_.guesses;
  }

  const Sprout& sprout_;
  const Plan& plan_;
};

class Growth {
 public:
  Growth(Decoder& decoder, Batch& batch, const Plan& plan, std::span<const Sprout> sprouts)
      : decoder_(decoder), batch_(batch), plan_(plan), sprouts_(sprouts) {
    const Shape& s = decoder.shape();
    outputs_ = plan.tokens.empty() ? std::min(s.outputs, plan.vocabulary) : s.outputs;
    wide_.resize(static_cast<std::size_t>(decoder.pool().threads()));
    if (decoder.fusion().version) wants_.push_back(s.layers - 1);
  }

  std::vector<Grown> run() {
    trees_.reserve(sprouts_.size());
    for (const Sprout& sprout : sprouts_) trees_.emplace_back(sprout, plan_);
    feed_roots();
    for (int level = 1; !questions_.empty(); ++level) {
      answer();
      feed_level(level);
    }
    std::vector<Grown> out;
    for (Tree& tree : trees_) out.push_back(tree.grown());
    return out;
  }

 private:
  std::int64_t hidden_size() const { return decoder_.shape().hidden; }

  void forward(bool own) {
    batch_.close();
    scores_ = decoder_.forward(batch_, wants_, {inputs_.data(), own, plan_.layers});
  }

  void feed_roots() {
    const std::int64_t width = decoder_.fusion().states;
    std::vector<std::int64_t> roots;  // rows of the forward
    inputs_.clear();
    batch_.clear();
    for (const Sprout& sprout : sprouts_) {
      const std::int32_t root = sprout.pending.back(), none = -1;
      const std::span<const std::int32_t> tokens(&root, sprout.guesses > 0 ? 1 : 0), parents(&none, tokens.size());
      batch_.add({sprout.length, sprout.pages, sprout.pending, tokens, parents});
      if (width) inputs_.insert(inputs_.end(), sprout.states, sprout.states + width * std::ssize(sprout.pending));
      roots.push_back(batch_.rows() - 1);
    }
    forward(false);
    states_.resize(trees_.size());
    std::int64_t scored = 0;
    for (std::size_t i = 0; i < trees_.size(); ++i) {
      if (sprouts_[i].guesses <= 0) continue;
      keep_state(i, roots[i]);
      if (sprouts_[i].depth > 0) ask(i, 0, scored);
      ++scored;
    }
  }

  void feed_level(int level) {
    inputs_.clear();
    batch_.clear();
    questions_.clear();
    std::vector<std::size_t> open;
    for (std::size_t i = 0; i < trees_.size(); ++i) {
      if (sprouts_[i].guesses <= 0 || !trees_[i].choose(level)) continue;
      open.push_back(i);
      const Sprout& sprout = sprouts_[i];
      const Tree& tree = trees_[i];
      batch_.add({sprout.length + std::ssize(sprout.pending) - 1, sprout.pages, sprout.pending.last(1), tree.fed_tokens,
                  tree.fed_parents, tree.fresh});
      if (wants_.empty()) continue;
      for (auto fed = static_cast<std::size_t>(tree.fresh); fed < tree.fed_nodes.size(); ++fed) {
        const float* state = states_[i].data() + tree.fed_parents[fed] * hidden_size();
        inputs_.insert(inputs_.end(), state, state + hidden_size());
      }
    }
    if (open.empty()) return;
    forward(true);
    std::int64_t row = 0;
    for (const std::size_t i : open) {
      for (std::size_t fed = static_cast<std::size_t>(trees_[i].fresh); fed < trees_[i].fed_nodes.size(); ++fed, ++row) {
        keep_state(i, row);
        ask(i, trees_[i].fed_nodes[fed], row);
      }
    }
  }

  // The output of a row, which its children read.
  void keep_state(std::size_t tree, std::int64_t row) {
    if (wants_.empty()) return;
    const float* state = scores_.hidden->data + row * hidden_size();
    states_[tree].insert(states_[tree].end(), state, state + hidden_size());
  }

  void ask(std::size_t tree, int node, std::int64_t scored) {
    const int count = trees_[tree].allowed();
    if (count <= 0) return;
    const float* logits = scores_.logits->data + scored * scores_.stride;
    questions_.push_back({tree, node, count, trees_[tree].nodes[node].confidence, logits, trees_[tree].path(node), {}, {}});
  }

  void answer() {
    Pool& pool = decoder_.pool();
    const auto each = [this](std::size_t i, int thread) {
      try {
        sprouts_[questions_[i].tree].rejection ? sample(questions_[i], thread) : rank(questions_[i], thread);
      } catch (const DrawError&) {  // the draft's own logits are broken: no guess, and no error that plain decoding lacks
        questions_[i].children.clear();
      }
    };
    const int threads = decoder_.threads();
    if (questions_.size() == 1 || threads == 1) {
      for (std::size_t i = 0; i < questions_.size(); ++i) each(i, 0);
    } else {
      pool.run(threads, [&](int thread) {
        const Share mine = share(static_cast<int>(questions_.size()), thread, threads);
        for (int i = mine.begin; i < mine.end; ++i) each(static_cast<std::size_t>(i), thread);
      });
    }
    for (Question& question : questions_) trees_[question.tree].add(question);
  }

  Moment moment(const Question& question) const {
    Moment moment = sprouts_[question.tree].moment;
    moment.path = question.path;
    moment.position += std::ssize(question.path);
    return moment;
  }

  DraftRow row(const Question& question, int thread) {
    return {{question.logits, static_cast<std::size_t>(outputs_)}, plan_.tokens, plan_.vocabulary,
            wide_[static_cast<std::size_t>(thread)], plan_.ascending};
  }

  void rank(Question& question, int thread) {
    const NativeShaping& shaping = *sprouts_[question.tree].shaping;
    for (const auto& [token, sureness] : shaping.ranked(row(question, thread), question.count, moment(question)))
      question.children.push_back({token, sureness});
  }

  // Children drawn one after the other without replacement, as many as may stand often enough. That is decided before
  // they are drawn: by the law, and by the way to the node.
  void sample(Question& question, int thread) {
    const NativeShaping& shaping = *sprouts_[question.tree].shaping;
    const Moment at = moment(question);
    const DraftLaw law = shaping.draft_law(row(question, thread), at);
    double usual = 0;  // the chance that a child stands
    for (const double q : law.q) usual += q * standing(q);
    int count = 0;
    for (double stands = std::exp(question.confidence) * usual; count < question.count && stands >= plan_.gain; ++count)
      stands *= 1 - usual;
    if (!count) return;
    const std::uint64_t seed = shaping.settings().seed ^ (static_cast<std::uint64_t>(question.node) * kGolden);
    const Place place{seed, static_cast<std::uint64_t>(at.position), stream::draft};
    // mass of the law; chance that the earlier ones are refused, over that of the node
    double left = 1, tested = 1;
    for (const std::int32_t drawn : draw_children(law, count, place)) {
      const double q = law.q[static_cast<std::size_t>(drawn)], stands = standing(std::min(1.0, q / left));
      question.children.push_back({law.tokens[static_cast<std::size_t>(drawn)], std::log(tested * stands)});
      left = std::max(left - q, 1e-9);
      tested = std::max(tested * (1 - stands), 1e-9);
    }
    question.law.assign(static_cast<std::size_t>(plan_.vocabulary), 0.0);
    for (std::size_t i = 0; i < law.q.size(); ++i) question.law[static_cast<std::size_t>(law.tokens[i])] = law.q[i];
  }

  Decoder& decoder_;
  Batch& batch_;
  const Plan& plan_;
  const std::span<const Sprout> sprouts_;
  int outputs_ = 0;
  std::vector<int> wants_;
  std::vector<Tree> trees_;
  std::vector<Question> questions_;
  std::vector<float> inputs_;
  std::vector<std::vector<float>> wide_;    // by thread, [V]
  std::vector<std::vector<float>> states_;  // by tree, of its fed nodes
  Scores scores_;
};

}  // namespace

std::vector<Grown> grow(Decoder& decoder, Batch& batch, const Plan& plan, std::span<const Sprout> sprouts) {
  if (sprouts.empty()) return {};
  return Growth(decoder, batch, plan, sprouts).run();
}

}  // namespace outrider
