"""What the host does for a GPU: few launches, no waiting, nothing new on the device after a step.

The launches are stubs that count, of each engine. Where waiting matters, the tensors are fakes on `cuda:0`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from algorithms import EVERY, NGND, Algorithm, NGNMDv1
from fake_gpu import Event, FakeGPU, Synchronised, counting, place
from helpers import replace_backend, warnings_of
from torch import Tensor

import ngn_kernels
import ngn_kernels.backends as backends
from ngn_kernels.distributed.exchange import Message, Ranks, Status
from ngn_kernels.layout import Reason
from ngn_kernels.messages import SkippedStepError
from ngn_kernels.planning.rows import BucketKey
from ngn_kernels.planning.transfer import SPARE, Pinned
from ngn_kernels.skips import WARNINGS

ENGINES = ("triton", "cuda")
EACH_ENGINE = pytest.mark.parametrize("engine", ENGINES)
CLIPPING = pytest.mark.parametrize("clipping", [None, 1.0], ids=["", "clipping"])


@pytest.fixture(params=ENGINES)
def fake_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    """Whose engine is the one that `auto` takes."""
    with FakeGPU(monkeypatch, request.param).active() as gpu:
        yield gpu


def on(engine: str) -> pytest.MarkDecorator:
    """Run a test with a `fake_gpu` on this engine only."""
    return pytest.mark.parametrize("fake_gpu", [engine], indirect=True)


def optimizer_of(
    algorithm: Algorithm, tensors: int, groups: int = 1, device: str = "cuda:0", **options: Any
) -> tuple[Any, list[Tensor]]:
    """An optimizer of parameters that have gradients."""
    params: list[Tensor] = [
        torch.nn.Parameter(torch.empty(7 + i % 5, device=device))
        for i in range(max(tensors, groups))
    ]
    new_gradients(params)
    columns = [{"params": params[i::groups], "lr": 0.1 + i} for i in range(groups)]
    return algorithm.simple(columns, **options), params


def new_gradients(params: list[Tensor]) -> None:
    for p in params:
        p.grad = torch.empty_like(p)


def new_loss(device: str = "cuda:0") -> Tensor:
    return torch.ones((), device=device)


def launches_of(algorithm: Algorithm, clipping: float | None) -> list[str]:
    norm = clipping is not None and (algorithm.coordinate or algorithm.rms)
    return ["reduce"] * norm + ["reduce"] * (not algorithm.coordinate) + ["apply"]


@EVERY
@EACH_ENGINE
@pytest.mark.parametrize("tensors", [1, 100, 1000])
@pytest.mark.parametrize("groups", [1, 20])
@CLIPPING
def test_launches_do_not_grow_with_the_model(
    algorithm: Algorithm,
    tensors: int,
    groups: int,
    clipping: float | None,
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches, _ = counting(monkeypatch, "cpu", engine)
    optimizer, params = optimizer_of(
        algorithm, tensors, groups, device="cpu", backend=engine, max_grad_norm=clipping
    )
    for _ in range(2):
        new_gradients(params)
        launches.clear()
        optimizer.step(loss=1.0)
        assert [name for name, _ in launches] == launches_of(algorithm, clipping)


@EVERY
@CLIPPING
def test_narrow_numbers_take_the_same_launches(
    algorithm: Algorithm, clipping: float | None, fake_gpu: FakeGPU
) -> None:
    """And nothing new on the device; small parameters, whose state is float32, are launched apart."""
    narrow = {"state": "8bit", "rounding": "exact"}
    for sizes, buckets in (
        ([5000, 4096], 1),
        ([5000, 10], 1 + (algorithm.rms or bool(algorithm.momentum))),
    ):
        params: list[Tensor] = [
            torch.nn.Parameter(torch.empty(n, device="cuda:0", dtype=torch.bfloat16)) for n in sizes
        ]
        optimizer = algorithm.simple(
            params, backend=fake_gpu.name, **narrow, max_grad_norm=clipping
        )
        new_gradients(params)
        for k in range(3):
            loss = new_loss()
            fake_gpu.launches.clear()
            fake_gpu.watch.forget()
            optimizer.step(loss=loss)
            names = [name for name, _ in fake_gpu.launches]
            assert sorted(names) == sorted(launches_of(algorithm, clipping) * buckets)
            assert k == 0 or fake_gpu.watch.created == []


# Each step: what it is given, and what it costs besides the launches when gradients stay in place.
# A step reads the report of an earlier one, which is a copy of its own.
REPORT = ["copy_"]
STEPS: dict[str, tuple[Callable[[Any, int], Any], list[str]]] = {
    "a loss on the device": (lambda optimizer, k: new_loss(), ["_foreach_copy_", *REPORT]),
    "the same number": (lambda optimizer, k: 1.0, REPORT),
    "another number": (lambda optimizer, k: 1.0 + k, ["copy_", *REPORT]),
    "a loss on the host": (lambda optimizer, k: torch.tensor(1.0 + k), ["copy_", *REPORT]),
    "a scheduler": (lambda optimizer, k: set_lrs(optimizer, 0.1 * k), ["copy_", *REPORT]),
    "a gradient scaler": (
        lambda optimizer, k: set_scale(optimizer, new_loss()),
        ["_foreach_copy_", *REPORT],
    ),
    "a gradient scaler, then none": (
        lambda optimizer, k: set_scale(optimizer, None if k % 2 else new_loss()),
        ["copy_", "_foreach_copy_", *REPORT],
    ),
    "lrs on the device": (
        lambda optimizer, k: set_lrs(optimizer, torch.full((), 0.1, device="cuda:0")),
        ["_foreach_copy_", *REPORT],
    ),
}


def set_lrs(optimizer: Any, lr: Any) -> float | Tensor:
    for group in optimizer.param_groups:
        group["lr"] = lr
    return new_loss() if isinstance(lr, Tensor) else 1.0


def set_scale(optimizer: Any, scale: Tensor | None) -> float | Tensor:
    optimizer.grad_scale, optimizer.found_inf = scale, scale
    return 1.0 if scale is None else new_loss()


@EVERY
@pytest.mark.parametrize("case", STEPS)
def test_a_step_never_waits(algorithm: Algorithm, case: str, fake_gpu: FakeGPU) -> None:
    """Nor does it create anything, nor do more than a few small copies, whatever it is given."""
    given, wanted = STEPS[case]
    optimizer, _ = optimizer_of(algorithm, 40, 20, max_grad_norm=1.0)
    for k in range(4):
        loss = given(optimizer, k)
        fake_gpu.watch.forget()
        optimizer.step(loss=loss)
        if k > 0:
            assert fake_gpu.watch.created == []
            assert set(fake_gpu.watch.work) <= set(wanted)
            assert len(fake_gpu.watch.work) <= len(wanted)
    assert optimizer.skipped_steps.device.type == "cuda"
    assert algorithm.coordinate or optimizer.shrink.device.type == "cuda"


def test_directions_wait_for_nothing(fake_gpu: FakeGPU) -> None:
    """And are written where they were in the step before."""
    shapes = ((7, 5), (5, 7), (7, 5), (3, 7, 5))
    params: list[Tensor] = [
        torch.nn.Parameter(torch.empty(shape, device="cuda:0")) for shape in shapes
    ]
    new_gradients(params)
    groups = [{"params": params[:3]}, {"params": params[3:], "spectral": "stack"}]
    optimizer = ngn_kernels.NGNMuon(groups, backend=fake_gpu.name, max_grad_norm=1.0)
    places = []
    for _ in range(3):
        new_gradients(params)
        fake_gpu.launches.clear()
        optimizer.step(loss=new_loss())
        (bucket,) = optimizer._plan.buckets
        places.append([id(row.direction) for row in bucket.rows])
        assert [name for name, _ in fake_gpu.launches] == ["reduce", "reduce", "apply"]
    assert places[0] == places[1] == places[2]


def test_lrs_on_the_device_are_copied_in_every_step(fake_gpu: FakeGPU) -> None:
    """What they are is not known here, so that no step can tell whether they have changed."""
    optimizer, _ = optimizer_of(NGNMDv1, 4, 2)
    for _ in range(3):
        set_lrs(optimizer, torch.full((), 0.1, device="cuda:0"))
        fake_gpu.watch.forget()
        optimizer.step(loss=1.0)
        assert "_foreach_copy_" in fake_gpu.watch.work


def test_an_lr_that_moves_to_the_device_and_back_is_copied(fake_gpu: FakeGPU) -> None:
    """From 0.0 on the host, which is also what the host writes for one that it never reads."""
    optimizer, params = optimizer_of(NGNMDv1, 3)
    set_lrs(optimizer, 0.0)
    new_gradients(params)
    optimizer.step(loss=1.0)
    set_lrs(optimizer, torch.full((), 0.1, device="cuda:0"))
    for _ in range(2):
        new_gradients(params)
        fake_gpu.watch.forget()
        optimizer.step(loss=1.0)
        assert "_foreach_copy_" in fake_gpu.watch.work
    set_lrs(optimizer, 0.0)
    fake_gpu.watch.forget()
    optimizer.step(loss=1.0)
    assert fake_gpu.watch.work == ["copy_", *REPORT]


@EVERY
def test_moved_gradients_are_one_more_copy(algorithm: Algorithm, fake_gpu: FakeGPU) -> None:
    optimizer, params = optimizer_of(algorithm, 40, 20, max_grad_norm=1.0, loss_floor=-1.0)
    for k in range(4):
        new_gradients(params)
        loss = new_loss()
        fake_gpu.watch.forget()
        optimizer.step(loss=loss)
        if k > 0:
            assert fake_gpu.watch.created == []
            assert fake_gpu.watch.work == ["copy_", "_foreach_copy_", *REPORT]


@EVERY
def test_the_reference_never_waits_either(algorithm: Algorithm, fake_gpu: FakeGPU) -> None:
    """It creates what it likes, and uses no assignment that would bring a number from the host."""
    optimizer, params = optimizer_of(algorithm, 3, 2, backend="reference", max_grad_norm=1.0)
    for k in range(2):
        new_gradients(params)
        optimizer.step(loss=1.0 + k)
        optimizer.step(loss=new_loss())
    assert "masked_fill" in " ".join(fake_gpu.watch.created)


@EVERY
@CLIPPING
def test_two_devices(algorithm: Algorithm, clipping: float | None, fake_gpu: FakeGPU) -> None:
    """One launch of each kind on each; scalars of the other device come over asynchronously."""
    params: list[Tensor] = [
        torch.nn.Parameter(torch.empty(7 + i, device=f"cuda:{i % 2}")) for i in range(5)
    ]
    optimizer = algorithm.simple(params, backend=fake_gpu.name, max_grad_norm=clipping)
    optimizer.param_groups[0]["lr"] = torch.full((), 0.1, device="cuda:1")
    for loss in (new_loss("cuda:1"), new_loss("cuda:0"), 1.0, 2.0):
        new_gradients(params)
        fake_gpu.launches.clear()
        optimizer.step(loss=loss)
        wanted = [name for name in launches_of(algorithm, clipping) for _ in range(2)]
        assert [name for name, _ in fake_gpu.launches] == wanted


class Group:
    _device_types = (torch.device("cuda"),)


@pytest.fixture
def four_ranks(fake_gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A group of four GPUs whose messages are only counted, in bytes."""
    sent: list[int] = []
    group = Group()

    def all_gather(received: list[Tensor], tensor: Tensor, group: Any) -> None:
        assert tensor.device.type == "cuda" and len(received) == 4
        sent.append(tensor.numel() * tensor.element_size())

    monkeypatch.setattr(Ranks, "group", lambda self: group)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 4)
    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    return sent


def message(status: int = Status.READY, agreement: float = 7.0) -> list[float]:
    """Of a rank with a loss."""
    values = {Message.WEIGHT: 1.0, Message.STATUS: float(status), Message.AGREEMENT: agreement}
    return [values.get(field, 0.0) for field in Message]


@EVERY
@CLIPPING
def test_ranks_wait_for_nothing(
    algorithm: Algorithm, clipping: float | None, fake_gpu: FakeGPU, four_ranks: list[int]
) -> None:
    """One small message, two where the norm must come first; as many launches as for one rank.

    The first step alone waits, to see that all ranks send as many messages.
    """
    optimizer, params = optimizer_of(algorithm, 40, 3, max_grad_norm=clipping)
    wanted = 2 if clipping and algorithm.rms and not algorithm.coordinate else 1
    for k, captured in enumerate((False, False, True)):
        new_gradients(params)
        loss = new_loss()
        fake_gpu.launches.clear()
        four_ranks.clear()
        fake_gpu.messages = [message()] * 4 if k == 0 else None
        with fake_gpu.capture() if captured else nullcontext():
            optimizer.step(loss=loss)
        assert len(fake_gpu.watch.waited) == 1
        assert [name for name, _ in fake_gpu.launches] == launches_of(algorithm, clipping)
        assert four_ranks == [64] * wanted
    assert fake_gpu.watch.pinned_while_capturing == 0


@pytest.mark.parametrize("unread", [1, 2])
def test_a_bad_argument_on_a_gpu_is_raised_after_the_messages(
    unread: int, fake_gpu: FakeGPU, four_ranks: list[int]
) -> None:
    """As many as the other ranks wait for, whose hosts read nothing."""
    optimizer, _ = optimizer_of(NGNMDv1, 3)
    fake_gpu.messages = [message(unread), message(Status.PROBLEM), *[message(unread)] * 2]
    with pytest.raises(TypeError, match="the loss is a str"):
        optimizer.step(loss="many")
    assert four_ranks == [64] * unread and not fake_gpu.launches


@pytest.mark.parametrize("unread", [1, 2])
@pytest.mark.parametrize("ours", [None, 1.0], ids=["not clipping", "clipping"])
def test_clipping_switched_on_one_rank_alone_is_seen_there(
    unread: int, ours: float | None, fake_gpu: FakeGPU, four_ranks: list[int]
) -> None:
    """The ranks would wait for messages that do not come: this one sends as many as the others."""
    optimizer, _ = optimizer_of(NGNMDv1, 3, max_grad_norm=None if ours else 1.0)
    fake_gpu.messages = [message()] * 4
    optimizer.step(loss=1.0)
    optimizer.max_grad_norm = ours
    four_ranks.clear()
    fake_gpu.launches.clear()
    fake_gpu.messages = [
        message(unread, 1.0),
        message(Status.READY, 2.0),
        *[message(unread, 1.0)] * 2,
    ]
    with pytest.raises(ValueError, match="rank 1 and rank 0 of 4 disagree"):
        optimizer.step(loss=1.0)
    assert four_ranks == [64] * unread
    assert "apply" not in [name for name, _ in fake_gpu.launches]


def test_a_frozen_parameter_on_the_host_is_not_where_ranks_meet(
    fake_gpu: FakeGPU, four_ranks: list[int]
) -> None:
    frozen = torch.nn.Parameter(torch.empty(3), requires_grad=False)
    params: list[Tensor] = [torch.nn.Parameter(torch.empty(5, device="cuda:0"))]
    optimizer = NGNMDv1.simple([frozen, *params], backend=fake_gpu.name)
    fake_gpu.messages = [message()] * 4
    for _ in range(2):
        new_gradients(params)
        optimizer.step(loss=1.0)
        fake_gpu.messages = None
    assert four_ranks == [64] * 2
    assert optimizer._plan.home.device == torch.device("cuda:0")
    with pytest.raises(TypeError, match="the loss is a str"):
        fake_gpu.messages = [message(1), message(Status.PROBLEM), *[message(1)] * 2]
        optimizer.step(loss="many")


@pytest.mark.parametrize("home", ["cpu", "cuda:0"])
def test_a_host_beside_a_gpu(home: str, fake_gpu: FakeGPU) -> None:
    """The host waits for the numbers that it computes with, and for nothing else; a GPU never."""
    fake_gpu.watch.host_may_wait = True
    other = "cuda:0" if home == "cpu" else "cpu"
    params: list[Tensor] = [torch.nn.Parameter(torch.empty(3, device=d)) for d in (home, other)]
    optimizer = NGNMDv1.simple(params, backend="reference")
    for _ in range(2):
        new_gradients(params)
        fake_gpu.watch.waited.clear()
        optimizer.step(loss=1.0)
        plan = optimizer._plan
        gpu = [d.device.type for d in plan.devices].index("cuda")
        needed = [plan.sums[gpu]] + [plan.devices[gpu].report.counts] * (home == "cpu")
        assert list(map(place, fake_gpu.watch.waited)) == list(map(place, needed))


def test_events_are_recorded_where_the_copies_are(fake_gpu: FakeGPU) -> None:
    """The current device is another one than the parameters'."""
    optimizer, params = optimizer_of(NGNMDv1, 3, device="cuda:1")
    for k in range(3):
        new_gradients(params)
        optimizer.step(loss=float(k))
    assert set(fake_gpu.events) == {torch.device("cuda:1")}


@EVERY
def test_a_skipped_step_is_warned_of_some_steps_later(
    algorithm: Algorithm, fake_gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, when its count has reached the host: nobody waits for it, and nobody forgets it."""
    optimizer, _ = optimizer_of(algorithm, 3)

    def said() -> list[str]:
        return warnings_of(lambda: optimizer.step(loss=new_loss()))

    assert said() == []
    fake_gpu.counts = [0, 1, Reason.LOSS_NOT_FINITE]
    assert said() == [], "the count of this step is only now on its way"
    monkeypatch.setattr(Event, "passed", False)
    assert said() == said() == [], "it has not arrived yet"
    monkeypatch.setattr(Event, "passed", True)
    (message,) = said()
    assert message == f"{algorithm.name}: {WARNINGS[Reason.LOSS_NOT_FINITE]}"
    assert said() == said() == []
    fake_gpu.counts = [0, 3, Reason.AMP_OVERFLOW]
    assert said() == []
    (message,) = said()
    assert "gradient scaler found an overflow" in message
    assert said() == []


def test_a_skipped_step_raises_some_steps_later(fake_gpu: FakeGPU) -> None:
    """But an overflow under AMP is warned of."""
    optimizer, _ = optimizer_of(NGNMDv1, 3, on_skip="raise")
    step = lambda: optimizer.step(loss=new_loss())  # noqa: E731
    step()
    fake_gpu.counts = [0, 1, Reason.AMP_OVERFLOW]
    step()
    fake_gpu.counts = [0, 2, Reason.LOSS_NOT_FINITE]
    (message,) = warnings_of(step)
    assert "gradient scaler found an overflow" in message
    with pytest.raises(SkippedStepError, match="the loss is not finite"):
        step()
    step()


def test_too_many_skips_in_a_row_raise_some_steps_later(
    fake_gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by the steps whose numbers have arrived, however many arrive at once."""
    optimizer, _ = optimizer_of(NGNMDv1, 3, on_skip="ignore", max_skipped_steps=4)
    step = lambda: optimizer.step(loss=new_loss())  # noqa: E731
    for skipped in (1, 2, 3, 3, 4, 5):  # the fourth step was applied
        fake_gpu.counts = [0, skipped, Reason.LOSS_NOT_FINITE]
        step()
    monkeypatch.setattr(Event, "passed", False)
    for skipped in (6, 7, 8):
        fake_gpu.counts = [0, skipped, Reason.LOSS_NOT_FINITE]
        step()
    monkeypatch.setattr(Event, "passed", True)
    fake_gpu.counts = [0, 9, Reason.LOSS_NOT_FINITE]
    step()
    with pytest.raises(SkippedStepError, match=r"not finite.*steps in a row; max_skipped_steps=4"):
        step()


def test_skips_of_replayed_graphs_are_warned_of_by_ordinary_steps(fake_gpu: FakeGPU) -> None:
    """A captured step asks nothing: neither an event nor memory that a copy may be writing."""
    optimizer, _ = optimizer_of(NGNMDv1, 3)
    optimizer.step(loss=new_loss())
    fake_gpu.counts = [0, 5, Reason.GRADIENT_NOT_FINITE]
    with fake_gpu.capture():
        assert warnings_of(lambda: optimizer.step(loss=new_loss())) == []
    later = [warnings_of(lambda: optimizer.step(loss=new_loss())) for _ in range(4)]
    assert [len(said) for said in later] == [0, 1, 0, 0]
    assert "is not finite" in later[1][0]


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_other_devices_are_asked_at_once(device: str, fake_gpu: FakeGPU) -> None:
    """Where counts do not come over by themselves a step reads them, and no skip is silent."""
    p = torch.nn.Parameter(torch.empty(3, device=device))
    optimizer = NGNMDv1.simple([p])
    p.grad = torch.empty_like(p)
    loss = torch.ones((), device=device)
    assert warnings_of(lambda: optimizer.step(loss=loss)) == []
    assert optimizer._plan.buckets[0].backend.name == "reference"
    fake_gpu.counts = [0, 1, Reason.LOSS_NOT_FINITE]
    (message,) = warnings_of(lambda: optimizer.step(loss=loss))
    assert "the loss is not finite" in message
    assert warnings_of(lambda: optimizer.step(loss=loss)) == []


WAITS = {
    "item": Tensor.item,
    "cpu": Tensor.cpu,
    "tolist": lambda t: t.tolist(),
    "bool": bool,
    "from the host": lambda t: torch.zeros(1).to(t.device),
    "onto it": lambda t: t.copy_(torch.zeros(())),
    "to pageable memory": lambda t: torch.zeros(()).copy_(t, non_blocking=True),
}


@on("triton")  # it is about the fake GPU, not about the engine
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_step_that_waits_is_noticed(wait: Any, fake_gpu: FakeGPU) -> None:
    optimizer, _ = optimizer_of(NGNMDv1, 3)
    launch = fake_gpu.backend.launch

    def waits(prepared: Any, name: str, *args: Any) -> None:
        launch(prepared, name, *args)
        if name == "apply":
            wait(prepared.memory.sums.sum())

    fake_gpu.backend.launch = waits
    with pytest.raises(Synchronised):
        optimizer.step(loss=new_loss())


def test_a_graph_of_pageable_memory_is_noticed(fake_gpu: FakeGPU) -> None:
    target, source = new_loss(), torch.zeros(())
    target.copy_(source, non_blocking=True)
    with fake_gpu.capture(), pytest.raises(Synchronised):
        target.copy_(source, non_blocking=True)


def sent_by(monkeypatch: pytest.MonkeyPatch) -> list[Pinned]:
    """Filled with what sends something to the device."""
    sent: list[Pinned] = []
    for name in ("_copy", "_capture"):
        original = getattr(Pinned, name)

        def noted(self: Pinned, *args: Any, original: Any = original) -> None:
            sent.append(self)
            original(self, *args)

        monkeypatch.setattr(Pinned, name, noted)
    return sent


def test_gradients_are_sent_only_when_they_move(
    fake_gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = sent_by(monkeypatch)
    optimizer, params = optimizer_of(NGNMDv1, 3)
    for moved, wanted in ((True, 1), (False, 1), (False, 1), (True, 2), (False, 2)):
        if moved:
            new_gradients(params)
        optimizer.step(loss=new_loss())
        column = optimizer._plan._prepared[0].gradients
        assert sent.count(column) == wanted
        assert column.values.tolist() == [p.grad.data_ptr() for p in params if p.grad is not None]


@EVERY
@CLIPPING
def test_a_graph_carries_its_own_numbers(
    algorithm: Algorithm, clipping: float | None, fake_gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a graph exists, every step sends all: who wrote last is not known. Once each."""
    sent = sent_by(monkeypatch)
    optimizer, params = optimizer_of(algorithm, 3, 2, max_grad_norm=clipping)
    loss = new_loss()

    def sends() -> int:
        sent.clear()
        optimizer.step(loss=loss)
        assert len(set(map(id, sent))) == len(sent)
        return len(sent)

    assert [sends(), sends(), sends()] == [3, 0, 0]
    for k in range(SPARE):
        with fake_gpu.capture():
            assert sends() == 3
        # The next graph has gradients and values of its own.
        new_gradients(params)
        optimizer.param_groups[0]["lr"] += 0.1
        optimizer.max_grad_norm = clipping and clipping * (k + 2.0)
    assert fake_gpu.watch.pinned_while_capturing == 0
    assert [sends(), sends()] == [3, 3]
    with fake_gpu.capture():
        assert sends() == 3
    assert fake_gpu.watch.pinned_while_capturing == 0


def test_a_graph_of_a_device_that_is_not_current(fake_gpu: FakeGPU) -> None:
    optimizer, _ = optimizer_of(NGND, 3, device="cuda:1")
    optimizer.step(loss=new_loss("cuda:1"))
    events = len(fake_gpu.events)
    with fake_gpu.capture("cuda:1"):
        optimizer.step(loss=new_loss("cuda:1"))
    assert len(optimizer._plan._prepared[0].gradients.in_graphs) == 1
    assert len(fake_gpu.events) == events, "an event of a capture cannot be asked"


@pytest.fixture
def column(monkeypatch: pytest.MonkeyPatch) -> Pinned:
    """On the CPU, where what is sent can be looked at."""
    pageable = lambda self: torch.zeros(len(self.target), dtype=torch.int64)  # noqa: E731
    monkeypatch.setattr(Pinned, "_pin", pageable)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.empty(0, device=device))
    monkeypatch.setattr("ngn_kernels.planning.transfer.is_capturing", lambda device: False)
    return Pinned(torch.zeros(3, dtype=torch.int64), np.zeros(3, dtype=np.int64))


def send(column: Pinned, *values: int) -> list[int]:
    column.values[:] = values
    column.send()
    return column.target.tolist()


def test_pinned_memory_is_not_rewritten_while_it_is_read(
    column: Pinned, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert send(column, 1, 2, 3) == [1, 2, 3]
    (under_way,) = [host for host, _ in column._slots]
    monkeypatch.setattr(Event, "passed", False)
    assert send(column, 4, 5, 6) == [4, 5, 6]
    assert under_way.tolist() == [1, 2, 3]
    monkeypatch.setattr(Event, "passed", True)
    for k in range(5):
        send(column, k, k, k)
    assert len(column._slots) == 2


def test_pinned_memory_of_a_graph_is_never_rewritten(
    column: Pinned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ngn_kernels.planning.transfer.is_capturing", lambda device: True)
    for values in ((1, 2, 3), (4, 5, 6), (1, 2, 3)):
        assert send(column, *values) == list(values)
    monkeypatch.setattr("ngn_kernels.planning.transfer.is_capturing", lambda device: False)
    column.target.zero_()
    assert send(column, 1, 2, 3) == [1, 2, 3], "a replay may have sent anything"
    for k in range(3):
        send(column, 7, 8, k)
    assert [host.tolist() for host in column.in_graphs.values()] == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("dtype", "message"), [(torch.float64, "float32, bfloat16 and float16"), (torch.float32, None)]
)
def test_float64_is_refused(dtype: torch.dtype, message: str | None, fake_gpu: FakeGPU) -> None:
    p = torch.nn.Parameter(torch.empty(3, device="cuda:0", dtype=dtype))
    p.grad = torch.empty_like(p)
    optimizer = NGNMDv1.simple([p], backend=fake_gpu.name)
    if message is None:
        optimizer.step(loss=new_loss())
        return
    with pytest.raises(RuntimeError, match=message):
        optimizer.step(loss=new_loss())
    assert not optimizer.state and not fake_gpu.launches


def test_float64_falls_back_under_auto(fake_gpu: FakeGPU) -> None:
    p = torch.nn.Parameter(torch.empty(3, device="cuda:0", dtype=torch.float64))
    p.grad = torch.empty_like(p)
    key = BucketKey.of(p, {})
    assert backends.select_backend("auto", key).name == "reference"
    single = key._replace(param=torch.float32, grad=torch.float32, m=torch.float32, v=torch.float32)
    assert backends.select_backend("auto", single).name == fake_gpu.name


@pytest.mark.parametrize("steps", [0, 2])
def test_a_gradient_left_on_another_device_is_refused(steps: int, fake_gpu: FakeGPU) -> None:
    """torch refuses to assign one, but a parameter can be moved away from its gradient."""
    optimizer, params = optimizer_of(NGNMDv1, 3)
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


def test_cpu_tensors_are_refused(fake_gpu: FakeGPU) -> None:
    p = torch.nn.Parameter(torch.empty(3))
    p.grad = torch.empty(3)
    with pytest.raises(RuntimeError, match="they are on cpu; it takes tensors on a GPU"):
        NGNMDv1.simple([p], backend=fake_gpu.name).step(loss=1.0)


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


BROKEN = {
    "raise OSError('libtriton.so: bad magic')": "OSError: libtriton.so: bad magic",
    "import triton.missing": "ModuleNotFoundError: No module named 'triton.missing'",
    "": "AttributeError: module 'triton' has no attribute '__version__'",
}


@pytest.mark.parametrize(("source", "reason"), BROKEN.items(), ids=["raises", "partial", "empty"])
def test_a_broken_triton(
    source: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Callable[[], str],
) -> None:
    """Asked for, it says why; `auto` takes the same sentence and falls back."""
    (tmp_path / "triton.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton")
    said = refusal()
    assert f"Triton does not load ({reason}" in said and "--force-reinstall" in said
    assert reason in str(backends.availability()["triton"])


def test_an_old_triton(monkeypatch: pytest.MonkeyPatch, refusal: Callable[[], str]) -> None:
    monkeypatch.setattr("triton.__version__", "3.3.1")
    assert "Triton 3.3.1 is too old: pip install 'triton>=3.4'" in refusal()


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, refusal: Callable[[], str]) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("triton.__version__", "3.7.1")
    said = refusal()
    assert "torch sees no CUDA or ROCm device; install a torch build for your GPU" in said
    assert "TRITON_INTERPRET=1" in said


def test_auto_falls_back_and_says_so_once(
    fake_gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_backend(monkeypatch, "the engine is missing", fake_gpu.name)
    backends._say_once.cache_clear()
    p = torch.nn.Parameter(torch.empty(3, device="cuda:0"))
    key = BucketKey.of(p, {})
    chosen = set()
    said = warnings_of(
        lambda: chosen.update(backends.select_backend("auto", key).name for _ in range(3))
    )
    assert chosen == {"reference"}
    assert ["the engine is missing" in text for text in said] == [True]
