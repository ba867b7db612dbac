"""What ranks exchange in a step, and the step's numbers that follow from it.

Each rank sends one message of eight numbers, and everyone adds up the same messages in the same
order: the result is the whole model's, with the same bits on every rank. A rank that has something
to complain about says so in its message, so that all ranks raise together and nobody waits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .plan import Plan, copy_to
from .shards import copies, is_sharded
from .tables import Input, Sum, array_of, float_type


class Message(IntEnum):
    """What one rank tells the others: 64 bytes."""

    LOSS = 0  # its loss, 0 if it has none
    WEIGHT = 1  # 1, or 0 if it has none
    WEIGHTED = 2  # its sums, each tensor's divided by the number of ranks that hold it
    ALIGNMENT = 3
    NORM = 4
    FOUND_INF = 5
    PROBLEM = 6  # not 0: it will raise
    AGREEMENT = 7  # a checksum of what must be the same everywhere


# What every reduction sums, in a message and in a plan's sums.
SENT_SUMS = slice(Message.WEIGHTED, Message.ALIGNMENT + 1)
OWN_SUMS = slice(Sum.WEIGHTED, Sum.ALIGNMENT + 1)

ERRORS = {kind.__name__: kind for kind in (TypeError, ValueError, NotImplementedError)}


class Ranks:
    """The ranks that share one step size: who they are, and who holds what."""

    def __init__(self, reduce_group: Any, replicas: int | None, loss_reduction: str) -> None:
        if isinstance(reduce_group, str) and reduce_group != "auto":
            raise ValueError(
                f'reduce_group={reduce_group!r}: must be "auto", None or a process group'
            )
        if replicas is not None and (
            not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1
        ):
            raise ValueError(f"replicas={replicas!r}: must be None or a whole number from 1 on")
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f'loss_reduction={loss_reduction!r}: must be "mean" or "sum"')
        self.reduce_group = reduce_group
        self.replicas = replicas
        self.loss_reduction = loss_reduction

    def group(self) -> Any:
        """The process group of a step, or None where this process is alone."""
        group = self.reduce_group
        if group is None or not dist.is_available() or not dist.is_initialized():
            return None
        if group == "auto":
            group = dist.group.WORLD
        elif group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "this rank is not in reduce_group: pass a group that every rank of the optimizer "
                "is in, or reduce_group=None for a rank that steps alone"
            )
        return group if dist.get_world_size(group) > 1 else None

    def copies(self, param: Tensor, label: str) -> int:
        """On how many ranks of the group the same elements of a parameter lie."""
        group = self.group()
        if group is None:
            return 1
        size = dist.get_world_size(group)
        if is_sharded(param):
            members = set(dist.get_process_group_ranks(group))
            mesh: Any = param
            if not set(mesh.device_mesh.mesh.flatten().tolist()) <= members:
                raise ValueError(
                    f"{label} lies on a mesh with ranks outside of reduce_group: pass a group "
                    'that holds the whole mesh, such as reduce_group="auto"'
                )
            return copies(param)
        if self.replicas is None:
            return size
        if size % self.replicas:
            raise ValueError(
                f"replicas={self.replicas} does not divide the {size} ranks of reduce_group: each "
                "ordinary parameter must lie on that many ranks"
            )
        return self.replicas


class Agreement:
    """What must be the same on every rank, and a number that tells whether it is."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items = items
        digest = hashlib.blake2b(repr(items).encode(), digest_size=6).digest()
        self.checksum = float(int.from_bytes(digest, "big"))


NOTHING_AGREED = Agreement({})


def on_host(array: Any) -> bool:
    return isinstance(array, np.ndarray)


def added_up(rows: Any) -> Any:
    """Of messages, or of buckets' sums. A few plain numbers are added before numpy gets going."""
    if on_host(rows):
        return [sum(column) for column in zip(*rows.tolist(), strict=True)]
    return rows.sum(0)


class Exchange:
    """The talk of a group's ranks: one step's, in memory that is kept for the next."""

    def __init__(
        self,
        ranks: Ranks,
        group: Any,
        name: str,
        home: torch.device,
        check_loss: Callable[[float], None],
    ) -> None:
        self.ranks = ranks
        self.group = group
        self.name = name
        self.home = home
        self.size = dist.get_world_size(group)
        self.check_loss = check_loss
        self._sent = torch.zeros(len(Message), dtype=float_type(home), device=home)
        wire = self._device()
        self._wired = self._sent if wire == home else torch.zeros_like(self._sent, device=wire)
        self._received = self._wired.new_zeros(self.size, len(Message))
        self._by_rank = list(self._received.unbind())
        self._message, self._messages = array_of(self._sent), array_of(self._received)
        self.begin()

    def begin(self) -> None:
        """Forget the step before."""
        self.agreement = NOTHING_AGREED
        self.has_gradients = True
        self.problem: Exception | None = None
        self._begun = False

    def fail(self, problem: Exception) -> None:
        """Take part in spite of an error, and raise it, here as on every other rank.

        Ranks on GPUs, whose hosts are not asked, skip this step instead.
        """
        self.problem = problem
        self._sent.zero_()
        self._sent[Message.PROBLEM].fill_(1.0)
        received = self._gather()
        if on_host(received):
            self._check(received)
        raise problem

    def run(self, plan: Plan, has_loss: bool, reduced: bool) -> bool:
        """This rank's sums and loss become those of all ranks; False if no rank has anything to do.

        With clipping, rules with RMS come here twice: with the norm, and with their own sums.
        """
        first, self._begun = not self._begun, True
        scalars, sums, sent = plan.home.inputs.array, plan.home_sums, self._message
        total = added_up(sums)
        sent[:] = 0.0
        if first:
            sent[Message.LOSS] = scalars[Input.LOSS]
            sent[Message.WEIGHT] = float(has_loss)
            sent[Message.FOUND_INF] = scalars[Input.FOUND_INF]
            sent[Message.AGREEMENT] = self.agreement.checksum
        if reduced:
            sent[SENT_SUMS] = total[OWN_SUMS]
            if first:
                sent[Message.NORM] = total[Sum.NORM]

        received = self._gather()
        everyone = added_up(received)
        if first:
            if on_host(received) and not self._check(received):
                return False
            self._tell_inputs(received, everyone, scalars)
        if reduced:
            sums[:] = 0.0
            sums[0, OWN_SUMS] = everyone[SENT_SUMS]
            sums[0, Sum.NORM] = everyone[Message.NORM] if first else total[Sum.NORM]
        for other, other_sums in zip(plan.devices[1:], plan.sums[1:], strict=True):
            copy_to(other.inputs.scalars, plan.home.inputs.scalars)
            copy_to(other_sums, plan.sums[0])
        return True

    def _tell_inputs(self, received: Any, everyone: Any, scalars: Any) -> None:
        loss = everyone[Message.LOSS]
        if self.ranks.loss_reduction == "mean":
            loss = loss / everyone[Message.WEIGHT]
        if on_host(received):
            self.check_loss(loss)
        else:
            # The host is not asked: a step that must not happen is one without a finite loss.
            told = received[:, Message.AGREEMENT]
            agreed = told == told[0]
            bad = ~agreed.all() | (everyone[Message.PROBLEM] != 0) | (everyone[Message.WEIGHT] == 0)
            loss = loss.masked_fill(bad, math.nan)
        scalars[Input.LOSS] = loss
        scalars[Input.FOUND_INF] = everyone[Message.FOUND_INF]

    def _check(self, received: Any) -> bool:
        """Raise on every rank alike if any has a problem, if they disagree, or if none has a loss.

        False if none has a loss and none has a gradient either.
        """
        rows = received.tolist()
        if any(row[Message.PROBLEM] for row in rows):
            self._raise_together(self._all(self._described()))
        if any(row[Message.AGREEMENT] != rows[0][Message.AGREEMENT] for row in rows):
            raise ValueError(self._difference(self._all(self.agreement.items)))
        if not any(row[Message.WEIGHT] for row in rows):
            if not any(self._all(self.has_gradients)):
                return False
            raise RuntimeError(
                f"{self.name} needs the loss of this step from at least one rank: "
                "write optimizer.step(loss=loss) on the ranks that have it"
            )
        return True

    def _described(self) -> tuple[str, str] | None:
        return None if self.problem is None else (type(self.problem).__name__, str(self.problem))

    def _raise_together(self, problems: list[tuple[str, str] | None]) -> None:
        rank, (kind, text) = next((r, p) for r, p in enumerate(problems) if p is not None)
        message = f"rank {rank} of {self.size}: {kind}: {text}"
        raise ERRORS.get(kind, RuntimeError)(message) from self.problem

    def _difference(self, told: list[dict[str, Any]]) -> str:
        keys = dict.fromkeys(key for agreement in told for key in agreement)
        for key in keys:
            values = [agreement.get(key) for agreement in told]
            other = next((r for r, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                break
        return (
            f"the ranks disagree on {key}: rank 0 has {values[0]}, rank {other} has "
            f"{values[other or 0]}; build the optimizer alike on every rank, or, where each rank "
            "owns other parameters (ZeroRedundancyOptimizer, pipeline stages), pass replicas=1"
        )

    def _all(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def _device(self) -> torch.device:
        """Where the group's messages travel: at home if they can, as offloaded ones cannot on NCCL."""
        types = {device.type for device in self.group._device_types}
        if self.home.type in types:
            return self.home
        return torch.device("cuda", torch.cuda.current_device())

    def _gather(self) -> Any:
        """The messages of all ranks, in their order, at home."""
        if self._wired is not self._sent:
            copy_to(self._wired, self._sent)
        try:
            dist.all_gather(self._by_rank, self._wired, group=self.group)
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.name}.step() waited for the numbers of the other {self.size - 1} ranks and "
                f"did not get them ({error}): every rank of reduce_group must call step() the same "
                "number of times, also one without gradients or without a loss"
            ) from error
        if self._wired is self._sent:
            return self._messages
        return array_of(self._received.to(self.home))
