"""The seven names: defaults, and the formula as docstring.

In the formulas: f the loss, h = f - loss_floor, g the gradient, c = lr, b1 and b2 the betas,
l = weight_decay, t the number of this step for this parameter. Sums run over all parameters of
all groups; with several groups c and l are each parameter's own. docs/algorithms.md has it all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from .optimizer import NGNOptimizer
from .options import Options

if TYPE_CHECKING:
    from typing_extensions import Unpack


class NGN(NGNOptimizer):
    """NGN: one step size from the loss and the gradient norm.

    ::

        rho = 2h / (2h + c sum(g^2))
        x  <- x - c rho g - l c x

    Args:
        params: parameters, named parameters, or groups of them.
        lr: c, the largest step size; a float or a tensor.
        weight_decay: l, decoupled.
        options: what all algorithms take, such as ``max_grad_norm``: :class:`NGNOptimizer`.

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
        **options: Unpack[Options],
    ) -> None:
        defaults = dict(lr=lr, weight_decay=weight_decay, algorithm="NGN")
        super().__init__(params, defaults, **options)


class NGNM(NGNOptimizer):
    """NGN-M: NGN's step with heavy-ball momentum.

    ::

        rho = 2h / (2h + c sum(g^2))
        m  <- b m + (1 - b) c rho g + l c x
        x  <- x - m

    Args:
        params: parameters, named parameters, or groups of them.
        lr: c, the largest step size; a float or a tensor.
        momentum: b.
        weight_decay: l, decoupled; it enters the momentum.
        options: what all algorithms take, such as ``max_grad_norm``: :class:`NGNOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        momentum: float = 0.9,
        *,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        defaults = dict(lr=lr, momentum=momentum, weight_decay=weight_decay, algorithm="NGNM")
        super().__init__(params, defaults, **options)


class NGND(NGNOptimizer):
    """NGN-D: a step size for each coordinate, from its own partial derivative.

    ::

        D = 1, or with "rms": v <- b2 v + (1 - b2) g^2,  D = eps + sqrt(v / (1 - b2^t))
        x <- x - 2h c g / (2h D + c g^2) - l c x

    Args:
        params: parameters, named parameters, or groups of them.
        lr: c, the largest step size; a float or a tensor.
        preconditioner: None, or "rms".
        beta2: b2, used with "rms".
        eps: keeps D above 0, used with "rms".
        weight_decay: l, decoupled.
        options: what all algorithms take, such as ``max_grad_norm``: :class:`NGNOptimizer`.
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
        **options: Unpack[Options],
    ) -> None:
        if preconditioner not in (None, "rms"):
            raise ValueError(f'preconditioner={preconditioner!r}: must be None or "rms"')
        algorithm = "NGND" if preconditioner is None else "NGND(rms)"
        defaults = dict(lr=lr, beta2=beta2, eps=eps, weight_decay=weight_decay, algorithm=algorithm)
        super().__init__(params, defaults, **options)


class _MomentumAndRms(NGNOptimizer):
    """The constructor that the MD family shares."""

    algorithm: str

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, algorithm=self.algorithm
        )
        super().__init__(params, defaults, **options)


class NGNMDv1(_MomentumAndRms):
    """NGN-MDv1: momentum, an RMS preconditioner and one step size. The one to begin with.

    ::

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
        options: what all algorithms take, such as ``max_grad_norm``: :class:`NGNOptimizer`.
    """

    algorithm = "NGNMDv1"


class NGNMDv2(_MomentumAndRms):
    """NGN-MDv2: momentum, an RMS preconditioner and a step size for each coordinate.

    ::

        v <- b2 v + (1 - b2) g^2,  D = eps + sqrt(v / (1 - b2^t))
        m <- b1 m + (1 - b1) 2h c g / (2h D + c g^2) + l c x
        x <- x - m

    Args: as :class:`NGNMDv1`.
    """

    algorithm = "NGNMDv2"


class DecNGNMDv1(_MomentumAndRms):
    """Dec-NGN-MDv1: NGN-MDv1 with decoupled weight decay, 1e-2 by default.

    Args: as :class:`NGNMDv1`.
    """

    algorithm = "DecNGNMDv1"

    def __init__(self, params: Any, *args: Any, weight_decay: float = 1e-2, **kwargs: Any) -> None:
        super().__init__(params, *args, weight_decay=weight_decay, **kwargs)


class NGNMDv1W(_MomentumAndRms):
    """NGN-MDv1W: NGN-MDv1 with weight decay inside the model that the step minimises.

    ::

        a   = c / (1 + l c)
        rho = max(0, 2h - c l sum(g x)) / (2h + a sum(g^2 / D))
        m  <- b1 m + (1 - b1) a rho g / D + l a x
        x  <- x - m

    As printed in the paper; docs/algorithms.md shows the factor that its derivation loses.

    Args: as :class:`NGNMDv1`, with ``weight_decay`` 1e-2 by default.
    """

    algorithm = "NGNMDv1W"

    def __init__(self, params: Any, *args: Any, weight_decay: float = 1e-2, **kwargs: Any) -> None:
        super().__init__(params, *args, weight_decay=weight_decay, **kwargs)
