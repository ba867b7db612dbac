"""DTensors: what of them lies here, on how many ranks the same elements lie, and state like them."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Runs = tuple[tuple[int, int], ...]
"""Indices of a dimension, as the first one and the one behind the last of each run."""


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
    """The place, in the whole parameter, of the first element that lies here.

    A part whose elements do not follow each other there is counted from a place of its own instead.
    """
    part = local(tensor)
    if not is_sharded(tensor) or part.numel() == 0:
        return 0
    number, runs = _shard(tensor, tensor.device_mesh.get_coordinate())  # type: ignore[attr-defined]
    if [_length(of) for of in runs] == list(part.shape) and part.is_contiguous():
        sizes = [math.prod(tensor.shape[d + 1 :]) for d in range(tensor.dim())]
        first = sum(of[0][0] * size for of, size in zip(runs, sizes, strict=True))
        last = sum((of[-1][1] - 1) * size for of, size in zip(runs, sizes, strict=True))
        if last - first + 1 == part.numel():
            return first
    return number << 40


def _shard(tensor: Any, place: Sequence[int]) -> tuple[int, list[Runs]]:
    """The number of the shard at a place of the mesh, and its indices in each dimension of the whole."""
    number = 0
    runs: list[Runs] = [((0, size),) if size else () for size in tensor.shape]
    mesh = tensor.device_mesh
    for dimension, placement in enumerate(tensor.placements):
        if not hasattr(placement, "dim"):
            continue
        rank, ranks = place[dimension], mesh.size(dimension)
        number = number * ranks + rank
        # Of a strided shard each block is shared out, as a later dimension of the mesh cuts them.
        whole = runs[placement.dim]
        blocks = getattr(placement, "split_factor", 1)
        runs[placement.dim] = tuple(
            run
            for block in range(blocks)
            for run in _chunk(_chunk(whole, blocks, block), ranks, rank)
        )
    return number, runs


def _length(runs: Runs) -> int:
    return sum(end - begin for begin, end in runs)


def _chunk(runs: Runs, count: int, number: int) -> Runs:
    """One of the parts into which torch.chunk would cut the indices of these runs; empty beyond the last."""
    size = -(-_length(runs) // count)
    first, last = size * number, size * (number + 1)
    found, before = [], 0
    for begin, end in runs:
        low, high = max(begin, begin + first - before), min(end, begin + last - before)
        if low < high:
            found.append((low, high))
        before += end - begin
    return tuple(found)


def is_split(tensor: Any, stacked: int = 0) -> bool:
    """Whether no rank has all of it, or, where its first dimensions stack tensors, all of any of these."""
    return is_sharded(tensor) and any(
        not placement.is_replicate()
        and not (hasattr(placement, "dim") and placement.dim % tensor.dim() < stacked)
        and tensor.device_mesh.size(dimension) > 1
        for dimension, placement in enumerate(tensor.placements)
    )


class Piece(NamedTuple):
    """What of a DTensor lies on a rank: in each dimension, which runs of indices, end to end."""

    runs: tuple[Runs, ...]
    is_first: bool  # of the ranks that hold the same elements

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(_length, self.runs))

    def blocks(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Where each block of it lies, in the whole and in the piece."""
        dimensions = []
        for runs in self.runs:
            first, here = 0, []
            for begin, end in runs:
                here.append((slice(begin, end), slice(first, first + end - begin)))
                first += end - begin
            dimensions.append(here)
        for block in itertools.product(*dimensions):
            yield tuple(whole for whole, _ in block), tuple(part for _, part in block)


def pieces(tensor: Any) -> dict[int, Piece]:
    """Of each rank of a DTensor's mesh."""
    mesh = tensor.device_mesh.mesh
    copies = [d for d, placement in enumerate(tensor.placements) if placement.is_replicate()]
    found = {}
    for place in itertools.product(*map(range, mesh.shape)):
        _, runs = _shard(tensor, place)
        found[int(mesh[place])] = Piece(tuple(runs), not any(place[d] for d in copies))
    return found


def mesh_replicas(tensor: Tensor) -> int:
    """How many ranks of a DTensor's mesh hold the same elements."""
    spec: Any = tensor
    count = 1
    for dimension, placement in enumerate(spec.placements):
        if placement.is_replicate():
            count *= spec.device_mesh.size(dimension)
    return count


def same_mesh(tensor: Any, other: Any) -> bool:
    """Of two DTensors; others have none."""
    return not is_sharded(tensor) or tensor.device_mesh == other.device_mesh


def same_placement(tensor: Any, other: Any) -> bool:
    """Whether two tensors are spread over ranks in the same way, or not at all."""
    if not (is_sharded(tensor) and is_sharded(other)):
        return is_sharded(tensor) == is_sharded(other)
    return tensor._spec is other._spec or (
        tensor.device_mesh == other.device_mesh and tensor.placements == other.placements
    )


def placed_like(tensor: Any, other: Any) -> Tensor:
    """A DTensor with the placements of another one on the same mesh; partial sums are added up."""
    if tensor.dtype == torch.int16:
        tensor = tensor.int()  # process groups send no int16
    placed: Tensor = tensor.redistribute(placements=other.placements)
    return placed


# Attributes that others leave on parameters which they have flattened.
FLATTENED = {
    ("_fsdp_flattened", "_is_flat_param"): "FSDP1",
    ("ds_id", "ds_status", "_hp_mapping"): "DeepSpeed ZeRO",
}


def flattened_by(param: Tensor) -> str | None:
    """Who has made a parameter a part of a flat one, of which each rank has a shard."""
    for marks, owner in FLATTENED.items():
        if any(hasattr(param, mark) for mark in marks):
            return owner
    return None
