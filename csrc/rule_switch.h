// Run-time flags to template flags, in the only place that does so.
#pragma once

#include <type_traits>

#include "tables.h"

namespace ngn {
inline namespace NGN_ISA {

template <typename F>
decltype(auto) with_flag(bool flag, F&& f) {
  return flag ? f(std::true_type{}) : f(std::false_type{});
}

// f(RMS, REGULARISED); a regularised rule always has RMS.
template <typename F>
decltype(auto) switch_reduce(const Rule& rule, F&& f) {
  if (!rule.rms) return f(std::false_type{}, std::false_type{});
  return with_flag(rule.regularised, [&](auto regularised) { return f(std::true_type{}, regularised); });
}

// f(MOMENTUM, COORDINATE, RMS)
template <typename F>
decltype(auto) switch_apply(const Rule& rule, F&& f) {
  return with_flag(rule.momentum, [&](auto momentum) {
    return with_flag(rule.coordinate, [&](auto coordinate) {
      return with_flag(rule.rms, [&](auto rms) { return f(momentum, coordinate, rms); });
    });
  });
}

}  // namespace NGN_ISA
}  // namespace ngn
