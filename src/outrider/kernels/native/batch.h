// The rows of a forward, laid flat: feed after feed, pending tokens first, then the nodes of its tree.
//
//   rows of a feed:  [0, length) committed | pending, the last one is the tree's root | nodes 1 ... of the tree
//
// Attention wants keys by logical position. Rows in order (pending ones, and nodes of a chain) find them through the
// feed's pages alone; a node whose ancestors are not the rows right before it gets a list of its last keys.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "rows.h"

namespace outrider {

// What the host says about one sequence. Slots of its rows are pages[row / page_size] * page_size + row % page_size.
struct Feed {
  std::int64_t length = 0;                 // committed rows
  std::span<const std::int32_t> pages;
  std::span<const std::int32_t> pending;   // tokens, at least one
  std::span<const std::int32_t> tokens;    // of the tree, tokens[0] == pending.back(); empty = nothing is scored
  std::span<const std::int32_t> parents;   // parents[0] == -1, parents before children
  // Nodes whose rows an earlier forward wrote, the root among them if any: only those behind them are computed. Then
  // `pending` is the root alone, and `length` the rows before it.
  std::int32_t fed = 0;
};

class Batch {
 public:
  Batch(int page_size, std::int64_t page_count, int vocabulary);

  void clear();
  void add(const Feed& feed);  // throws std::invalid_argument and then holds nothing of the feed
  void close();                // after the last add: views are valid from here on

  int page_size() const { return page_size_; }
  int rows() const { return static_cast<int>(tokens.size()); }
  std::int64_t positions() const { return positions_; }  // largest position + 1

  std::vector<std::int32_t> tokens;     // [M]
  std::vector<std::int32_t> positions_of;  // [M]
  std::vector<std::int64_t> slots;      // [M]
  std::vector<std::uint8_t> scored;     // [M]
  std::vector<RowView> views;           // [M]
  std::vector<FeedView> feeds;
  std::vector<std::int32_t> tails;

 private:
  void check(const Feed& feed) const;
  void add_row(std::int32_t token, std::int64_t position, std::int64_t slot, bool scored, RowView view);
  void add_tiles(const Feed& feed, std::int64_t rows);
  std::int32_t slot(const Feed& feed, std::int64_t row) const;

  const int page_size_;
  const std::int64_t page_count_;
  const int vocabulary_;
  std::int64_t positions_ = 0;
  std::vector<std::int32_t> tiles_, pages_, depths_, shared_;
  std::vector<std::size_t> tiles_at_, pages_at_;  // by feed
};

}  // namespace outrider
