// The Python module `outrider._native`. Long work runs without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "batch.h"
#include "bind_tokens.h"
#include "decoder.h"
#include "growth.h"
#include "linear/isa.h"
#include "pool.h"

namespace nb = nanobind;

void bind_linear(nb::module_& module);

namespace outrider {

void bind_machine(nb::module_& module);
void bind_sampling(nb::module_& module);

namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Integers of a list, tuple, array or any other sequence, behind those that `out` holds. Returns how many.
std::size_t append_integers(nb::handle sequence, std::vector<std::int32_t>& out) {
  if (sequence.is_none()) return 0;
  const auto fast = nb::steal(PySequence_Fast(sequence.ptr(), "a feed takes sequences of integers"));
  if (!fast.is_valid()) throw nb::python_error();
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(fast.ptr());
  for (Py_ssize_t i = 0; i < count; ++i) {
    const long value = PyLong_AsLong(PySequence_Fast_GET_ITEM(fast.ptr(), i));
    if (value == -1 && PyErr_Occurred()) throw nb::python_error();
    out.push_back(value < INT32_MIN || value > INT32_MAX ? -2 : static_cast<std::int32_t>(value));  // -2: no token, no page
  }
  return static_cast<std::size_t>(count);
}

Shape shape_of(const nb::dict& shape) {
  const auto number = [&shape](const char* name) { return nb::cast<int>(shape[name]); };
  return {number("vocabulary"), number("hidden"),       number("layers"),
          number("heads"),      number("kv_heads"),     number("head_dim"),
          number("intermediate"), nb::cast<float>(shape["norm_eps"]), number("outputs")};
}

Fusion fusion_of(const nb::dict& fusion) {
  Fusion reads;
  if (!fusion.size()) return reads;
  reads.version = nb::cast<int>(fusion["version"]);
  reads.states = nb::cast<int>(fusion["states"]);
  reads.normed_residual = nb::cast<bool>(fusion["norm_before_residual"]);
  return reads;
}

// A decoder together with what Python must keep alive for it.
class Runner {
 public:
  Runner(nb::dict shape, nb::dict fusion, nb::dict tensors, nb::dict formats, Doubles frequencies, double rope_factor,
         const std::string& kv_dtype, std::int64_t page_count, int page_size, int threads, nb::handle tokens,
         const Runner* head)
      : page_size_(page_size), page_count_(page_count) {
    if (page_size < 1 || page_count < 1) throw std::invalid_argument("a cache without pages");
    const Shape dimensions = shape_of(shape);
    Fusion reads = fusion_of(fusion);
    append_integers(tokens, tokens_);
    if (!tokens_.empty() && static_cast<int>(tokens_.size()) != dimensions.outputs) {
      throw std::invalid_argument(std::to_string(tokens_.size()) + " target tokens for a head of " +
                                  std::to_string(dimensions.outputs) + " rows");
    }
    if (head && head->decoder_->head().rows() != dimensions.outputs) {
      throw std::invalid_argument("the shared head has other rows than the shape says");
    }
    Tensors sources;
    for (auto [name, value] : tensors) {
      const auto [kind, raw, columns] = nb::cast<std::tuple<std::string, Bytes, std::int64_t>>(value);
      sources[nb::cast<std::string>(name)] = source(nb::cast<std::string>(name), kind, raw, columns);
    }
    if (!tensors.contains("embed")) throw std::invalid_argument("tensor embed is missing");
    embed_ = tensors["embed"];
    Formats chosen;
    for (auto [name, value] : formats) chosen[nb::cast<std::string>(name)] = format_of(nb::cast<std::string>(value));
    const KvFormat kv_format = kv_format_of(kv_dtype);
    Rope rope(std::vector<double>(frequencies.data(), frequencies.data() + frequencies.size()), rope_factor);

    const nb::gil_scoped_release released;
    auto pool = Pool::of(threads);
    decoder_ = std::make_unique<Decoder>(
        pack_weights(dimensions, std::move(reads), sources, chosen, threads, head ? &head->decoder_->head() : nullptr),
        std::move(rope), kv_format, page_count * page_size, std::move(pool));
  }

  // feeds: (committed rows, pages, pending tokens, tree tokens or None, tree parents or None)
  nb::tuple forward(nb::list feeds, nb::handle wants, std::vector<int> through) {
    std::unique_ptr<Batch> batch = take_batch();
    for (nb::handle item : feeds) {
      numbers_.clear();
      const auto feed = nb::cast<nb::tuple>(item);
      if (feed.size() != 5) throw std::invalid_argument("a feed is a tuple of five");
      std::size_t sizes[4];
      for (int part = 0; part < 4; ++part) sizes[part] = append_integers(feed[part + 1], numbers_);
      std::span<const std::int32_t> parts[4];
      const std::int32_t* at = numbers_.data();
      for (int part = 0; part < 4; ++part) {
        parts[part] = {at, sizes[part]};
        at += sizes[part];
      }
      batch->add({nb::cast<std::int64_t>(feed[0]), parts[0], parts[1], parts[2], parts[3]});
    }
    batch->close();
    std::vector<std::int32_t> layers;
    append_integers(wants, layers);
    Scores scores;
    {
      const nb::gil_scoped_release released;
      scores = decoder_->forward(*batch, layers, {.layers = through});
    }
    const std::size_t rows = batch->rows();
    spare_.push_back(std::move(batch));
    return nb::make_tuple(view<2>(scores.logits, {static_cast<std::size_t>(scores.rows),
                                                  static_cast<std::size_t>(decoder_->shape().outputs)},
                                  {scores.stride, 1}),
                          scores.hidden ? hidden(scores, rows, layers.size()) : nb::none());
  }

  // plan: (width, least, reach, layers, vocabulary, gain); sprouts: (rows, pages, pending, states or None, shaping, position,
  // history, mask or None, guesses, depth, rejection). Each tree: (tokens, parents, chances, {parent: law})
  nb::list grow(nb::tuple plan, nb::list sprouts) {
    if (plan.size() != 6) throw std::invalid_argument("a plan is a tuple of six");
    const Plan wanted{.width = nb::cast<int>(plan[0]),
                      .least = nb::cast<double>(plan[1]),
                      .reach = nb::cast<double>(plan[2]),
                      .gain = nb::cast<double>(plan[5]),
                      .layers = nb::cast<std::vector<int>>(plan[3]),
                      .tokens = tokens_,
                      .ascending = std::ranges::is_sorted(tokens_),
                      .vocabulary = nb::cast<int>(plan[4])};
    if (wanted.width < 1 || wanted.vocabulary < 1) throw std::invalid_argument("a plan without width or vocabulary");
    for (const std::int32_t token : tokens_) {
      if (token < 0 || token >= wanted.vocabulary) throw std::invalid_argument("a draft token that the target lacks");
    }
    std::vector<std::array<std::vector<std::int32_t>, 2>> numbers(nb::len(sprouts));
    std::vector<std::pair<Floats, Mask>> arrays(numbers.size());
    std::vector<Sprout> given(numbers.size());
    for (std::size_t i = 0; i < given.size(); ++i) read_sprout(nb::cast<nb::tuple>(sprouts[i]), numbers[i], arrays[i], given[i]);
    std::unique_ptr<Batch> batch = take_batch();
    std::vector<Grown> grown;
    {
      const nb::gil_scoped_release released;
      grown = outrider::grow(*decoder_, *batch, wanted, given);
    }
    spare_.push_back(std::move(batch));
    nb::list trees;
    for (Grown& tree : grown) {
      nb::dict laws;
      for (auto& [parent, law] : tree.laws) laws[nb::int_(parent)] = array_of(std::move(law));
      trees.append(nb::make_tuple(tuple_of(tree.tokens), tuple_of(tree.parents), tuple_of(tree.chances), laws));
    }
    return trees;
  }

  void move(const std::vector<std::int64_t>& source, const std::vector<std::int64_t>& target) {
    decoder_->cache().move(source, target);
  }

  nb::dict memory() const {
    nb::dict bytes;
    bytes["weights"] = decoder_->weight_bytes();
    bytes["cache"] = decoder_->cache().bytes();
    bytes["workspace"] = decoder_->workspace_bytes();
    return bytes;
  }

  // Bytes of one cache row in all layers.
  std::size_t row_bytes() const { return decoder_->cache().row_bytes(); }

 private:
  void read_sprout(const nb::tuple& item, std::array<std::vector<std::int32_t>, 2>& numbers,
                   std::pair<Floats, Mask>& arrays, Sprout& sprout) const {
    if (item.size() != 11) throw std::invalid_argument("a sprout is a tuple of eleven");
    sprout.length = nb::cast<std::int64_t>(item[0]);
    append_integers(item[1], numbers[0]);
    append_integers(item[2], numbers[1]);
    sprout.pages = numbers[0];
    sprout.pending = numbers[1];
    if (sprout.pending.empty()) throw std::invalid_argument("a sprout without pending tokens");
    if (const int width = decoder_->fusion().states) {
      arrays.first = nb::cast<Floats>(item[3]);
      if (arrays.first.shape(0) != sprout.pending.size() || static_cast<int>(arrays.first.shape(1)) != width) {
        throw std::invalid_argument("states [" + std::to_string(arrays.first.shape(0)) + ", " +
                                    std::to_string(arrays.first.shape(1)) + "] for " +
                                    std::to_string(sprout.pending.size()) + " tokens, each of " + std::to_string(width));
      }
      sprout.states = arrays.first.data();
    }
    auto& shaping = nb::cast<NativeShaping&>(item[4]);
    catch_up(shaping, item[6]);
    sprout.shaping = &shaping;
    sprout.moment.position = nb::cast<std::int64_t>(item[5]);
    if (!nb::handle(item[7]).is_none()) {
      arrays.second = nb::cast<Mask>(item[7]);
      sprout.moment.mask = {arrays.second.data(), arrays.second.size()};
      sprout.moment.masked = true;
    }
    sprout.guesses = nb::cast<int>(item[8]);
    sprout.depth = nb::cast<int>(item[9]);
    sprout.rejection = nb::cast<bool>(item[10]);
  }

  template <class Number>
  static nb::tuple tuple_of(const std::vector<Number>& numbers) {
    nb::list items;
    for (const Number number : numbers) items.append(number);
    return nb::tuple(items);
  }

  static nb::object array_of(std::vector<double>&& values) {
    auto* kept = new std::vector<double>(std::move(values));
    nb::capsule owner(kept, [](void* memory) noexcept { delete static_cast<std::vector<double>*>(memory); });
    return nb::cast(nb::ndarray<nb::numpy, double, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
  }

  static Source source(const std::string& name, const std::string& kind_name, const Bytes& raw, std::int64_t columns) {
    const Kind kind = kind_of(kind_name);
    const std::int64_t bytes = outrider::row_bytes(kind, columns);
    if (static_cast<std::int64_t>(raw.shape(1)) != bytes || (raw.shape(1) > 1 && raw.stride(1) != 1)) {
      throw std::invalid_argument("tensor " + name + ": rows of " + std::to_string(raw.shape(1)) + " bytes, not the " +
                                  std::to_string(bytes) + " of " + std::to_string(columns) + " columns in " + kind_name);
    }
    const std::int64_t stride = raw.shape(0) > 1 ? raw.stride(0) : bytes;
    if (stride < bytes) throw std::invalid_argument("tensor " + name + ": rows overlap");
    return {kind, raw.data(), static_cast<std::int64_t>(raw.shape(0)), columns, stride};
  }

  // A batch that no other thread's forward uses. Its vectors keep their room from call to call.
  std::unique_ptr<Batch> take_batch() {
    if (spare_.empty()) return std::make_unique<Batch>(page_size_, page_count_, decoder_->shape().vocabulary);
    auto batch = std::move(spare_.back());
    spare_.pop_back();
    batch->clear();
    return batch;
  }

  template <std::size_t N>
  static nb::object view(const std::shared_ptr<Buffer>& buffer, std::array<std::size_t, N> shape,
                         std::array<std::int64_t, N> strides) {
    nb::capsule owner(new std::shared_ptr<Buffer>(buffer),
                      [](void* held) noexcept { delete static_cast<std::shared_ptr<Buffer>*>(held); });
    return nb::cast(nb::ndarray<nb::numpy, float>(buffer->data, N, shape.data(), owner, strides.data()));
  }

  nb::object hidden(const Scores& scores, std::size_t rows, std::size_t wanted) const {
    const auto size = static_cast<std::size_t>(decoder_->shape().hidden);
    return view<3>(scores.hidden, {rows, wanted, size},
                   {static_cast<std::int64_t>(wanted * size), static_cast<std::int64_t>(size), 1});
  }

  const int page_size_;
  const std::int64_t page_count_;
  std::unique_ptr<Decoder> decoder_;
  nb::object embed_;
  std::vector<std::int32_t> tokens_;  // of the target, by row of the head; empty: the same
  std::vector<std::unique_ptr<Batch>> spare_;  // guarded by the GIL, as is numbers_
  std::vector<std::int32_t> numbers_;
};

}  // namespace
}  // namespace outrider

NB_MODULE(_native, module) {
  using outrider::Runner;
  module.doc() = "Outrider's native core: the forward of a decoder, and draws from its logits.";
  module.def("isa", [] { return outrider::name(outrider::isa()); },
             "The instruction set in use: avx512, avxvnni, avx2 or portable. OUTRIDER_ISA overrides it.");
  module.def(
      "cache_bytes",
      [](const std::string& kv_dtype, int layers, int kv_heads, int head_dim, std::int64_t slots) {
        return outrider::KvCache(outrider::kv_format_of(kv_dtype), layers, kv_heads, head_dim, slots).bytes();
      },
      nb::arg("kv_dtype"), nb::arg("layers"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("slots"));
  module.def(
      "workspace_bytes",
      [](const nb::dict& shape, const nb::dict& fusion, int threads) {
        return outrider::Decoder::workspace_bytes(outrider::shape_of(shape), outrider::fusion_of(fusion), threads);
      },
      nb::arg("shape"), nb::arg("fusion"), nb::arg("threads"));
  nb::class_<Runner>(module, "Decoder")
      .def(nb::init<nb::dict, nb::dict, nb::dict, nb::dict, outrider::Doubles, double, const std::string&, std::int64_t,
                    int, int, nb::handle, const Runner*>(),
           nb::kw_only(), nb::arg("shape"), nb::arg("fusion"), nb::arg("tensors"), nb::arg("formats"), nb::arg("frequencies"),
           nb::arg("rope_factor"), nb::arg("kv_dtype"), nb::arg("page_count"), nb::arg("page_size"), nb::arg("threads"),
           nb::arg("tokens").none(), nb::arg("head").none())
      .def("forward", &Runner::forward, nb::arg("feeds"), nb::arg("wants"), nb::arg("layers"))
      .def("grow", &Runner::grow, nb::arg("plan"), nb::arg("sprouts"))
      .def("move", &Runner::move, nb::arg("source"), nb::arg("target"))
      .def("memory", &Runner::memory)
      .def_prop_ro("row_bytes", &Runner::row_bytes);
  bind_linear(module);
  outrider::bind_machine(module);
  outrider::bind_sampling(module);
}
