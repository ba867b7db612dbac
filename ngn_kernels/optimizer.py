"""NGNOptimizer: groups, the loss, the path of a step, telemetry, saving."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar, overload

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .backends import check_backend, default_backend, select_backend
from .checkpoint import SAVED, LoadedInto, load, plain_state
from .distributed.dtensors import is_sharded
from .distributed.exchange import ALONE, NOTHING_AGREED, Agreement, Alone, Exchange, Ranks, add_up
from .distributed.owners import split_with_gradients
from .formats import Storage
from .hooks import entrance
from .layout import Count, Size
from .loss import PendingLoss, has_gradients, read_weight, whole_loss
from .messages import FOREIGN_OPTIONS, is_called_by, warn
from .options import (
    PER_OPTIMIZER,
    SAVED_OPTIONS,
    SPECTRAL_VALUES,
    DecayForm,
    LossReduction,
    OnSkip,
    RoundingName,
    StateFormat,
    check_group,
    check_group_names,
    require,
    usable_lr,
)
from .planning.plan import (
    Draft,
    Plan,
    create_state,
    draft_plan,
    home_device,
    make_plan,
    misplaced,
)
from .planning.rows import Participant
from .planning.tables import DeviceTables, GroupValues, StepOptions
from .rules import RULES, Rule, rule_of
from .skips import SkipPolicy
from .spectral import Spectral, check_matrix

# What these options were in a checkpoint that does not have them.
NEWER = {"loss_target": 0.0, "decay_form": "paper", "nesterov": False}

Returned = TypeVar("Returned")

# What makes optimizers create their state by a step at lr 0: of torch, and of torchtitan.
INITIALISE_STATE = (
    "torch.distributed.checkpoint.state_dict._init_optim_state",
    "torchtitan.components.optimizer.utils.init_optim_state",
)


class NGNOptimizer(Optimizer):
    """What the algorithms share; they differ by their rule and their defaults.

    Args:
        params: parameters, named parameters, or groups of them.
        defaults: the per-group values, among them ``algorithm``, a key of RULES.
        loss_floor: a lower bound of the loss; steps see ``loss - loss_floor``.
        loss_target: each step takes this fraction of the current loss above its floor for the lowest
            that the loss can reach, in [0, 1); 0 is the paper.
        max_grad_norm: clip the norm of all gradients together to this, without touching them.
        decay_form: "paper": lr weight_decay x, which enters the momentum; "adamw": the step size times
            weight_decay x, taken off the parameter beside the momentum as AdamW does.
        nesterov: Nesterov's momentum, with ``decay_form="adamw"``.
        on_skip: what a skipped step does: "warn", "raise" a ``SkippedStepError``, or "ignore". An
            overflow under AMP, by which a GradScaler finds its scale, is no reason to raise.
        max_skipped_steps: raise after this many skipped steps in a row, whatever ``on_skip`` says.
        backend: "auto", "cuda", "triton", "cpu" or "reference".
        reduce_group: the ranks that share one step size: "auto" (all of torch.distributed's, if
            there are several), a process group, or None for this process alone.
        replicas: how many of these ranks hold each ordinary parameter: None for all of them, 1
            where every rank owns other ones. DTensors follow from their meshes.
        loss_reduction: "mean" of the ranks' losses, or their "sum".
        state: how m and v are stored: "float32", "bfloat16" or "8bit", or a pair of these.
        rounding: of 16-bit parameters: "nearest", "stochastic" or "exact".
    """

    # GradScaler hands grad_scale and found_inf over instead of unscaling and syncing itself.
    _step_supports_amp_scaling: ClassVar[bool] = True
    grad_scale: Tensor | None
    found_inf: Tensor | None
    _storage = Storage()
    _loss_floor: float
    _loss_target: float
    _max_grad_norm: float | None
    _decay_form: DecayForm
    _nesterov: bool
    _skip_policy: SkipPolicy
    _backend: str

    def __new__(cls, *args: Any, **options: Any) -> NGNOptimizer:
        known = inspect.signature(cls.__init__).parameters
        passes_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
        for name in options:
            if name not in known and (name in FOREIGN_OPTIONS or not passes_on):
                listed = ", ".join(n for n in known if n not in ("self", "params", "defaults"))
                advice = FOREIGN_OPTIONS.get(name, f"its options are {listed}")
                raise TypeError(f"{cls.__name__} has no option {name}: {advice}")
        return super().__new__(cls)

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        loss_floor: float = 0.0,
        loss_target: float = 0.0,
        max_grad_norm: float | None = None,
        decay_form: DecayForm = "paper",
        nesterov: bool = False,
        on_skip: OnSkip = "warn",
        max_skipped_steps: int | None = None,
        backend: str = "auto",
        state: StateFormat | tuple[StateFormat, StateFormat] = "float32",
        rounding: RoundingName = "nearest",
        reduce_group: Any = "auto",
        replicas: int | None = None,
        loss_reduction: LossReduction = "mean",
    ) -> None:
        self._storage = Storage.of(state, rounding)
        self._ranks = Ranks(reduce_group, replicas, loss_reduction)
        self.loss_floor = loss_floor
        self.loss_target = loss_target
        self.max_grad_norm = max_grad_norm
        self._own_rule = rule_of(defaults["algorithm"], decay_form, nesterov)
        self._decay_form, self._nesterov = decay_form, nesterov
        self._skip_policy = SkipPolicy(on_skip, max_skipped_steps)
        self.backend = backend
        self._pending = PendingLoss()  # one object, which proxies that copy __dict__ share
        self._skipped_before = 0
        self._forget()
        super().__init__(params, defaults)

    def _forget(self) -> None:
        """Drop all that can be derived again."""
        self._plan: Plan | None = None
        self._tables: dict[torch.device, DeviceTables] = {}
        self._home: DeviceTables | None = None
        self._knows_grad_norm = False  # perhaps not of the last step, whose norm is then NaN
        self._last_exchange: Exchange | Alone = ALONE
        self._agreed: tuple[Any, Agreement] = (None, NOTHING_AGREED)
        self._checked: Any = None
        self.rule = Rule()
        self._values: list[GroupValues] = []
        self._spectral: list[Spectral | None] = []

    def _inner(self) -> NGNOptimizer:
        """Itself, or the optimizer in a wrapper of Lightning's, which is of this class, too."""
        inner: NGNOptimizer = self.__dict__.get("_optimizer", self)
        return inner

    # Options

    @property
    def loss_floor(self) -> float:
        return self._inner()._loss_floor

    @loss_floor.setter
    def loss_floor(self, value: float) -> None:
        require("loss_floor", value, "a finite number", lambda v: math.isfinite(v))
        self._inner()._loss_floor = float(value)

    @property
    def loss_target(self) -> float:
        return self._inner()._loss_target

    @loss_target.setter
    def loss_target(self, value: float) -> None:
        require("loss_target", value, "in [0, 1)", lambda v: 0 <= v < 1)
        self._inner()._loss_target = float(value)

    @property
    def max_grad_norm(self) -> float | None:
        return self._inner()._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        if value is not None:
            require("max_grad_norm", value, "None or in (0, inf)", lambda v: 0 < v < math.inf)
        self._inner()._max_grad_norm = None if value is None else float(value)

    @property
    def decay_form(self) -> DecayForm:
        return self._inner()._decay_form

    @decay_form.setter
    def decay_form(self, value: DecayForm) -> None:
        self._inner()._set_forms(value, self.nesterov)

    @property
    def nesterov(self) -> bool:
        """Whether the parameter also moves by beta1 times what the displacement has changed."""
        return self._inner()._nesterov

    @nesterov.setter
    def nesterov(self, value: bool) -> None:
        self._inner()._set_forms(self.decay_form, value)

    def _set_forms(self, decay_form: DecayForm, nesterov: bool) -> None:
        self._own_rule = rule_of(self.defaults["algorithm"], decay_form, nesterov)
        self._decay_form, self._nesterov = decay_form, nesterov
        self._set_rule(self.rule.momentum)

    @property
    def on_skip(self) -> OnSkip:
        return self._inner()._skip_policy.on_skip

    @on_skip.setter
    def on_skip(self, value: OnSkip) -> None:
        self._inner()._skip_policy = SkipPolicy(value, self.max_skipped_steps)

    @property
    def max_skipped_steps(self) -> int | None:
        return self._inner()._skip_policy.limit

    @max_skipped_steps.setter
    def max_skipped_steps(self, value: int | None) -> None:
        self._inner()._skip_policy = SkipPolicy(self.on_skip, value)

    @property
    def backend(self) -> str:
        return self._inner()._backend

    @backend.setter
    def backend(self, name: str) -> None:
        check_backend(name)
        self._inner()._backend = name
        self._inner()._plan = None

    def _options(self) -> StepOptions:
        return StepOptions(self._loss_floor, self._loss_target, self._max_grad_norm)

    def _saved_options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SAVED_OPTIONS}

    def _option(self, name: str) -> Any:
        """As it was given; the attribute `state` is every optimizer's own."""
        if name == "state":
            return self._storage.given
        return self._storage.rounding if name == "rounding" else getattr(self, name)

    @property
    def preconditioner(self) -> str | None:
        return "rms" if RULES[self.defaults["algorithm"]].rms else None

    @property
    def reduce_group(self) -> Any:
        return self._inner()._ranks.reduce_group

    @property
    def replicas(self) -> int | None:
        return self._inner()._ranks.replicas

    @property
    def loss_reduction(self) -> str:
        return self._inner()._ranks.loss_reduction

    # Groups

    @classmethod
    def from_adamw(cls, adamw: Optimizer, **options: Any) -> NGNOptimizer:
        """Only of the algorithms that keep AdamW's second moment and a momentum."""
        raise NotImplementedError(
            f"{cls.__name__} keeps another state than AdamW: write NGNMDv1.from_adamw(adamw), or "
            f"begin anew with {cls.__name__}(params, lr=...)"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            param_group = dict(param_group)
            for name in PER_OPTIMIZER:
                # ZeroRedundancyOptimizer echoes options into its groups.
                if name in param_group and param_group.pop(name) != self._option(name):
                    raise ValueError(
                        f"{name} is an option of the whole optimizer, not of a group: "
                        f"pass it to {type(self).__name__}(...) itself"
                    )
            params = param_group["params"]
            if isinstance(params, (set, frozenset)):
                raise TypeError("a group is a set of parameters, which has no order: pass a list")
            params = [params] if isinstance(params, Tensor) else list(params)
            param_group["params"] = params
            tensors = [p[1] if isinstance(p, tuple) else p for p in params]
            if len({id(p) for p in tensors}) < len(tensors):
                raise ValueError("a group lists the same parameter twice: pass each parameter once")
            check_group_names(
                param_group,
                [*self.defaults, "params", "param_names", SAVED, *PER_OPTIMIZER],
                type(self).__name__,
            )
            values = {**self.defaults, **param_group}
            check_group(values, self.defaults)
            self._check_matrices(values, params)
            param_group[SAVED] = None
        super().add_param_group(param_group)
        self._set_rule(self.rule.momentum)
        self._plan = None
        self._pending.backwards.watch(self.param_groups)

    def _check_matrices(self, values: dict[str, Any], params: list[Any]) -> None:
        """Raise if a parameter of a new spectral group is no matrix; the first step checks lazy ones."""
        spectral = Spectral.of(values)
        for index, item in enumerate(params if spectral is not None else ()):
            name, param = item if isinstance(item, tuple) else (None, item)
            if isinstance(param, Tensor) and not is_lazy(param):
                label = labelled(param, name, index, len(self.param_groups))
                check_matrix(param, spectral, label)  # type: ignore[arg-type]

    def _set_rule(self, momentum: bool) -> None:
        """The point of the grid; momentum is on once any group has had some."""
        momentum = momentum or any(_betas(group)[0] > 0 for group in self.param_groups)
        rule = self._own_rule
        self.rule = rule if rule.momentum == momentum else replace(rule, momentum=momentum)

    def _group_values(self) -> tuple[list[GroupValues], dict[int, Tensor]]:
        """The groups' values, checked if they changed; lrs on a device come separately, without a sync."""
        seen, device_lrs = [], {}
        for index, group in enumerate(self.param_groups):
            lr, betas = group["lr"], group.get("betas")
            if isinstance(lr, Tensor):
                if lr.device.type != "cpu":
                    device_lrs[index] = lr
                lr = lr.item() if lr.device.type == "cpu" else 0.0
            if isinstance(betas, list):  # which may have been changed in place
                betas = tuple(betas)
            others = group.get("momentum"), group.get("beta2"), group.get("eps")
            values = group["weight_decay"], group.get("step_cap")
            directions = None
            if "spectral" in group:
                directions = [
                    v[:] if isinstance(v, list) else v for v in map(group.get, SPECTRAL_VALUES)
                ]
            seen.append((lr, betas, others, values, directions, len(group)))
        if seen != self._checked:
            for group in self.param_groups:
                check_group(group, self.defaults)
            self._set_rule(self.rule.momentum)
            self._checked = seen
            spectral = [Spectral.of(group) for group in self.param_groups]
            if spectral != self._spectral:
                self._spectral, self._plan = spectral, None
            self._values = [
                GroupValues(
                    usable_lr(values[0], group, self.defaults),
                    *_betas(group),
                    group.get("eps", 1.0),
                    group["weight_decay"],
                    group.get("step_cap") or 0.0,
                )
                for values, group in zip(seen, self.param_groups, strict=True)
            ]
        return self._values, device_lrs

    def _all_params(self) -> Iterator[tuple[int, int, Tensor]]:
        """Group, place in it, parameter: in the order in which state_dict counts them."""
        for group, values in enumerate(self.param_groups):
            for place, param in enumerate(values["params"]):
                yield group, place, param

    def _named_params(self) -> Iterator[tuple[Tensor, str]]:
        for group, place, param in self._all_params():
            yield param, self._label(group, place)

    def _label(self, group: int, index: int) -> str:
        params = self.param_groups[group]
        name = params["param_names"][index] if "param_names" in params else None
        return labelled(params["params"][index], name, index, group)

    # The loss

    @torch._disable_dynamo
    def add_loss(self, share: float | Tensor) -> None:
        """Add to the loss of the next ``step()`` what a ``backward()`` is called on.

        It is dropped with its gradients, where these are cleared before a step has used them.

        Args:
            share: such as ``loss / n`` where n micro-batches make a step; before any loss scale.
        """
        self._pending.add(share, self.param_groups)

    @torch._disable_dynamo
    def set_loss(self, loss: float | Tensor, weight: float | Tensor = 1.0) -> None:
        """Give the loss of the next ``step()``; several calls make a weighted mean.

        Args:
            loss: the loss of one micro-batch.
            weight: its share, such as its number of samples or tokens; greater than 0. A tensor
                must be on the host.
        """
        weight = read_weight(weight)
        self._pending.set(loss, weight, self.param_groups)

    @torch._disable_dynamo
    def drop_loss(self) -> None:
        """Drop the loss that ``add_loss`` or ``set_loss`` gave for the next ``step()``."""
        self._pending.clear()

    @torch._disable_dynamo
    def loss_is_pending(self) -> bool:
        """Whether ``add_loss`` or ``set_loss`` gave a loss whose gradients are not thrown away.

        One whose gradients are is dropped.
        """
        self._pending.drop_stale(self.param_groups)
        return bool(self._pending)

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and with those that no step has used the loss given for them."""
        self._pending.before_zero_grad(self.param_groups)
        super().zero_grad(set_to_none)
        self._pending.after_zero_grad(self.param_groups, set_to_none)

    # The step

    @overload  # type: ignore[override]  # torch's has no loss
    def step(
        self, closure: None = None, *, loss: float | Tensor | None = None
    ) -> float | Tensor | None: ...

    @overload
    def step(
        self, closure: Callable[[], Returned], *, loss: float | Tensor | None = None
    ) -> Returned: ...

    @entrance
    def step(
        self, closure: Callable[[], Any] | None = None, *, loss: float | Tensor | None = None
    ) -> Any:
        """Take one step. It is atomic: on bad input nothing changes.

        Args:
            closure: re-evaluates the model and returns the loss. What ``add_loss`` or ``set_loss``
                gave, before or in the closure, takes precedence over what it returns.
            loss: the loss that the gradients belong to, a number or a tensor with one element; of
                several ``backward()`` calls their sum. A closure given as well must return None.

        Returns:
            The loss as it was given, or what the closure returned.
        """
        with torch.set_grad_enabled(False):  # no_grad() takes twice as long
            exchange = self._exchange()
            try:
                given, value = self._pending.of_step(closure, loss, self.param_groups)
                if self._skip_policy.has_error:
                    self._skip_policy.raise_error()
                plan = self._prepare(value, exchange, closure is not None)
                if plan is None or not add_up(plan, exchange, value is not None):
                    return given
            except Exception as error:
                exchange.fail(error)
            plan.apply()
            plan.finish()
            self._home = plan.home
            self._knows_grad_norm |= plan.computes_norm
            skips = plan.home.report.poll_skips()
            if skips is not None:
                name, alone = type(self).__name__, exchange is ALONE
                self._skip_policy.report(name, skips, alone, self._named_params)
            return given

    def _exchange(self) -> Exchange | Alone:
        """With the ranks of this step."""
        group, exchange = self._ranks.group(), self._last_exchange
        if group is None:
            self._last_exchange = ALONE
            return ALONE
        home = home_device(self.param_groups)
        if exchange.group is not group or exchange.home != home:
            name, check = type(self).__name__, self._check_loss
            exchange = self._last_exchange = Exchange(self._ranks, group, name, home, check)
        exchange.begin()
        return exchange

    def _prepare(
        self, loss: float | Tensor | None, exchange: Exchange | Alone, by_closure: bool
    ) -> Plan | None:
        """The plan with the numbers of this step, or None where no step is to be taken."""
        if loss is None and self._only_creates_state():
            create_state(self._draft(), self.state)
            return None
        if exchange is ALONE:
            if loss is None and has_gradients(self.param_groups):
                raise RuntimeError(self._pending.missing(type(self).__name__, by_closure))
            if loss is None:
                return None
            loss = whole_loss(loss)
            self._check_loss(loss)
        values, device_lrs = self._group_values()
        known, self._plan = self._plan, None  # one whose step fails is not kept
        plan = self._current(known, exchange)
        draft = self._draft(known) if plan is None else None
        # Check all that can be refused before the first collective.
        if isinstance(exchange, Exchange):
            self._skip_policy.check(exchange.home)
            agreement = self._agreement(plan, values, device_lrs)
            unready = is_sharded(loss) or misplaced(plan, draft)
            exchange.meet(agreement, has_gradients(self.param_groups), unready)
            loss = 0.0 if loss is None else whole_loss(loss)
        if draft is not None:
            plan = self._make_plan(draft, exchange)
        assert plan is not None and loss is not None
        plan.load_gradients()
        for device in plan.devices:
            device.inputs.set_groups(values, device_lrs)
            device.inputs.set(
                loss,
                self._options(),
                (self.__dict__.get("grad_scale"), self.__dict__.get("found_inf")),
            )
            device.inputs.send()
        self._plan = plan
        return plan

    def _only_creates_state(self) -> bool:
        """Whether a checkpoint library calls, which has optimizers create their state by a step.

        Only the call stack shows it: a rank in training may have lr 0, no loss and gradients of 0, too.
        """
        if self.state or any(group["lr"] != 0 for group in self.param_groups):
            return False
        return is_called_by(INITIALISE_STATE)

    def _current(self, plan: Plan | None, exchange: Exchange | Alone) -> Plan | None:
        """The plan of the step before, if nothing but gradients has changed since."""
        fits = (
            plan is not None
            and (plan.rule is self.rule or plan.rule == self.rule)
            and plan.clipping == (self._max_grad_norm is not None)
            and plan.is_of(exchange.group)
            and plan.check(self.param_groups, self.state)
        )
        return plan if fits else None

    def _agreement(
        self, plan: Plan | None, values: list[GroupValues], device_lrs: dict[int, Tensor]
    ) -> Agreement:
        """What must be the same on every rank, made again where something has changed."""
        options = self._saved_options()
        split = split_with_gradients(self.param_groups, self._spectral)
        made_of = values, options, self._spectral, split
        if plan is None or self._agreed[0] != made_of:
            options = {"the algorithm": self.defaults["algorithm"], **options}
            groups = [v._replace(lr=0.0) if i in device_lrs else v for i, v in enumerate(values)]
            params = [param for *_, param in self._all_params()]
            labels = [self._label(*place) for place in split]
            backend = partial(default_backend, self._backend)
            agreement = self._ranks.agreement(
                options, groups, self._spectral, labels, params, self._storage, backend
            )
            self._agreed = made_of, agreement
        return self._agreed[1]

    def _check_loss(self, loss: float | Tensor) -> None:
        """Raise if a loss on the host is below the floor; kernels check one on a device."""
        if not isinstance(loss, Tensor) and math.isfinite(loss) and loss < self._loss_floor:
            raise ValueError(
                f"the loss {loss} is below loss_floor={self.loss_floor}: NGN step sizes need "
                f"loss >= loss_floor, pass {type(self).__name__}(..., loss_floor=...) that holds"
            )

    def _draft(self, known: Plan | None = None) -> Draft:
        """Of parameters that take part, or of those alone that join a plan which is right otherwise."""
        if known is not None and not known.has_grown:
            known = None
        select = partial(select_backend, self.backend)
        participants = list(self._participants(known))
        draft = draft_plan(self.state, participants, select, self._storage, known)
        return self._draft() if draft is None else draft

    def _participants(self, known: Plan | None) -> Iterator[Participant]:
        """Parameters that have a gradient, or had one before, and have no row in a known plan."""
        there: Collection[int] = () if known is None else known.params
        spectral = [Spectral.of(group) for group in self.param_groups]
        for number, (group, place, param) in enumerate(self._all_params()):
            if id(param) not in there and (
                param.grad is not None or (known is None and "step" in self.state.get(param, ()))
            ):
                label = self._label(group, place)
                replicas, how = self._ranks.replicas_of(param, label), spectral[group]
                rule = self.rule if how is None else self.rule.with_directions()
                yield Participant(param, group, label, replicas, rule, number, how)

    def _make_plan(self, draft: Draft, exchange: Exchange | Alone) -> Plan:
        tables = partial(self._tables_of, alone=exchange is ALONE)
        clipping = self._max_grad_norm is not None
        groups, group = self.param_groups, exchange.group
        plan = make_plan(draft, groups, self.state, self.rule, clipping, tables, group)
        if not plan.check(groups, self.state):
            raise RuntimeError("a tensor was replaced while the step was being planned")
        return plan

    def _tables_of(self, device: torch.device, alone: bool) -> DeviceTables:
        groups = len(self.param_groups)
        if device not in self._tables:
            self._tables[device] = DeviceTables(device, groups, alone)
        self._tables[device].fit(groups, alone)
        return self._tables[device]

    # Telemetry

    @property
    def shrink(self) -> Tensor | None:
        """rho of the last applied step, on the device; None before it and for coordinate rules.

        On a GPU, where the host does not know whether a step was applied, NaN before the first.
        """
        sizes = self._sizes()
        return None if sizes is None else sizes[Size.SHRINK]

    def step_sizes(self) -> list[Tensor] | None:
        """gamma of each group in the last applied step, on the device; None where ``shrink`` is."""
        sizes = self._sizes()
        return None if sizes is None else list(sizes[Size.STEP_SIZES :].unbind())

    def _sizes(self) -> Tensor | None:
        inner = self._inner()
        if inner._home is None or inner.rule.coordinate:
            return None
        sizes = inner._home.report.sizes.clone()
        return None if sizes.is_cpu and sizes[Size.SHRINK].isnan() else sizes

    @property
    def grad_norm(self) -> Tensor | None:
        """The gradients' norm before clipping in the last applied step, on the device.

        None where no pass of the step computes it: with RMS or a step size per coordinate, and
        without ``max_grad_norm``.
        """
        inner = self._inner()
        if inner._home is None or not inner._knows_grad_norm:
            return None
        norm = inner._home.report.sizes[Size.SQUARED_NORM].sqrt()
        return None if norm.is_cpu and norm.isnan() else norm

    @property
    def skipped_steps(self) -> Tensor:
        """How many steps were skipped, in whole or in part; an int64 tensor on the device."""
        inner = self._inner()
        device = home_device(inner.param_groups) if inner._home is None else inner._home.device
        total = torch.full((), inner._skipped_before, dtype=torch.int64, device=device)
        for tables in inner._tables.values():
            total += tables.report.counts[Count.SKIPPED].to(device)
        return total

    def metrics(self, as_floats: bool = False, prefix: str = "ngn") -> dict[str, Any]:
        """What the last applied step did, by the names that trainers log; without waiting for a GPU.

        Args:
            as_floats: numbers for ``json`` and the like, which wait for a GPU.
            prefix: what the names begin with.

        Returns:
            ``ngn/shrink``, ``ngn/step_size`` (and ``ngn/step_size/1`` of a second group),
            ``ngn/grad_norm`` and ``ngn/skipped_steps``, without what this optimizer has not.
        """
        found: dict[str, Any] = {}
        sizes = self._sizes()
        if sizes is not None:
            found["shrink"] = sizes[Size.SHRINK]
            for group, size in enumerate(sizes[Size.STEP_SIZES :].unbind()):
                if not (size.is_cpu and size.isnan()):  # of a group that has taken no step
                    found[f"step_size/{group}" if group else "step_size"] = size
        norm = self.grad_norm
        if norm is not None:
            found["grad_norm"] = norm
        found["skipped_steps"] = self.skipped_steps
        return {
            f"{prefix}/{name}": value.item() if as_floats else value
            for name, value in found.items()
        }

    # Saving and loading

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_loss_floor": self._loss_floor,
            "_loss_target": self._loss_target,
            "_max_grad_norm": self._max_grad_norm,
            "_decay_form": self._decay_form,
            "_nesterov": self._nesterov,
            "_skip_policy": self._skip_policy,
            "_backend": self._backend,
            "_ranks": self._ranks,
            "_storage": self._storage,
            "_pending": self._pending,
            "_skipped_before": int(self.skipped_steps),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch's; groups would take it over
        if "_backend" in state:  # unpickled or copied, not merely loaded
            forms = self._decay_form, self._nesterov
            self._own_rule = rule_of(self.defaults["algorithm"], *forms)
            self._forget()
            self._pending.backwards.watch(self.param_groups)
        self._plan = None
        self._set_rule(any("momentum_buffer" in values for values in self.state.values()))

    def state_dict(self) -> dict[str, Any]:
        """The state in plain tensors, which any backend and any ``state=`` loads.

        Each group has what was counted and chosen for all of them as its ``"ngn"``, since loaders
        that flatten a state_dict keep what groups have, and nothing else.
        """
        if self._inner() is not self:
            return self._inner().state_dict()
        state, groups = self.state, self.param_groups
        options = {
            "skipped_steps": int(self.skipped_steps),
            **self._saved_options(),
        }
        for group in groups:
            group[SAVED] = dict(options)
        if self._storage.narrow or self._storage.rounding == "exact":
            self.state = defaultdict(dict, {p: plain_state(values) for p, values in state.items()})
        try:
            return super().state_dict()
        finally:
            self.state = state
            for group in groups:
                group[SAVED] = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, on any backend and device.

        Unlike torch's, it recasts state only if ``state=`` says so, and copies every tensor.
        Everything is checked before anything changes. ``skipped_steps`` is restored; this
        optimizer keeps its own ``loss_floor``, ``loss_target``, ``max_grad_norm``, ``decay_form`` and
        ``nesterov``, and warns of other saved ones.
        """
        if self._inner() is not self:
            return self._inner().load_state_dict(state_dict)
        state_dict = dict(state_dict)
        for pre_hook in list(self._optimizer_load_state_dict_pre_hooks.values()):
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced

        params = [
            LoadedInto(param, self._label(group, place), index)
            for index, (group, place, param) in enumerate(self._all_params())
        ]
        loaded = load(state_dict, self.param_groups, self.defaults, params, self._storage)
        self._warn_of_others(loaded.options)
        self.__setstate__({"state": loaded.state, "param_groups": loaded.groups})
        self._skip_policy.drop_error()
        for tables in self._tables.values():
            tables.report.end_row_of_skips()
        if "skipped_steps" in loaded.options:
            self._skipped_before += loaded.options["skipped_steps"] - int(self.skipped_steps)
        for post_hook in list(self._optimizer_load_state_dict_post_hooks.values()):
            post_hook(self)

    def _warn_of_others(self, saved: dict[str, Any]) -> None:
        """Of saved options that differ, in an order in which they can be assigned."""
        if not saved:
            return
        mine = self._saved_options()
        theirs = {name: saved.get(name, NEWER.get(name, value)) for name, value in mine.items()}
        # Nesterov's momentum goes with one form of decay: it ends before that changes, or begins afterwards.
        for name in mine if theirs["nesterov"] else reversed(mine):
            if theirs[name] != mine[name]:
                warn(
                    f"the loaded run had {name}={theirs[name]!r}, and this {type(self).__name__} goes on "
                    f"with {name}={mine[name]!r}: write optimizer.{name} = {theirs[name]!r} to keep the "
                    "former",
                    UserWarning,
                )


def labelled(param: Tensor, name: str | None, index: int, group: int) -> str:
    """What errors call a parameter."""
    named = "" if name is None else f" {name!r}"
    return f"parameter{named} {index} of group {group} (shape {tuple(param.shape)})"


def _betas(group: dict[str, Any]) -> tuple[float, float]:
    if "betas" in group:
        beta1, beta2 = group["betas"]
        return beta1, beta2
    return group.get("momentum", 0.0), group.get("beta2", 0.0)
