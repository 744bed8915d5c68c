// How bindings read tokens from Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "sampling.h"

namespace outrider {

namespace nb = nanobind;

inline std::int32_t token_of(PyObject* number) {
  const long token = PyLong_AsLong(number);
  if (token == -1 && PyErr_Occurred()) throw nb::python_error();
  if (token < 0 || token > INT32_MAX) throw nb::value_error("a token id outside [0, 2**31)");
  return static_cast<std::int32_t>(token);
}

// A list or tuple, read in place.
class Sequence {
 public:
  explicit Sequence(nb::handle source) : fast_(nb::steal(PySequence_Fast(source.ptr(), "tokens are a sequence"))) {
    if (!fast_.is_valid()) throw nb::python_error();
  }
  std::int64_t size() const { return PySequence_Fast_GET_SIZE(fast_.ptr()); }
  std::int32_t operator[](std::int64_t i) const { return token_of(PySequence_Fast_GET_ITEM(fast_.ptr(), i)); }

 private:
  nb::object fast_;
};

// Counts the committed tokens that a sequence's penalties do not know yet.
inline void catch_up(NativeShaping& shaping, nb::handle tokens) {
  if (!shaping.penalised()) return;
  const Sequence history(tokens);
  if (history.size() < shaping.known()) shaping.forget();
  for (std::int64_t i = shaping.known(); i < history.size(); ++i) shaping.append(history[i]);
}

}  // namespace outrider
