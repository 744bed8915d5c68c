// outrider._native.Linear: one linear layer for tests and for heads that live in Python. Decoders use linear.h itself.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "linear/linear.h"
#include "pool.h"

namespace nb = nanobind;

namespace {

using Raw = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Given = std::tuple<std::string, Raw, std::int64_t>;  // kind, raw [rows, bytes per row], columns

// A new array that owns its [rows, columns] floats.
nb::ndarray<nb::numpy, float, nb::ndim<2>> matrix(std::int64_t rows, std::int64_t columns, float** data) {
  *data = new float[static_cast<std::size_t>(rows * columns)]();
  nb::capsule owner(*data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return {*data, {static_cast<std::size_t>(rows), static_cast<std::size_t>(columns)}, owner};
}

outrider::Source source_of(const Given& given) {
  const auto& [kind_name, raw, columns] = given;
  const outrider::Kind kind = outrider::kind_of(kind_name);
  const std::int64_t bytes = outrider::row_bytes(kind, columns);
  if (raw.shape(1) < static_cast<std::size_t>(bytes) || raw.stride(1) != 1)
    throw std::invalid_argument("rows of " + std::to_string(columns) + " columns of " + kind_name + " take " +
                                std::to_string(bytes) + " contiguous bytes, not " + std::to_string(raw.shape(1)));
  return {kind, raw.data(), static_cast<std::int64_t>(raw.shape(0)), columns, raw.stride(0)};
}

// A Linear with its own workspace.
class PyLinear {
 public:
  PyLinear(const std::string& format, const std::vector<Given>& given, const std::optional<Vector>& bias, bool paired,
           int group, int threads) {
    std::vector<outrider::Source> sources;
    std::int64_t rows = 0;
    for (const Given& one : given) {
      sources.push_back(source_of(one));
      rows += sources.back().rows;
    }
    if (bias && bias->shape(0) != static_cast<std::size_t>(rows))
      throw std::invalid_argument("a bias of " + std::to_string(bias->shape(0)) + " values for " + std::to_string(rows) + " rows");
    const outrider::Format wanted = outrider::format_of(format);
    const float* values = bias ? bias->data() : nullptr;
    nb::gil_scoped_release release;
    linear_ = outrider::Linear(wanted, sources, values, {.paired = paired, .group = group, .threads = threads});
  }

  nb::ndarray<nb::numpy, float, nb::ndim<2>> multiply(const Rows& x, const std::vector<int>& splits,
                                                      const std::optional<Rows>& add_to, bool swiglu, int first_row) {
    const std::int64_t M = static_cast<std::int64_t>(x.shape(0));
    if (static_cast<std::int64_t>(x.shape(1)) != linear_.columns())
      throw std::invalid_argument("rows of " + std::to_string(x.shape(1)) + " values for a layer of " +
                                  std::to_string(linear_.columns()) + " columns");
    if (first_row < 0 || first_row + M > outrider::kMaxRows || M < 1)
      throw std::invalid_argument(std::to_string(M) + " rows from " + std::to_string(first_row) + ": from 1 to " +
                                  std::to_string(outrider::kMaxRows) + " may be multiplied at once");
    if (swiglu && !linear_.paired()) throw std::invalid_argument("swiglu needs a paired layer");
    const std::int64_t N = swiglu ? linear_.rows() / 2 : linear_.rows();
    float* y;
    auto out = matrix(M, N, &y);
    outrider::Epilogue epilogue = swiglu ? outrider::Epilogue::swiglu : outrider::Epilogue::store;
    if (add_to) {
      if (static_cast<std::int64_t>(add_to->shape(0)) != M || static_cast<std::int64_t>(add_to->shape(1)) != N || swiglu)
        throw std::invalid_argument("add_to must have the shape of the result");
      std::copy(add_to->data(), add_to->data() + M * N, y);
      epilogue = outrider::Epilogue::add;
    }
    std::vector<int> bounds{0};
    for (int split : splits) {
      if (split < bounds.back() || split > linear_.units())
        throw std::invalid_argument("splits must ascend within " + std::to_string(linear_.units()) + " units");
      bounds.push_back(split);
    }
    bounds.push_back(linear_.units());
    const float* rows = x.data();
    nb::gil_scoped_release release;
    // Rows before `first_row` hold zeros: they only move the others.
    outrider::Activations activations(static_cast<int>(first_row + M), linear_.columns());
    for (std::int64_t m = 0; m < M; ++m) activations.prepare(linear_, rows + m * linear_.columns(), static_cast<int>(first_row + m));
    std::vector<float> moved;
    float* begin = y;
    if (first_row > 0) {
      moved.assign(static_cast<std::size_t>((first_row + M) * N), 0.0f);
      std::copy(y, y + M * N, moved.data() + first_row * N);
      begin = moved.data();
    }
    std::vector<std::thread> threads;
    const auto work = [&](std::size_t i) {
      outrider::multiply(linear_, activations, static_cast<int>(first_row + M), bounds[i], bounds[i + 1], begin, N, epilogue);
    };
    for (std::size_t i = 1; i + 1 < bounds.size(); ++i) threads.emplace_back(work, i);
    work(0);
    for (std::thread& thread : threads) thread.join();
    if (first_row > 0) std::copy(moved.data() + first_row * N, moved.data() + (first_row + M) * N, y);
    return out;
  }

  // x W^T + b on the process's pool of `threads` threads, the one that the decoders use.
  nb::ndarray<nb::numpy, float, nb::ndim<2>> apply(const Rows& x, int threads) {
    const auto M = static_cast<std::int64_t>(x.shape(0)), K = linear_.columns(), N = linear_.rows();
    if (static_cast<std::int64_t>(x.shape(1)) != K) {
      throw std::invalid_argument("rows of " + std::to_string(x.shape(1)) + " values for a layer of " +
                                  std::to_string(K) + " columns");
    }
    if (linear_.paired()) throw std::invalid_argument("a paired layer is multiplied with swiglu only");
    float* y;
    auto out = matrix(M, N, &y);
    const float* rows = x.data();
    const nb::gil_scoped_release released;
    const std::lock_guard lock(busy_);
    if (!pool_ || pool_->threads() != threads) {
      pool_ = outrider::Pool::of(threads);
      staffing_ = outrider::Staffing(threads);
    }
    const auto room = static_cast<int>(std::min<std::int64_t>(M, outrider::kMaxRows));
    if (activations_.max_rows() < room) activations_ = outrider::Activations(room, K);
    for (std::int64_t first = 0; first < M; first += outrider::kMaxRows) {
      const auto count = static_cast<int>(std::min<std::int64_t>(M - first, outrider::kMaxRows));
      const int staff = staffing_.threads();
      staffing_.learn(pool_->run(staff, [&](int thread) {
        const outrider::Share mine = outrider::share(count, thread, staff);
        for (int m = mine.begin; m < mine.end; ++m) activations_.prepare(linear_, rows + (first + m) * K, m);
        pool_->barrier(thread);
        const outrider::Share units = outrider::share(linear_.units(), thread, staff);
        if (units.begin < units.end) {
          outrider::multiply(linear_, activations_, count, units.begin, units.end, y + first * N, N,
                             outrider::Epilogue::store);
        }
      }));
    }
    return out;
  }

  nb::ndarray<nb::numpy, float, nb::ndim<2>> dequantised() const {
    float* out;
    auto array = matrix(linear_.rows(), linear_.columns(), &out);
    linear_.dequantised(out);
    return array;
  }

  const outrider::Linear& linear() const { return linear_; }

 private:
  outrider::Linear linear_;
  std::mutex busy_;
  std::shared_ptr<outrider::Pool> pool_;
  outrider::Staffing staffing_{1};
  outrider::Activations activations_;
};

}  // namespace

void bind_linear(nb::module_& m) {
  m.def("isas", [] {
    std::vector<std::string> all;
    for (outrider::Isa isa : {outrider::Isa::portable, outrider::Isa::avx2, outrider::Isa::avxvnni, outrider::Isa::avx512})
      if (outrider::available(isa)) all.push_back(outrider::name(isa));
    return all;
  }, "The instruction sets that OUTRIDER_ISA may name on this machine.");
  m.def("dequantise", [](const std::string& kind, const Raw& raw, std::int64_t columns) {
    const outrider::Source source = source_of({kind, raw, columns});
    float* out;
    auto array = matrix(source.rows, columns, &out);
    for (std::int64_t n = 0; n < source.rows; ++n)
      outrider::dequantise(source.kind, source.data + n * source.stride, columns, out + n * columns);
    return array;
  }, nb::arg("kind"), nb::arg("raw"), nb::arg("columns"), "Rows of a tensor as they lie in a file, as float32. [rows, columns]");

  nb::class_<PyLinear>(m, "Linear", R"(A linear layer y = x W^T + b with packed weights; each row of y has the same bits whatever stands beside it.

Linear(format, sources, bias=None, paired=False, group=0, threads=0): `format` is fp32, bf16, int8 or int4; `sources`
are (kind, raw [rows, bytes per row], columns), stacked along N; ValueError for shapes that do not fit.)")
      .def(nb::init<const std::string&, const std::vector<Given>&, const std::optional<Vector>&, bool, int, int>(),
           nb::arg("format"), nb::arg("sources"), nb::arg("bias") = nb::none(), nb::arg("paired") = false,
           nb::arg("group") = 0, nb::arg("threads") = 0)
      .def("multiply", &PyLinear::multiply, nb::arg("x"), nb::arg("splits") = std::vector<int>{},
           nb::arg("add_to") = nb::none(), nb::arg("swiglu") = false, nb::arg("first_row") = 0,
           R"(x [M, K] -> [M, N], one thread per part of `splits` (unit numbers). `add_to` [M, N] is added,
`swiglu` gives silu(gate) * up [M, N / 2], `first_row` puts the rows elsewhere in their tiles.)")
      .def("apply", &PyLinear::apply, nb::arg("x"), nb::arg("threads"),
           "x [M, K] -> [M, N], any M, on the process's pool of `threads` threads.")
      .def("dequantised", &PyLinear::dequantised, "What is multiplied, as float32. [N, K]")
      .def_prop_ro("bytes", [](const PyLinear& l) { return l.linear().bytes(); }, "Bytes streamed by one multiplication.")
      .def_prop_ro("format", [](const PyLinear& l) { return outrider::name(l.linear().format()); })
      .def_prop_ro("group", [](const PyLinear& l) { return l.linear().group(); }, "Columns that share a scale; 0 without scales.")
      .def_prop_ro("units", [](const PyLinear& l) { return l.linear().units(); }, "Parts that a multiplication may be split into.")
      .def_prop_ro("shape", [](const PyLinear& l) { return std::make_tuple(l.linear().rows(), l.linear().columns()); });
}
