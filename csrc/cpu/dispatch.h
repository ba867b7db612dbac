// From run-time values to template arguments: the only place where flags of a rule, element types and loops are
// dispatched. Each function calls f with std::integral_constant arguments, or with a value of the element type.
#pragma once

#include <type_traits>

#include "math/convert.h"
#include "math/rule.h"
#include "math/tables.h"

namespace ngn {
inline namespace NGN_ISA {

template <typename F>
decltype(auto) dispatch_flag(bool flag, F&& f) {
  return flag ? f(std::true_type{}) : f(std::false_type{});
}

// f(RMS, REGULARISED, DIRECTED); a regularised rule always has RMS, one with given directions has none.
template <typename F>
decltype(auto) dispatch_reduce(const Rule& rule, F&& f) {
  if (!rule.rms) {
    return dispatch_flag(rule.directed, [&](auto directed) { return f(std::false_type{}, std::false_type{}, directed); });
  }
  return dispatch_flag(rule.regularised,
                       [&](auto regularised) { return f(std::true_type{}, regularised, std::false_type{}); });
}

// f(MOMENTUM, COORDINATE, RMS)
template <typename F>
decltype(auto) dispatch_apply(const Rule& rule, F&& f) {
  return dispatch_flag(rule.momentum, [&](auto momentum) {
    return dispatch_flag(rule.coordinate, [&](auto coordinate) {
      return dispatch_flag(rule.rms, [&](auto rms) { return f(momentum, coordinate, rms); });
    });
  });
}

// f(DECAY); without momentum there is one place for decay, and nothing to move ahead by.
template <bool MOMENTUM, typename F>
decltype(auto) dispatch_decay(const Rule& rule, bool any, F&& f) {
  if constexpr (MOMENTUM) {
    if (rule.nesterov) return f(std::integral_constant<Decay, Decay::apart_and_ahead>{});
  }
  if (!any) return f(std::integral_constant<Decay, Decay::none>{});
  if constexpr (MOMENTUM) {
    if (rule.adamw_decay) return f(std::integral_constant<Decay, Decay::apart>{});
  }
  return f(std::integral_constant<Decay, Decay::in_displacement>{});
}

// Of a floating-point type; int8 and uint8 have no value without their scales.
template <typename F>
inline void dispatch_type(DType type, F&& f) {
  switch (type) {
    case DType::float64: return f(double{});
    case DType::float32: return f(float{});
    case DType::bfloat16: return f(bfloat16{});
    case DType::float16: return f(float16{});
    case DType::int8:
    case DType::uint8: break;
  }
  __builtin_trap();
}

// Which loop works on a bucket: elements in their own order with a float type of the computation, or quantisation
// blocks in float32.
enum class LoopKind { float32, float64, quant_blocks };

template <typename F>
decltype(auto) dispatch_kernel(const Bucket& bucket, F&& f) {
  const auto narrow = [](DType type) { return size_of(type) < 4; };
  const DType x = bucket.x_type, g = bucket.g_type, m = bucket.m_type, v = bucket.v_type;
  const bool wide = x == DType::float64 || g == DType::float64 || m == DType::float64 || v == DType::float64;
  const bool quantised = narrow(m) || narrow(v) || bucket.rounding != Rounding::nearest;
  if (quantised || (!wide && (narrow(x) || narrow(g)))) {
    return f(std::integral_constant<LoopKind, LoopKind::quant_blocks>{});
  }
  return wide ? f(std::integral_constant<LoopKind, LoopKind::float64>{})
              : f(std::integral_constant<LoopKind, LoopKind::float32>{});
}

}  // namespace NGN_ISA
}  // namespace ngn
