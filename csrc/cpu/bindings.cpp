// pybind11: argument checks and the release of the GIL; no math, and no torch headers.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <string>
#include <vector>

#include "arguments.h"
#include "cpu/engine.h"
#include "cpu/signature.h"
#include "cpu/threads.h"

namespace py = pybind11;

namespace {

using ngn::Bucket;
using ngn::check;
using ngn::DType;
using ngn::Engine;
using ngn::known_rounding;
using ngn::known_type;
using ngn::Rounding;
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

// How many numbers a row of a table has.
template <typename Row>
constexpr py::ssize_t NUMBERS = sizeof(Row) / sizeof(int64_t);

template <typename Array>
void check_shape(const Array& array, const char* name, py::ssize_t rows, py::ssize_t columns) {
  const bool ok = array.ndim() == 2 && (rows < 0 || array.shape(0) == rows) &&
                  (columns < 0 || array.shape(1) == columns);
  if (!ok) throw py::value_error(std::string(name) + " has the wrong shape");
}

template <typename Array>
void check_size(const Array& array, const std::string& name, py::ssize_t size) {
  const bool ok = array.ndim() == 1 && array.shape(0) == size;
  if (!ok) throw py::value_error(name + " must hold " + std::to_string(size) + " numbers");
}

// Keeps the arrays it points into alive; every index in them is checked here, once.
class BucketTables {
 public:
  BucketTables(IntArray table, IntArray chunks, DoubleArray groups, DoubleArray inputs, DoubleArray sums,
               DoubleArray totals, int64_t index, IntArray counts, DoubleArray sizes, int x_type, int g_type,
               int m_type, int v_type, int rounding)
      : table_(std::move(table)), chunks_(std::move(chunks)), groups_(std::move(groups)),
        inputs_(std::move(inputs)), sums_(std::move(sums)), totals_(std::move(totals)),
        counts_(std::move(counts)), sizes_(std::move(sizes)) {
    check_shape(table_, "table", ngn::COLUMNS, -1);
    check_shape(chunks_, "chunks", -1, NUMBERS<ngn::Chunk>);
    check_shape(groups_, "groups", -1, NUMBERS<ngn::Group>);
    check_shape(sums_, "sums", -1, NUMBERS<ngn::Sums>);
    check_shape(totals_, "totals", sums_.shape(0), NUMBERS<ngn::Sums>);
    check_size(inputs_, "inputs", NUMBERS<ngn::Inputs>);
    check_size(counts_, "counts", NUMBERS<ngn::Counts>);
    const bool fits = sizes_.ndim() == 1 && sizes_.shape(0) == ngn::STEP_SIZES + groups_.shape(0);
    check(fits, "sizes must hold 2 numbers and one for each group");
    check(index >= 0 && index < sums_.shape(0), "index is not a row of sums");
    const DType x = known_type(x_type), g = known_type(g_type), m = known_type(m_type), v = known_type(v_type);
    bucket_.rounding = known_rounding(rounding);
    const bool exact = bucket_.rounding == Rounding::exact;
    check(!exact || x == DType::bfloat16, "exact rounding needs bfloat16 parameters");
    check(is_state(m) || m == DType::int8, "m must be float32, float64, bfloat16 or int8");
    check(is_state(v) || v == DType::uint8, "v must be float32, float64, bfloat16 or uint8");
    for (const DType type : {x, g}) {
      check(type != DType::int8 && type != DType::uint8, "parameters and gradients must be floating-point");
    }

    const int64_t rows = table_.shape(1);
    for (int c = 0; c < ngn::COLUMNS; ++c) bucket_.columns[c] = table_.data(c, 0);
    bucket_.rows = rows;
    bucket_.chunks = reinterpret_cast<const ngn::Chunk*>(chunks_.data());
    bucket_.chunk_count = chunks_.shape(0);
    bucket_.groups = reinterpret_cast<const ngn::Group*>(groups_.data());
    bucket_.group_count = groups_.shape(0);
    bucket_.inputs = reinterpret_cast<const ngn::Inputs*>(inputs_.data());
    bucket_.sums = reinterpret_cast<ngn::Sums*>(sums_.mutable_data());
    bucket_.totals = reinterpret_cast<const ngn::Sums*>(totals_.data());
    bucket_.bucket_count = sums_.shape(0);
    bucket_.index = index;
    bucket_.counts = reinterpret_cast<ngn::Counts*>(counts_.mutable_data());
    bucket_.sizes = sizes_.mutable_data();
    bucket_.x_type = x;
    bucket_.g_type = g;
    bucket_.m_type = m;
    bucket_.v_type = v;

    for (int64_t i = 0; i < rows; ++i) {
      const ngn::TensorRow row = row_of(bucket_, i);
      check(row.numel >= 0, "a row has a negative number of elements");
      check(row.group >= 0 && row.group < groups_.shape(0), "a row names a group that does not exist");
      check(row.replicas > 0, "a row needs at least one replica");
      check(row.step != nullptr, "a row has no step count");
      check(row.x != nullptr || row.numel == 0, "a row has no parameter");
      check(!exact || row.remainder || row.numel == 0, "a row has no remainder");
    }
    for (int64_t i = 0; i < bucket_.chunk_count; ++i) {
      const ngn::Chunk chunk = bucket_.chunks[i];
      check(chunk.row >= 0 && chunk.row < rows, "a chunk names a row that does not exist");
      check(chunk.begin >= 0 && chunk.begin < row_of(bucket_, chunk.row).numel && chunk.begin % ngn::CHUNK == 0,
            "a chunk begins outside its row");
    }
    partials_.resize(static_cast<size_t>(bucket_.chunk_count));
    bucket_.partials = partials_.data();
  }

  void reduce(int64_t flags, int threads) {
    const Rule rule = ngn::known_rule(flags);
    check(!rule.coordinate, "coordinate rules have nothing to reduce");
    check(rule.rms || !rule.regularised, "regularised decay needs rms");
    check_columns(rule, false);
    py::gil_scoped_release release;
    current->reduce(bucket_, rule, threads);
  }

  void apply(int64_t flags, int threads, bool last) {
    const Rule rule = ngn::known_rule(flags);
    check_columns(rule, rule.momentum);
    py::gil_scoped_release release;
    current->apply(bucket_, rule, threads, last);
  }

 private:
  static bool is_state(DType type) {
    return type == DType::float32 || type == DType::float64 || type == DType::bfloat16;
  }

  void check_columns(const Rule& rule, bool momentum) const {
    const bool rms = rule.rms, directed = rule.directed;
    for (int64_t i = 0; i < bucket_.rows; ++i) {
      const ngn::TensorRow row = row_of(bucket_, i);
      if (!row.g || row.numel == 0) continue;
      check(!momentum || row.m, "a row has no momentum buffer");
      check(!rms || row.v, "a row has no second moment");
      check(!directed || row.d, "a row has no direction");
      check(!momentum || bucket_.m_type != DType::int8 || row.m_scale, "a row has no scales of its momentum buffer");
      check(!rms || bucket_.v_type != DType::uint8 || row.v_scale, "a row has no scales of its second moment");
    }
  }

  IntArray table_, chunks_;
  DoubleArray groups_, inputs_, sums_, totals_;
  IntArray counts_;
  DoubleArray sizes_;
  std::vector<ngn::Sums> partials_;
  Bucket bucket_{};
};

using FloatArray = py::array_t<float, py::array::c_style>;

ngn::EncodedColumn column_of(const FloatArray& values, py::array& data, py::array& scales, int type_number, int rounding) {
  const DType type = known_type(type_number);
  const bool quantised = type == DType::int8 || type == DType::uint8;
  check(quantised || type == DType::bfloat16, "type must be int8, uint8 or bfloat16");
  check(data.nbytes() == values.size() * (quantised ? 1 : 2), "data must have one element for each of values");
  const int64_t blocks = (values.size() + ngn::QUANT_BLOCK - 1) / ngn::QUANT_BLOCK;
  check(!quantised || scales.nbytes() == 4 * blocks, "scales must have one number for each quantisation block");
  return {data.mutable_data(), scales.mutable_data(), type, known_rounding(rounding)};
}

}  // namespace

PYBIND11_MODULE(_cpu, module) {
  module.doc() = "Fused multi-tensor kernels for the CPU.";
  module.attr("CHUNK") = ngn::CHUNK;

  module.attr("LAYOUT_CHECKSUM") = ngn::LAYOUT_CHECKSUM;
  module.attr("SOURCES_CHECKSUM") = ngn::SOURCES_CHECKSUM;

  // noconvert: Python and the engine must share the memory of the tables.
  py::class_<BucketTables>(module, "Bucket")
      .def(py::init<IntArray, IntArray, DoubleArray, DoubleArray, DoubleArray, DoubleArray, int64_t, IntArray,
                    DoubleArray, int, int, int, int, int>(),
           py::kw_only(), py::arg("table").noconvert(), py::arg("chunks").noconvert(),
           py::arg("groups").noconvert(), py::arg("inputs").noconvert(), py::arg("sums").noconvert(),
           py::arg("totals").noconvert(), py::arg("index"), py::arg("counts").noconvert(), py::arg("sizes").noconvert(),
           py::arg("x_type"), py::arg("g_type"), py::arg("m_type"), py::arg("v_type"),
           py::arg("rounding"))
      .def("reduce", &BucketTables::reduce, py::arg("rule"), py::arg("threads"))
      .def("apply", &BucketTables::apply, py::arg("rule"), py::arg("threads"), py::arg("last"));

  py::class_<ngn::Signature>(module, "Signature")
      .def(py::init<py::list, py::dict, py::list, py::list, py::capsule>(), py::kw_only(), py::arg("groups"),
           py::arg("state"), py::arg("rows"), py::arg("columns"), py::arg("api"))
      .def_static("understands", &ngn::Signature::understands, py::arg("api"))
      .def("check", [](ngn::Signature& signature, const py::object& groups, const py::dict& state) {
        return static_cast<int>(signature.check(groups, state));
      }, py::arg("groups"), py::arg("state"))
      .def("extend", &ngn::Signature::extend, py::arg("state"), py::arg("rows"), py::arg("columns"), py::arg("places"))
      .def("gradients", &ngn::Signature::gradients)
      .def("release", &ngn::Signature::release);

  module.def("encode", [](const FloatArray& values, py::array data, py::array scales, int type, int rounding,
                          int64_t noise_key, int64_t step_count, int64_t offset) {
    const ngn::EncodedColumn column = column_of(values, data, scales, type, rounding);
    check(column.rounding != Rounding::exact, "a column of the state has no remainders");
    current->encode(values.data(), values.size(), noise_key, step_count, offset, column);
  }, py::arg("values").noconvert(), py::arg("data"), py::arg("scales"), py::arg("type"), py::arg("rounding"),
     py::arg("noise_key"), py::arg("step_count"), py::arg("offset") = 0,
     "Numbers to a column's format, as a step stores them.");
  module.def("decode", [](FloatArray values, py::array data, py::array scales, int type) {
    const int nearest = static_cast<int>(Rounding::nearest);
    current->decode(column_of(values, data, scales, type, nearest), values.size(), values.mutable_data());
  }, py::arg("values").noconvert(), py::arg("data"), py::arg("scales"), py::arg("type"), "A column's numbers.");

  module.def("isas", [] {
    std::vector<std::string> names;
    for (const Engine* engine : engines()) names.emplace_back(engine->name);
    return names;
  }, "Instruction sets that run here, the best first.");
  module.def("isa", [] { return std::string(current->name); }, "The instruction set in use.");
  module.def("use_isa", &use_isa, py::arg("name"), "Use another of isas(); the results differ by rounding.");
  module.def("use_team_launcher", [](uintptr_t address) {
    ngn::team_launcher = reinterpret_cast<ngn::TeamLauncher>(address);
  }, py::arg("address"), "Run on the threads of the OpenMP library whose GOMP_parallel is at this address.");
}
