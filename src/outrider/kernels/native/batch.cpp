#include "batch.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace outrider {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

}  // namespace

Batch::Batch(int page_size, std::int64_t page_count, int vocabulary)
    : page_size_(page_size), page_count_(page_count), vocabulary_(vocabulary) {}

void Batch::clear() {
  tokens.clear();
  positions_of.clear();
  slots.clear();
  scored.clear();
  views.clear();
  feeds.clear();
  tails.clear();
  tiles_.clear();
  pages_.clear();
  tiles_at_.clear();
  pages_at_.clear();
  positions_ = 0;
}

std::int32_t Batch::slot(const Feed& feed, std::int64_t row) const {
  return feed.pages[row / page_size_] * page_size_ + static_cast<std::int32_t>(row % page_size_);
}

void Batch::check(const Feed& feed) const {
  const auto in_vocabulary = [this](std::int32_t token) {
    if (token < 0 || token >= vocabulary_) {
      refuse("token " + std::to_string(token) + " is outside the vocabulary of " + std::to_string(vocabulary_));
    }
  };
  if (feed.pending.empty()) refuse("a feed without pending tokens");
  if (feed.length < 0) refuse("a feed of " + std::to_string(feed.length) + " committed rows");
  const std::int64_t rows = feed.length + static_cast<std::int64_t>(feed.pending.size()) +
                            std::max<std::int64_t>(0, static_cast<std::int64_t>(feed.tokens.size()) - 1);
  const std::int64_t room = static_cast<std::int64_t>(feed.pages.size()) * page_size_;
  if (rows > room) {
    refuse("a feed of " + std::to_string(rows) + " rows into " + std::to_string(feed.pages.size()) + " pages of " +
           std::to_string(page_size_) + ": reserve them before");
  }
  for (const std::int32_t page : feed.pages) {
    if (page < 0 || page >= page_count_) {
      refuse("page " + std::to_string(page) + " of a cache of " + std::to_string(page_count_));
    }
  }
  for (const std::int32_t token : feed.pending) in_vocabulary(token);
  if (feed.tokens.size() != feed.parents.size()) {
    refuse("a tree of " + std::to_string(feed.tokens.size()) + " tokens and " + std::to_string(feed.parents.size()) +
           " parents");
  }
  const auto nodes = static_cast<std::int64_t>(feed.tokens.size());
  if (feed.fed < 0 || (feed.fed > 0 && (feed.fed >= nodes || feed.pending.size() != 1))) {
    refuse(std::to_string(feed.fed) + " of " + std::to_string(nodes) + " nodes were fed before");
  }
  if (feed.tokens.empty()) return;
  if (feed.tokens[0] != feed.pending.back()) {
    refuse("the tree's root is token " + std::to_string(feed.tokens[0]) + ", the last pending one is " +
           std::to_string(feed.pending.back()));
  }
  for (std::size_t node = 1; node < feed.tokens.size(); ++node) {
    in_vocabulary(feed.tokens[node]);
    if (feed.parents[node] < 0 || feed.parents[node] >= static_cast<std::int32_t>(node)) {
      refuse("node " + std::to_string(node) + " has parent " + std::to_string(feed.parents[node]) +
             ": parents come before children");
    }
  }
}

void Batch::add_row(std::int32_t token, std::int64_t position, std::int64_t slot, bool is_scored, RowView view) {
  tokens.push_back(token);
  positions_of.push_back(static_cast<std::int32_t>(position));
  slots.push_back(slot);
  scored.push_back(is_scored);
  views.push_back(view);
  positions_ = std::max(positions_, position + 1);
}

void Batch::add_tiles(const Feed& feed, std::int64_t rows) {
  tiles_at_.push_back(tiles_.size());
  pages_at_.push_back(pages_.size());
  pages_.insert(pages_.end(), feed.pages.begin(), feed.pages.end());
  for (std::int64_t first = 0; first < rows; first += kTileRows) {
    const std::int32_t start = slot(feed, first);
    bool in_order = start % kTileRows == 0;
    if (page_size_ % kTileRows != 0) {
      const std::int64_t end = std::min<std::int64_t>(first + kTileRows, rows);
      for (std::int64_t row = first; in_order && row < end; ++row) in_order = slot(feed, row) == start + (row - first);
    }
    tiles_.push_back(in_order ? start / kTileRows : -1);
  }
}

void Batch::add(const Feed& feed) {
  check(feed);
  const auto index = static_cast<std::int32_t>(tiles_at_.size());
  const auto pending = static_cast<std::int64_t>(feed.pending.size());
  const auto nodes = static_cast<std::int64_t>(feed.tokens.size());
  const std::int64_t root = feed.length + pending - 1;
  add_tiles(feed, root + std::max<std::int64_t>(nodes, 1));

  for (std::int64_t i = 0; i < pending && !feed.fed; ++i) {
    const std::int64_t row = feed.length + i;
    const auto count = static_cast<std::int32_t>(row + 1);
    add_row(feed.pending[i], row, slot(feed, row), nodes > 0 && row == root, {index, count, count, 0});
  }
  depths_.assign(std::max<std::int64_t>(nodes, 1), 0);
  shared_.assign(std::max<std::int64_t>(nodes, 1), 0);
  shared_[0] = static_cast<std::int32_t>(root + 1);
  for (std::int64_t node = 1; node < nodes; ++node) {
    const std::int32_t parent = feed.parents[node];
    depths_[node] = depths_[parent] + 1;
    const auto count = static_cast<std::int32_t>(root + depths_[node] + 1);
    const bool in_order = parent == node - 1 && shared_[parent] == count - 1;
    const std::int32_t shared = shared_[node] = in_order ? count : shared_[parent];
    if (node < feed.fed) continue;
    RowView view{index, count, shared, 0};
    if (!in_order) {
      const std::int32_t start = shared / kTileRows * kTileRows;
      view.tail = static_cast<std::int32_t>(tails.size());
      tails.resize(tails.size() + (count - start));
      std::int32_t* tail = tails.data() + view.tail;
      for (std::int32_t row = start; row < shared; ++row) tail[row - start] = slot(feed, row);
      for (std::int64_t n = node; root + depths_[n] >= shared; n = feed.parents[n]) {
        tail[root + depths_[n] - start] = slot(feed, root + n);
      }
    }
    add_row(feed.tokens[node], root + depths_[node], slot(feed, root + node), true, view);
  }
}

void Batch::close() {
  for (std::size_t feed = 0; feed < tiles_at_.size(); ++feed) {
    feeds.push_back({tiles_.data() + tiles_at_[feed], pages_.data() + pages_at_[feed]});
  }
}

}  // namespace outrider
