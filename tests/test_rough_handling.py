"""What training code in the wild does to an optimizer: other hands on its state, groups and mode."""

from __future__ import annotations

import contextlib
import copy
import inspect
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from algorithms import EVERY, NGND, NGNM, SCALAR, TWO_GROUPS, Algorithm, Hyper, NGNMDv1, NGNMDv2
from helpers import (
    COMPILES,
    GPU_ENGINES,
    SHAPES,
    fresh,
    params_of,
    random_columns,
    random_gradients,
    real64,
    snapshot,
    with_grad,
)
from pair import Pair
from steps import check_next_step, train
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

import ngn_kernels
from ngn_kernels import NGN, SkippedStepWarning, backends
from ngn_kernels.planning import signature

STATE = ("momentum_buffer", "exp_avg_sq")


@pytest.fixture(params=["native", "python"])
def either_signature(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of the signature; the Python one serves older torch."""
    if request.param == "python":
        monkeypatch.setattr(signature, "NativeSignature", None)
    elif signature.NativeSignature is None:
        pytest.skip("the C++ extension is not built")


EITHER = pytest.mark.usefixtures("either_signature")


def after_a_step(algorithm: Algorithm, backend: str, hypers: Sequence[Hyper] = TWO_GROUPS) -> Any:
    optimizer = fresh(algorithm, backend, hypers=hypers)
    optimizer.step(loss=1.0)
    return optimizer


# Groups

# Whose parameters keep the same state.
ALIKE = tuple(hyper._replace(spectral="flat") for hyper in TWO_GROUPS)


@EITHER
@EVERY
def test_a_parameter_moved_between_neighbouring_groups(algorithm: Algorithm, backend: str) -> None:
    """The flat list of parameters stays the same; the lr and decay of the moved one do not."""
    optimizer = after_a_step(algorithm, backend, ALIKE)
    first, second = optimizer.param_groups
    second["params"].insert(0, first["params"].pop())
    check_next_step(algorithm, optimizer)


@EITHER
@EVERY
def test_merged_groups(algorithm: Algorithm, backend: str) -> None:
    optimizer = after_a_step(algorithm, backend, ALIKE)
    first, second = optimizer.param_groups
    first["params"] += second["params"]
    del optimizer.param_groups[1]
    check_next_step(algorithm, optimizer)
    assert algorithm.coordinate or len(optimizer.step_sizes()) == 1


@EITHER
def test_a_group_taken_out(backend: str) -> None:
    optimizer = after_a_step(NGNMDv1, backend)
    left_out = optimizer.param_groups.pop(0)["params"]
    before = [p.clone() for p in left_out]
    check_next_step(NGNMDv1, optimizer)
    assert all(map(torch.equal, left_out, before))


# State


@EITHER
@EVERY
@pytest.mark.parametrize("key", STATE)
def test_state_memory_replaced(algorithm: Algorithm, key: str, backend: str) -> None:
    """Offloading helpers swap `.data`: the old memory is gone, and may be somebody else's."""
    optimizer = after_a_step(algorithm, backend)
    for p in params_of(optimizer):
        if key in optimizer.state[p]:
            optimizer.state[p][key].data = optimizer.state[p][key].clone() * 2
    check_next_step(algorithm, optimizer)


@EITHER
@EVERY
def test_a_new_dict_of_state(algorithm: Algorithm, backend: str) -> None:
    """A parameter's whole entry replaced by another dict, with tensors of its own."""
    optimizer = after_a_step(algorithm, backend)
    for p in params_of(optimizer):
        copied = {key: value.clone() * 2 for key, value in optimizer.state[p].items()}
        optimizer.state[p] = copied
    check_next_step(algorithm, optimizer)
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


@EITHER
def test_conjugate_state(backend: str) -> None:
    """Of a complex parameter, turned by a lazy conjugation: another tensor over the same memory."""
    p = Parameter(torch.tensor([1 + 2j, -0.5j, 0.3 + 0j]))
    optimizer = NGNM.simple([p], lr=0.1, backend=backend)
    random_gradients([p], seed=1)
    optimizer.step(loss=1.0)
    state = optimizer.state[p]
    state["momentum_buffer"] = state["momentum_buffer"].conj()
    assert state["momentum_buffer"].is_conj()
    check_next_step(NGNM, optimizer)


@EITHER
@pytest.mark.parametrize("key", [*STATE, "parameter"])
def test_memory_swapped_away_is_freed(key: str, backend: str) -> None:
    """That is what it is offloaded for: nothing here keeps the old memory until the next step."""
    optimizer = after_a_step(NGNMDv1, backend)
    p = params_of(optimizer)[0]
    tensor = p if key == "parameter" else optimizer.state[p][key]
    old = StorageWeakRef(tensor.untyped_storage())
    assert not old.expired()
    tensor.data = tensor.detach().clone()
    assert old.expired()
    check_next_step(NGNMDv1, optimizer)


@EITHER
@EVERY
@pytest.mark.parametrize("keys", [STATE[:1], STATE[1:], (*STATE, "step")], ids=["m", "v", "all"])
def test_state_cast_to_double(algorithm: Algorithm, keys: tuple[str, ...], backend: str) -> None:
    """The step count goes on, and each tensor keeps the type that it was given."""
    if backend in GPU_ENGINES:
        pytest.skip("it keeps float32 state")
    optimizer = after_a_step(algorithm, backend)
    optimizer.step(loss=1.0)
    cast = [(state, key) for state in optimizer.state.values() for key in keys if key in state]
    for state, key in cast:
        state[key] = state[key].double()
    check_next_step(algorithm, optimizer)
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}
    assert {s[k].dtype for s, k in cast if k != "step"} <= {torch.float64}


@EITHER
@pytest.mark.parametrize("count", [5, 5.0, torch.tensor([5.0]), torch.tensor(5)], ids=repr)
def test_step_counts_of_other_kinds(count: Any, backend: str) -> None:
    """As other optimizers, and files, have them."""
    optimizer = after_a_step(NGNMDv1, backend)
    for p in params_of(optimizer):
        optimizer.state[p]["step"] = count.clone() if isinstance(count, Tensor) else count
    check_next_step(NGNMDv1, optimizer)
    assert {float(s["step"]) for s in optimizer.state.values()} == {6.0}


BAD_STATE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "another shape": (lambda t: t.new_zeros(t.numel() + 1), r"has shape \(\d+,\)"),
    "fewer elements": (lambda t: t.new_zeros(t.numel() - 1), "has shape"),
    "half precision": (lambda t: t.half(), r"is torch\.float16; state is float32 or float64"),
    "integers": (lambda t: t.long(), r"is torch\.int64"),
    "sparse": (lambda t: t.to_sparse(), "is not a dense tensor"),
    "a number": (lambda t: 1.0, "is not a dense tensor"),
    "meta": (lambda t: t.to("meta"), "has no memory"),
}


@EITHER
@pytest.mark.parametrize("key", STATE)
@pytest.mark.parametrize(("make", "message"), BAD_STATE.values(), ids=BAD_STATE)
def test_bad_state_is_refused(
    make: Callable[[Tensor], Any], message: str, key: str, backend: str
) -> None:
    optimizer = after_a_step(NGNMDv1, backend)
    p = params_of(optimizer)[1]
    kept, before = optimizer.state[p][key], snapshot(optimizer)
    optimizer.state[p][key] = make(kept)
    with pytest.raises((TypeError, ValueError), match=rf"the {key} of parameter 1 .*{message}"):
        optimizer.step(loss=1.0)
    optimizer.state[p][key] = kept
    assert snapshot(optimizer) == before
    check_next_step(NGNMDv1, optimizer)


@EITHER
@pytest.mark.parametrize("step", ["a word", torch.zeros(2)], ids=["word", "two"])
def test_a_bad_step_count_is_refused(step: Any, backend: str) -> None:
    optimizer = after_a_step(NGNMDv1, backend)
    optimizer.state[params_of(optimizer)[0]]["step"] = step
    with pytest.raises(ValueError, match=r"the step of parameter 0 .* is not one number"):
        optimizer.step(loss=1.0)


@EITHER
def test_state_that_shares_memory_is_refused(backend: str) -> None:
    optimizer = after_a_step(NGNMDv1, backend)
    state = optimizer.state[params_of(optimizer)[1]]
    state["exp_avg_sq"] = state["momentum_buffer"]
    with pytest.raises(ValueError, match=r"the momentum_buffer of .* overlap in memory"):
        optimizer.step(loss=1.0)


@EITHER
@EVERY
def test_state_in_another_memory_order(algorithm: Algorithm, backend: str) -> None:
    """Transposed, expanded, or resized to the same shape: its values go on."""
    optimizer = after_a_step(algorithm, backend)
    for p in params_of(optimizer):
        for key in set(STATE) & set(optimizer.state[p]):
            if p.dim() == 2:
                optimizer.state[p][key] = optimizer.state[p][key].t().contiguous().t()
            if p.dim() == 1:
                optimizer.state[p][key] = torch.full((1,), 1e-3).expand(p.shape)
    check_next_step(algorithm, optimizer)


@EITHER
def test_logging_that_reads_the_state_of_frozen_parameters(backend: str) -> None:
    """Reading `optimizer.state[p]` makes an empty entry: it stays empty, and costs no error."""
    params: list[Tensor] = [
        *random_columns([[(3,), (4,)]])[0],
        Parameter(torch.ones(5, dtype=torch.int8), requires_grad=False),
    ]
    params[1].requires_grad_(False)
    optimizer = NGNMDv1.simple(params, backend=backend)
    for k in range(3):
        random_gradients(params[:1], seed=k)
        optimizer.step(loss=1.0)
        assert len(optimizer.state[params[1]]) == 0 and len(optimizer.state[params[2]]) == 0
    params[1].requires_grad_(True)
    random_gradients(params[:2], seed=9)
    before = [p.detach().clone() for p in params]
    optimizer.step(loss=1.0)
    assert [torch.equal(p, b) for p, b in zip(params, before, strict=True)] == [False, False, True]


# Threads


@EITHER
@pytest.mark.parametrize("algorithm", [NGNMDv1, NGNMDv2], ids=str)
def test_gradients_dropped_while_a_step_is_under_way(
    algorithm: Algorithm, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another thread does while a kernel runs: what the step has seen is kept until it is done."""
    params = random_columns([[(50_000,), (20_000, 2)]])[0]
    if backend in GPU_ENGINES:
        params = random_columns([[(500,), (20, 2)]])[0]
    optimizer = algorithm.simple(params, backend=backend)
    engine = backends._load(backend)
    garbage = []

    def dropping(method: Any) -> Any:
        def drop(*args: Any, **kwargs: Any) -> None:
            for p in params:
                p.grad = None
            garbage.extend(torch.full(p.shape, float("nan")) for p in params)
            method(*args, **kwargs)

        return drop

    prepare = engine.prepare

    def prepare_dropping(*args: Any) -> Any:
        prepared = prepare(*args)
        for name in ("reduce", "compute", "apply"):
            setattr(prepared, name, dropping(getattr(prepared, name)))
        return prepared

    monkeypatch.setattr(engine, "prepare", prepare_dropping)
    for k in range(3):
        random_gradients(params, seed=k)
        Pair(algorithm, optimizer).checked_step(1.0)
        garbage.clear()


@EITHER
def test_gradients_are_let_go_after_a_step(backend: str) -> None:
    optimizer = fresh(NGNMDv1, backend)
    optimizer.step(loss=1.0)
    counts = [sys.getrefcount(p.grad) for p in params_of(optimizer)]
    optimizer.step(loss=1.0)
    assert [sys.getrefcount(p.grad) for p in params_of(optimizer)] == counts
    other = with_grad(torch.zeros(3), 0.0)
    assert set(counts) == {sys.getrefcount(other.grad)}


# Numbers


@contextlib.contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    """So many; what flushes subnormal numbers then stops doing so."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


def after_a_zero_gradient(x: Tensor, backend: str) -> Tensor:
    p = with_grad(x.clone(), 0.0)
    ngn_kernels.NGN([p], lr=1.0, backend=backend).step(loss=1.0)
    return p.detach()


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot flush")
@pytest.mark.parametrize("threads", [1, 2])
def test_half_precision_under_flushed_subnormals(threads: int, backend: str) -> None:
    """Every float16 below 6e-5 is a subnormal; as a float32 it is not."""
    x = torch.arange(1, 70_001, dtype=torch.float32).remainder(1000).mul(2.0**-24).half()
    with threads_of_torch(threads):
        torch.set_flush_denormal(True)
        stepped = after_a_zero_gradient(x, backend)
    assert torch.equal(stepped, x)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot flush")
def test_flushing_is_the_same_on_all_threads(backend: str) -> None:
    """The mode belongs to a thread: the others take it over from the caller."""
    if backend != "cpu":
        pytest.skip("torch's own operators do not")
    x = torch.full((4_000_000,), 1e-39)  # enough for a second thread to take part
    results = []
    with threads_of_torch(2):  # threads that are there before take over nothing by themselves
        after_a_zero_gradient(x, backend)
        torch.set_flush_denormal(True)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(after_a_zero_gradient(x, backend).view(torch.int32))
    assert torch.equal(*results)


@pytest.mark.parametrize("algorithm", [NGND, NGNMDv2], ids=str)
@pytest.mark.parametrize("lr", [1e15, 1e-3, 1e30])
@pytest.mark.parametrize("loss", [1e-40, 1e-30, 1e-12, 1e20, 1e30])
def test_step_sizes_of_coordinates_at_the_edges(
    algorithm: Algorithm, lr: float, loss: float, backend: str
) -> None:
    """c / 2h may lie far outside of float32; the step does not."""
    p = Parameter(torch.zeros(5))
    optimizer = algorithm.build([[p]], [Hyper(lr, 0.0, 0.99)], backend=backend)
    p.grad = torch.tensor([1e-6, -1e-3, 0.0, 1.0, 1e3])
    pair = Pair(algorithm, optimizer)
    with contextlib.nullcontext() if lr * loss < 1e38 else warnings.catch_warnings():
        pair.step(loss)
    expected = pair.oracle.groups[0].variables[0].x
    atol = 0 if loss > 1e-38 else 1e-33  # 2h g itself is below the least float32
    np.testing.assert_allclose(real64(p), expected, rtol=1e-5, atol=atol)
    assert int(optimizer.skipped_steps) == 0


# Warnings, devices, element types


def test_a_warning_out_of_code_without_a_name(backend: str) -> None:
    optimizer = fresh(NGNMDv1, backend)
    with pytest.warns(SkippedStepWarning, match="not finite"):
        exec("optimizer.step(loss=float('nan'))", {"optimizer": optimizer})


def test_interleaved_views_are_told_apart_at_once(backend: str) -> None:
    """Two halves of every row, 20 million elements: no element is looked at one by one."""
    buffer = torch.empty(20_000, 2_000)
    halves = [Parameter(buffer[:, :1000]), Parameter(buffer[:, 1000:])]
    started = time.monotonic()
    ngn_kernels.planning.checks.check_overlap([(half, "half") for half in halves])
    assert time.monotonic() - started < 5, "it was 3 minutes"
    with pytest.raises(ValueError, match="overlap in memory"):
        ngn_kernels.planning.checks.check_overlap(
            [(buffer[:, :1001], "a"), (buffer[:, 1000:], "b")]
        )


@pytest.fixture
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@EVERY
def test_another_default_device(algorithm: Algorithm, backend: str, default_device: None) -> None:
    torch.set_default_device(None)
    optimizer = fresh(algorithm, backend, max_grad_norm=1.0)
    pair = Pair(algorithm, optimizer, max_grad_norm=1.0)
    torch.set_default_device("meta")
    for _ in range(2):
        pair.step(1.0)
        pair.check_trajectory()
    assert optimizer.skipped_steps.device.type == "cpu"
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    pair.step(1.0)
    pair.check_trajectory()


def test_a_type_that_nothing_can_update_is_refused_before_anything_is(backend: str) -> None:
    """float8 parameters, in an optimizer whose other parameters could have moved."""
    good, bad = Parameter(torch.ones(3)), Parameter(torch.ones(3).to(torch.float8_e4m3fn))
    optimizer = ngn_kernels.NGNMDv1([good, bad], backend="auto")
    good.grad = torch.ones(3)
    bad.grad = torch.ones(3).to(torch.float8_e4m3fn)
    with pytest.raises((TypeError, RuntimeError), match="float8_e4m3fn"):
        optimizer.step(loss=1.0)
    assert good.tolist() == [1, 1, 1] and not optimizer.state


# AMP


@pytest.mark.parametrize("way", ["a bad loss", "a warning as an error", "a hook"])
def test_a_step_that_raises_leaves_no_scale_behind(way: str, backend: str) -> None:
    """GradScaler sets grad_scale and found_inf, and removes them only after a step that returns."""
    optimizer, expected = fresh(NGNMDv1, backend), fresh(NGNMDv1, backend)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    if way == "a hook":
        handle = optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook"))
    with pytest.raises(BaseException):  # noqa: B017 (each way has its own)
        if way == "a bad loss":
            scaler.step(optimizer, loss="many")
        elif way == "a hook":
            scaler.step(optimizer, loss=1.0)
        else:
            for p in params_of(optimizer):
                p.grad.fill_(float("inf"))
            scaler.step(optimizer, loss=1.0)
    if way == "a hook":
        handle.remove()
    assert not {"grad_scale", "found_inf"} & set(optimizer.__dict__)
    random_gradients(params_of(optimizer), seed=1)
    for o in (optimizer, expected):
        o.step(loss=1.0)
    assert snapshot(optimizer) == snapshot(expected)


# Groups that say too much, options set later


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("momentum", 0.9), ("betas", (0.9, 0.99)), ("eps", 1e-8), ("beta2", 0.9)),
        *(("momentum", 0.0), ("eps", 1.0), ("eps", None)),  # which would change nothing
    ],
)
def test_values_of_other_algorithms_are_refused(name: str, value: Any, backend: str) -> None:
    with pytest.raises(ValueError, match=rf"NGN has no {name} .*take it out of the group"):
        NGN([{"params": [Parameter(torch.ones(2))], name: value}], backend=backend)
    p = with_grad(torch.ones(2))
    optimizer = NGN([p], backend=backend)
    optimizer.step(loss=1.0)
    before = p.tolist()
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=f"NGN has no {name}"):
        optimizer.step(loss=1.0)
    assert p.tolist() == before
    del optimizer.param_groups[0][name]
    optimizer.step(loss=1.0)
    optimizer.load_state_dict(optimizer.state_dict())


BAD_OPTIONS = {
    "max_grad_norm": (-5, float("nan"), "1"),
    "loss_floor": (float("inf"), None, "0"),
    "backend": ("gpu", None),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in BAD_OPTIONS.items() for v in vs])
def test_options_set_later_are_checked(name: str, value: Any, backend: str) -> None:
    optimizer = fresh(NGNMDv1, backend)
    before = getattr(optimizer, name)
    with pytest.raises(ValueError, match=f"{name}|{value!r}"):
        setattr(optimizer, name, value)
    assert getattr(optimizer, name) == before
    optimizer.step(loss=1.0)


def test_options_set_later_are_used(backend: str) -> None:
    early = fresh(NGNM, backend, max_grad_norm=0.1, loss_floor=-1.0)
    late = fresh(NGNM, backend)
    late.max_grad_norm, late.loss_floor, late.backend = 0.1, -1.0, "reference"
    early.backend = "reference"
    for optimizer in (early, late):
        optimizer.step(loss=1.0)
    assert snapshot(early) == snapshot(late)


@EVERY
def test_options_set_between_steps_are_used(algorithm: Algorithm, backend: str) -> None:
    """A plan was made without them."""
    optimizer = after_a_step(algorithm, backend)
    for norm, floor in ((0.1, -1.0), (0.05, 0.2), (None, 0.0)):
        optimizer.max_grad_norm, optimizer.loss_floor = norm, floor
        random_gradients(params_of(optimizer), seed=3)
        Pair(algorithm, optimizer, max_grad_norm=norm, loss_floor=floor).checked_step(0.8)
    for name in ("reference", backend):
        optimizer.backend = name
        check_next_step(algorithm, optimizer)
        assert {bucket.backend.name for bucket in optimizer._plan.buckets} == {name}


def test_a_group_without_parameters(backend: str) -> None:
    """As the first one, where a device might be looked for."""
    p = Parameter(torch.ones(3))
    optimizer = ngn_kernels.NGNMDv1([{"params": []}, {"params": [p]}], backend=backend)
    assert int(optimizer.skipped_steps) == 0
    assert int(copy.deepcopy(optimizer).skipped_steps) == 0
    p.grad = torch.ones(3)
    optimizer.step(loss=1.0)
    assert len(optimizer.step_sizes() or ()) == 2 and p.tolist() != [1, 1, 1]


def test_a_set_of_parameters_is_refused(backend: str) -> None:
    params = {Parameter(torch.ones(2)), Parameter(torch.ones(3))}
    with pytest.raises(TypeError, match="no order: pass a list"):
        NGN([{"params": params}], backend=backend)


@pytest.mark.parametrize("name", ngn_kernels.messages.FOREIGN_OPTIONS)
@EVERY
def test_keywords_of_torchs_optimizers(name: str, algorithm: Algorithm) -> None:
    advice = ngn_kernels.messages.FOREIGN_OPTIONS[name]
    if name in inspect.signature(algorithm.cls.__init__).parameters:
        pytest.skip("an option of its own")
    with pytest.raises(TypeError) as caught:
        algorithm.simple([Parameter(torch.ones(2))], **{name: True})
    assert str(caught.value) == f"{algorithm.name} has no option {name}: {advice}"


def test_an_unknown_keyword_lists_the_known_ones() -> None:
    with pytest.raises(
        TypeError, match=r"NGNMDv1 has no option bogus: .*lr, betas, eps, weight_de"
    ):
        ngn_kernels.NGNMDv1([Parameter(torch.ones(2))], bogus=1)  # type: ignore[call-arg]


# Telemetry


@pytest.mark.parametrize("algorithm", SCALAR, ids=str)
def test_telemetry_is_of_the_last_applied_step(algorithm: Algorithm, backend: str) -> None:
    optimizer = fresh(algorithm, backend)
    with pytest.warns(SkippedStepWarning):
        optimizer.step(loss=float("nan"))
    assert optimizer.shrink is None and optimizer.step_sizes() is None
    optimizer.step(loss=1.0)
    shrink, sizes = float(optimizer.shrink), list(map(float, optimizer.step_sizes()))
    for group in optimizer.param_groups:
        group["lr"] *= 10
    with pytest.warns(SkippedStepWarning):
        optimizer.step(loss=float("nan"))
    assert float(optimizer.shrink) == shrink
    assert list(map(float, optimizer.step_sizes())) == sizes
    assert all(
        0 < size <= group["lr"] / 10
        for size, group in zip(sizes, optimizer.param_groups, strict=True)
    )
    optimizer.step(loss=1.0)
    assert all(float(new) != old for new, old in zip(optimizer.step_sizes(), sizes, strict=True))


# torch.compile and inference mode


COMPILED = """
import sys, warnings
import torch, ngn_kernels
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
twin = torch.nn.Linear(8, 8)
twin.load_state_dict(model.state_dict())
optimizers = [ngn_kernels.NGNMDv1(m.parameters(), backend=sys.argv[1]) for m in (model, twin)]
x = torch.randn(4, 8)

def train(model, optimizer, clears_first, set_to_none):
    if clears_first:
        optimizer.zero_grad(set_to_none)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step(loss=loss)
    if not clears_first:
        optimizer.zero_grad(set_to_none)
    return loss

breaks = torch._dynamo.utils.counters["graph_break"]
for how in ((False, True), (False, False), (True, True), (True, False)):
    torch._dynamo.reset()
    breaks.clear()
    compiled = torch.compile(train, backend="eager")
    for _ in range(3):
        compiled(model, optimizers[0], *how)
        train(twin, optimizers[1], *how)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    places = ["NGNOptimizer.step", "NGNOptimizer.zero_grad", "Tensor.backward"]
    for reason in breaks:
        assert any(place in reason for place in places), reason
    found = [sum(place in reason for reason in breaks) for place in places]
    assert found[0] == 1 and max(found) == 1, breaks
torch._dynamo.reset()
try:
    torch.compile(train, backend="eager", fullgraph=True)(model, optimizers[0], *how)
except Exception as error:
    print(type(error).__name__)
"""


@COMPILES
def test_a_compiled_training_step(backend: str, tmp_path: Path) -> None:
    """Breaks of the graph where AdamW has them, no warning about our code, the same numbers."""
    if backend in GPU_ENGINES:
        pytest.skip("the interpreter is not to be traced")
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)
    command = [sys.executable, "-W", "always", str(script), backend]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.splitlines()[-1] == "Unsupported", result.stdout
    assert "ngn_kernels" not in result.stderr, result.stderr


@EVERY
def test_state_made_in_inference_mode_goes_on_outside(algorithm: Algorithm, backend: str) -> None:
    inside, outside = fresh(algorithm, backend), fresh(algorithm, backend)
    with torch.inference_mode():
        inside.step(loss=1.0)
    outside.step(loss=1.0)
    for optimizer in (inside, outside):
        optimizer.step(loss=0.5)
    assert snapshot(inside) == snapshot(outside)


@EITHER
def test_gradients_laid_out_in_inference_mode_go_on_outside(backend: str) -> None:
    """In another memory order than their parameters, so that each is copied into a buffer."""
    inside, outside = fresh(NGNMDv1, backend), fresh(NGNMDv1, backend)
    for k, optimizer in enumerate((inside, outside, inside, outside)):
        for p in params_of(optimizer):
            p.grad = p.grad.t().contiguous().t() if p.dim() == 2 else p.grad
        with torch.inference_mode(k == 0):
            optimizer.step(loss=1.0)
    assert snapshot(inside) == snapshot(outside)


# Two threads, each with an optimizer of its own


@pytest.mark.parametrize("threads", [1, 2])
def test_optimizers_in_threads(backend: str, threads: int) -> None:
    """Each with a team of its own, where there are several chunks to share."""

    def large() -> Any:
        shapes = SHAPES if backend in GPU_ENGINES else ([(3,), (40_000,)], [(5, 7_001), ()])
        return NGNMDv1.build(random_columns(shapes), backend=backend)

    expected = large()
    train(expected, *range(5))
    optimizers = [large() for _ in range(4)]
    with threads_of_torch(threads), ThreadPoolExecutor(len(optimizers)) as pool:
        for done in [pool.submit(train, optimizer, *range(5)) for optimizer in optimizers]:
            done.result()
    for optimizer in optimizers:
        assert snapshot(optimizer) == snapshot(expected)


# Wrappers that claim to be the optimizer


class WrapperOfLightning:
    """As lightning.pytorch and Fabric make them: of the optimizer's class, with an empty __dict__."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Wrapped", (type(self), type(optimizer)), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class CopyingWrapper(WrapperOfLightning):
    """As older ones make them: with a copy of the optimizer's __dict__ from before its first step."""

    def __init__(self, optimizer: Any) -> None:
        self.__dict__ = dict(optimizer.__dict__)
        super().__init__(optimizer)

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)


def test_a_wrapper_that_copies_shows_the_optimizers_numbers() -> None:
    optimizer = ngn_kernels.NGNM([with_grad(torch.ones(3))])
    wrapper: Any = CopyingWrapper(optimizer)
    wrapper.loss_target, wrapper.max_skipped_steps = 0.5, 9
    assert (wrapper.loss_target, wrapper.max_skipped_steps) == (0.5, 9)
    for loss in (1.0, float("nan")):
        wrapper.add_loss(loss)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ngn_kernels.SkippedStepWarning)
            wrapper.step()
        assert wrapper.metrics(as_floats=True) == optimizer.metrics(as_floats=True)
        params_of(optimizer)[0].grad = torch.ones(3)
    assert wrapper.metrics(as_floats=True)["ngn/skipped_steps"] == 1
    assert wrapper.shrink is not None and wrapper.grad_norm is not None


def test_adamws_state_is_loaded_into_a_wrapper_with_exact_rounding() -> None:
    param = Parameter(torch.ones(3, dtype=torch.bfloat16))
    adamw = torch.optim.AdamW([param])
    param.grad = torch.ones_like(param)
    adamw.step()
    wrapper: Any = WrapperOfLightning(ngn_kernels.NGNMDv1([param], rounding="exact"))
    wrapper.load_adamw_state_dict(adamw.state_dict())
    assert int(wrapper.state[param]["step"]) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss_floor", -1.0),
        ("loss_target", 0.5),
        ("max_grad_norm", 2.0),
        ("decay_form", "adamw"),
        ("on_skip", "raise"),
        ("max_skipped_steps", 3),
        ("backend", "reference"),
    ],
)
def test_options_that_are_set_on_a_wrapper_are_the_optimizers(name: str, value: Any) -> None:
    optimizer, direct = (NGNMDv1.simple([with_grad(torch.ones(3))]) for _ in range(2))
    wrapper: Any = WrapperOfLightning(optimizer)
    assert isinstance(wrapper, ngn_kernels.NGNMDv1)
    setattr(wrapper, name, value)
    setattr(direct, name, value)
    assert getattr(optimizer, name) == getattr(wrapper, name) == value
    for each in (optimizer, direct):
        each.param_groups[0]["weight_decay"] = 0.1
        each.step(loss=1.0)
    assert snapshot(optimizer) == snapshot(direct)
    assert not set(wrapper.__dict__) & set(optimizer.__dict__), (
        "what would hide the optimizer's own"
    )


@pytest.mark.parametrize("state", ["float32", "8bit"])
def test_state_that_is_loaded_into_a_wrapper_is_the_optimizers(state: str) -> None:
    optimizer = NGNMDv1.simple([with_grad(torch.ones(70, 65))], state=state)
    wrapper: Any = WrapperOfLightning(optimizer)
    optimizer.step(loss=1.0)
    saved, known = copy.deepcopy(wrapper.state_dict()), snapshot(optimizer)
    optimizer.step(loss=1.0)
    params_of(optimizer)[0].data.fill_(0)
    wrapper.load_state_dict(saved)
    assert [s for _, s in snapshot(optimizer)] == [s for _, s in known]
    assert wrapper.state is optimizer.state and wrapper.param_groups is optimizer.param_groups
