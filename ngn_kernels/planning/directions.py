"""The pass before the sums: from this step's gradients to the directions of rows that have given ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed.owners import Owners, check_group, has_split_matrices
from ..spectral import BATCH, Spectral, write_directions
from .rows import Bucket, Row


class Directions:
    """The directions of a bucket's rows; matrices that no rank has whole go to their owners and back."""

    def __init__(
        self,
        bucket: Bucket,
        gradients: Callable[[], list[Tensor | None]],
        process_group: Any,
    ) -> None:
        self._rows = rows = bucket.rows
        self._gradient_type = bucket.key.grad
        self._gradients = gradients
        split = [has_split_matrices(row.param, row.spectral) for row in rows]
        self._split = [i for i, is_split in enumerate(split) if is_split]
        self._whole = [i for i, is_split in enumerate(split) if not is_split]
        self._here = Matrices((rows[i], rows[i].local.shape) for i in self._whole)
        self._owners: Owners | None = None
        if self._split:
            check_group(process_group, bucket.key.device, rows[self._split[0]].label)
            self._owners = Owners([rows[i].param for i in self._split], process_group)
            owned = [rows[self._split[i]] for i in self._owners.owned]
            self._owned = Matrices((row, row.param.shape) for row in owned)

    def write(self) -> None:
        """Of every row that has a gradient."""
        gradients = self._gradients()
        directions: list[Any] = [row.direction for row in self._rows]
        self._here.write([gradients[i] for i in self._whole], [directions[i] for i in self._whole])
        if self._owners is None:
            return
        targets = [directions[i] for i in self._split]
        parts = []
        for i, target in zip(self._split, targets, strict=True):
            part = gradients[i]
            if part is None:  # other ranks wait for it
                part = torch.zeros_like(target, dtype=self._gradient_type)
            parts.append(part)
        wholes = self._owners.gather(parts)
        found = {i: torch.zeros_like(w, dtype=targets[0].dtype) for i, w in wholes.items()}
        self._owned.write(list(wholes.values()), list(found.values()))
        self._owners.scatter(found, targets)


class Part(NamedTuple):
    """A parameter, or some of its matrices."""

    place: int
    span: slice | None  # of the first dimension; None: all of it
    numel: int


class Matrices:
    """Parameters whose matrices become directions, many of one shape at a time."""

    def __init__(self, rows: Iterable[tuple[Row, torch.Size]]) -> None:
        """With the shape of what of a row's parameter is at hand, in whole matrices."""
        self._complex: list[bool] = []
        alike: dict[Any, list[Part]] = {}
        for place, (row, shape) in enumerate(rows):
            spectral = row.spectral
            assert spectral is not None
            self._complex.append(row.param.is_complex())
            if shape.numel():
                _, *sizes = spectral.matrices(shape)
                key = spectral, *sizes, self._complex[-1]
                alike.setdefault(key, []).extend(_parts(place, shape, spectral))
        self._batches = [
            (key[0], batch) for key, parts in alike.items() for batch in _batches(parts)
        ]

    def write(
        self, gradients: Sequence[Tensor | None], directions: Sequence[Tensor | None]
    ) -> None:
        """The directions of those that have a gradient; complex numbers are pairs of reals."""
        for spectral, batch in self._batches:
            there = [part for part in batch if gradients[part.place] is not None]
            if there:
                write_directions(
                    [self._shaped(gradients[part.place], part) for part in there],
                    [self._shaped(directions[part.place], part) for part in there],
                    spectral,
                )

    def _shaped(self, reals: Tensor | None, part: Part) -> Tensor:
        """With the shape of the parameter: complex where it is."""
        assert reals is not None
        found = torch.view_as_complex(reals) if self._complex[part.place] else reals
        return found if part.span is None else found[part.span]


def _parts(place: int, shape: torch.Size, spectral: Spectral) -> Iterator[Part]:
    if spectral.form != "stack" or len(shape) < 3:
        yield Part(place, None, shape.numel())
        return
    one = shape[1:].numel()
    several = max(1, BATCH // one)
    for begin in range(0, shape[0], several):
        end = min(begin + several, shape[0])
        yield Part(place, slice(begin, end), (end - begin) * one)


def _batches(parts: list[Part]) -> Iterator[list[Part]]:
    batch: list[Part] = []
    for part in parts:
        if batch and sum(p.numel for p in batch) + part.numel > BATCH:
            yield batch
            batch = []
        batch.append(part)
    yield batch
