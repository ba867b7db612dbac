"""The atomic step: bad numbers never reach parameters or state, and never pass in silence."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from algorithms import (
    ALGORITHMS,
    COORDINATE,
    EVERY,
    NGND,
    NGND_RMS,
    NGNM,
    SCALAR,
    Algorithm,
    Hyper,
    NGNMDv1,
    NGNMDv1W,
    NGNMDv2,
    NGNMuon,
)
from extent import Extent
from helpers import (
    GPU_ENGINES,
    assert_unchanged,
    params_of,
    random_columns,
    random_gradients,
    snapshot,
    with_grad,
)
from layouts import LAYOUTS
from pair import Pair
from steps import train
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import ngn_kernels
from ngn_kernels import SkippedStepWarning

pytestmark = pytest.mark.essential

INF, NAN = float("inf"), float("nan")
SHAPES = ([(3,), (5, 7)], [(1025,), ()])
PLACES = ((2, 1024), (1, 34), (0, 0), (3, 0))  # parameter, element


def after(steps: int, algorithm: Algorithm, backend: str, **options: Any) -> Pair:
    """A pair after some good steps, with good gradients for the next."""
    optimizer = algorithm.build(random_columns(SHAPES), backend=backend, **options)
    for k in range(steps):
        train(optimizer, k)
    random_gradients(params_of(optimizer), seed=steps)
    return Pair(algorithm, optimizer, **options)


def count_of(record: Iterable[warnings.WarningMessage]) -> int:
    """How many skipped steps were warned about, whatever else an interpreter may say."""
    return sum(issubclass(warning.category, SkippedStepWarning) for warning in record)


def assert_skipped(pair: Pair, loss: Any) -> None:
    """The next step is skipped as a whole, warned about and counted once; the one after works.

    It leaves good gradients for another step.
    """
    optimizer = pair.optimizer
    before, count = snapshot(optimizer), int(optimizer.skipped_steps)
    with pytest.warns(SkippedStepWarning) as record:
        optimizer.step(loss=loss)
    assert count_of(record) == 1
    assert_unchanged(optimizer, before)
    assert int(optimizer.skipped_steps) == count + 1

    random_gradients(params_of(optimizer), seed=99)
    pair.checked_step(1.0)
    assert int(optimizer.skipped_steps) == count + 1


@EVERY
@pytest.mark.parametrize("loss", [NAN, INF, -INF])
@pytest.mark.parametrize("steps", [0, 2])
def test_non_finite_loss(algorithm: Algorithm, backend: str, loss: float, steps: int) -> None:
    pair = after(steps, algorithm, backend)
    assert_skipped(pair, loss)
    assert_skipped(pair, torch.tensor(loss))


@EVERY
def test_non_finite_loss_by_other_ways(algorithm: Algorithm, backend: str) -> None:
    pair = after(1, algorithm, backend)
    before = snapshot(pair.optimizer)
    with pytest.warns(SkippedStepWarning):
        pair.optimizer.step(lambda: torch.tensor(NAN))
    pair.optimizer.set_loss(1.0)
    pair.optimizer.set_loss(INF)
    with pytest.warns(SkippedStepWarning):
        pair.optimizer.step()
    assert_unchanged(pair.optimizer, before)
    assert int(pair.optimizer.skipped_steps) == 2


@pytest.mark.parametrize("algorithm", SCALAR, ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("steps", [0, 2])
def test_non_finite_gradient_in_scalar_rules(
    algorithm: Algorithm, backend: str, value: float, steps: int, extent: Extent
) -> None:
    """One bad element anywhere, and the whole step is a no-op."""
    pair = after(steps, algorithm, backend)
    for where in PLACES[: extent.places]:
        poison(pair.optimizer, where, value)
        assert_skipped(pair, 1.0)


@EVERY
@pytest.mark.parametrize("value", [NAN, INF])
def test_non_finite_norm_when_clipping(
    algorithm: Algorithm, backend: str, value: float, extent: Extent
) -> None:
    """With a norm pass there is a whole sum to look at, in coordinate rules too."""
    pair = after(2, algorithm, backend, max_grad_norm=1.0)
    for where in PLACES[: extent.places]:
        poison(pair.optimizer, where, value)
        assert_skipped(pair, 1.0)


def poison(optimizer: Any, where: tuple[int, int], value: float) -> None:
    tensor, element = where
    params_of(optimizer)[tensor].grad.view(-1)[element] = value


@pytest.mark.parametrize("algorithm", COORDINATE, ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("steps", [0, 2])
def test_non_finite_gradient_in_coordinate_rules(
    algorithm: Algorithm, backend: str, value: float, steps: int, extent: Extent
) -> None:
    """Only those coordinates stand still; t advances, the step is counted once and warned about."""
    pair = after(steps, algorithm, backend)
    for where in PLACES[: extent.places]:
        random_gradients(params_of(pair.optimizer), seed=8)
        poison(pair.optimizer, where, value)
        poison(pair.optimizer, (2, 7), value)
        pair.sync()
        assert_only_those_stand_still(pair, {where, (2, 7)}, 1.0)


def assert_only_those_stand_still(pair: Pair, places: set[tuple[int, int]], loss: float) -> None:
    """A step that leaves x, m and v at these places alone; everything else is the oracle's."""
    optimizer = pair.optimizer
    params = params_of(optimizer)
    kept = {
        (i, j): {key: flat(t)[j].clone() for key, t in tensors(pair, i).items()} for i, j in places
    }
    grads = [p.grad for p in params]
    for p in params:
        p.grad = p.grad.nan_to_num(0.0, 0.0, 0.0)
    pair.expect(loss)
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    count = int(optimizer.skipped_steps)
    with pytest.warns(SkippedStepWarning) as record:
        optimizer.step(loss=loss)
    assert count_of(record) == 1
    assert int(optimizer.skipped_steps) == count + 1

    variables = [v for group in pair.oracle.groups for v in group.variables]
    for (i, j), values in kept.items():
        now = tensors(pair, i)
        for key, value in values.items():
            assert torch.equal(flat(now[key])[j], value), f"{key} at {(i, j)} moved"
        x, m, v = (float(values.get(key, 0.0)) for key in ("x", "m", "v"))
        variables[i].x.reshape(-1)[j] = x
        variables[i].previous.reshape(-1)[j] = x + m
        variables[i].v.reshape(-1)[j] = v
    pair.check_step()


def tensors(pair: Pair, index: int) -> dict[str, torch.Tensor]:
    """x, m and v of one parameter; state that is still to come counts as zeros."""
    p = params_of(pair.optimizer)[index]
    state = pair.optimizer.state.get(p, {})
    found = {"x": p}
    if pair.algorithm.momentum:
        found["m"] = state.get("momentum_buffer", torch.zeros(p.shape))
    if pair.algorithm.rms:
        found["v"] = state.get("exp_avg_sq", torch.zeros(p.shape))
    return found


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)


@EVERY
def test_loss_below_the_floor_raises(algorithm: Algorithm, backend: str) -> None:
    """The value is on the host, so it is an error and not a skipped step."""
    pair = after(1, algorithm, backend)
    before = snapshot(pair.optimizer)
    for loss in (-1e-6, -3.0, torch.tensor(-1e-6), torch.tensor(-3.0)):
        with pytest.raises(ValueError, match="loss_floor"):
            pair.optimizer.step(loss=loss)
        assert_unchanged(pair.optimizer, before)
    assert int(pair.optimizer.skipped_steps) == 0


def test_loss_below_a_raised_floor_raises(backend: str) -> None:
    pair = after(1, NGNMDv1, backend, loss_floor=0.5)
    before = snapshot(pair.optimizer)
    with pytest.raises(ValueError, match=r"loss_floor(.|\n)*0\.5|0\.5(.|\n)*loss_floor"):
        pair.optimizer.step(loss=0.4)
    assert_unchanged(pair.optimizer, before)


def test_negative_loss_above_the_floor_is_fine(backend: str) -> None:
    pair = after(1, NGNMDv1, backend, loss_floor=-2.0)
    pair.step(-1.5)
    pair.check_step()


@EVERY
def test_skips_add_up(algorithm: Algorithm, backend: str) -> None:
    """Several reasons at once are one skipped step; each skipped step is one count."""
    pair = after(1, algorithm, backend)
    before = snapshot(pair.optimizer)
    for k in range(3):
        poison(pair.optimizer, (0, 0), NAN)
        poison(pair.optimizer, (2, 5), INF)
        pair.optimizer.found_inf = torch.tensor(1.0)
        with pytest.warns(SkippedStepWarning) as record:
            pair.optimizer.step(loss=NAN)
        assert count_of(record) == 1
        assert int(pair.optimizer.skipped_steps) == k + 1
    assert_unchanged(pair.optimizer, before)


@pytest.mark.parametrize("algorithm", SCALAR, ids=str)
@pytest.mark.dtypes(torch.float64)
def test_squares_that_overflow_the_sums(
    algorithm: Algorithm, backend: str, dtype: torch.dtype
) -> None:
    """Finite gradients whose squares no sum can hold skip the whole step of a scalar rule."""
    optimizer = algorithm.build(random_columns(SHAPES, dtype), backend=backend)
    random_gradients(params_of(optimizer), seed=0)
    pair = Pair(algorithm, optimizer)
    # Where the direction is that of a matrix, the sum has no squares.
    poison(optimizer, (2, 34) if algorithm.spectral else (1, 34), 1e200)
    assert_skipped(pair, 1.0)


@pytest.mark.parametrize("algorithm", [NGND_RMS, NGNMDv2], ids=str)
def test_second_moment_overflow_in_coordinate_rules(algorithm: Algorithm, backend: str) -> None:
    """g² beyond float32: v cannot be stored, so that coordinate keeps x, m and v."""
    pair = after(2, algorithm, backend)
    poison(pair.optimizer, (2, 1024), 1e30)
    assert_only_those_stand_still(pair, {(2, 1024)}, 1.0)


@EVERY
@pytest.mark.dtypes(torch.float64)
def test_norm_that_overflows_when_clipping(
    algorithm: Algorithm, backend: str, dtype: torch.dtype
) -> None:
    optimizer = algorithm.build(random_columns(SHAPES, dtype), backend=backend, max_grad_norm=1.0)
    random_gradients(params_of(optimizer), seed=0)
    poison(optimizer, (1, 34), 1e200)
    assert_skipped(Pair(algorithm, optimizer, max_grad_norm=1.0), 1.0)


@EVERY
def test_huge_finite_gradient(algorithm: Algorithm, backend: str) -> None:
    """Whether the sums hold 1e60 or not: nothing non-finite is stored, and training goes on."""
    pair = after(2, algorithm, backend)
    optimizer = pair.optimizer
    poison(optimizer, (2, 1024), 1e30)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        optimizer.step(loss=1.0)
    assert count_of(record) == int(optimizer.skipped_steps) <= 1
    for p in params_of(optimizer):
        assert p.isfinite().all()
        assert all(torch.as_tensor(value).isfinite().all() for value in optimizer.state[p].values())
    random_gradients(params_of(optimizer), seed=9)
    pair.checked_step(1.0)


def test_ngnd_takes_a_huge_gradient_for_what_it_is(backend: str) -> None:
    """Without a second moment nothing overflows in storage: γ g = 2h/g, next to nothing."""
    pair = after(0, NGND, backend)
    poison(pair.optimizer, (2, 1024), 1e30)
    pair.step(1.0)
    pair.check_step()


@EVERY
@pytest.mark.parametrize(
    ("half", "x", "lr", "loss"),
    [
        (torch.float16, 6e4, 2e4, 1e12),
        (torch.bfloat16, torch.finfo(torch.bfloat16).max, 2e36, 1e44),
    ],
    ids=["float16", "bfloat16"],
)
def test_storage_overflow(
    algorithm: Algorithm, backend: str, half: torch.dtype, x: float, lr: float, loss: float
) -> None:
    """6e4 + 1e4 does not fit float16: that element keeps x, m and v, every other one moves.

    Nor does 3.38e38 + 1e36 fit bfloat16, though it would fit float32.
    """
    columns = [[Parameter(torch.tensor([0.1, x, -x, 2.0], dtype=half))]]
    pair = Pair(algorithm, algorithm.build(columns, [Hyper(lr, 0.5)], backend=backend))
    columns[0][0].grad = torch.tensor([0.5, -1.0, -1.0, 1.0], dtype=half)
    assert_only_those_stand_still(pair, {(0, 1)}, loss)


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a.momentum or a.rms], ids=str)
@pytest.mark.parametrize("key", ["momentum_buffer", "exp_avg_sq"])
@pytest.mark.dtypes(torch.float64)
def test_float32_state_of_float64_parameters_overflows(
    algorithm: Algorithm, key: str, backend: str, dtype: torch.dtype
) -> None:
    """Numbers that float64 parameters bear and their float32 state does not: kept, and told."""
    if not (algorithm.momentum if key == "momentum_buffer" else algorithm.rms):
        pytest.skip("the rule has no such state")
    p = with_grad(torch.tensor([1.0, 1.0, 1.0], dtype=dtype))
    groups = [{"params": [p], **algorithm.values(Hyper(1.0, 0.5, 0.99))}]
    optimizer = algorithm.simple(groups, backend=backend)
    optimizer.step(loss=1.0)
    state = optimizer.state[p]
    state[key] = state[key].float()
    if key == "momentum_buffer":
        state[key].fill_(1.0)
        p.grad = torch.tensor([0.0, 1e30, 0.0], dtype=dtype)
        optimizer.param_groups[0]["lr"] = 1e40
        loss = 1e90
    else:
        p.grad = torch.tensor([1.0, 1e21, 1.0], dtype=dtype)
        loss = 1e90
    before = {"x": p.detach().clone()} | {k: t.clone() for k, t in state.items() if k != "step"}
    with pytest.warns(SkippedStepWarning, match="some elements"):
        optimizer.step(loss=loss)
    after = {"x": p.detach()} | {k: t for k, t in state.items() if k != "step"}
    assert state[key].dtype == torch.float32
    for name, old in before.items():
        assert after[name].isfinite().all(), name
        assert after[name][1] == old[1], f"{name} of the element that overflows has moved"
    assert (after["x"] != before["x"]).tolist() == [True, False, True]
    assert int(optimizer.skipped_steps) == 1


@pytest.mark.parametrize("algorithm", ["NGND", "NGNMDv2"])
def test_no_step_where_lr_and_height_are_0(algorithm: str, backend: str) -> None:
    """gamma would be 0/0 for each coordinate: it is 0, and that is no bad number."""
    p = with_grad(torch.ones(70))
    optimizer = getattr(ngn_kernels, algorithm)([p], lr=0.0, backend=backend)
    optimizer.step(loss=0.0)
    assert torch.equal(p.detach(), torch.ones(70))
    assert int(optimizer.skipped_steps) == 0


def test_an_overflow_explains_a_bad_loss(backend: str) -> None:
    """Where both are there, the scaler's overflow is the reason that is told."""
    p = with_grad(torch.ones(3))
    optimizer = ngn_kernels.NGNM([p], backend=backend)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.ones(())
    with pytest.warns(SkippedStepWarning, match="scaler found an overflow"):
        optimizer.step(loss=float("inf"))


# Memory that runs out


class Allocations(TorchDispatchMode):
    """Counts the operations that return memory of their own, and fails in one of them."""

    def __init__(self, fail_at: int, error: type[BaseException]) -> None:
        super().__init__()
        self.left = fail_at
        self.error = error

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(result.alias_info is None for result in function._schema.returns):
            self.left -= 1
            if self.left == 0:
                raise self.error("out of memory")
        return function(*args, **(kwargs or {}))


def several_kinds(algorithm: Algorithm, backend: str, **options: Any) -> Any:
    """Parameters of two element types, with gaps, complex ones and large ones, in two groups."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3,), (4100,)), ((5, 2), (2,))
    columns: list[list[torch.Tensor]] = [
        [Parameter(torch.randn(shape, generator=generator)) for shape in column]
        for column in shapes
    ]
    columns[0].append(Parameter(LAYOUTS["strided"](torch.ones(7))))
    columns[1].append(Parameter(torch.ones(3, dtype=torch.complex64)))
    columns[1].append(Parameter(torch.ones(6, dtype=torch.bfloat16)))
    if backend not in GPU_ENGINES and "state" not in options:
        columns[0].append(Parameter(torch.ones(2, dtype=torch.float64)))
    return algorithm.build(columns, backend=backend, **options)


@pytest.mark.parametrize("options", [{}, {"state": "8bit", "rounding": "stochastic"}], ids=str)
@pytest.mark.parametrize(
    ("algorithm", "clip"),
    [(NGNM, None), (NGNMDv1W, 1.0), (NGNMDv2, None), (NGNMuon, 1.0)],
    ids=str,
)
def test_memory_that_runs_out_changes_nothing(
    algorithm: Algorithm, clip: float | None, options: dict[str, str], backend: str
) -> None:
    """Wherever in a step it does, over all rows and buckets; the next step is as ever."""
    if backend in GPU_ENGINES:
        pytest.skip("its interpreter allocates, the kernels do not")
    optimizer, twin = (
        several_kinds(algorithm, backend, max_grad_norm=clip, **options) for _ in range(2)
    )
    failed = 0
    for k in range(3):
        for each in (optimizer, twin):
            random_gradients(params_of(each), seed=k)
        before = snapshot(optimizer)
        fail_at = k + 1
        while True:
            error = (MemoryError, torch.OutOfMemoryError)[failed % 2]
            try:
                with Allocations(fail_at, error):
                    optimizer.step(loss=1.0)
                break
            except error:
                assert_unchanged(optimizer, before)
                failed += 1
            fail_at += 23 if backend == "reference" else 1
        twin.step(loss=1.0)
        assert snapshot(optimizer) == snapshot(twin)
        assert int(optimizer.skipped_steps) == 0
    assert failed > (30 if backend == "reference" else 5)
