"""DTensors: what of them lies here, on how many ranks the same elements lie, and state like them."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor; where nobody has imported them, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank. to_local() would take a thousand times as long."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def like(tensor: Tensor, part: Tensor) -> Tensor:
    """A tensor that is spread over ranks as another one is, and of which this part lies here."""
    if not is_sharded(tensor):
        return part
    from torch.distributed.tensor import DTensor

    spec: Any = tensor
    return DTensor.from_local(
        part,
        spec.device_mesh,
        spec.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def first_element(tensor: Tensor) -> int:
    """The place, in the whole parameter, of the first element that lies here."""
    return 0


def copies(tensor: Tensor) -> int:
    """How many ranks of a DTensor's mesh hold the same elements."""
    spec: Any = tensor
    count = 1
    for dimension, placement in enumerate(spec.placements):
        if placement.is_replicate():
            count *= spec.device_mesh.size(dimension)
    return count


def same_placement(tensor: Any, other: Any) -> bool:
    """Whether two tensors are spread over ranks in the same way, or not at all."""
    if not (is_sharded(tensor) and is_sharded(other)):
        return is_sharded(tensor) == is_sharded(other)
    return tensor._spec is other._spec or (
        tensor.device_mesh == other.device_mesh and tensor.placements == other.placements
    )


def placed_like(tensor: Any, other: Any) -> Tensor:
    """A DTensor with the placements of another one on the same mesh; partial sums are added up."""
    placed: Tensor = tensor.redistribute(placements=other.placements)
    return placed
