// The element math for host and device, with the names of reference.py, which shows it plainly:
//   contribute()  one element's part of the sums, and contribute_along() with given directions; writes nothing
//   shrink()      from the sums to rho, the clip factor, and whether the step may happen
//   draft()       one element's new v, and what its gradient is divided by
//   update()      one element's new x, m, v
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "math/arithmetic.h"
#include "math/tables.h"

namespace ngn {
inline namespace NGN_ISA {

// What all elements of a chunk share, in the type of the computation. The bias correction of v is part of
// these and not applied to each element: with u = 2 sqrt(1 - beta2^t), D u = eps u + 2 sqrt(v).
template <typename T>
struct Coefficients {
  T gradient_scale;  // s / grad_scale; loading g multiplies by it
  T beta1, beta2, one_minus_beta2;
  T eps;             // eps u
  T step;            // (1 - beta1) gamma u; of coordinate rules (1 - beta1) min(c, 2h) u
  T flatness;        // 2h / max(c, 2h), coordinate rules
  T curvature;       // c u / max(c, 2h), coordinate rules
  T decay;           // lambda a; of AdamW's form lambda gamma
  T x_limit;         // the smallest magnitude that storing x takes to infinity
  T m_limit;         // the same for m
  T v_limit;         // the same for v
  double unit;       // u; 1 without RMS
};

struct Shrink {
  double rho;
  double clip;  // s
  Reason reason;
};

NGN_HD inline bool is_finite(double value) { return value - value == 0; }

// h = (1 - loss_target) (f - loss_floor): what a step aims to remove of the loss
NGN_HD inline double aimed_loss(const Inputs& inputs) { return inputs.aim * (inputs.loss - inputs.loss_floor); }

// Whether the sum is over clipped gradients, so that their norm is a sum of its own.
NGN_HD inline bool sums_clipped(const Rule& rule) { return rule.rms || rule.directed; }

// Whether a pass of the step has summed g^2 alone.
NGN_HD inline bool knows_norm(const Rule& rule, const Inputs& inputs) {
  return inputs.max_grad_norm < INFINITY || !(rule.coordinate || sums_clipped(rule));
}

// s = min(1, max_grad_norm / (norm + 1e-6))
NGN_HD inline double clip_factor(double norm_squared, double max_grad_norm) {
  if (!is_finite(max_grad_norm)) return 1.0;
  const double factor = max_grad_norm / (std::sqrt(norm_squared) + 1e-6);
  return factor < 1.0 ? factor : 1.0;
}

// rho = max(0, 2h - W) / (2h + Q), 1 where 0/0
NGN_HD inline Shrink shrink(const Rule& rule, const Sums& sums, const Inputs& inputs) {
  const double h = aimed_loss(inputs);
  const double clip = clip_factor(sums.norm, inputs.max_grad_norm);
  const double q = sums_clipped(rule) ? sums.weighted : clip * clip * sums.weighted;
  const double denominator = 2 * h + q;
  const double above = 2 * h - sums.alignment;
  const double rho = denominator == 0 ? 1.0 : (above > 0 ? above : 0.0) / denominator;

  Reason reason = Reason::none;
  const double norm = is_finite(inputs.max_grad_norm) ? sums.norm : 0.0;
  if (inputs.found_inf != 0) {
    reason = Reason::amp_overflow;
  } else if (!is_finite(h)) {
    reason = Reason::loss_not_finite;
  } else if (h < 0) {
    reason = Reason::loss_below_floor;
  } else if (!is_finite(sums.weighted + sums.alignment + norm)) {
    reason = Reason::gradient_not_finite;
  }
  return {rho, clip, reason};
}

// c: the step size that rho is computed at
NGN_HD inline double largest_step(const Group& group) { return group.step_cap > 0 ? group.step_cap : group.lr; }

// lr / c: what a schedule leaves of the whole step
NGN_HD inline double schedule(const Group& group) { return group.step_cap > 0 ? group.lr / group.step_cap : 1; }

// a: c; with regularised decay c / (1 + lambda c)
NGN_HD inline double effective_step(const Rule& rule, const Group& group) {
  const double c = largest_step(group);
  return rule.regularised ? c / (1 + group.weight_decay * c) : c;
}

template <typename T>
NGN_HD inline Coefficients<T> coefficients(const Rule& rule, const Group& group, double step_count,
                                           const Inputs& inputs, double clip, double rho, T x_limit,
                                           T m_limit, T v_limit) {
  const double c = largest_step(group), a = effective_step(rule, group), left = schedule(group);
  const double unit = rule.rms ? 2 * std::sqrt(1 - power(group.beta2, step_count)) : 1.0;
  // gamma = min(c, 2h) / (flatness D + curvature g^2): both are divided by max(c, 2h), so that nothing overflows.
  const double two_h = 2 * aimed_loss(inputs);
  const double smaller = c < two_h ? c : two_h, larger = c < two_h ? two_h : c;
  const double gamma = rule.coordinate ? smaller : a * rho;
  Coefficients<T> k;
  k.gradient_scale = static_cast<T>(clip / inputs.grad_scale);
  k.beta1 = static_cast<T>(group.beta1);
  k.beta2 = static_cast<T>(group.beta2);
  k.one_minus_beta2 = static_cast<T>(1 - group.beta2);
  k.eps = static_cast<T>(group.eps * unit);
  k.step = static_cast<T>((1 - group.beta1) * (left * gamma) * unit);
  k.flatness = static_cast<T>(larger > 0 ? two_h / larger : 0);
  k.curvature = static_cast<T>(larger > 0 ? c / larger * unit : 0);
  k.decay = static_cast<T>(group.weight_decay * (left * (rule.adamw_decay && !rule.coordinate ? gamma : a)));
  k.x_limit = x_limit;
  k.m_limit = m_limit;
  k.v_limit = v_limit;
  k.unit = unit;
  return k;
}

// V is a scalar T or a vector of them; both have the same operators. g is already unscaled and clipped. A rule with
// given directions updates with d in the place of g, neither unscaled nor clipped.

// v <- beta2 v + (1 - beta2) g^2
template <typename V, typename T>
NGN_HD inline V second_moment(V v, V g, const Coefficients<T>& k) {
  return multiply_add(all<V>(k.one_minus_beta2), g * g, k.beta2 * v);
}

// D u
template <typename V, typename T>
NGN_HD inline V preconditioner(V v, const Coefficients<T>& k) {
  return add_twice_root<T>(all<V>(k.eps), v);
}

template <bool RMS, bool REGULARISED, typename V, typename T>
NGN_HD inline void contribute(V x, V v, V g, const Coefficients<T>& k, V& weighted, V& alignment) {
  if constexpr (RMS) {
    weighted += g * g / preconditioner(second_moment(v, g, k), k);
  } else {
    weighted = multiply_add(g, g, weighted);
  }
  if constexpr (REGULARISED) alignment = multiply_add(g, x, alignment);
}

// The same of a rule with given directions.
template <typename V>
NGN_HD inline void contribute_along(V g, V d, V& weighted) {
  weighted = multiply_add(g, d, weighted);
}

// The distance of a value's magnitude to a limit, in floating-point numbers: negative if the magnitude is not
// below the limit, or not a number. Integer arithmetic, because the floating-point units are busy.
template <typename V, typename T>
NGN_HD inline auto headroom(V value, T limit) {
  using Integer = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
  Integer limit_bits;
  std::memcpy(&limit_bits, &limit, sizeof(limit));
  std::conditional_t<std::is_floating_point_v<V>, Integer, decltype(V{} < V{})> bits;
  std::memcpy(&bits, &value, sizeof(value));
  constexpr Integer all_but_sign = static_cast<std::make_unsigned_t<Integer>>(-1) >> 1;
  return limit_bits - 1 - (bits & all_but_sign);
}

template <typename V>
struct Element {
  V x, m, v;
};

// The first half of an update: the new v, and what g is divided by. Both take long, so that loops compute them
// some vectors ahead of the second half.
template <typename V>
struct Draft {
  V v, divisor;
};

template <bool COORDINATE, bool RMS, typename V, typename T>
NGN_HD inline Draft<V> draft(V v, V g, const Coefficients<T>& k) {
  V divisor = all<V>(T(1));
  if constexpr (RMS) {
    v = second_moment(v, g, k);
    divisor = preconditioner(v, k);
  }
  if constexpr (COORDINATE) {
    divisor = at_least_normal<T>(multiply_add(all<V>(k.curvature), g * g, k.flatness * divisor));
  }
  return {v, divisor};
}

// Where weight decay goes: into the displacement, which momentum keeps, or off the parameter alone. There the parameter
// may also move ahead, by Nesterov's momentum.
enum class Decay { none, in_displacement, apart, apart_and_ahead };

// The second half: x, m, v to their new values.
template <bool MOMENTUM, Decay DECAY, typename V, typename T>
NGN_HD inline void update(Element<V>& element, const Draft<V>& draft, V g, const Coefficients<T>& k) {
  auto& [x, m, v] = element;
  v = draft.v;
  V displacement = k.step * g / draft.divisor;
  if constexpr (DECAY == Decay::in_displacement) displacement = multiply_add(all<V>(k.decay), x, displacement);
  if constexpr (MOMENTUM) displacement = multiply_add(all<V>(k.beta1), m, displacement);
  const V before = m;
  m = displacement;
  if constexpr (DECAY >= Decay::apart) displacement = multiply_add(all<V>(k.decay), x, displacement);
  if constexpr (DECAY == Decay::apart_and_ahead) displacement = multiply_add(all<V>(k.beta1), m - before, displacement);
  x = x - displacement;
}

// Negative where x, m or v would not be finite in its storage type: there the caller must keep() the old values.
// NARROW: m or v may be stored in a type of a smaller range than T.
template <bool MOMENTUM, bool RMS, bool NARROW, typename V, typename T>
NGN_HD inline auto headroom_of(const Element<V>& element, const Coefficients<T>& k) {
  // A non-finite m makes x non-finite, and so does an infinite v whose root is estimated.
  auto least = headroom(element.x, k.x_limit);
  if constexpr (MOMENTUM && (NARROW || sizeof(T) == 8)) least |= headroom(element.m, k.m_limit);
  if constexpr (RMS && (NARROW || !estimates_root<T>)) least |= headroom(element.v, k.v_limit);
  return least;
}

template <typename V, typename Headroom>
NGN_HD inline void keep(const Element<V>& old, Headroom headroom, Element<V>& element) {
  element.x = headroom < 0 ? old.x : element.x;
  element.m = headroom < 0 ? old.m : element.m;
  element.v = headroom < 0 ? old.v : element.v;
}

}  // namespace NGN_ISA
}  // namespace ngn
