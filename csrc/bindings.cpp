// pybind11: argument checks and the release of the GIL; no math, and no torch headers.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "engine.h"
#include "scan.h"

namespace py = pybind11;

namespace {

using ngn::Bucket;
using ngn::DType;
using ngn::Engine;
using ngn::Rule;

using IntArray = py::array_t<int64_t, py::array::c_style>;
using DoubleArray = py::array_t<double, py::array::c_style>;

const std::vector<const Engine*>& engines() {
  static const std::vector<const Engine*> all = [] {
    std::vector<const Engine*> found;
#ifdef NGN_X86
    for (const Engine* engine : {&ngn::engine_avx512, &ngn::engine_avx2}) {
      if (engine->runs_here()) found.push_back(engine);
    }
#endif
    found.push_back(&ngn::engine_baseline);
    return found;
  }();
  return all;
}

const Engine* current = engines().front();

void use_isa(const std::string& name) {
  for (const Engine* engine : engines()) {
    if (name == engine->name) {
      current = engine;
      return;
    }
  }
  throw py::value_error("instruction set '" + name + "' does not run here; isas() lists those that do");
}

void check(bool ok, const char* message) {
  if (!ok) throw py::value_error(message);
}

template <typename Array>
void check_shape(const Array& array, const char* name, py::ssize_t rows, py::ssize_t columns) {
  const bool ok = array.ndim() == 2 && (rows < 0 || array.shape(0) == rows) &&
                  (columns < 0 || array.shape(1) == columns);
  if (!ok) throw py::value_error(std::string(name) + " has the wrong shape");
}

// Keeps the arrays it points into alive; every index in them is checked here, once.
class BucketTables {
 public:
  BucketTables(IntArray table, IntArray chunks, DoubleArray groups, DoubleArray scalars, DoubleArray sums,
               int64_t index, IntArray report, DType x_type, DType g_type, DType state_type)
      : table_(std::move(table)), chunks_(std::move(chunks)), groups_(std::move(groups)),
        scalars_(std::move(scalars)), sums_(std::move(sums)), report_(std::move(report)) {
    check_shape(table_, "table", 7, -1);
    check_shape(chunks_, "chunks", -1, 2);
    check_shape(groups_, "groups", -1, 5);
    check_shape(sums_, "sums", -1, 3);
    check(scalars_.ndim() == 1 && scalars_.shape(0) == 5, "scalars must hold 5 numbers");
    check(report_.ndim() == 1 && report_.shape(0) == 3, "report must hold 3 numbers");
    check(index >= 0 && index < sums_.shape(0), "index is not a row of sums");
    check(state_type == DType::float32 || state_type == DType::float64, "state must be float32 or float64");

    const int64_t rows = table_.shape(1);
    for (int c = 0; c < 7; ++c) bucket_.columns[c] = table_.data(c, 0);
    bucket_.rows = rows;
    bucket_.chunks = reinterpret_cast<const ngn::Chunk*>(chunks_.data());
    bucket_.chunk_count = chunks_.shape(0);
    bucket_.groups = reinterpret_cast<const ngn::Group*>(groups_.data());
    bucket_.scalars = reinterpret_cast<ngn::StepScalars*>(scalars_.mutable_data());
    bucket_.sums = reinterpret_cast<ngn::Sums*>(sums_.mutable_data());
    bucket_.bucket_count = sums_.shape(0);
    bucket_.index = index;
    bucket_.report = reinterpret_cast<ngn::Report*>(report_.mutable_data());
    bucket_.x_type = x_type;
    bucket_.g_type = g_type;
    bucket_.state_type = state_type;

    for (int64_t i = 0; i < rows; ++i) {
      const ngn::TensorRow row = bucket_.row(i);
      check(row.numel >= 0, "a row has a negative number of elements");
      check(row.group >= 0 && row.group < groups_.shape(0), "a row names a group that does not exist");
      check(row.step != nullptr, "a row has no step count");
      check(row.x != nullptr || row.numel == 0, "a row has no parameter");
    }
    for (int64_t i = 0; i < bucket_.chunk_count; ++i) {
      const ngn::Chunk chunk = bucket_.chunks[i];
      check(chunk.row >= 0 && chunk.row < rows, "a chunk names a row that does not exist");
      check(chunk.begin >= 0 && chunk.begin < bucket_.row(chunk.row).numel && chunk.begin % ngn::CHUNK == 0,
            "a chunk begins outside its row");
    }
    partials_.resize(static_cast<size_t>(bucket_.chunk_count));
    bucket_.partials = partials_.data();
  }

  void reduce(const Rule& rule, int threads) {
    check(!rule.coordinate, "coordinate rules have nothing to reduce");
    check(rule.rms || !rule.regularised, "regularised decay needs rms");
    check_state(false, rule.rms);
    py::gil_scoped_release release;
    current->reduce(bucket_, rule, threads);
  }

  void apply(const Rule& rule, int threads, bool last) {
    check_state(rule.momentum, rule.rms);
    py::gil_scoped_release release;
    current->apply(bucket_, rule, threads, last);
  }

 private:
  void check_state(bool momentum, bool rms) const {
    for (int64_t i = 0; i < bucket_.rows; ++i) {
      const ngn::TensorRow row = bucket_.row(i);
      if (!row.g || row.numel == 0) continue;
      check(!momentum || row.m, "a row has no momentum buffer");
      check(!rms || row.v, "a row has no second moment");
    }
  }

  IntArray table_, chunks_;
  DoubleArray groups_, scalars_, sums_;
  IntArray report_;
  std::vector<ngn::Sums> partials_;
  Bucket bucket_{};
};

}  // namespace

PYBIND11_MODULE(_cpu, module) {
  module.doc() = "Fused multi-tensor kernels for the CPU.";
  module.attr("CHUNK") = ngn::CHUNK;

  py::enum_<DType>(module, "DType")
      .value("float64", DType::float64)
      .value("float32", DType::float32)
      .value("bfloat16", DType::bfloat16)
      .value("float16", DType::float16);

  py::class_<Rule>(module, "Rule")
      .def(py::init([](bool momentum, bool coordinate, bool rms, bool regularised) {
             return Rule{momentum, coordinate, rms, regularised};
           }),
           py::kw_only(), py::arg("momentum"), py::arg("coordinate"), py::arg("rms"), py::arg("regularised"));

  // noconvert: a silent copy would break the sharing of memory that the tables are for.
  py::class_<BucketTables>(module, "Bucket")
      .def(py::init<IntArray, IntArray, DoubleArray, DoubleArray, DoubleArray, int64_t, IntArray, DType, DType,
                    DType>(),
           py::kw_only(), py::arg("table").noconvert(), py::arg("chunks").noconvert(),
           py::arg("groups").noconvert(), py::arg("scalars").noconvert(), py::arg("sums").noconvert(),
           py::arg("index"), py::arg("report").noconvert(), py::arg("x_type"), py::arg("g_type"),
           py::arg("state_type"))
      .def("reduce", &BucketTables::reduce, py::arg("rule"), py::arg("threads"))
      .def("apply", &BucketTables::apply, py::arg("rule"), py::arg("threads"), py::arg("last"));

  py::class_<ngn::Scan>(module, "Scan")
      .def(py::init<py::list, py::list, py::list, py::tuple, py::capsule, py::object>(), py::kw_only(),
           py::arg("params"), py::arg("dense"), py::arg("states"), py::arg("keys"), py::arg("api"),
           py::arg("sample"))
      .def("refresh", &ngn::Scan::refresh, py::arg("pointers").noconvert());

  module.def("same_items", &ngn::same_items, "Whether two lists hold the same objects.");
  module.def("same_values", &ngn::same_values, "Whether a dict's values are a list's objects.");

  module.def("isas", [] {
    std::vector<std::string> names;
    for (const Engine* engine : engines()) names.emplace_back(engine->name);
    return names;
  }, "Instruction sets that run here, the best first.");
  module.def("isa", [] { return std::string(current->name); }, "The instruction set in use.");
  module.def("use_isa", &use_isa, py::arg("name"), "Use another of isas(); the results differ by rounding.");
  module.def("use_team_launcher", [](uintptr_t address) {
    ngn::team_launcher = reinterpret_cast<ngn::TeamLauncher>(address);
  }, py::arg("address"), "Run on the threads of the OpenMP library whose GOMP_parallel lies at this address.");
}
