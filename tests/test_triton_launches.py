"""What the host does for a GPU: few launches, no waiting, nothing new on the device after a step.

The launches are stubs that count. Where waiting matters, the tensors are fakes on `cuda:0`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from algorithms import EVERY, NGND, Algorithm, NGNMDv1
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import ngn_kernels.backends as backends
from ngn_kernels.backends.triton import GradientColumn, TritonBackend

pytest.importorskip("triton")

aten = torch.ops.aten


class Synchronised(AssertionError):
    """Something made the host wait for the device."""


class Watch(TorchDispatchMode):
    """Refuses what waits for the device, and notes what is created there."""

    def __init__(self) -> None:
        super().__init__()
        self.created: list[str] = []
        self._pinned: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default):
            raise Synchronised(str(func))
        if func is aten.copy_.default and args[0].device.type == "cpu" != args[1].device.type:
            place = args[0].untyped_storage()._cdata
            pinned = any(place == host.untyped_storage()._cdata for host in self._pinned)
            asynchronous = kwargs.get("non_blocking", len(args) > 2 and args[2])
            if not (pinned and asynchronous):
                raise Synchronised("a copy to the host that waits")
        result = func(*args, **kwargs)
        if func is aten._to_copy.default and args[0].device.type != result.device.type == "cpu":
            raise Synchronised("a copy to the host")
        if kwargs.get("pin_memory"):
            self._pinned.append(result)
        factory = not any(isinstance(arg, Tensor) for arg in args)
        if factory and isinstance(result, Tensor) and result.device.type == "cuda":
            self.created.append(str(func))
        return result


class CountedKernel:
    """Stands for a jit function and for what it compiles to."""

    def __init__(self, name: str, launches: list[tuple[str, tuple[Any, ...]]]) -> None:
        self.name = name
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> CountedKernel:
            self.launches.append((self.name, grid))
            return self

        return launch


class Event:
    """Passed at once, unless a test says otherwise."""

    passed = True

    def query(self) -> bool:
        return self.passed

    def record(self) -> None:
        pass


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
    result: Tensor = tensor
    for i in index if isinstance(index, tuple) else (index,):
        result = result.select(0, i)
    return result


def fill(tensor: FakeTensor, index: Any, value: Any) -> None:
    part = select(tensor, index)
    part.copy_(value) if isinstance(value, Tensor) else part.fill_(value)


def copy(tensor: FakeTensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    result: Tensor = aten.copy_.default(tensor, source, non_blocking)
    return result


def counting(monkeypatch: pytest.MonkeyPatch, device_type: str) -> tuple[list[Any], TritonBackend]:
    """The backend with launches that only count."""
    launches: list[tuple[str, tuple[Any, ...]]] = []
    kernels = SimpleNamespace(
        reduce=CountedKernel("reduce", launches), apply=CountedKernel("apply", launches)
    )
    target = SimpleNamespace(backend="cuda", warp_size=32)
    backend = TritonBackend(kernels, lambda: target, device_type)
    load = backends._load
    monkeypatch.setattr(backends, "_load", lambda name: backend if name == "triton" else load(name))
    return launches, backend


def read(tensor: FakeTensor) -> list[Any]:
    """What has arrived on the host may be read; it is all zeros."""
    if tensor.device.type != "cpu":
        raise Synchronised("tolist")
    return [0] * tensor.numel()


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A `cuda:0` that computes nothing; what torch itself needs a CUDA build for is replaced."""
    launches, backend = counting(monkeypatch, "cuda")
    addresses = Addresses()
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda t: addresses.of(t), raising=False)
    monkeypatch.setattr(FakeTensor, "__getitem__", select)
    monkeypatch.setattr(FakeTensor, "__setitem__", fill)
    monkeypatch.setattr(FakeTensor, "copy_", copy)
    monkeypatch.setattr(FakeTensor, "tolist", read)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    with FakeTensorMode(allow_non_fake_inputs=True), Watch() as watch:
        yield SimpleNamespace(launches=launches, backend=backend, watch=watch)


def optimizer_of(
    algorithm: Algorithm, tensors: int, groups: int = 1, device: str = "cuda:0", **options: Any
) -> tuple[Any, list[Tensor]]:
    params: list[Tensor] = [
        torch.nn.Parameter(torch.empty(7 + i % 5, device=device))
        for i in range(max(tensors, groups))
    ]
    columns = [{"params": params[i::groups], "lr": 0.1 + i} for i in range(groups)]
    return algorithm.simple(columns, backend="triton", **options), params


def new_gradients(params: list[Tensor]) -> None:
    for p in params:
        p.grad = torch.empty_like(p)


def new_loss() -> Tensor:
    return torch.ones((), device="cuda:0")


@EVERY
@pytest.mark.parametrize("tensors", [1, 100, 1000])
@pytest.mark.parametrize("groups", [1, 20])
@pytest.mark.parametrize("clipping", [False, True])
def test_launches_do_not_grow_with_the_model(
    algorithm: Algorithm,
    tensors: int,
    groups: int,
    clipping: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches, _ = counting(monkeypatch, "cpu")
    options = {"max_grad_norm": 1.0} if clipping else {}
    optimizer, params = optimizer_of(algorithm, tensors, groups, device="cpu", **options)
    wanted = ["apply"] if algorithm.coordinate else ["reduce", "apply"]
    if clipping and (algorithm.coordinate or algorithm.rms):
        wanted.insert(0, "reduce")
    for _ in range(2):
        new_gradients(params)
        launches.clear()
        optimizer.step(loss=1.0)
        assert [name for name, _ in launches] == wanted


@EVERY
def test_a_step_never_waits(algorithm: Algorithm, fake_gpu: SimpleNamespace) -> None:
    """With a loss, a clip norm, a gradient scale and an lr that live on the device."""
    optimizer, params = optimizer_of(algorithm, 5, 2, max_grad_norm=1.0)
    optimizer.param_groups[0]["lr"] = torch.full((), 0.1, device="cuda:0")
    for k in range(4):
        new_gradients(params)
        loss = new_loss()
        optimizer.grad_scale, optimizer.found_inf = new_loss(), torch.zeros((), device="cuda:0")
        optimizer.param_groups[1]["lr"] = 0.2 * k
        fake_gpu.watch.created.clear()
        optimizer.step(loss=loss)
        if k > 0:
            assert fake_gpu.watch.created == []
    assert optimizer.skipped_steps.device.type == "cuda"
    assert algorithm.coordinate or optimizer.shrink.device.type == "cuda"


@pytest.mark.parametrize("wait", [Tensor.item, Tensor.cpu, lambda t: t.tolist(), bool])
def test_a_step_that_waits_is_noticed(wait: Any, fake_gpu: SimpleNamespace) -> None:
    optimizer, params = optimizer_of(NGNMDv1, 3)
    new_gradients(params)
    apply = fake_gpu.backend.apply

    def waits(bucket: Any, rule: Any, last: bool) -> None:
        apply(bucket, rule, last)
        wait(bucket.sums.sum())

    fake_gpu.backend.apply = waits
    with pytest.raises(Synchronised):
        optimizer.step(loss=new_loss())


def test_gradients_are_uploaded_only_when_they_move(
    fake_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads: list[list[int]] = []
    monkeypatch.setattr(
        GradientColumn,
        "upload",
        lambda self, addresses, capturing: uploads.append(addresses.tolist()),
    )
    optimizer, params = optimizer_of(NGNMDv1, 3)
    for moved, wanted in ((True, 1), (False, 1), (False, 1), (True, 2), (False, 2)):
        if moved:
            new_gradients(params)
        optimizer.step(loss=new_loss())
        assert len(uploads) == wanted
        assert uploads[-1] == [p.grad.data_ptr() for p in params if p.grad is not None]


def test_a_graph_carries_its_own_addresses(
    fake_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While capturing the addresses are uploaded though they stand still, and from then on always."""
    uploads: list[bool] = []
    upload = GradientColumn.upload

    def noted(self: GradientColumn, addresses: np.ndarray, capturing: bool) -> None:
        uploads.append(capturing)
        upload(self, addresses, capturing)

    monkeypatch.setattr(GradientColumn, "upload", noted)
    optimizer, params = optimizer_of(NGND, 3)
    new_gradients(params)
    for capturing in (False, False, True, False, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        optimizer.step(loss=new_loss())
    assert uploads == [False, True, False, False]


@pytest.fixture
def column(monkeypatch: pytest.MonkeyPatch) -> GradientColumn:
    pageable = lambda self: torch.zeros(len(self.target), dtype=torch.int64)  # noqa: E731
    monkeypatch.setattr(GradientColumn, "_pinned", pageable)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return GradientColumn(torch.zeros(3, dtype=torch.int64))


def test_pinned_memory_is_not_rewritten_while_it_is_read(
    column: GradientColumn, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = np.array([1, 2, 3]), np.array([4, 5, 6])
    column.upload(first, capturing=False)
    (under_way,) = [host for host, _ in column._slots]
    monkeypatch.setattr(Event, "passed", False)
    column.upload(second, capturing=False)
    assert under_way.tolist() == [1, 2, 3]
    assert column.target.tolist() == [4, 5, 6]
    monkeypatch.setattr(Event, "passed", True)
    for k in range(5):
        column.upload(first + k, capturing=False)
    assert len(column._slots) == 2


def test_pinned_memory_of_a_graph_is_never_rewritten(column: GradientColumn) -> None:
    column.upload(np.array([1, 2, 3]), capturing=True)
    column.upload(np.array([4, 5, 6]), capturing=True)
    for k in range(3):
        column.upload(np.array([7, 8, 9]) + k, capturing=False)
    assert [host.tolist() for host in column.in_graphs] == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("dtype", "message"), [(torch.float64, "float32, bfloat16 and float16"), (torch.float32, None)]
)
def test_float64_is_refused(
    dtype: torch.dtype, message: str | None, fake_gpu: SimpleNamespace
) -> None:
    p = torch.nn.Parameter(torch.empty(3, device="cuda:0", dtype=dtype))
    p.grad = torch.empty_like(p)
    optimizer = NGNMDv1.simple([p], backend="triton")
    if message is None:
        optimizer.step(loss=new_loss())
        return
    with pytest.raises(RuntimeError, match=message):
        optimizer.step(loss=new_loss())
    assert not optimizer.state and not fake_gpu.launches


def test_float64_falls_back_under_auto(fake_gpu: SimpleNamespace) -> None:
    p = torch.nn.Parameter(torch.empty(3, device="cuda:0", dtype=torch.float64))
    p.grad = torch.empty_like(p)
    key = NGNMDv1.simple([p], backend="auto")._bucket_key(p)
    assert backends.select_backend("auto", key).name == "reference"
    single = key._replace(param=torch.float32, grad=torch.float32, state=torch.float32)
    assert backends.select_backend("auto", single).name == "triton"


@pytest.mark.parametrize("steps", [0, 2])
def test_a_gradient_left_on_another_device_is_refused(
    steps: int, fake_gpu: SimpleNamespace
) -> None:
    """torch refuses to assign one, but a parameter can be moved away from its gradient."""
    optimizer, params = optimizer_of(NGNMDv1, 3)
    new_gradients(params)
    for _ in range(steps):
        optimizer.step(loss=new_loss())
    new_gradients(params)
    grad: Any = params[1].grad
    grad.fake_device = torch.device("cpu")
    fake_gpu.launches.clear()
    with pytest.raises(RuntimeError, match=r"parameter 1 .* its gradient on cpu: move both"):
        optimizer.step(loss=new_loss())
    assert not fake_gpu.launches
    grad.fake_device = torch.device("cuda:0")
    optimizer.step(loss=new_loss())
    assert [name for name, _ in fake_gpu.launches] == ["reduce", "apply"]


def test_cpu_tensors_are_refused(fake_gpu: SimpleNamespace) -> None:
    p = torch.nn.Parameter(torch.empty(3))
    p.grad = torch.empty(3)
    with pytest.raises(RuntimeError, match="they are on cpu; it takes tensors on a GPU"):
        NGNMDv1.simple([p], backend="triton").step(loss=1.0)


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """What `backend="triton"` says where it cannot run; it must leave the parameters alone."""

    def ask() -> str:
        monkeypatch.setattr(backends, "_load", backends._load.__wrapped__)
        p = torch.nn.Parameter(torch.ones(3))
        p.grad = torch.full((3,), 2.0)
        with pytest.raises(RuntimeError) as caught:
            NGNMDv1.simple([p], backend="triton")
        assert p.tolist() == [1, 1, 1] and p.grad.tolist() == [2, 2, 2]
        return str(caught.value)

    return ask


def test_without_triton(monkeypatch: pytest.MonkeyPatch, refusal: Callable[[], str]) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "Triton is not installed: pip install 'triton>=3.4'" in refusal()


def test_an_old_triton(monkeypatch: pytest.MonkeyPatch, refusal: Callable[[], str]) -> None:
    monkeypatch.setattr("triton.__version__", "3.3.1")
    assert "Triton 3.3.1 is too old: pip install 'triton>=3.4'" in refusal()


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, refusal: Callable[[], str]) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = refusal()
    assert "torch sees no CUDA or ROCm device; install a torch build for your GPU" in said
    assert "TRITON_INTERPRET=1" in said


def test_auto_falls_back_and_says_so_once(
    fake_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = backends._load
    monkeypatch.setattr(
        backends, "_load", lambda name: "Triton is missing" if name == "triton" else load(name)
    )
    backends._say_once.cache_clear()
    p = torch.nn.Parameter(torch.empty(3, device="cuda:0"))
    key = NGNMDv1.simple([p])._bucket_key(p)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        chosen = {backends.select_backend("auto", key).name for _ in range(3)}
    assert chosen == {"reference"}
    assert ["Triton is missing" in str(warning.message) for warning in said] == [True]
