// Detects when a cached plan must be rebuilt: every step compares each parameter, gradient and state tensor with
// those of the plan. The tensors are read through DLPack's C exchange API, which torch offers on its tensor type
// (2.10 and newer): a stable interface, several times faster than Python. ngn_kernels has the same in Python.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <structmember.h>

#include <cstdint>
#include <unordered_set>
#include <vector>

#include "layout.h"

namespace ngn {

namespace py = pybind11;

// The structs of DLPack 1.3 that are needed here.
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
constexpr uint8_t COMPLEX = 5;  // code of a data type
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

inline py::object interned(const char* name) {
  return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name));
}

// An attribute that a class keeps in a slot; the slot's offset is looked up once for each class.
struct Attribute {
  explicit Attribute(const char* name) : key(interned(name)) {}

  py::object of(const py::object& object) {
    PyTypeObject* type = Py_TYPE(object.ptr());
    if (type != type_) find_slot(type);
    if (offset_ > 0) {
      PyObject* value = *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object.ptr()) + offset_);
      if (value) return py::reinterpret_borrow<py::object>(value);
    }
    PyObject* value = PyObject_GetAttr(object.ptr(), key.ptr());
    if (!value) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
  }

  py::object key;

 private:
  void find_slot(PyTypeObject* type) {
    const py::object descriptor = py::getattr(reinterpret_cast<PyObject*>(type), key, py::none());
    const bool is_slot = PyObject_TypeCheck(descriptor.ptr(), &PyMemberDescr_Type);
    offset_ = is_slot ? reinterpret_cast<PyMemberDescrObject*>(descriptor.ptr())->d_member->offset : 0;
    type_ = type;
  }

  PyTypeObject* type_ = nullptr;
  Py_ssize_t offset_ = 0;
};

class Signature {
 public:
  static bool understands(const py::object& api) {
    if (!PyCapsule_IsValid(api.ptr(), "dlpack_exchange_api")) return false;
    const auto* exchange = py::capsule(api).get_pointer<dlpack::ExchangeApi>();
    return exchange->version.major == 1 && exchange->tensor_from_object;
  }

  // `groups`: the parameters of each group. `state`: the optimizer's. `rows`: of each parameter that
  // takes part (param, dense, state, keys, sample): `dense` has the memory order that state and gradient
  // must have, `sample` the gradient's element type. `columns`: where the gradients' addresses go, in
  // the order of the rows.
  Signature(const py::list& groups, const py::dict& state, const py::list& rows, const py::list& columns,
            const py::capsule& api)
      : api_(api.get_pointer<dlpack::ExchangeApi>()), params_key_(interned("params")) {
    const py::object tensor = py::module_::import("torch").attr("Tensor");
    tensor_type_ = reinterpret_cast<PyTypeObject*>(tensor.ptr());
    grad_ = tensor.attr("grad");
    is_neg_ = tensor.attr("is_neg");
    for (const py::handle group : groups) {
      sizes_.push_back(py::len(group));
      for (const py::handle param : group) params_.push_back(py::reinterpret_borrow<py::object>(param));
    }
    extend(state, rows, columns, py::array_t<int64_t>(0));
  }

  // Add rows for parameters that had none. `columns` replace the old ones. `places` are the indices in them of all rows,
  // the old rows first; empty if rows and columns are in the same order.
  void extend(const py::dict& state, const py::list& rows, const py::list& columns, const py::array_t<int64_t>& places) {
    states_.clear();
    for (const auto& item : state) {
      states_.push_back(py::reinterpret_borrow<py::object>(item.first));
      states_.push_back(py::reinterpret_borrow<py::object>(item.second));
    }
    for (const py::handle item : rows) add_row(py::reinterpret_borrow<py::tuple>(item));
    gradients_.resize(rows_.size());
    columns_.clear();
    std::vector<int64_t*> slots;
    for (const py::handle item : columns) {
      auto column = py::reinterpret_borrow<py::array_t<int64_t>>(item);
      for (py::ssize_t i = 0; i < column.size(); ++i) slots.push_back(column.mutable_data(i));
      columns_.push_back(std::move(column));
    }
    if (slots.size() != rows_.size()) throw py::value_error("columns must have one number per row");
    slots_ = slots;
    if (places.size() > 0) {
      if (static_cast<size_t>(places.size()) != slots.size()) throw py::value_error("each row must have a place");
      for (size_t i = 0; i < slots.size(); ++i) slots_[i] = slots.at(static_cast<size_t>(places.at(i)));
    }
    std::unordered_set<PyObject*> taken;
    for (const Row& row : rows_) taken.insert(row.param.ptr());
    idle_.clear();
    for (const py::object& param : params_) {
      if (!taken.count(param.ptr())) idle_.push_back(param.ptr());
    }
  }

  // Compare all tensors with those of the plan. GROWN: they are the same, but parameters without a row have gradients.
  // Unless STALE, write the gradients' addresses into the columns (0 for none, UNUSUAL_ADDRESS where a gradient
  // must be checked), and keep references to the gradients.
  Guard check(const py::object& groups, const py::dict& state) {
    if (!same_groups(groups) || !same_state(state)) return STALE;
    bool grown = false;
    for (size_t i = 0; i < idle_.size() && !grown; ++i) grown = !gradient_of(idle_[i]).is_none();
    // Two loops: the code of each fits the instruction cache, that of both would not.
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (is_stale(rows_[i])) return STALE;
    }
    Guard found = SAME;
    for (size_t i = 0; i < rows_.size(); ++i) {
      gradients_[i] = gradient_of(rows_[i].param.ptr());
      const int64_t address = gradient_address(rows_[i], gradients_[i]);
      if (address == UNUSUAL_ADDRESS) {
        found = UNUSUAL;
      } else if (address != *slots_[i] && found == SAME) {
        found = MOVED;
      }
      *slots_[i] = address;
    }
    return grown ? GROWN : found;
  }

  // The gradients that check() has found, in the order of the rows; None where there is none.
  py::list gradients() const {
    py::list found;
    for (const py::object& gradient : gradients_) found.append(gradient ? gradient : py::none());
    return found;
  }

  // The kernels have run: drop the references to the gradients.
  void release() {
    for (py::object& gradient : gradients_) gradient = py::object();
  }

 private:
  // Shape and strides are in extents_, those of all rows one after the other, in the order of the comparison.
  struct Place {
    int64_t address;
    dlpack::Device device;
    dlpack::DataType dtype;
    int32_t ndim;
    size_t first_extent;
  };

  struct State {
    py::object name, tensor;
    int64_t address;
    dlpack::DataType dtype;
    Place order;  // that of the row; of a step count or scales, their own
    bool sharded;
  };

  struct Row {
    py::object param;
    py::object state;
    py::object spec;  // how a DTensor is distributed over ranks; null for other tensors
    Place place, order;
    size_t first_state, end_state;  // in state_tensors_
    dlpack::DataType gradient_type;
    bool may_be_negated;  // has one element
  };

  void add_row(const py::tuple& item) {
    Row row;
    row.param = item[0];
    row.state = item[2];
    if (!PyDict_Check(row.state.ptr())) throw py::type_error("a parameter's state must be a dict");
    if (is_sharded(row.param)) row.spec = spec_.of(row.param);
    const py::object part = part_of(row.param, bool(row.spec));
    row.place = place(part.ptr());
    row.order = py::object(item[1]).is(part) ? row.place : place(py::object(item[1]).ptr());
    row.gradient_type = tensor_of(py::object(item[4]).ptr()).dtype;
    row.first_state = state_tensors_.size();
    for (const py::handle key : py::tuple(item[3])) {
      const py::object name = py::reinterpret_borrow<py::object>(key), tensor = row.state[key];
      const bool sharded = is_sharded(tensor);
      const py::object tensor_part = part_of(tensor, sharded);
      const dlpack::Tensor t = tensor_of(tensor_part.ptr());
      const bool like_row = same_kind(t, t.dtype, row.order);
      const Place order = like_row ? row.order : place(tensor_part.ptr());
      state_tensors_.push_back({name, tensor, t.address(), t.dtype, order, sharded});
    }
    row.end_state = state_tensors_.size();
    row.may_be_negated = true;
    for (int32_t d = 0; d < row.order.ndim; ++d) {
      row.may_be_negated = row.may_be_negated && extents_[row.order.first_extent + 2 * d] == 1;
    }
    rows_.push_back(std::move(row));
  }

  dlpack::Tensor tensor_of(PyObject* tensor) const {
    dlpack::Tensor out;
    if (api_->tensor_from_object(tensor, &out) != 0) throw py::error_already_set();
    return out;
  }

  bool is_sharded(const py::object& tensor) const {
    return Py_TYPE(tensor.ptr()) != tensor_type_ && py::hasattr(tensor, part_.key);
  }

  // The local part of a tensor.
  py::object part_of(const py::object& tensor, bool sharded) const {
    return sharded ? part_.of(tensor) : tensor;
  }

  Place place(PyObject* tensor) {
    const dlpack::Tensor t = tensor_of(tensor);
    const Place place = {t.address(), t.device, t.dtype, t.ndim, extents_.size()};
    for (int32_t d = 0; d < t.ndim; ++d) extents_.insert(extents_.end(), {t.shape[d], t.strides[d]});
    return place;
  }

  // A list or tuple itself; a list of the items of any other iterable.
  static py::object sequence(PyObject* iterable) {
    PyObject* fast = PySequence_Fast(iterable, "groups and their parameters must be sequences");
    if (!fast) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(fast);
  }

  bool same_groups(const py::object& given) const {
    const py::object groups = sequence(given.ptr());
    if (static_cast<size_t>(PySequence_Fast_GET_SIZE(groups.ptr())) != sizes_.size()) return false;
    size_t next = 0;
    for (size_t g = 0; g < sizes_.size(); ++g) {
      PyObject* group = PySequence_Fast_GET_ITEM(groups.ptr(), g);
      PyObject* found = PyDict_Check(group) ? PyDict_GetItemWithError(group, params_key_.ptr()) : nullptr;
      if (!found) return false;
      const py::object params = sequence(found);
      if (static_cast<size_t>(PySequence_Fast_GET_SIZE(params.ptr())) != sizes_[g]) return false;
      for (size_t i = 0; i < sizes_[g]; ++i, ++next) {
        if (PySequence_Fast_GET_ITEM(params.ptr(), i) != params_[next].ptr()) return false;
      }
    }
    return true;
  }

  bool same_state(const py::dict& state) const {
    if (2 * static_cast<size_t>(PyDict_GET_SIZE(state.ptr())) != states_.size()) return false;
    Py_ssize_t position = 0;
    PyObject *key, *value;
    for (size_t i = 0; PyDict_Next(state.ptr(), &position, &key, &value); i += 2) {
      if (key != states_[i].ptr() || value != states_[i + 1].ptr()) return false;
    }
    return true;
  }

  // Whether a parameter or one of its state tensors was replaced or moved.
  bool is_stale(const Row& row) const {
    const dlpack::Tensor param = row.spec ? tensor_of(part_of(row.param, true).ptr()) : tensor_of(row.param.ptr());
    if (param.address() != row.place.address || !same_kind(param, row.place.dtype, row.place)) return true;
    Py_ssize_t position = 0;
    for (size_t i = row.first_state; i < row.end_state; ++i) {
      const State& state = state_tensors_[i];
      // Keys that are in the order of the plan need no lookup.
      PyObject *name, *value;
      if (!PyDict_Next(row.state.ptr(), &position, &name, &value) || name != state.name.ptr()) {
        value = PyDict_GetItemWithError(row.state.ptr(), state.name.ptr());
      }
      if (value != state.tensor.ptr()) return true;
      const dlpack::Tensor tensor = state.sharded ? tensor_of(part_of(state.tensor, true).ptr()) : tensor_of(value);
      if (tensor.address() != state.address) return true;
      if (!same_kind(tensor, state.dtype, state.order)) return true;
    }
    return false;
  }

  py::object gradient_of(PyObject* param) const {
    PyObject* grad = Py_TYPE(grad_.ptr())->tp_descr_get(grad_.ptr(), param, nullptr);
    if (!grad) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(grad);
  }

  // 0 for no gradient, UNUSUAL_ADDRESS for one that must be checked.
  int64_t gradient_address(const Row& row, const py::object& grad) const {
    if (grad.is_none()) return 0;
    if (row.spec) {
      if (Py_TYPE(grad.ptr()) != Py_TYPE(row.param.ptr())) return UNUSUAL_ADDRESS;
      if (!spec_.of(grad).is(row.spec)) return UNUSUAL_ADDRESS;
      const py::object part = part_of(grad, true);
      return Py_TYPE(part.ptr()) == tensor_type_ ? part_address(row, part) : UNUSUAL_ADDRESS;
    }
    return part_address(row, grad);
  }

  int64_t part_address(const Row& row, const py::object& grad) const {
    dlpack::Tensor tensor;
    if (api_->tensor_from_object(grad.ptr(), &tensor) != 0) {
      PyErr_Clear();
      return UNUSUAL_ADDRESS;
    }
    if (!same_kind(tensor, row.gradient_type, row.order)) return UNUSUAL_ADDRESS;
    if (row.gradient_type.code == dlpack::COMPLEX) return UNUSUAL_ADDRESS;  // it may be conjugated lazily
    if (row.may_be_negated && is_negated(grad)) return UNUSUAL_ADDRESS;
    if (tensor.address()) return tensor.address();
    return is_empty(tensor) ? EMPTY_ADDRESS : UNUSUAL_ADDRESS;
  }

  // Dimensions of size 1 play no part in the memory order.
  bool same_kind(const dlpack::Tensor& t, const dlpack::DataType& dtype, const Place& place) const {
    if (!(t.dtype == dtype) || !(t.device == place.device) || t.ndim != place.ndim) return false;
    const int64_t* extent = extents_.data() + place.first_extent;
    for (int32_t d = 0; d < t.ndim; ++d, extent += 2) {
      if (t.shape[d] != extent[0]) return false;
      if (t.shape[d] != 1 && t.strides[d] != extent[1]) return false;
    }
    return true;
  }

  static bool is_empty(const dlpack::Tensor& t) {
    for (int32_t d = 0; d < t.ndim; ++d) {
      if (t.shape[d] == 0) return true;
    }
    return false;
  }

  // torch's lazily negated tensors hold the negative of what DLPack shows. They are imaginary parts, so that only those
  // of one element are dense; asking every gradient would cost as much as two comparisons of it.
  bool is_negated(const py::object& grad) const {
    const py::object answer = py::reinterpret_steal<py::object>(PyObject_CallOneArg(is_neg_.ptr(), grad.ptr()));
    if (!answer) throw py::error_already_set();
    return answer.ptr() != Py_False;
  }

  const dlpack::ExchangeApi* api_;
  py::object params_key_;
  mutable Attribute part_{"_local_tensor"}, spec_{"_spec"};  // of DTensors
  PyTypeObject* tensor_type_;
  std::vector<size_t> sizes_;
  std::vector<py::object> params_, states_;  // of all groups; keys and values of the optimizer's state
  std::vector<int64_t> extents_;
  std::vector<State> state_tensors_;
  std::vector<Row> rows_;
  std::vector<PyObject*> idle_;  // parameters without a row
  std::vector<py::array_t<int64_t>> columns_;
  std::vector<int64_t*> slots_;
  std::vector<py::object> gradients_;
  py::object grad_, is_neg_;  // attributes of torch.Tensor
};

}  // namespace ngn
