"""Matrices of which ranks hold parts, each brought to the one rank that owns it, and back again.

All parts that go from one rank to another travel in one message.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..spectral import Spectral
from .dtensors import Piece, is_split, pieces

Parts = dict[int, list[Tensor]]


def has_split_matrices(param: Tensor, spectral: Spectral | None) -> bool:
    """Whether ranks hold parts of a parameter's matrices, and not whole ones of a stack."""
    return spectral is not None and is_split(param, spectral.stacked(param.dim()))


def split_with_gradients(
    groups: list[dict[str, Any]], spectral: list[Spectral | None]
) -> list[tuple[int, int]]:
    """Group and place of the matrices of which ranks will send each other the parts."""
    return [
        (number, place)
        for number, (how, group) in enumerate(zip(spectral, groups, strict=True))
        for place, param in enumerate(group["params"] if how is not None else ())
        if param.grad is not None and has_split_matrices(param, how)
    ]


def check_group(group: Any, device: torch.device, label: str) -> None:
    """Raise unless the ranks of a group can send each other the parts of a matrix."""
    if group is None:
        raise ValueError(
            f"{label} is sharded, and this rank steps alone: the direction of a matrix needs the parts of "
            "all ranks, so leave reduce_group=None out, or use spectral=False"
        )
    if device.type not in {d.type for d in group._device_types}:
        raise NotImplementedError(
            f"{label} is sharded and on {device.type}, and its ranks send tensors of other devices alone: "
            f'use a process group for both, such as init_process_group("cpu:gloo,cuda:nccl"), or '
            "spectral=False"
        )


class Owners:
    """Which rank owns which matrix, and who holds what of it; on all ranks of a mesh alike."""

    def __init__(self, params: list[Tensor], group: Any) -> None:
        self._group = group
        self._me = dist.get_rank()
        self._shapes = [tuple(param.shape) for param in params]
        self._pieces = [pieces(param) for param in params]
        self._owners = self._chosen(params)

    def _chosen(self, params: list[Tensor]) -> list[int]:
        """Of each mesh's ranks the one with the fewest elements so far, the largest matrices first."""
        owners = [0] * len(params)
        taken: dict[tuple[int, ...], dict[int, int]] = {}
        for i in sorted(range(len(params)), key=lambda i: -params[i].numel()):
            ranks = tuple(self._pieces[i])
            load = taken.setdefault(ranks, dict.fromkeys(ranks, 0))
            owners[i] = min(ranks, key=lambda rank: load[rank])
            load[owners[i]] += params[i].numel()
        return owners

    @property
    def owned(self) -> list[int]:
        return [i for i, owner in enumerate(self._owners) if owner == self._me]

    def gather(self, parts: list[Tensor]) -> dict[int, Tensor]:
        """The matrices that this rank owns, from everyone's parts; numbers as reals."""
        sent: Parts = {}
        expected: dict[int, list[tuple[int, Piece]]] = {}
        for i, (owner, pieces_of) in enumerate(zip(self._owners, self._pieces, strict=True)):
            if pieces_of[self._me].is_first:
                sent.setdefault(owner, []).append(parts[i])
            for rank, piece in pieces_of.items() if owner == self._me else ():
                if piece.is_first:
                    expected.setdefault(rank, []).append((i, piece))
        like = parts[0]
        last = [
            tuple(part.shape[len(shape) :]) for part, shape in zip(parts, self._shapes, strict=True)
        ]
        shapes = {r: [(*p.shape, *last[i]) for i, p in of] for r, of in expected.items()}
        wholes = {i: like.new_empty((*self._shapes[i], *last[i])) for i in self.owned}
        for rank, found in self._exchange(sent, shapes, like).items():
            for (i, piece), part in zip(expected[rank], found, strict=True):
                for there, here in piece.blocks():
                    wholes[i][there] = part[here]
        return wholes

    def scatter(self, wholes: dict[int, Tensor], parts: list[Tensor]) -> None:
        """Write everyone's parts, from the matrices of their owners."""
        sent: Parts = {}
        expected: dict[int, list[Tensor]] = {}
        for i, (owner, pieces_of) in enumerate(zip(self._owners, self._pieces, strict=True)):
            expected.setdefault(owner, []).append(parts[i])
            for rank, piece in pieces_of.items() if owner == self._me else ():
                part = wholes[i].new_empty((*piece.shape, *wholes[i].shape[len(self._shapes[i]) :]))
                for there, here in piece.blocks():
                    part[here] = wholes[i][there]
                sent.setdefault(rank, []).append(part)
        shapes = {rank: [tuple(p.shape) for p in of] for rank, of in expected.items()}
        for rank, found in self._exchange(sent, shapes, parts[0]).items():
            for target, part in zip(expected[rank], found, strict=True):
                target.copy_(part)

    def _exchange(
        self, sent: Parts, shapes: dict[int, list[tuple[int, ...]]], like: Tensor
    ) -> Parts:
        """Send each rank its tensors, and receive those of these shapes from each."""
        received = {r: like.new_empty(sum(map(_numel, of))) for r, of in shapes.items()}
        messages = {r: torch.cat([t.reshape(-1) for t in tensors]) for r, tensors in sent.items()}
        if self._me in messages:
            received[self._me] = messages.pop(self._me)
        operations = [
            dist.P2POp(operation, buffer, rank, self._group)
            for operation, buffers in ((dist.isend, messages), (dist.irecv, received))
            for rank, buffer in sorted(buffers.items())
            if rank != self._me and buffer.numel()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return {
            rank: [
                part.view(shape)
                for part, shape in zip(
                    received[rank].split([_numel(shape) for shape in of]), of, strict=True
                )
            ]
            for rank, of in shapes.items()
        }


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
