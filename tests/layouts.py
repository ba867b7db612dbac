"""The same values in other memory layouts; gaps are NaN, so that reading one would show."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def gaps(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def channels_last(values: Tensor) -> Tensor:
    return values.contiguous(memory_format=torch.channels_last) if values.dim() == 4 else values


def transposed(values: Tensor) -> Tensor:
    return values.transpose(0, -1).contiguous().transpose(0, -1) if values.dim() > 1 else values


def strided(values: Tensor) -> Tensor:
    if values.dim() == 0:
        return values
    return gaps((*values.shape[:-1], 3 * values.shape[-1]), values.dtype)[..., 1::3].copy_(values)


def row_strided(values: Tensor) -> Tensor:
    if values.dim() == 0:
        return values
    return gaps((2 * values.shape[0], *values.shape[1:]), values.dtype)[::2].copy_(values)


def odd_offset(values: Tensor) -> Tensor:
    return torch.cat([gaps((1,), values.dtype), values.flatten()])[1:].view(values.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": torch.clone,
    "channels_last": channels_last,
    "transposed": transposed,
    "strided": strided,
    "row_strided": row_strided,
    "odd_offset": odd_offset,
}
