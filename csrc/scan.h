// Where tensors lie, asked once per step of every parameter, gradient and state tensor. The answers
// come through DLPack's C exchange API, which torch offers on its tensor type (2.10 and newer): a
// stable interface, and several times cheaper than the same questions from Python.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ngn {

namespace py = pybind11;

// The public layouts of DLPack 1.3, as far as they are needed here.
namespace dlpack {
struct Device {
  int32_t type, id;
  bool operator==(const Device& other) const { return type == other.type && id == other.id; }
};
struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
  bool operator==(const DataType& other) const {
    return code == other.code && bits == other.bits && lanes == other.lanes;
  }
};
struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;

  int64_t address() const { return reinterpret_cast<int64_t>(data) + static_cast<int64_t>(byte_offset); }
};
struct Version { uint32_t major, minor; };
struct ExchangeApi {
  Version version;
  void* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, Tensor* out);
  void* current_stream;
};
}  // namespace dlpack

// What a look at all tensors tells; scan.py has the same numbers.
enum Seen : int { SAME, MOVED, ODD, STALE };

// Whether these are the same objects in the same order.
inline bool same_items(const py::list& items, const py::list& others) {
  if (items.size() != others.size()) return false;
  for (size_t i = 0; i < items.size(); ++i) {
    if (PyList_GET_ITEM(items.ptr(), i) != PyList_GET_ITEM(others.ptr(), i)) return false;
  }
  return true;
}

// The same of a dict's values.
inline bool same_values(const py::dict& mapping, const py::list& others) {
  if (mapping.size() != others.size()) return false;
  Py_ssize_t position = 0;
  PyObject *key, *value;
  for (size_t i = 0; PyDict_Next(mapping.ptr(), &position, &key, &value); ++i) {
    if (value != PyList_GET_ITEM(others.ptr(), i)) return false;
  }
  return true;
}

class Scan {
 public:
  // `dense` gives the memory order that gradients must have, `sample` their element type.
  Scan(py::list params, py::list dense, py::list states, py::tuple keys, py::capsule api, py::object sample)
      : params_(std::move(params)), states_(std::move(states)), keys_(std::move(keys)) {
    api_ = api.get_pointer<dlpack::ExchangeApi>();
    if (api_->version.major != 1 || !api_->tensor_from_object) {
      throw py::value_error("this version of DLPack's exchange API is not known");
    }
    if (dense.size() != params_.size() || states_.size() != params_.size()) {
      throw py::value_error("params, dense and states must have the same length");
    }
    gradients_.resize(params_.size());
    for (const py::handle key : keys_) names_.push_back(key.ptr());
    gradient_type_ = look(sample.ptr()).dtype;
    grad_ = py::type::of(sample).attr("grad");
    is_neg_ = py::type::of(sample).attr("is_neg");
    for (size_t i = 0; i < params_.size(); ++i) {
      rows_.push_back({params_[i].ptr(), states_[i].ptr()});
      places_.push_back(place(rows_[i].param));
      orders_.push_back(place(dense[i].ptr()));
      for (PyObject* name : names_) {
        PyObject* value = state_value(i, name);
        if (!value) throw py::key_error("a state lacks a key");
        values_.push_back(py::reinterpret_borrow<py::object>(value));
      }
      addresses_.push_back(look(values_.back().ptr()).address());
    }
  }

  // Look at all rows, and write the gradients' addresses, 0 for none, if all are plain.
  int refresh(py::array_t<int64_t, py::array::c_style> out) {
    if (out.ndim() != 1 || static_cast<size_t>(out.shape(0)) != rows_.size()) {
      throw py::value_error("out must have one number per parameter");
    }
    // Two loops: each one's code stays in the instruction cache, both together would not.
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (is_stale(i)) return STALE;
    }
    for (size_t i = 0; i < rows_.size(); ++i) {
      gradients_[i] = gradient_address(i);
      if (gradients_[i] == ODD_ADDRESS) return ODD;
    }
    int64_t* addresses = out.mutable_data();
    if (std::equal(gradients_.begin(), gradients_.end(), addresses)) return SAME;
    std::copy(gradients_.begin(), gradients_.end(), addresses);
    return MOVED;
  }

 private:
  struct Place {
    int64_t address;
    dlpack::Device device;
    dlpack::DataType dtype;
    std::vector<int64_t> shape, strides;
  };

  dlpack::Tensor look(PyObject* tensor) const {
    dlpack::Tensor out;
    if (api_->tensor_from_object(tensor, &out) != 0) throw py::error_already_set();
    return out;
  }

  Place place(PyObject* tensor) const {
    const dlpack::Tensor t = look(tensor);
    return {t.address(), t.device, t.dtype, {t.shape, t.shape + t.ndim}, {t.strides, t.strides + t.ndim}};
  }

  // Whether a parameter or its state was replaced, or lies elsewhere than at the start. Of the state,
  // which is moved as a whole, only the last tensor is asked where it lies.
  bool is_stale(size_t i) const {
    if (!same_place(look(rows_[i].param), places_[i])) return true;
    const size_t keys = names_.size();
    Py_ssize_t position = 0;
    for (size_t k = 0; k < keys; ++k) {
      // In the order that the state was made in, there is nothing to look up.
      PyObject *name, *value;
      const bool in_order = PyDict_Next(rows_[i].state, &position, &name, &value) && name == names_[k];
      if ((in_order ? value : state_value(i, names_[k])) != values_[i * keys + k].ptr()) return true;
    }
    return look(values_[(i + 1) * keys - 1].ptr()).address() != addresses_[i];
  }

  // Of a plain gradient; 0 of none, ODD_ADDRESS of one that must be looked at more closely.
  int64_t gradient_address(size_t i) const {
    const py::object grad = py::reinterpret_steal<py::object>(
        Py_TYPE(grad_.ptr())->tp_descr_get(grad_.ptr(), rows_[i].param, nullptr));
    if (!grad) throw py::error_already_set();
    if (grad.is_none()) return 0;
    dlpack::Tensor tensor;
    if (api_->tensor_from_object(grad.ptr(), &tensor) != 0) {
      PyErr_Clear();
      return ODD_ADDRESS;
    }
    const bool alike = tensor.dtype == gradient_type_ && tensor.device == orders_[i].device;
    if (!alike || !same_order(tensor, orders_[i]) || is_negated(grad)) return ODD_ADDRESS;
    if (tensor.address()) return tensor.address();
    return is_empty(tensor) ? 1 : ODD_ADDRESS;  // a gradient without elements is one, too
  }

  // Dimensions of size 1 have no say in the order.
  static bool same_order(const dlpack::Tensor& t, const Place& place) {
    if (static_cast<size_t>(t.ndim) != place.shape.size()) return false;
    for (int32_t d = 0; d < t.ndim; ++d) {
      if (t.shape[d] != place.shape[d]) return false;
      if (t.shape[d] != 1 && t.strides[d] != place.strides[d]) return false;
    }
    return true;
  }

  static bool is_empty(const dlpack::Tensor& t) {
    for (int32_t d = 0; d < t.ndim; ++d) {
      if (t.shape[d] == 0) return true;
    }
    return false;
  }

  static bool same_place(const dlpack::Tensor& t, const Place& place) {
    return t.address() == place.address && t.device == place.device && t.dtype == place.dtype && same_order(t, place);
  }

  PyObject* state_value(size_t i, PyObject* name) const {
    PyObject* state = rows_[i].state;
    return PyDict_Check(state) ? PyDict_GetItemWithError(state, name) : nullptr;
  }

  // torch's lazily negated tensors hold the negative of what DLPack shows.
  bool is_negated(const py::object& grad) const {
    const py::object answer = py::reinterpret_steal<py::object>(PyObject_CallOneArg(is_neg_.ptr(), grad.ptr()));
    if (!answer) throw py::error_already_set();
    return answer.ptr() != Py_False;
  }

  static constexpr int64_t ODD_ADDRESS = -1;

  struct Row {
    PyObject *param, *state;
  };

  py::list params_, states_;  // keep the rows alive, as keys_ does the names
  std::vector<Row> rows_;
  std::vector<PyObject*> names_;
  py::tuple keys_;
  const dlpack::ExchangeApi* api_;
  dlpack::DataType gradient_type_{};
  std::vector<Place> places_, orders_;
  std::vector<py::object> values_;
  std::vector<int64_t> addresses_, gradients_;
  py::object grad_, is_neg_;  // of torch.Tensor, looked up once: parameters here have no other class
};

}  // namespace ngn
