// Grows draft trees on a decoder: one call per proposal, one forward per level, and in it only rows that are new.
//
// Under match verification (Li et al. 2024, EAGLE-2, section 4): each node of a level gets its likeliest children, the
// best `width` of all the level's children are fed next, and the `guesses` best nodes of all that were found are the
// tree. At T > 0 children are the draft's own draws with the target's noise. Under rejection how many
// children a node gets is known before they are drawn, and the laws come along. runtime/growth.py does the same over any runner.
//
// Letters: D hidden size, F floats of a target's states at a row, V vocabulary of the target.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "batch.h"
#include "decoder.h"
#include "sampling.h"

namespace outrider {

struct Plan {
  int width = 1;             // children of a node, and nodes of a level that are fed
  double least = 0;          // a node with less confidence than this is not kept
  double reach = 0;          // a level is grown only if the nodes it grows from are reached with this chance, together
  double gain = 0.1;         // under rejection: a child is drawn if it comes to stand with this chance
  std::vector<int> layers;   // of the decoder; empty: all
  std::span<const std::int32_t> tokens;  // of the target, by row of the head; empty: the same
  bool ascending = false;                // `tokens` ascend
  int vocabulary = 0;        // V: rows of the head from here on are padding
};

// One sequence. Its cache has room for the pending rows and `width` nodes per level behind them.
struct Sprout {
  std::int64_t length = 0;                // rows that are in the cache
  std::span<const std::int32_t> pages;
  std::span<const std::int32_t> pending;  // tokens, the last one is the root
  const float* states = nullptr;          // [pending, F] for an EAGLE head
  const NativeShaping* shaping = nullptr;
  Moment moment;                          // of the root's children, without a path
  int guesses = 0, depth = 0;             // at most; without guesses the rows are fed and nothing is grown
  bool rejection = false;
};

struct Grown {
  std::vector<std::int32_t> tokens, parents;  // tokens[0] is the root, parents before children
  std::vector<float> chances;                  // chance that the node is reached and accepted, 1 for the root
  std::vector<std::pair<int, std::vector<double>>> laws;  // [V] of a parent, under rejection
};

// Throws std::invalid_argument for rows that were not reserved. Broken logits of a draft end its own tree only.
std::vector<Grown> grow(Decoder& decoder, Batch& batch, const Plan& plan, std::span<const Sprout> sprouts);

}  // namespace outrider
