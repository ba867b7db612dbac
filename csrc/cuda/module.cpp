// pybind11: the choice of a kernel, its argument, and the release of the GIL; no math, and no torch headers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "arguments.h"
#include "cuda/driver.h"
#include "cuda/image.h"
#include "cuda/launch.h"

namespace py = pybind11;

namespace {

using ngn::check;
using ngn::DType;
using ngn::known_rounding;
using ngn::known_rule;
using ngn::known_type;
using ngn::Rounding;
using ngn::Rule;
using ngn::Storage;

struct Kernel {
  const char* name;
  bool updates;  // or sums
  Rule rule;
  Storage storage;
};

#define NGN_REDUCE(name, RMS, REGULARISED, DIRECTED, STORAGE) \
  {"ngn_" #name, false, {false, false, RMS, REGULARISED, false, DIRECTED}, Storage::STORAGE},
#define NGN_APPLY(name, MOMENTUM, COORDINATE, RMS, STORAGE) \
  {"ngn_" #name, true, {MOMENTUM, COORDINATE, RMS, false, false, false}, Storage::STORAGE},
const std::vector<Kernel> KERNELS = {NGN_REDUCE_KERNELS(NGN_REDUCE) NGN_APPLY_KERNELS(NGN_APPLY)};

std::vector<const char*> kernel_names() {
  std::vector<const char*> names;
  for (const Kernel& kernel : KERNELS) names.push_back(kernel.name);
  return names;
}

// A device is loaded when it is first asked for, and stays.
class Engine {
 public:
  explicit Engine(const std::string& library) : driver_(library) {}

  const ngn::Driver::Device& device(int index) {
    const auto known = devices_.find(index);
    if (known != devices_.end()) return known->second;
    return devices_.try_emplace(index, driver_, index, ngn::image, kernel_names()).first->second;
  }

 private:
  ngn::Driver driver_;
  std::map<int, ngn::Driver::Device> devices_;
};

bool is_any(DType type, std::initializer_list<DType> types) {
  for (const DType other : types) {
    if (type == other) return true;
  }
  return false;
}

// The narrowest kind of code that serves the columns which the pass reads.
Storage storage_of(const ngn::Bucket& bucket, const Rule& rule, bool updates) {
  const bool reads_x = updates || rule.regularised;
  const bool rounds = updates ? bucket.rounding != Rounding::nearest : reads_x && bucket.rounding == Rounding::exact;
  const bool narrow_m = updates && rule.momentum && bucket.m_type != DType::float32;
  const bool narrow_v = rule.rms && bucket.v_type != DType::float32;
  if (rounds || narrow_m || narrow_v) return Storage::narrow;
  const bool wide = bucket.g_type == DType::float32 || (reads_x && bucket.x_type == DType::float32);
  return wide || rule.rms || rule.directed || (updates && rule.momentum) ? Storage::single : Storage::half;
}

size_t kernel_of(const ngn::Bucket& bucket, const Rule& rule, bool updates) {
  const Storage storage = storage_of(bucket, rule, updates);
  for (size_t i = 0; i < KERNELS.size(); ++i) {
    const Kernel& kernel = KERNELS[i];
    const bool same = kernel.updates == updates && kernel.storage == storage && kernel.rule.momentum == rule.momentum &&
                      kernel.rule.coordinate == rule.coordinate && kernel.rule.rms == rule.rms &&
                      (updates || (kernel.rule.regularised == rule.regularised && kernel.rule.directed == rule.directed));
    if (same) return i;
  }
  throw py::value_error("no kernel has this rule");
}

// A kernel with its argument: a launch is one call.
class Launch {
 public:
  Launch(std::shared_ptr<Engine> engine, int device, bool updates, const ngn::Launch& argument)
      : engine_(std::move(engine)), device_(engine_->device(device)), argument_(argument),
        kernel_(kernel_of(argument.bucket, argument.rule, updates)) {}

  void operator()(uintptr_t stream, bool last) {
    argument_.last = last;
    py::gil_scoped_release release;
    device_.launch(kernel_, argument_.bucket.chunk_count, ngn::THREADS, &argument_,
                   reinterpret_cast<ngn::DriverStream>(stream));
  }

  const char* name() const { return KERNELS[kernel_].name; }

 private:
  std::shared_ptr<Engine> engine_;
  const ngn::Driver::Device& device_;
  ngn::Launch argument_;
  size_t kernel_;
};

template <typename T>
T* at(uintptr_t address) { return reinterpret_cast<T*>(address); }

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "Fused multi-tensor kernels for NVIDIA GPUs, launched through CUDA's driver.";
  module.attr("LAYOUT_CHECKSUM") = ngn::LAYOUT_CHECKSUM;
  module.attr("SOURCES_CHECKSUM") = ngn::SOURCES_CHECKSUM;
  module.attr("THREADS") = ngn::THREADS;
  module.attr("TARGETS") = NGN_CUDA_TARGETS;
  module.attr("COMPILER") = NGN_CUDA_COMPILER;
  py::register_exception<ngn::NoDriver>(module, "NoDriver", PyExc_RuntimeError);
  py::register_exception<ngn::DriverError>(module, "DriverError", PyExc_RuntimeError);

  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
      .def(py::init<std::string>(), py::arg("library"))
      .def("load", [](Engine& engine, int device) { engine.device(device); }, py::arg("device"),
           "Load the kernels on a device; the first launch there does the same.");

  py::class_<Launch>(module, "Launch")
      .def(py::init([](std::shared_ptr<Engine> engine, int device, bool updates, int64_t rule, uintptr_t table, int64_t rows,
                       uintptr_t chunks, int64_t chunk_count, int64_t chunk_size, uintptr_t groups, int64_t group_count,
                       uintptr_t inputs, uintptr_t sums, uintptr_t totals, int64_t bucket_count, int64_t index,
                       uintptr_t partials, uintptr_t counts, uintptr_t sizes, uintptr_t ticket, int x_type, int g_type,
                       int m_type, int v_type, int rounding) {
             ngn::Launch launch{};
             ngn::Bucket& bucket = launch.bucket;
             for (int c = 0; c < ngn::COLUMNS; ++c) bucket.columns[c] = at<const int64_t>(table) + c * rows;
             bucket.rows = rows;
             bucket.chunks = at<const ngn::Chunk>(chunks);
             bucket.chunk_count = chunk_count;
             bucket.groups = at<const ngn::Group>(groups);
             bucket.group_count = group_count;
             bucket.inputs = at<const ngn::Inputs>(inputs);
             bucket.sums = at<ngn::Sums>(sums);
             bucket.totals = at<const ngn::Sums>(totals);
             bucket.bucket_count = bucket_count;
             bucket.index = index;
             bucket.partials = at<ngn::Sums>(partials);
             bucket.counts = at<ngn::Counts>(counts);
             bucket.sizes = at<double>(sizes);
             bucket.x_type = known_type(x_type);
             bucket.g_type = known_type(g_type);
             bucket.m_type = known_type(m_type);
             bucket.v_type = known_type(v_type);
             bucket.rounding = known_rounding(rounding);
             const auto floats = {DType::float32, DType::bfloat16, DType::float16};
             check(is_any(bucket.x_type, floats) && is_any(bucket.g_type, floats),
                   "parameters and gradients must be float32, bfloat16 or float16");
             check(is_any(bucket.m_type, {DType::float32, DType::bfloat16, DType::int8}), "m must be float32, bfloat16 or int8");
             check(is_any(bucket.v_type, {DType::float32, DType::bfloat16, DType::uint8}), "v must be float32, bfloat16 or uint8");
             check(bucket.rounding != Rounding::exact || bucket.x_type == DType::bfloat16,
                   "exact rounding needs bfloat16 parameters");
             check(chunk_count > 0 && chunk_count <= INT32_MAX, "the number of chunks is no number of blocks");
             check(chunk_size > 0 && chunk_size <= INT32_MAX && chunk_size % ngn::QUANT_BLOCK == 0,
                   "chunks must consist of quantisation blocks");
             launch.chunk_size = chunk_size;
             launch.rule = known_rule(rule);
             if (launch.rule.directed && updates) bucket.g_type = DType::float32;  // of the direction, which is read in g's place
             launch.ticket = at<uint32_t>(ticket);
             return std::make_unique<Launch>(std::move(engine), device, updates, launch);
           }),
           py::kw_only(), py::arg("engine"), py::arg("device"), py::arg("updates"), py::arg("rule"), py::arg("table"),
           py::arg("rows"), py::arg("chunks"), py::arg("chunk_count"), py::arg("chunk_size"), py::arg("groups"),
           py::arg("group_count"), py::arg("inputs"), py::arg("sums"), py::arg("totals"), py::arg("bucket_count"),
           py::arg("index"), py::arg("partials"), py::arg("counts"), py::arg("sizes"), py::arg("ticket"),
           py::arg("x_type"), py::arg("g_type"), py::arg("m_type"), py::arg("v_type"), py::arg("rounding"))
      .def("__call__", &Launch::operator(), py::arg("stream"), py::arg("last") = false)
      .def_property_readonly("name", &Launch::name);

  module.def("image", [] { return py::bytes(static_cast<const char*>(ngn::image), ngn::image_size); },
             "The compiled kernels, as the driver gets them.");
}
