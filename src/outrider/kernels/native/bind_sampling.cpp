// Python's view of sampling.h; outrider/runtime/native_sampling.py is the one caller.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "bind_tokens.h"
#include "noise.h"
#include "sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace outrider {
namespace {

using RowArray = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RowsArray = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using KnownArray = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MaskArray = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const float> view(const RowArray& row) {
  if (row.size() == 0) throw nb::value_error("a row without logits");
  return {row.data(), row.size()};
}

// The arguments that place a row in its text, kept alive for the call.
class Arguments {
 public:
  Arguments(NativeShaping& shaping, std::int64_t position, nb::handle path, nb::handle tokens, nb::handle mask) {
    moment_.position = position;
    const Sequence guessed(path);
    path_.reserve(static_cast<std::size_t>(guessed.size()));
    for (std::int64_t i = 0; i < guessed.size(); ++i) path_.push_back(guessed[i]);
    moment_.path = path_;
    catch_up(shaping, tokens);
    if (!mask.is_none()) {
      mask_ = nb::cast<MaskArray>(mask);
      moment_.mask = {mask_.data(), mask_.size()};
      moment_.masked = true;
    }
  }
  const Moment& moment() const { return moment_; }

 private:
  std::vector<std::int32_t> path_;
  MaskArray mask_;
  Moment moment_;
};

template <typename Value, typename... Sizes>
auto array_of(std::vector<Value>&& values, Sizes... sizes) {
  auto* kept = new std::vector<Value>(std::move(values));
  nb::capsule owner(kept, [](void* memory) noexcept { delete static_cast<std::vector<Value>*>(memory); });
  return nb::ndarray<nb::numpy, Value, nb::ndim<sizeof...(Sizes)>>(kept->data(), {static_cast<std::size_t>(sizes)...},
                                                                  owner);
}

nb::object tuple_of(const std::vector<std::pair<std::int32_t, double>>& pairs) {
  nb::list items;
  for (const auto& [token, logprob] : pairs) items.append(nb::make_tuple(token, logprob));
  return nb::tuple(items);
}

nb::object pair_of(Top&& top) {
  const std::size_t size = top.tokens.size();
  return nb::make_tuple(array_of(std::move(top.tokens), size), array_of(std::move(top.logprobs), size));
}

}  // namespace

void bind_sampling(nb::module_& module) {
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const DrawError& broken) {
      PyErr_SetString(nb::module_::import_("outrider.core.sampling").attr("DrawError").ptr(), broken.what());
    }
  });

  nb::class_<NativeShaping>(module, "NativeShaping", "The parameters of one sequence, ready for draws.")
      .def(
          "__init__",
          [](NativeShaping* self, double temperature, std::int64_t top_k, double top_p, double min_p,
             double repetition_penalty, double frequency_penalty, double presence_penalty,
             std::vector<std::pair<std::int32_t, double>> bias, std::int64_t min_tokens, std::vector<std::int32_t> ends,
             std::uint64_t seed, std::int64_t prompt_length, int logprobs) {
            new (self) NativeShaping({.temperature = temperature,
                                      .top_p = top_p,
                                      .min_p = min_p,
                                      .top_k = top_k,
                                      .repetition_penalty = repetition_penalty,
                                      .frequency_penalty = frequency_penalty,
                                      .presence_penalty = presence_penalty,
                                      .bias = std::move(bias),
                                      .min_tokens = min_tokens,
                                      .ends = std::move(ends),
                                      .seed = seed,
                                      .prompt_length = prompt_length,
                                      .logprobs = logprobs});
          },
          nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "repetition_penalty"_a,
          "frequency_penalty"_a, "presence_penalty"_a, "bias"_a, "min_tokens"_a, "ends"_a, "seed"_a, "prompt_length"_a,
          "logprobs"_a)
      .def(
          "draw",
          [](NativeShaping& self, const RowArray& row, std::int64_t position, nb::handle path, nb::handle tokens,
             nb::handle mask) {
            const Arguments arguments(self, position, path, tokens, mask);
            const Drawn drawn = self.draw(view(row), arguments.moment());
            const nb::object logprob = self.settings().logprobs < 0 ? nb::none() : nb::object(nb::float_(drawn.logprob));
            return nb::make_tuple(drawn.token, logprob, tuple_of(drawn.top));
          },
          "row"_a, "position"_a, "path"_a, "tokens"_a, "mask"_a.none())
      .def(
          "law",
          [](NativeShaping& self, const RowArray& row, std::int64_t position, nb::handle path, nb::handle tokens,
             nb::handle mask) {
            const Arguments arguments(self, position, path, tokens, mask);
            std::vector<double> p(row.size());
            self.law(view(row), arguments.moment(), p.data());
            return array_of(std::move(p), row.size());
          },
          "row"_a, "position"_a, "path"_a, "tokens"_a, "mask"_a.none())
      .def(
          "top",
          [](NativeShaping& self, const RowArray& row, std::int64_t k, std::int64_t position, nb::handle path,
             nb::handle tokens, nb::handle mask) {
            const Arguments arguments(self, position, path, tokens, mask);
            return pair_of(self.top(view(row), k, arguments.moment()));
          },
          "row"_a, "k"_a, "position"_a, "path"_a, "tokens"_a, "mask"_a.none())
      .def(
          "ranked",
          [](NativeShaping& self, const RowArray& row, const std::optional<KnownArray>& known, std::int64_t vocabulary,
             std::int64_t k, std::int64_t position, nb::handle path, nb::handle tokens, nb::handle mask) {
            const std::span<const std::int32_t> names =
                known ? std::span(known->data(), known->size()) : std::span<const std::int32_t>();
            if (known && (names.size() != row.size() || std::ranges::any_of(names, [&](std::int32_t token) {
                            return token < 0 || token >= vocabulary;
                          })))
              throw nb::value_error("`known` has a token of the vocabulary for each logit");
            const Arguments arguments(self, position, path, tokens, mask);
            std::vector<float> space;
            return tuple_of(self.ranked({view(row), names, vocabulary, space, std::ranges::is_sorted(names)}, k, arguments.moment()));
          },
          "row"_a, "known"_a.none(), "vocabulary"_a, "k"_a, "position"_a, "path"_a, "tokens"_a, "mask"_a.none());

  module.def("top", [](const RowArray& row, std::int64_t k) { return pair_of(top(view(row), k)); }, "row"_a, "k"_a);
  module.def(
      "log_softmax",
      [](const RowArray& row, const std::vector<std::int64_t>& tokens) {
        for (const std::int64_t token : tokens)
          if (token < 0 || static_cast<std::size_t>(token) >= row.size())
            throw nb::index_error("a token outside the row");
        std::vector<double> out(tokens.size());
        log_softmax(view(row), tokens, out.data());
        return array_of(std::move(out), tokens.size());
      },
      "row"_a, "tokens"_a);
  module.def(
      "draw_children",
      [](const nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>& q, std::int64_t count,
         std::uint64_t seed, std::uint64_t position, std::uint32_t stream) {
        nb::list tokens;
        for (const std::int32_t token : draw_children({q.data(), q.size()}, count, {seed, position, stream}))
          tokens.append(token);
        return nb::tuple(tokens);
      },
      "q"_a, "count"_a, "seed"_a, "position"_a, "stream"_a);
  module.def(
      "gumbel",
      [](std::uint64_t seed, std::uint64_t position, std::size_t count, std::uint32_t stream) {
        std::vector<double> out(count);
        gumbels({seed, position, stream}, out);
        return array_of(std::move(out), count);
      },
      "seed"_a, "position"_a, "count"_a, "stream"_a);
}

}  // namespace outrider
