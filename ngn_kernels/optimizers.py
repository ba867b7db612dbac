"""The names: defaults, and the formula as docstring.

In the formulas: f the loss, h = f - loss_floor, g the gradient, c = lr, b1 and b2 the betas,
l = weight_decay, t the number of this step for this parameter. Sums run over all parameters of
all groups; with several groups c and l are each parameter's own. docs/algorithms.md has it all.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from .adamw import (
    VALUES,
    group_from_adamw,
    groups_from_adamw,
    state_for_adamw,
    state_from_adamw,
)
from .messages import warn
from .optimizer import NGNOptimizer
from .options import DecayForm, LossReduction, OnSkip, RoundingName, StateFormat, require
from .rules import RULES

if TYPE_CHECKING:
    from typing_extensions import Self


class NGN(NGNOptimizer):
    """NGN: one step size from the loss and the gradient norm.

    One step:

        rho = 2h / (2h + c sum(g^2))
        x  <- x - c rho g - l c x

    Args:
        params: parameters, named parameters, or groups of them.
        lr: c, the largest step size; a float or a tensor.
        weight_decay: l, decoupled.
        step_cap: the step size that rho is computed at, so that lr and its schedule scale the whole
            step; None: this step's lr, as in the paper.

    The other options are the same for all algorithms: ``NGNOptimizer`` explains them.

    Example:
        >>> import torch
        >>> from ngn_kernels import NGN
        >>> x = torch.nn.Parameter(torch.tensor([3.0]))
        >>> opt = NGN([x], lr=10.0)
        >>> loss = (x**2).sum()
        >>> loss.backward()
        >>> _ = opt.step(loss=loss)
        >>> round(x.item(), 3)  # x - 2h/(2h + c g^2) c g = 3 - 18/378 * 60
        0.143
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        *,
        weight_decay: float = 0.0,
        step_cap: float | None = None,
        loss_floor: float = 0.0,
        loss_target: float = 0.0,
        max_grad_norm: float | None = None,
        decay_form: DecayForm = "paper",
        on_skip: OnSkip = "warn",
        max_skipped_steps: int | None = None,
        backend: str = "auto",
        state: StateFormat | tuple[StateFormat, StateFormat] = "float32",
        rounding: RoundingName = "nearest",
        reduce_group: Any = "auto",
        replicas: int | None = None,
        loss_reduction: LossReduction = "mean",
    ) -> None:
        defaults = dict(lr=lr, weight_decay=weight_decay, step_cap=step_cap, algorithm="NGN")
        super().__init__(
            params,
            defaults,
            loss_floor=loss_floor,
            loss_target=loss_target,
            max_grad_norm=max_grad_norm,
            decay_form=decay_form,
            on_skip=on_skip,
            max_skipped_steps=max_skipped_steps,
            backend=backend,
            state=state,
            rounding=rounding,
            reduce_group=reduce_group,
            replicas=replicas,
            loss_reduction=loss_reduction,
        )


class NGNM(NGNOptimizer):
    """NGN-M: NGN's step with heavy-ball momentum.

    One step:

        rho = 2h / (2h + c sum(g^2))
        m  <- b m + (1 - b) c rho g + l c x
        x  <- x - m

    Args:
        params: parameters, named parameters, or groups of them.
        lr: c, the largest step size; a float or a tensor.
        momentum: b.
        weight_decay: l, decoupled; it enters the momentum.
        step_cap: the step size that rho is computed at, so that lr and its schedule scale the whole
            step; None: this step's lr, as in the paper.

    The other options are the same for all algorithms: ``NGNOptimizer`` explains them.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        momentum: float = 0.9,
        *,
        weight_decay: float = 0.0,
        step_cap: float | None = None,
        loss_floor: float = 0.0,
        loss_target: float = 0.0,
        max_grad_norm: float | None = None,
        decay_form: DecayForm = "paper",
        on_skip: OnSkip = "warn",
        max_skipped_steps: int | None = None,
        backend: str = "auto",
        state: StateFormat | tuple[StateFormat, StateFormat] = "float32",
        rounding: RoundingName = "nearest",
        reduce_group: Any = "auto",
        replicas: int | None = None,
        loss_reduction: LossReduction = "mean",
    ) -> None:
        defaults = dict(
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            step_cap=step_cap,
            algorithm="NGNM",
        )
        super().__init__(
            params,
            defaults,
            loss_floor=loss_floor,
            loss_target=loss_target,
            max_grad_norm=max_grad_norm,
            decay_form=decay_form,
            on_skip=on_skip,
            max_skipped_steps=max_skipped_steps,
            backend=backend,
            state=state,
            rounding=rounding,
            reduce_group=reduce_group,
            replicas=replicas,
            loss_reduction=loss_reduction,
        )


class NGND(NGNOptimizer):
    """NGN-D: a step size for each coordinate, from its own partial derivative.

    One step:

        D = 1, or with "rms": v <- b2 v + (1 - b2) g^2,  D = eps + sqrt(v / (1 - b2^t))
        x <- x - 2h c g / (2h D + c g^2) - l c x

    Args:
        params: parameters, named parameters, or groups of them.
        lr: c, the largest step size; a float or a tensor.
        preconditioner: None, or "rms".
        beta2: b2, used with "rms".
        eps: keeps D above 0, used with "rms".
        weight_decay: l, decoupled.
        step_cap: the step size that rho is computed at, so that lr and its schedule scale the whole
            step; None: this step's lr, as in the paper.

    The other options are the same for all algorithms: ``NGNOptimizer`` explains them.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        preconditioner: str | None = None,
        beta2: float = 0.999,
        eps: float = 1e-8,
        *,
        weight_decay: float = 0.0,
        step_cap: float | None = None,
        loss_floor: float = 0.0,
        loss_target: float = 0.0,
        max_grad_norm: float | None = None,
        decay_form: DecayForm = "paper",
        on_skip: OnSkip = "warn",
        max_skipped_steps: int | None = None,
        backend: str = "auto",
        state: StateFormat | tuple[StateFormat, StateFormat] = "float32",
        rounding: RoundingName = "nearest",
        reduce_group: Any = "auto",
        replicas: int | None = None,
        loss_reduction: LossReduction = "mean",
    ) -> None:
        if preconditioner not in (None, "rms"):
            raise ValueError(f'preconditioner={preconditioner!r}: must be None or "rms"')
        algorithm = "NGND" if preconditioner is None else "NGND(rms)"
        defaults = dict(
            lr=lr,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            step_cap=step_cap,
            algorithm=algorithm,
        )
        super().__init__(
            params,
            defaults,
            loss_floor=loss_floor,
            loss_target=loss_target,
            max_grad_norm=max_grad_norm,
            decay_form=decay_form,
            on_skip=on_skip,
            max_skipped_steps=max_skipped_steps,
            backend=backend,
            state=state,
            rounding=rounding,
            reduce_group=reduce_group,
            replicas=replicas,
            loss_reduction=loss_reduction,
        )


class _MomentumAndRms(NGNOptimizer):
    """What the MD family shares: the constructor, and the ways from AdamW and back."""

    algorithm: str

    @classmethod
    def from_adamw(cls, adamw: Optimizer, **options: Any) -> Self:
        """Go on where a ``torch.optim.AdamW`` is, with the same parameters.

        Groups keep their lr, betas, eps, weight decay and own keys; state is taken over as
        ``load_adamw_state_dict`` does it. Weight decay stays outside of the momentum
        (``decay_form="adamw"``), unless the options say otherwise; NGNMDv1W has a form of its own.

        Args:
            adamw: the optimizer so far.
            options: of this optimizer, such as ``loss_target``. ``lr``, ``betas``, ``eps`` and
                ``weight_decay`` among them replace AdamW's. ``lr`` is that of the group with the
                largest one; others keep their ratio to it. Where AdamW has a schedule, it is the base
                lr, of which a group gets the part that the schedule has left (docs/from-adamw.md).
                ``weight_decay`` is for the groups that have some; if none has, for all.
        """
        if not RULES[cls.algorithm].regularised:
            options.setdefault("decay_form", "adamw")
        values = {name: options[name] for name in VALUES if name in options}
        groups = groups_from_adamw(adamw, values)
        known = group_from_adamw(adamw.defaults)
        defaults = {name: known[name] for name in VALUES}
        optimizer = cls(groups, **{**defaults, **options})
        if adamw.state:
            optimizer.load_adamw_state_dict(adamw.state_dict())
        return optimizer

    def load_adamw_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state that a ``torch.optim.AdamW`` with the same groups saved.

        The second moment and the step count are the same here. The momentum becomes AdamW's last
        displacement, lr exp_avg / ((1 - beta1^t) D). This optimizer keeps the values of its groups,
        such as lr and weight decay, and its ``decay_form``, and warns if that is another decay.
        """
        inner = self._inner()
        exact = inner._storage.rounding == "exact"
        kept = [dict(group) for group in inner.param_groups]
        inner.load_state_dict(state_from_adamw(state_dict, kept, exact))
        for group, values in zip(inner.param_groups, kept, strict=True):
            group.update(values)
        in_momentum = not (inner.rule.adamw_decay or inner.rule.regularised)
        if in_momentum and any(group["weight_decay"] for group in kept):
            warn(
                f"AdamW decays outside of the momentum, and this {type(self).__name__} goes on with "
                'decay_form="paper", in which weight_decay acts 1 / (1 - beta1) times as much: write '
                'optimizer.decay_form = "adamw" to keep the former',
                UserWarning,
            )

    def adamw_state_dict(
        self,
        lr: float | Tensor | None = None,
        *,
        fused: bool | None = None,
        foreach: bool | None = None,
        capturable: bool = False,
    ) -> dict[str, Any]:
        """A ``state_dict`` that a ``torch.optim.AdamW`` with the same groups loads.

        The way back of ``load_adamw_state_dict``, with which AdamW goes on at the speed of this run.
        With ``decay_form="paper"`` the momentum has decay in it, which AdamW takes for gradients until
        it has forgotten it.

        Args:
            lr: AdamW's base lr of the group with the largest one, to which others keep their ratio; each
                gets the part that a schedule has left. By default that of each group, which AdamW then
                has to use.
            fused: AdamW's, which it takes from the state_dict that it loads.
            foreach: the same.
            capturable: the same.
        """
        if lr is not None:
            number = lr.item() if isinstance(lr, Tensor) and lr.numel() == 1 else lr
            require("lr", number, "in [0, inf)", lambda v: 0 <= v < math.inf)
        switches = {"fused": fused, "foreach": foreach, "capturable": capturable}
        return state_for_adamw(self.state_dict(), lr, switches)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        weight_decay: float = 0.0,
        step_cap: float | None = None,
        loss_floor: float = 0.0,
        loss_target: float = 0.0,
        max_grad_norm: float | None = None,
        decay_form: DecayForm = "paper",
        on_skip: OnSkip = "warn",
        max_skipped_steps: int | None = None,
        backend: str = "auto",
        state: StateFormat | tuple[StateFormat, StateFormat] = "float32",
        rounding: RoundingName = "nearest",
        reduce_group: Any = "auto",
        replicas: int | None = None,
        loss_reduction: LossReduction = "mean",
    ) -> None:
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            step_cap=step_cap,
            algorithm=self.algorithm,
        )
        super().__init__(
            params,
            defaults,
            loss_floor=loss_floor,
            loss_target=loss_target,
            max_grad_norm=max_grad_norm,
            decay_form=decay_form,
            on_skip=on_skip,
            max_skipped_steps=max_skipped_steps,
            backend=backend,
            state=state,
            rounding=rounding,
            reduce_group=reduce_group,
            replicas=replicas,
            loss_reduction=loss_reduction,
        )


class NGNMDv1(_MomentumAndRms):
    """NGN-MDv1: momentum, an RMS preconditioner and one step size. The one to begin with.

    One step:

        v  <- b2 v + (1 - b2) g^2,  D = eps + sqrt(v / (1 - b2^t))
        rho = 2h / (2h + c sum(g^2 / D))
        m  <- b1 m + (1 - b1) c rho g / D + l c x
        x  <- x - m

    Args:
        params: parameters, named parameters, or groups of them.
        lr: c, the largest step size; a float or a tensor.
        betas: (b1, b2).
        eps: keeps D above 0.
        weight_decay: l, decoupled; it enters the momentum.
        step_cap: the step size that rho is computed at, so that lr and its schedule scale the whole
            step; None: this step's lr, as in the paper.

    The other options are the same for all algorithms: ``NGNOptimizer`` explains them.
    """

    algorithm = "NGNMDv1"


class NGNMDv2(_MomentumAndRms):
    """NGN-MDv2: momentum, an RMS preconditioner and a step size for each coordinate.

    One step:

        v <- b2 v + (1 - b2) g^2,  D = eps + sqrt(v / (1 - b2^t))
        m <- b1 m + (1 - b1) 2h c g / (2h D + c g^2) + l c x
        x <- x - m

    The arguments are those of ``NGNMDv1``.
    """

    algorithm = "NGNMDv2"


class DecNGNMDv1(_MomentumAndRms):
    """Dec-NGN-MDv1: NGN-MDv1 with decoupled weight decay, 1e-2 by default.

    The arguments are those of ``NGNMDv1``.
    """

    algorithm = "DecNGNMDv1"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        weight_decay: float = 1e-2,
        step_cap: float | None = None,
        loss_floor: float = 0.0,
        loss_target: float = 0.0,
        max_grad_norm: float | None = None,
        decay_form: DecayForm = "paper",
        on_skip: OnSkip = "warn",
        max_skipped_steps: int | None = None,
        backend: str = "auto",
        state: StateFormat | tuple[StateFormat, StateFormat] = "float32",
        rounding: RoundingName = "nearest",
        reduce_group: Any = "auto",
        replicas: int | None = None,
        loss_reduction: LossReduction = "mean",
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay=weight_decay,
            step_cap=step_cap,
            loss_floor=loss_floor,
            loss_target=loss_target,
            max_grad_norm=max_grad_norm,
            decay_form=decay_form,
            on_skip=on_skip,
            max_skipped_steps=max_skipped_steps,
            backend=backend,
            state=state,
            rounding=rounding,
            reduce_group=reduce_group,
            replicas=replicas,
            loss_reduction=loss_reduction,
        )


class NGNMDv1W(_MomentumAndRms):
    """NGN-MDv1W: NGN-MDv1 with weight decay inside the model that the step minimises.

    One step:

        a   = c / (1 + l c)
        rho = max(0, 2h - c l sum(g x)) / (2h + a sum(g^2 / D))
        m  <- b1 m + (1 - b1) a rho g / D + l a x
        x  <- x - m

    As printed in the paper; docs/algorithms.md shows the factor that its derivation loses.

    The arguments are those of ``NGNMDv1``, with a ``weight_decay`` of 1e-2 by default.
    """

    algorithm = "NGNMDv1W"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        weight_decay: float = 1e-2,
        step_cap: float | None = None,
        loss_floor: float = 0.0,
        loss_target: float = 0.0,
        max_grad_norm: float | None = None,
        decay_form: DecayForm = "paper",
        on_skip: OnSkip = "warn",
        max_skipped_steps: int | None = None,
        backend: str = "auto",
        state: StateFormat | tuple[StateFormat, StateFormat] = "float32",
        rounding: RoundingName = "nearest",
        reduce_group: Any = "auto",
        replicas: int | None = None,
        loss_reduction: LossReduction = "mean",
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay=weight_decay,
            step_cap=step_cap,
            loss_floor=loss_floor,
            loss_target=loss_target,
            max_grad_norm=max_grad_norm,
            decay_form=decay_form,
            on_skip=on_skip,
            max_skipped_steps=max_skipped_steps,
            backend=backend,
            state=state,
            rounding=rounding,
            reduce_group=reduce_group,
            replicas=replicas,
            loss_reduction=loss_reduction,
        )


class NGNMuon(NGNOptimizer):
    """NGN on Muon: matrices step along their orthogonalised gradients, all with NGN's one step size.

    One step:

        d   = s polar(g) where a group is spectral, g / D of NGN-MDv1 elsewhere
        rho = 2h / (2h + sum(c g d))
        m  <- b1 m + (1 - b1) c rho d + l c x
        x  <- x - m

    polar(g) = U V^T for g = U S V^T, so that sum(g d) of a matrix is s times the sum of its singular
    values. Newton-Schulz computes it, once a step; its polynomials bring singular values to about 1.
    Momentum is of displacements, where Muon has that of gradients. With ``nesterov=True``

        m  <- b1 m + (1 - b1) c rho d
        x  <- x - (m + b1 (m - the m before)) - rho c l x

    Args:
        params: matrices, or groups such as ``ngn_kernels.muon_groups(model)`` makes.
        lr: c, the largest step size; a float or a tensor.
        betas: (b1, b2); b2 is of the groups that are not spectral.
        eps: keeps D above 0.
        spectral: of a group: True for matrices of two dimensions; "flat" for convolutions, whose first
            dimension is a matrix's rows and all others its columns; "stack" for matrices in the last
            two dimensions, such as those of experts; False for g / D.
        adjust_lr_fn: s, as ``torch.optim.Muon`` has it: "match_rms_adamw", with which matrices and the
            other parameters take about the same lr, or "original".
        ns_steps: the number of Newton-Schulz's polynomials, each with two products of a matrix and one of
            its smaller side.
        ns_coefficients: (a, b, c) of a s + b s^3 + c s^5, or "polar_express", which has others for each.
        ns_dtype: of the matrix products: "bfloat16", "float32", or "auto" for bfloat16 on AMD GPUs
            and NVIDIA's of capability 8.0 or newer, float32 elsewhere; float64 and complex parameters
            have their own.
        weight_decay: l, decoupled; it enters the momentum.
        step_cap: the step size that rho is computed at, so that lr and its schedule scale the whole
            step; None: this step's lr.
        nesterov: Nesterov's momentum; it needs ``decay_form="adamw"``.

    The other options are the same for all algorithms: ``NGNOptimizer`` explains them.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        spectral: bool | str = True,
        adjust_lr_fn: str = "match_rms_adamw",
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] | str = (3.4445, -4.775, 2.0315),
        ns_dtype: str = "auto",
        weight_decay: float = 0.0,
        step_cap: float | None = None,
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
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            step_cap=step_cap,
            spectral=spectral,
            adjust_lr_fn=adjust_lr_fn,
            ns_steps=ns_steps,
            ns_coefficients=ns_coefficients,
            ns_dtype=ns_dtype,
            algorithm="NGNMuon",
        )
        super().__init__(
            params,
            defaults,
            loss_floor=loss_floor,
            loss_target=loss_target,
            max_grad_norm=max_grad_norm,
            decay_form=decay_form,
            nesterov=nesterov,
            on_skip=on_skip,
            max_skipped_steps=max_skipped_steps,
            backend=backend,
            state=state,
            rounding=rounding,
            reduce_group=reduce_group,
            replicas=replicas,
            loss_reduction=loss_reduction,
        )
