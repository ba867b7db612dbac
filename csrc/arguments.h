// What both modules check of Python's arguments.
#pragma once

#include <pybind11/pybind11.h>

#include "math/tables.h"

namespace ngn {

inline void check(bool ok, const char* message) {
  if (!ok) throw pybind11::value_error(message);
}

// Python's number of an enum; every switch relies on it being a named one.
inline DType known_type(int type) {
  check(type >= 0 && type < DTYPE_COUNT, "no such element type");
  return static_cast<DType>(type);
}
inline Rounding known_rounding(int rounding) {
  check(rounding >= 0 && rounding < ROUNDING_COUNT, "no such rounding");
  return static_cast<Rounding>(rounding);
}

inline Rule known_rule(int64_t flags) {
  check(flags >= 0 && flags >> FLAG_COUNT == 0, "no such rule");
  const Rule rule = rule_of(flags);
  check(!rule.directed || !(rule.rms || rule.coordinate), "given directions have no rms and no step size of their own");
  return rule;
}

}  // namespace ngn
