"""Counts the backward passes into the gradients that are there now, by hooks on one parameter."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn.parameter import is_lazy

from .distributed.dtensors import is_sharded, local

Groups = list[dict[str, Any]]


def has_gradient(param: Tensor) -> bool:
    return param.grad is not None


def has_gradients(groups: Groups) -> bool:
    return any(param.grad is not None for group in groups for param in group["params"])


def params_of(groups: Groups) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in groups)


class BackwardCounter:
    """Counts the backward passes into the gradients that are there now.

    Two permanent hooks on one parameter, the witness, see every pass that reaches it. They know this
    object only weakly, and it knows the witness only by its hook: a weak reference to a parameter
    would keep torch.utils.swap_tensors() from swapping it.
    """

    def __init__(self) -> None:
        self.count = 0  # passes since the last step or clearing
        self.earlier = 0  # those of them that were made before the closure of a step
        self.present = False  # whether the witness has got a gradient since then
        self.discards = 0  # how often gradients that no step has used were thrown away
        self._place = (0, 0)
        self._handles: list[Any] = []
        self._works = False  # whether the hooks on the witness have ever run
        self._task = -1
        self._version = 0
        self._was_zero: bool | None = False
        self._cleared_is_known = False  # before this accumulation, as hooks on a tensor see it
        self._grad: Any = None  # weakly, where only its identity tells

    def restart(self) -> None:
        """Begin anew, as after a step or zero_grad()."""
        self.count = self.earlier = 0
        self.present = False

    def discard(self) -> None:
        self.restart()
        self.discards += 1

    def check(self, groups: Groups, in_place: bool = True) -> None:
        """Find out whether the gradients that were counted have been thrown away since."""
        if not self.present:
            return
        param = self.witness(groups)
        grad = None if param is None else param.grad
        if grad is None:
            # Some loops drop the gradients of single layers before a step.
            gone: bool | None = not has_gradients(groups)
        elif self._grad is not None and self._grad is not weakref.ref(grad):
            gone = True
        else:
            gone = in_place and self._is_zeroed(grad)
        if gone:
            self.discard()

    def join(self, groups: Groups, unused: Callable[[Tensor], bool]) -> None:
        """Take a pass into account that made unused gradients and did not reach the witness."""
        if self.present:
            return
        before = self.witness(groups)
        lost = before if self._works else None  # its hooks, as swap_tensors() leaves them behind
        self.watch(groups, lambda param: param is not lost and unused(param))
        param = self.witness(groups)
        if param is None or param.grad is None or not unused(param):
            return
        sharded = is_sharded(param.grad)
        if sharded or param is not before:  # else no hook runs where its gradient is made
            self.present, self.count = True, int(param is not before)
            self._note(param.grad)
            self._grad = weakref.ref(param.grad) if sharded else None

    def after_step(self, groups: Groups) -> None:
        self.restart()
        self.watch(groups)

    # The witness

    def watch(self, groups: Groups, wanted: Callable[[Tensor], bool] = has_gradient) -> None:
        """Choose another witness where this one is none of the parameters, or not a wanted one."""
        current = self.witness(groups)
        if current is not None and wanted(current):
            return
        places = [
            ((i, j), param)
            for i, group in enumerate(groups)
            for j, param in enumerate(group["params"])
            if _can_be_hooked(param)
        ]
        # In turn, so that one that every batch reaches is found and stays.
        later = (item for item in places if current is not None and item[0] > self._place)
        for place, param in chain(later, places):
            if wanted(param):
                return self._hook(place, param)
        if current is None and places:
            self._hook(*places[0])

    def witness(self, groups: Groups) -> Tensor | None:
        group, index = self._place
        if group < len(groups) and index < len(groups[group]["params"]):
            param: Tensor = groups[group]["params"][index]
            if self._is_hooked(param):
                return param
        if self._handles:
            for i, values in enumerate(groups):
                for j, param in enumerate(values["params"]):
                    if self._is_hooked(param):
                        self._place = i, j
                        return param
        return None

    def _is_hooked(self, param: Tensor) -> bool:
        hooks = param._backward_hooks
        return bool(hooks and self._handles and self._handles[0].id in hooks)

    def _hook(self, place: tuple[int, int], param: Tensor) -> None:
        self._unhook()
        counter = weakref.ref(self)
        before = partial(_before_accumulation, counter)
        before.__torch_unserializable__ = True  # type: ignore[attr-defined]  # as pickle warns else
        self._handles = [
            param.register_hook(before),
            param.register_post_accumulate_grad_hook(partial(_after_accumulation, counter)),
        ]
        self._place, self._works = place, False

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __del__(self) -> None:
        self._unhook()

    def __reduce__(self) -> Any:
        return BackwardCounter, ()

    # What the hooks see

    def before_accumulation(self, grad: Tensor | None) -> None:
        self._cleared_is_known = True
        if not self.present:
            return
        if grad is None:
            self.discard()
        else:
            zeroed = self._is_zeroed(grad)
            if zeroed:
                self.discard()
            elif zeroed is None:
                self.count = self.earlier = 0  # perhaps it was cleared

    def after_accumulation(self, grad: Tensor) -> None:
        mark = None
        if not self._cleared_is_known and is_sharded(grad):
            # FSDP2 adds to the same DTensor, and calls the second hook only.
            mark = weakref.ref(grad)
            if self.present and mark is not self._grad:
                self.discard()
        self._grad = mark
        self._cleared_is_known = False
        self.present = self._works = True
        self._note(grad)
        node = _outer_node()
        if node is None:
            self._count()
            return

        def after(*_: Any) -> None:
            handle.remove()
            self._count()

        handle = node.register_hook(after)

    def _note(self, grad: Tensor) -> None:
        self._version, self._was_zero = version(grad), is_zero(grad)

    def _is_zeroed(self, grad: Tensor) -> bool | None:
        """Whether it was zeroed in place since the last pass; None where that cannot be known.

        Clipping and the averages of ranks change a gradient too, and one that was zero stays so.
        """
        if version(grad) == self._version or self._was_zero:
            return False
        return is_zero(grad)

    def _count(self) -> None:
        task = torch._C._current_graph_task_id()
        if task < 0 or task != self._task:
            self._task, self.count = task, self.count + 1


def _can_be_hooked(param: Tensor) -> bool:
    return param.requires_grad and param.is_leaf and not is_lazy(param) and param.numel() > 0


def version(grad: Tensor) -> int:
    """It changes with every operation in place."""
    return (grad if type(grad) is Tensor else local(grad))._version


def is_zero(grad: Tensor) -> bool | None:
    """None where reading it would wait for a device or for other ranks."""
    if type(grad) is not Tensor or not grad.is_cpu or grad.layout is not torch.strided:
        return None
    return not grad.any()


def _outer_node() -> Any:
    """The outermost node of the graph that runs this pass inside of itself; None if none does.

    Reentrant checkpoints do so, once for each segment, and each time with a task id of its own.
    """
    frame, node = sys._getframe(1), None
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            node = frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return node


@torch._disable_dynamo
def _before_accumulation(counter: Callable[[], BackwardCounter | None], _: Tensor) -> None:
    """Runs before a gradient is added to ``.grad``, and in torch.autograd.grad()."""
    owner = counter()
    param = getattr(torch._C._current_autograd_node(), "variable", None)
    if owner is not None and param is not None:
        owner.before_accumulation(param.grad)


@torch._disable_dynamo
def _after_accumulation(counter: Callable[[], BackwardCounter | None], param: Tensor) -> None:
    owner = counter()
    if owner is not None and param.grad is not None:
        owner.after_accumulation(param.grad)
