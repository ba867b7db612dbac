"""GPUs that compute nothing: fake tensors, launches that only count, and a watch on the host."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpu_engines import require
from helpers import replace_backend
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ngn_kernels.backends as backends
from ngn_kernels.layout import Count

aten = torch.ops.aten
READS = (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default)


class Synchronised(AssertionError):
    """Something made the host wait for the device."""


def place(tensor: Tensor) -> int:
    """The storage that a tensor lies in."""
    return int(tensor.untyped_storage()._cdata)


def tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Watch(TorchDispatchMode):
    """Refuses what waits for a device, and notes what is done and created there.

    Copies to the host may wait where a test says so; they are noted.
    """

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu
        self.work: list[str] = []
        self.created: list[str] = []
        self.pinned: list[Tensor] = []
        self.pinned_while_capturing = 0
        self.host_may_wait = False
        self.waited: list[Tensor] = []

    def forget(self) -> None:
        self.work.clear()
        self.created.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in READS and args[0].device.type == "cuda":
            raise Synchronised(str(func))
        if func is aten.copy_.default:
            self._check_copy(args[1], args[0], kwargs.get("non_blocking", args[2:] == (True,)))
        result = func(*args, **kwargs)
        if func is aten._to_copy.default:
            self._check_copy(args[0], result, kwargs.get("non_blocking", False))
        if kwargs.get("pin_memory"):
            self.pinned.append(result)
            self.pinned_while_capturing += bool(self.gpu.capturing)
        given = tensors((args, kwargs))
        known = {place(t) for t in given}
        new = any(t.device.type == "cuda" and place(t) not in known for t in tensors(result))
        if new:
            self.created.append(str(func))
        if new or (func._schema.is_mutable and any(t.device.type == "cuda" for t in given)):
            self.work.append(func._schema.name.removeprefix("aten::"))
        return result

    def _check_copy(self, source: Tensor, target: Tensor, asynchronous: bool) -> None:
        """Between host and GPU only without waiting; CUDA graphs want pinned memory."""
        if {source.device.type, target.device.type} != {"cpu", "cuda"}:
            return
        if not asynchronous and target.device.type == "cpu" and self.host_may_wait:
            self.waited.append(source)
            return
        if not asynchronous:
            raise Synchronised("a copy that waits")
        host = source if source.device.type == "cpu" else target
        pinned = any(place(host) == place(known) for known in self.pinned)
        if not pinned and (host is target or self.gpu.capturing):
            raise Synchronised("a copy of memory that is not pinned")


def counting(
    monkeypatch: pytest.MonkeyPatch, device_type: str, engine: str = "triton"
) -> tuple[list[Any], Any]:
    """A GPU engine with launches that only count, in the place of the real one."""
    require(engine)
    stub = {"triton": "stub_kernels", "cuda": "stub_driver"}[engine]
    counting_backend = importlib.import_module(f"ngn_bench.gpu.{stub}").counting_backend
    launches, backend = counting_backend(device_type)
    replace_backend(monkeypatch, backend, engine)
    return launches, backend


class Event:
    """Passed at once, unless a test says otherwise; notes the devices it was recorded on."""

    passed = True
    recorded_on: list[torch.device] = []  # noqa: RUF012 (a test replaces it)

    def query(self) -> bool:
        return self.passed

    def record(self, stream: Any) -> None:
        self.recorded_on.append(stream.device)


class Addresses:
    """Gives each fake storage a place of its own."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[int, Any]] = {}
        self.end = 1 << 20

    def of(self, tensor: FakeTensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known[storage._cdata] = (self.end, storage)
            self.end += -(-(storage.nbytes() + 1) // 512) * 512
        return self.known[storage._cdata][0] + int(tensor.storage_offset()) * tensor.element_size()


def select(tensor: FakeTensor, index: Any) -> Tensor:
    """Numbers and slices without a step, as torch would on a CUDA build."""
    result: Tensor = tensor
    kept = 0
    for i in index if isinstance(index, tuple) else (index,):
        if isinstance(i, slice):
            first, end, _ = i.indices(result.shape[kept])
            result = result.narrow(kept, first, end - first)
            kept += 1
        else:
            result = result.select(kept, i)
    return result


def assign(tensor: FakeTensor, index: Any, value: Any) -> None:
    """Torch's own reads no tensor either."""
    part = select(tensor, index)
    if isinstance(value, Tensor):
        part.copy_(value)
    else:
        part.fill_(value)


class FakeGPU:
    """Two devices, `cuda:0` the current one; what torch itself needs a CUDA build for is replaced.

    `counts` is what the report of any device says now, in the order of Count: nothing is computed,
    so a test writes it. The host has it once it has been copied there and the event has passed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: str = "triton") -> None:
        """`engine` is the one that backend="auto" takes."""
        self.name = engine
        self.launches, self.backend = counting(monkeypatch, "cuda", engine)
        preferred = backends.preferred_backends
        monkeypatch.setattr(
            backends, "preferred_backends", lambda d: (engine,) if d == "cuda" else preferred(d)
        )
        self.watch = Watch(self)
        self.current = torch.device("cuda:0")
        self.capturing: set[torch.device] = set()
        self.events: list[torch.device] = []
        self.counts = [0] * len(Count)
        # What ranks have sent, where a test lets the host read it: it waits for the device.
        self.messages: list[list[float]] | None = None
        self._arrived: dict[int, list[int]] = {}
        addresses = Addresses()
        monkeypatch.setattr(FakeTensor, "__invert__", lambda t: aten.bitwise_not.default(t))
        monkeypatch.setattr(FakeTensor, "__getitem__", select)
        monkeypatch.setattr(FakeTensor, "__setitem__", assign)
        monkeypatch.setattr(FakeTensor, "copy_", lambda *args, **kw: self._copy(*args, **kw))
        monkeypatch.setattr(FakeTensor, "tolist", lambda tensor: self._read(tensor))
        monkeypatch.setattr(FakeTensor, "numpy", self._host_memory)
        monkeypatch.setattr(FakeTensor, "data_ptr", lambda t: addresses.of(t), raising=False)
        monkeypatch.setattr(torch.cuda, "device", self.on)
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda: self.current in self.capturing
        )
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda device: SimpleNamespace(device=device)
        )
        monkeypatch.setattr(Event, "recorded_on", self.events)
        monkeypatch.setattr(torch.cuda, "Event", Event)

    def _copy(self, target: FakeTensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if source.device.type == "cuda" and target.shape == (len(Count),):
            self._arrived[place(target)] = list(self.counts)
        result: Tensor = aten.copy_.default(target, source, non_blocking)
        return result

    @staticmethod
    def _host_memory(tensor: FakeTensor) -> np.ndarray:
        if tensor.device.type != "cpu":
            raise Synchronised("numpy")
        return np.zeros(tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))

    def _read(self, tensor: FakeTensor) -> list[Any]:
        """A device other than a GPU is asked directly; what came from a GPU must have arrived."""
        if tensor.device.type == "cuda" and self.messages is not None:
            self.watch.waited.append(tensor)
            return self.messages
        if tensor.device.type == "cuda" or not Event.passed:
            raise Synchronised("tolist")
        if tensor.device.type != "cpu":
            return list(self.counts)
        return self._arrived.get(place(tensor), [0] * tensor.numel())

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before

    @contextmanager
    def capture(self, device: str = "cuda:0") -> Iterator[None]:
        self.capturing.add(torch.device(device))
        yield
        self.capturing.clear()

    @contextmanager
    def active(self) -> Iterator[FakeGPU]:
        with FakeTensorMode(allow_non_fake_inputs=True), self.watch:
            yield self
