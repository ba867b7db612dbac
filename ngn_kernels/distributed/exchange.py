"""What ranks exchange in a step, and the step's numbers that follow from it.

Each rank sends one message of eight numbers, and everyone adds up the same messages in the same order:
the result is the whole model's, with the same bits on every rank. A rank with an error says so in its
message, so that all ranks raise together and none of them waits for it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..formats import Storage
from ..layout import Input
from ..messages import SkippedStepError
from ..planning.plan import Plan, copy_to
from ..planning.tables import GroupValues, array_of, float_type
from ..planning.transfer import is_capturing
from ..spectral import Spectral, work_dtype
from .dtensors import is_sharded, mesh_replicas


class Message(IntEnum):
    """What one rank sends to the others: 64 bytes."""

    LOSS = 0  # its loss, 0 if it has none
    WEIGHT = 1  # 1, or 0 if it has none
    WEIGHTED = 2  # its sums, each tensor's divided by the number of ranks that hold it
    ALIGNMENT = 3
    NORM = 4
    FOUND_INF = 5
    STATUS = 6  # one of Status, or how many messages it still sends without its host reading any
    AGREEMENT = 7  # a checksum of what must be the same everywhere


class Status(IntEnum):
    """Of a rank whose host reads the messages."""

    READY = 0
    PROBLEM = -1  # it will raise
    UNREADY = -2  # its numbers come with the next message, after collectives of its tensors


SUMS = slice(Message.WEIGHTED, Message.NORM + 1)  # in the order of Sum

KINDS = (TypeError, ValueError, NotImplementedError, SkippedStepError)
ERRORS = {kind.__name__: kind for kind in KINDS}


class Agreement:
    """What must be the same on every rank, and its checksum."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items = items
        digest = hashlib.blake2b(repr(items).encode(), digest_size=6).digest()
        self.checksum = float(int.from_bytes(digest, "big"))


NOTHING_AGREED = Agreement({})

WITH_GRADIENTS = "the sharded matrices that have gradients"
THE_BACKEND = "the backend"
ALIKE = (
    "build the optimizer alike on every rank, or, where each rank owns other parameters "
    "(ZeroRedundancyOptimizer, pipeline stages), pass replicas=1"
)
REMEDIES = {
    WITH_GRADIENTS: "ranks send each other the parts of these: each must have its own part of a gradient, "
    "if only zeros, or none of them may have one",
    THE_BACKEND: "`python -m ngn_kernels` says on each machine which ones run there, and why not others: "
    "pass backend= one that runs on all",
}


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
            raise ValueError(f"replicas={replicas!r}: must be None or a positive integer")
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f'loss_reduction={loss_reduction!r}: must be "mean" or "sum"')
        self.reduce_group = reduce_group
        self.replicas = replicas
        self.loss_reduction = loss_reduction

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self  # it never changes, and a process group has no copies

    def __getstate__(self) -> dict[str, Any]:
        if self.reduce_group not in ("auto", None):
            raise TypeError(
                "an optimizer with a process group as reduce_group= cannot be pickled: save its "
                "state_dict(), and build the optimizer with the group before loading it"
            )
        return self.__dict__

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

    def replicas_of(self, param: Tensor, label: str) -> int:
        """How many ranks of the group hold the same elements of a parameter."""
        group = self.group()
        if group is None:
            return 1
        size = dist.get_world_size(group)
        if size % (self.replicas or 1):
            raise ValueError(
                f"replicas={self.replicas} does not divide the {size} ranks of reduce_group: each "
                "ordinary parameter must lie on that many ranks"
            )
        replicas = self.replicas or size
        return self._mesh_replicas(param, label, group, replicas) if is_sharded(param) else replicas

    def _mesh_replicas(self, param: Any, label: str, group: Any, replicas: int) -> int:
        """Of a DTensor: those on its mesh, times the meshes that hold the same elements.

        A parameter that lies whole on `replicas` ranks lies on `replicas / mesh size` such meshes.
        """
        members, mesh = set(dist.get_process_group_ranks(group)), param.device_mesh
        if not set(mesh.mesh.flatten().tolist()) <= members:
            raise ValueError(
                f"{label} lies on a mesh with ranks outside of reduce_group: pass a group "
                'that holds the whole mesh, such as reduce_group="auto"'
            )
        size = mesh.size()
        if replicas % size and size % replicas:
            raise ValueError(
                f"{label} lies on a mesh of {size} ranks, and an ordinary parameter on {replicas} of "
                f"the {len(members)} in reduce_group: one must divide the other for replicas= to say "
                "how many meshes hold the same elements"
            )
        return mesh_replicas(param) * max(1, replicas // size)

    def agreement(
        self,
        options: dict[str, Any],
        groups: list[GroupValues],
        spectral: list[Spectral | None],
        split: list[str],
        params: list[Tensor],
        storage: Storage,
        backend: Callable[[torch.device], str],
    ) -> Agreement:
        """What ranks compare; where all of them hold all parameters, every value of every group."""
        items = {**options, "loss_reduction": self.loss_reduction, "replicas": self.replicas}
        if self.replicas is None:
            items["state and rounding"] = tuple(storage)
            items[THE_BACKEND] = ", ".join(sorted({backend(p.device) for p in params}))
            items["the number of groups"] = len(groups)
            items["the number of elements"] = sum(p.numel() for p in params)
            for i, values in enumerate(groups):
                for name, value in values._asdict().items():
                    items[f"{name} of group {i}"] = float(value)
                items[f"step_cap of group {i}"] = float(values.step_cap) or None
                items[f"the directions of group {i}"] = spectral[i]
            items["the type of matrix products"] = sorted(
                {
                    str(work_dtype(how.products, torch.float32, device)).removeprefix("torch.")
                    for how in spectral
                    for device in {p.device for p in params}
                    if how is not None
                }
            )
            items[WITH_GRADIENTS] = split
            # Rounding depends on a parameter's place.
            items["the order of the parameters"] = [
                f"{str(p.dtype).removeprefix('torch.')}{tuple(p.shape)}" for p in params
            ]
        return Agreement(items)


def on_host(array: Any) -> bool:
    return isinstance(array, np.ndarray)


def added_up(rows: Any) -> Any:
    """The sums of the columns; of a few numbers on the host Python's sum is faster than numpy's."""
    if on_host(rows):
        return [sum(column) for column in zip(*rows.tolist(), strict=True)]
    return rows.sum(0)


def add_up(plan: Plan, exchange: Exchange | Alone, has_loss: bool) -> bool:
    """All sums of a step, of all ranks; False if no rank has anything to do."""
    plan.find_directions()
    for index in range(len(plan.rounds)):
        plan.reduce(index)
        if not exchange.combine(plan, has_loss, index):
            return False
    return True


class Alone:
    """The exchange of a process that steps by itself."""

    group = None
    home = None

    def fail(self, problem: Exception) -> NoReturn:
        raise problem

    def combine(self, plan: Plan, has_loss: bool, index: int) -> bool:
        return True


ALONE = Alone()


class Exchange:
    """The messages of a group's ranks: one step's, in memory that is kept for the next."""

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
        self._rounds = 0  # of the last step

    def begin(self) -> None:
        """Begin a step, without anything of the one before."""
        self.agreement = NOTHING_AGREED
        self.has_gradient = True
        self.problem: Exception | None = None
        self._raises_everywhere = False

    def fail(self, problem: Exception) -> NoReturn:
        """Raise an error of this rank, after telling the others, which wait for its message."""
        if not self._raises_everywhere:
            self.problem = problem
            self._message[:] = 0.0
            self._message[Message.STATUS] = float(Status.PROBLEM)
            self._check(self._gather().tolist())
        raise problem

    def meet(self, agreement: Agreement, has_gradient: bool, unready: bool) -> None:
        """Say what this rank has, and whether collectives of its tensors come before its numbers.

        Before these it raises, on all ranks alike, if one has an error, which would leave the others
        waiting in them. Ranks on GPUs, whose hosts do not wait for messages, begin at once.
        """
        self.agreement, self.has_gradient = agreement, has_gradient
        if unready and on_host(self._message):
            self._message[:] = 0.0
            self._message[Message.STATUS] = float(Status.UNREADY)
            self._message[Message.AGREEMENT] = self.agreement.checksum
            self._check(self._gather().tolist())

    def combine(self, plan: Plan, has_loss: bool, index: int) -> bool:
        """This rank's loss and sums to those of all ranks; False if no rank has anything to do.

        Args:
            plan: where the sums are, and where the step's numbers go.
            has_loss: whether this rank has one.
            index: which of the plan's rounds has just been summed.
        """
        home, count = plan.home.inputs, len(plan.rounds)
        own, scalars, sent = home.own_array, home.array, self._message
        # Hosts of GPUs read the first message where the number of messages is new: unless all ranks
        # agree on it, some would wait for ever.
        changed = index == 0 and count != self._rounds and not is_capturing(self.home)
        reads, self._rounds = on_host(sent) or changed, count
        sent[:] = 0.0
        sent[Message.LOSS] = own[Input.LOSS]
        sent[Message.WEIGHT] = float(has_loss)
        sent[SUMS] = added_up(plan.home_sums)
        sent[Message.FOUND_INF] = own[Input.FOUND_INF]
        sent[Message.AGREEMENT] = self.agreement.checksum
        sent[Message.STATUS] = float(Status.READY if reads else count - index)

        received = self._gather()
        if reads:
            rows = received.tolist()
            while self._check(rows):
                received = self._gather()
                rows = received.tolist()
            if not any(row[Message.WEIGHT] for row in rows) and self._nothing_to_do(rows):
                return False
        everyone = added_up(received)
        scalars[Input.LOSS] = self._loss(received, everyone)
        scalars[Input.FOUND_INF] = everyone[Message.FOUND_INF]
        plan.home_totals[0] = everyone[SUMS]
        for other, totals in zip(plan.devices[1:], plan.totals[1:], strict=True):
            copy_to(other.inputs.scalars, home.scalars)
            copy_to(totals, plan.totals[0])
        return True

    def _loss(self, received: Any, everyone: Any) -> Any:
        loss = everyone[Message.LOSS]
        if self.ranks.loss_reduction == "mean":
            loss = loss / everyone[Message.WEIGHT]
        if on_host(received):
            self._raises_everywhere = True
            self.check_loss(loss)
            self._raises_everywhere = False
            return loss
        # A host that does not read skips the step by a loss that is not finite.
        sent = received[:, Message.AGREEMENT]
        bad = ~(sent == sent[0]).all() | (received[:, Message.STATUS] == Status.PROBLEM).any()
        return loss.masked_fill(bad | (everyone[Message.WEIGHT] == 0), math.nan)

    def _check(self, rows: list[list[float]]) -> bool:
        """Raise if a rank has a problem or the ranks disagree. Whether another message follows."""
        statuses = [int(row[Message.STATUS]) for row in rows]
        problem = Status.PROBLEM in statuses
        apart = next(
            (
                r
                for r, row in enumerate(rows)
                if row[Message.AGREEMENT] != rows[0][Message.AGREEMENT]
            ),
            None,
        )
        if problem or apart is not None:
            self._raises_everywhere = True
            unread = max(statuses)
            if unread > 0:
                self._raise_alone(unread, apart)
            elif problem:
                self._raise_first(self._all(self._described()))
            raise ValueError(self._difference(self._all(self.agreement.items)))
        return Status.UNREADY in statuses

    def _raise_alone(self, unread: int, apart: int | None) -> NoReturn:
        """Raise on this rank, whose host alone reads, after the messages that other ranks wait for.

        They skip the step.
        """
        for _ in range(unread - 1):
            self._gather()
        raise self.problem or ValueError(
            f"rank {apart} and rank 0 of {self.size} disagree on the optimizer's options, or one of "
            "them raised an error: build the optimizer alike on every rank and change options on all"
        )

    def _nothing_to_do(self, rows: list[list[float]]) -> bool:
        """Where no rank has a loss: whether none has a gradient either; raises, if one has."""
        if any(row[Message.STATUS] != Status.READY for row in rows):
            return False  # the hosts that read nothing skip the step
        if not any(self._all(self.has_gradient)):
            return True
        self._raises_everywhere = True
        raise RuntimeError(
            f"{self.name} needs the loss of this step from at least one rank: "
            "write optimizer.step(loss=loss) on the ranks that have it"
        )

    def _described(self) -> tuple[str, str] | None:
        return None if self.problem is None else (type(self.problem).__name__, str(self.problem))

    def _raise_first(self, problems: list[tuple[str, str] | None]) -> NoReturn:
        """The first rank's error, on every rank."""
        rank, (kind, text) = next((r, p) for r, p in enumerate(problems) if p is not None)
        message = f"rank {rank} of {self.size}: {kind}: {text}"
        raise ERRORS.get(kind, RuntimeError)(message) from self.problem

    def _difference(self, agreements: list[dict[str, Any]]) -> str:
        for key in dict.fromkeys(key for items in agreements for key in items):
            values = [items.get(key) for items in agreements]
            other = next((r for r, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                where, ours, theirs = key, values[0], values[other]
                if isinstance(ours, list) and isinstance(theirs, list):
                    place = next(
                        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                        min(len(ours), len(theirs)),
                    )
                    where += f" from parameter {place} on"
                    ours, theirs = (
                        ", ".join(v[place : place + 1]) or "none" for v in (ours, theirs)
                    )
                return (
                    f"the ranks disagree on {where}: rank 0 has {ours}, rank {other} has {theirs}; "
                    f"{REMEDIES.get(key, ALIKE)}"
                )
        raise AssertionError("the ranks' checksums differ, and what they are made of does not")

    def _all(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def _device(self) -> torch.device:
        """The device of messages: home, unless the group cannot send from there, as NCCL from a CPU."""
        types = {device.type for device in self.group._device_types}
        if self.home.type in types:
            return self.home
        return torch.device("cuda", torch.cuda.current_device())

    def _gather(self) -> Any:
        """The messages of all ranks, in their order, on the home device."""
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
