"""The pass before the sums: from this step's gradients to the directions of rows that have given ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..spectral import BATCH, write_directions
from .rows import Row


class Directions:
    """The directions of a bucket's rows, many matrices of one shape at a time."""

    def __init__(self, rows: list[Row], gradients: Callable[[], list[Tensor | None]]) -> None:
        self._rows = rows
        self._gradients = gradients
        alike: dict[Any, list[Part]] = {}
        for i, row in enumerate(rows):
            if row.local.numel():
                assert row.spectral is not None
                _, *shape = row.spectral.matrices(row.local.shape)
                key = row.spectral, *shape, row.local.is_complex()
                alike.setdefault(key, []).extend(_parts(i, row))
        self._batches = [batch for parts in alike.values() for batch in _batches(parts)]

    def write(self) -> None:
        """Of every row that has a gradient."""
        gradients = self._gradients()
        for batch in self._batches:
            there = [part for part in batch if gradients[part.row] is not None]
            if not there:
                continue
            spectral = self._rows[there[0].row].spectral
            assert spectral is not None
            write_directions(
                [self._shaped(gradients[part.row], part) for part in there],
                [self._shaped(self._rows[part.row].direction, part) for part in there],
                spectral,
            )

    def _shaped(self, reals: Tensor | None, part: Part) -> Tensor:
        """With the shape of the parameter: complex where it is."""
        assert reals is not None
        is_complex = self._rows[part.row].local.is_complex()
        return (torch.view_as_complex(reals) if is_complex else reals)[part.span]


class Part(NamedTuple):
    """A row, or some of its matrices."""

    row: int
    span: Any  # of the first dimension
    numel: int


def _parts(i: int, row: Row) -> Iterator[Part]:
    shape, numel = row.local.shape, row.local.numel()
    if row.spectral is None or row.spectral.form != "stack" or len(shape) < 3:
        yield Part(i, ..., numel)
        return
    one = numel // shape[0]
    several = max(1, BATCH // one)
    for begin in range(0, shape[0], several):
        end = min(begin + several, shape[0])
        yield Part(i, slice(begin, end), (end - begin) * one)


def _batches(parts: list[Part]) -> Iterator[list[Part]]:
    batch: list[Part] = []
    for part in parts:
        if batch and sum(p.numel for p in batch) + part.numel > BATCH:
            yield batch
            batch = []
        batch.append(part)
    yield batch
