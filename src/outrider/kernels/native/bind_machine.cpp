// `_native.Reader`: the machine's read bandwidth.
#include <nanobind/nanobind.h>

#include <stdexcept>

#include "machine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace outrider {

void bind_machine(nb::module_& module) {
  nb::class_<Reader>(module, "Reader")
      .def(nb::init<std::size_t>(), "bytes"_a)
      .def(
          "read",
          [](Reader& reader, int threads) {
            if (threads < 1 || threads > 1024) throw std::invalid_argument("threads: 1 to 1024");
            const nb::gil_scoped_release released;
            return reader.read(threads);
          },
          "threads"_a);
}

}  // namespace outrider
