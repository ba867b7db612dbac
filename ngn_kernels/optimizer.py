"""NGNOptimizer: groups, state, the loss, the path of a step, and state_dict."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from .backends import check_backend, select_backend
from .checks import check_group, check_overlap, check_param, read_loss, require, warn, wide
from .plan import (
    FOUND_INF,
    GRAD_SCALE,
    HEIGHT,
    MAX_GRAD_NORM,
    SHRINK,
    SKIPPED,
    Board,
    Bucket,
    BucketKey,
    Hyper,
    Plan,
    Row,
)
from .rules import RULES, Reason, Rule
from .state import STATE_KEYS, check_loadable, init_state, load_state, state_dtype

PER_OPTIMIZER = ("loss_floor", "max_grad_norm", "backend", "preconditioner")

HOW_TO_PASS_THE_LOSS = (
    "write optimizer.step(loss=loss), or optimizer.step(closure), "
    "or optimizer.set_loss(loss) before optimizer.step()"
)

WARNINGS = {
    Reason.AMP_OVERFLOW: "the gradient scaler found an overflow; the step was skipped",
    Reason.LOSS_NOT_FINITE: "the loss is not finite; the step was skipped",
    Reason.LOSS_BELOW_FLOOR: "the loss is below loss_floor; the step was skipped: "
    "pass a loss_floor that the loss never falls below",
    Reason.GRADIENT_NOT_FINITE: "a gradient, or the sum of squared gradients, is not finite; "
    "the step was skipped",
    Reason.ELEMENTS_KEPT: "some elements would have become non-finite (a non-finite gradient, "
    "or an overflow of the storage type) and kept their old values",
}


class SkippedStepWarning(RuntimeWarning):
    """A step, or some of its elements, left everything as it was."""


class NGNOptimizer(Optimizer):
    """What the seven algorithms share; they differ by their rule and their defaults.

    Args:
        params: parameters, named parameters, or groups of them.
        defaults: the per-group values, among them ``algorithm``, a key of RULES.
        loss_floor: a lower bound of the loss; steps see ``loss - loss_floor``.
        max_grad_norm: clip the norm of all gradients together to this, without touching them.
        backend: "auto", "triton", "cpu" or "reference".
    """

    # GradScaler hands grad_scale and found_inf over instead of unscaling and syncing itself.
    _step_supports_amp_scaling: ClassVar[bool] = True
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        loss_floor: float,
        max_grad_norm: float | None,
        backend: str,
    ) -> None:
        require("loss_floor", loss_floor, "a finite number", lambda v: math.isfinite(v))
        if max_grad_norm is not None:
            require(
                "max_grad_norm", max_grad_norm, "None or in (0, inf)", lambda v: 0 < v < math.inf
            )
        check_backend(backend)
        self.loss_floor = float(loss_floor)
        self.max_grad_norm = max_grad_norm
        self.backend = backend
        self._pending: tuple[float | Tensor, float] | None = None
        self._skipped_before = 0
        self._forget()
        super().__init__(params, defaults)

    def _forget(self) -> None:
        """Drop all that can be derived again."""
        self._plan: Plan | None = None
        self._boards: dict[torch.device, Board] = {}
        self._home: Board | None = None
        self._momentum = False
        self._checked: list[Hyper] | None = None

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            param_group = dict(param_group)
            for name in PER_OPTIMIZER:
                if name in param_group:
                    raise ValueError(
                        f"{name} is an option of the whole optimizer, not of a group: "
                        f"pass it to {type(self).__name__}(...) itself"
                    )
            params = param_group["params"]
            params = [params] if isinstance(params, Tensor) else list(params)
            param_group["params"] = params
            tensors = [p[1] if isinstance(p, tuple) else p for p in params]
            if len({id(p) for p in tensors}) < len(tensors):
                raise ValueError("a group lists the same parameter twice: pass each parameter once")
            check_group({**self.defaults, **param_group}, self.defaults["algorithm"])
        super().add_param_group(param_group)
        self._plan = None

    @property
    def rule(self) -> Rule:
        """The point of the grid; momentum is on once any group has had some."""
        rule = RULES[self.defaults["algorithm"]]
        if not self._momentum:
            self._momentum = any(_betas(group)[0] > 0 for group in self.param_groups)
        return rule.with_momentum(self._momentum)

    def _hypers(self) -> tuple[list[Hyper], dict[int, Tensor]]:
        """The groups' values, checked if they changed; an lr on a device comes apart, unread."""
        hypers, device_lrs = [], {}
        for index, group in enumerate(self.param_groups):
            lr = group["lr"]
            if isinstance(lr, Tensor):
                if lr.device.type != "cpu":
                    device_lrs[index] = lr
                lr = lr.item() if lr.device.type == "cpu" else 0.0
            hypers.append(Hyper(lr, *_betas(group), group.get("eps", 1.0), group["weight_decay"]))
        if hypers != self._checked:
            for group in self.param_groups:
                check_group(group, self.defaults["algorithm"])
            self._checked = hypers
        return hypers, device_lrs

    def _label(self, group: int, index: int) -> str:
        params = self.param_groups[group]
        name = f" {params['param_names'][index]!r}" if "param_names" in params else ""
        shape = tuple(params["params"][index].shape)
        return f"parameter{name} {index} of group {group} (shape {shape})"

    # The loss

    def set_loss(self, loss: float | Tensor, weight: float = 1.0) -> None:
        """Give the loss of the next bare ``step()``; several calls make a weighted mean.

        Args:
            loss: the loss of one micro-batch.
            weight: its share, such as its number of samples or tokens; greater than 0.
        """
        require("weight", weight, "in (0, inf)", lambda v: 0 < v < math.inf)
        value = wide(read_loss(loss)) * weight
        if self._pending is not None:
            value, weight = value + self._pending[0], weight + self._pending[1]
        self._pending = (value, float(weight))

    def _find_loss(
        self, closure: Callable[[], Any] | None, loss: Any
    ) -> tuple[Any, float | Tensor | None]:
        """The loss as the caller gave it, and as a number; None if there is none."""
        if closure is not None and not callable(closure):
            raise TypeError(
                f"step() takes a closure, not {type(closure).__name__}: {HOW_TO_PASS_THE_LOSS}"
            )
        sources = (closure is not None) + (loss is not None) + (self._pending is not None)
        if sources > 1:
            raise RuntimeError(f"the loss came from two sources at once: {HOW_TO_PASS_THE_LOSS}")
        if self._pending is not None:
            total, weight = self._pending
            self._pending = None
            return None, total / weight
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if loss is None:
                raise RuntimeError("the closure returned None: return the loss from it")
        return loss, None if loss is None else read_loss(loss)

    # The step

    def step(
        self, closure: Callable[[], Any] | None = None, *, loss: float | Tensor | None = None
    ) -> Any:
        """Take one step. It is atomic: on bad input nothing changes.

        Args:
            closure: re-evaluates the model and returns the loss.
            loss: the loss that the gradients belong to, a number or a tensor with one element.

        Returns:
            The loss as it was given.
        """
        # torch would wrap every step() for hooks and profilers, at half the cost of a small step.
        observed = (
            torch.autograd._profiler_enabled()
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        )
        # A step() of a subclass has been wrapped already.
        if observed and type(self).step is NGNOptimizer.step:
            return _observed_step(self, closure, loss=loss)
        return self._step(closure, loss=loss)

    step.hooked = True  # type: ignore[attr-defined]  # tells torch not to wrap it

    def _step(
        self, closure: Callable[[], Any] | None = None, *, loss: float | Tensor | None = None
    ) -> Any:
        with torch.set_grad_enabled(False):  # no_grad() takes twice as long
            return self._take_step(closure, loss)

    def _take_step(self, closure: Callable[[], Any] | None, loss: float | Tensor | None) -> Any:
        given, value = self._find_loss(closure, loss)
        if value is None:
            # torch.distributed.checkpoint makes optimizers create their state this way.
            if any(group["lr"] != 0 for group in self.param_groups):
                name = type(self).__name__
                raise RuntimeError(f"{name} needs the loss of this step: {HOW_TO_PASS_THE_LOSS}")
            self._current_plan()
            return None
        height = value if isinstance(value, Tensor) else value - self.loss_floor
        if not isinstance(height, Tensor) and height < 0 and math.isfinite(height):
            raise ValueError(
                f"the loss {value} is below loss_floor={self.loss_floor}: NGN step sizes need "
                f"loss >= loss_floor, pass {type(self).__name__}(..., loss_floor=...) that holds"
            )

        hypers, device_lrs = self._hypers()
        plan = self._current_plan()
        if plan is None:
            return given
        for board in plan.boards:
            board.set_groups(hypers, device_lrs)
            board.set(HEIGHT, height)
            board.set(GRAD_SCALE, _or(getattr(self, "grad_scale", None), 1.0))
            board.set(FOUND_INF, _or(getattr(self, "found_inf", None), 0.0))
            board.set(MAX_GRAD_NORM, _or(self.max_grad_norm, math.inf))
            board.send()
            if self.loss_floor and isinstance(height, Tensor):
                board.scalars[HEIGHT].sub_(self.loss_floor)

        for reduction in plan.reductions:
            for bucket in plan.buckets:
                bucket.backend.reduce(bucket, reduction)
            plan.share_sums()
        # The home device comes last: it counts the step for all.
        for bucket in reversed(plan.buckets):
            if len(plan.boards) > 1 and bucket.board is plan.home:
                plan.share_reason()
            bucket.backend.apply(bucket, plan.rule, last=bucket is plan.buckets[0])
        plan.finish()
        self._home = plan.home
        self._tell(plan.home.news())
        return given

    def _tell(self, reason: Reason) -> None:
        if reason is not Reason.NONE:
            warn(f"{type(self).__name__}: {WARNINGS[reason]}", SkippedStepWarning)

    def _current_plan(self) -> Plan | None:
        """The plan with this step's gradients, built anew if anything else has moved."""
        plan, rule = self._plan, self.rule
        reductions = rule.reductions(self.max_grad_norm is not None)
        params: list[Tensor] = list(chain.from_iterable(g["params"] for g in self.param_groups))
        if plan is not None and plan.is_of(rule, reductions, params, self.state) and plan.refresh():
            return plan
        self._plan = None
        self._plan = self._build_plan(rule, reductions, params)
        return self._plan

    def _build_plan(
        self, rule: Rule, reductions: tuple[Rule, ...], params: list[Tensor]
    ) -> Plan | None:
        # A parameter that once had a gradient keeps its row, so that plans stay.
        found = [
            (param, group_index, self._label(group_index, index))
            for group_index, group in enumerate(self.param_groups)
            for index, param in enumerate(group["params"])
            if param.grad is not None or param in self.state
        ]
        for param, _, label in found:
            check_param(param, label)
        check_overlap([(param, label) for param, _, label in found])
        keys = [self._bucket_key(param) for param, _, _ in found]
        backends = {key: select_backend(self.backend, key) for key in keys}
        # Nothing can be refused from here on: state may be created.
        rows: dict[BucketKey, list[Row]] = {}
        for key, (param, group_index, label) in zip(keys, found, strict=True):
            init_state(self.state[param], param, rule)
            rows.setdefault(key, []).append(Row(param, group_index, label, self.state[param], rule))
        if not rows:
            return None

        # Buckets of one device lie together, the home device's first.
        devices = list(dict.fromkeys(key.device for key in rows))
        for device in devices:
            if device not in self._boards:
                self._boards[device] = Board(device)
            self._boards[device].make_room(len(self.param_groups))
        in_order = sorted(rows, key=lambda key: devices.index(key.device))
        buckets = [Bucket(key, rows[key], backends[key]) for key in in_order]
        states = list(self.state.values())
        plan = Plan(buckets, self._boards, rule, reductions, params, states)
        for bucket in plan.buckets:
            bucket.backend.prepare(bucket)
        if not plan.refresh():
            raise RuntimeError("a tensor was replaced while the step was being planned")
        return plan

    def _bucket_key(self, param: Tensor) -> BucketKey:
        grad = param.dtype if param.grad is None else param.grad.dtype
        held = self.state.get(param, {})
        state = next(
            (held[key].dtype for key in STATE_KEYS if key in held), state_dtype(param.dtype)
        )
        return BucketKey(param.device, param.dtype.to_real(), grad.to_real(), state.to_real())

    # Telemetry

    @property
    def shrink(self) -> Tensor | None:
        """rho of the last applied step, on the device; None before it and for coordinate rules."""
        if self._home is None or self.rule.coordinate:
            return None
        return self._home.scalars[SHRINK].clone()

    def step_sizes(self) -> list[Tensor] | None:
        """gamma of each group in the last step, on the device; None where ``shrink`` is."""
        rho = self.shrink
        if rho is None or self._home is None:
            return None
        lr, weight_decay = self._home.groups[:, 0], self._home.groups[:, 4]
        a = lr / (1 + weight_decay * lr) if self.rule.regularised else lr
        return list((a * rho).unbind())

    @property
    def skipped_steps(self) -> Tensor:
        """How many steps were skipped, in whole or in part; an int64 tensor on the device."""
        device = (
            self.param_groups[0]["params"][0].device if self._home is None else self._home.device
        )
        total = torch.full((), self._skipped_before, dtype=torch.int64, device=device)
        for board in self._boards.values():
            total += board.report[SKIPPED].to(device)
        return total

    # Saving and loading

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "loss_floor": self.loss_floor,
            "max_grad_norm": self.max_grad_norm,
            "backend": self.backend,
            "_pending": self._pending,
            "_skipped_before": int(self.skipped_steps),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "backend" in state:  # unpickled or copied, not merely loaded
            self._forget()
        self._plan = None
        self._momentum = any("momentum_buffer" in held for held in self.state.values())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, on any backend and device.

        Unlike torch's, it never recasts state and copies every tensor. Everything is checked
        before anything changes.
        """
        state_dict = dict(state_dict)
        for pre_hook in list(self._optimizer_load_state_dict_pre_hooks.values()):
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced

        groups = deepcopy(state_dict["param_groups"])
        check_loadable(groups, self.param_groups, self.defaults)
        owners: dict[Any, tuple[Tensor, str]] = {}
        for g, (theirs, ours) in enumerate(zip(groups, self.param_groups, strict=True)):
            for i, saved in enumerate(theirs["params"]):
                owners[saved] = (ours["params"][i], self._label(g, i))
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for saved, values in state_dict["state"].items():
            if saved not in owners:
                raise ValueError(f"the loaded state has parameter {saved!r}, which is in no group")
            param, label = owners[saved]
            state[param] = load_state(param, values, self.defaults["algorithm"], label)

        for theirs, ours in zip(groups, self.param_groups, strict=True):
            theirs["params"] = ours["params"]
            if "param_names" in ours:
                theirs.setdefault("param_names", ours["param_names"])
            for name, value in self.defaults.items():  # a value that an older file lacks
                theirs.setdefault(name, value)
        self.__setstate__({"state": state, "param_groups": groups})
        for post_hook in list(self._optimizer_load_state_dict_post_hooks.values()):
            post_hook(self)


_observed_step = Optimizer.profile_hook_step(NGNOptimizer._step)


def _betas(group: dict[str, Any]) -> tuple[float, float]:
    if "betas" in group:
        beta1, beta2 = group["betas"]
        return beta1, beta2
    return group.get("momentum", 0.0), group.get("beta2", 0.0)


def _or(value: Any, default: float) -> Any:
    return default if value is None else value
