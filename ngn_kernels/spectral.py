"""Directions in the spectral norm: polar factors of gradients, by Newton-Schulz in plain torch.

The polar factor of a matrix U S V^T is U V^T. Each step of Newton-Schulz applies an odd polynomial to all
singular values, a s + b s^3 + c s^5, and brings them to about 1 in a few matrix products. Nothing here
waits for the device, and a matrix with a number that is not finite gets a direction of NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .options import POLAR_EXPRESS, SPECTRAL_VALUES

Polynomial = tuple[float, float, float]

# Of Polar Express: the best polynomials one after the other, where the smallest singular value is 1e-3 of
# the norm. All but the last are for values that rounding has made up to 1 % too large.
BEST: tuple[Polynomial, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.875, -1.25, 0.375),
)
MARGIN = 1.01

# Elements of a batch of matrices, whose temporary memory is a few times as large; a matrix is never cut.
BATCH = 2**22


class Spectral(NamedTuple):
    """How the gradients of a group become directions."""

    form: bool | str  # True, "flat" or "stack": how a parameter is a matrix, or several
    adjust: str  # adjust_lr_fn: the scale of a direction
    polynomials: tuple[Polynomial, ...]
    products: str = "auto"  # ns_dtype: the type that they are computed in

    @staticmethod
    def of(group: dict[str, Any]) -> Spectral | None:
        """Of a group with valid values; None for one whose directions are g / D."""
        form, adjust, steps, coefficients, dtype = (group.get(name) for name in SPECTRAL_VALUES)
        if form is None or form is False:
            return None
        assert isinstance(adjust, str) and isinstance(steps, int) and isinstance(dtype, str)
        assert coefficients is not None
        return Spectral(form, adjust, polynomials(coefficients, steps), dtype)

    def matrices(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """How many matrices a parameter of this shape is, and their rows and columns."""
        if self.form == "flat":
            rows = shape[0] if len(shape) else 1
            return 1, rows, math.prod(shape[1:])
        return math.prod(shape[:-2]), shape[-2], shape[-1]

    def stacked(self, dimensions: int) -> int:
        """How many of a parameter's dimensions, the first ones, count its matrices."""
        return max(0, dimensions - 2) if self.form == "stack" else 0

    def scale(self, rows: int, columns: int) -> float:
        """As torch.optim.Muon has it."""
        if self.adjust == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def polynomials(coefficients: str | Sequence[float], steps: int) -> tuple[Polynomial, ...]:
    """The polynomial of each step."""
    if isinstance(coefficients, str):
        assert coefficients == POLAR_EXPRESS
        chosen = [BEST[min(i, len(BEST) - 1)] for i in range(steps)]
        early = [(a / MARGIN, b / MARGIN**3, c / MARGIN**5) for a, b, c in chosen[:-1]]
        return (*early, chosen[-1])
    a, b, c = coefficients
    return ((float(a), float(b), float(c)),) * steps


def check_matrix(param: Tensor, spectral: Spectral, label: str) -> None:
    """Raise unless a parameter is a matrix, or several."""
    wanted = {True: "is 2", "stack": "is 2 or more"}.get(spectral.form)
    fits = {True: param.dim() == 2, "stack": param.dim() >= 2}.get(spectral.form, True)
    if not fits:
        raise ValueError(
            f"{label} has {param.dim()} dimensions, and with spectral={spectral.form!r} it {wanted}: "
            'write spectral="flat" for a convolution, whose matrix is its first dimension by all others, '
            'spectral="stack" for matrices in the last two dimensions, or spectral=False for g / D; '
            "ngn_kernels.muon_groups(model) makes these groups"
        )


@cache
def has_bfloat16_products(device: torch.device) -> bool:
    """Whether a GPU multiplies matrices in bfloat16: AMD's do, NVIDIA's from compute capability 8.0 on.

    One of fake tensors, which is not there, counts as one that does.
    """
    is_there = (device.index or 0) < torch.cuda.device_count()
    if torch.version.hip is not None or not is_there:
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)


def work_dtype(products: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What the products are computed in, of gradients in float32, float64 or their complex types."""
    if products == "auto":
        fast = device.type == "cuda" and has_bfloat16_products(device)
        products = "bfloat16" if fast else "float32"
    return torch.bfloat16 if products == "bfloat16" and dtype == torch.float32 else dtype


def polar(matrices: Tensor, steps: Sequence[Polynomial], products: str = "auto") -> Tensor:
    """About the polar factor of each matrix of a batch; 0 of a zero matrix."""
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mH if tall else matrices  # of the two products with its own transpose the smaller
    # By the largest first: squares of numbers that are there neither overflow nor vanish.
    for size in (lambda x: x.abs().amax((-2, -1), True), _frobenius_norm):
        divisor = size(x)
        x = x / divisor.masked_fill(divisor == 0, 1.0)
    x = x.to(work_dtype(products, x.dtype, x.device))
    for a, b, c in steps:
        gram = torch.bmm(x, x.mH)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mH if tall else x


def _frobenius_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)


def write_directions(
    gradients: Sequence[Tensor], directions: Sequence[Tensor], spectral: Spectral
) -> None:
    """The directions of parameters whose matrices have one shape, in the order of their elements."""
    shapes = [spectral.matrices(gradient.shape) for gradient in gradients]
    _, rows, columns = shapes[0]
    dtype, device = directions[0].dtype, directions[0].device
    parts = [g.reshape(shape) for g, shape in zip(gradients, shapes, strict=True)]
    cast = torch.is_autocast_enabled(device.type)
    with torch.autocast(device.type, enabled=False) if cast else nullcontext():
        found = polar(torch.cat(parts).to(dtype), spectral.polynomials, spectral.products)
    found = found.to(dtype) * spectral.scale(rows, columns)
    pieces = found.split([count for count, _, _ in shapes])
    for direction, piece in zip(directions, pieces, strict=True):
        direction.copy_(piece.reshape(direction.shape))
