"""State in fewer bits: the codes themselves, and every algorithm with them on every backend."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from algorithms import ALGORITHMS, EVERY, Algorithm, NGNMDv1, NGNMDv1W, NGNMDv2
from conftest import runnable_backends
from extent import Extent
from helpers import (
    GPU_ENGINES,
    OWN_GRADIENT_TYPES,
    copies_of,
    params_of,
    random_columns,
    random_gradients,
    snapshot,
    through_file,
    with_grad,
)
from pair import Pair, numbers_in
from steps import check_next_step, checked_steps, train
from torch import Tensor
from torch.nn import Parameter

import ngn_kernels
from ngn_kernels import SkippedStepWarning, formats
from ngn_kernels.backends import availability
from ngn_kernels.formats import FORMATS, Format
from ngn_kernels.layout import QUANT_BLOCK, DType, Rounding

STATES: tuple[Any, ...] = ("bfloat16", "8bit", ("8bit", "bfloat16"), ("float32", "8bit"))
EVERY_STATE = pytest.mark.parametrize("state", STATES, ids=str)
KEPT = [a for a in ALGORITHMS if a.momentum or a.rms]
# A whole number of blocks, one element more, a matrix; and a small one.
SHAPES = ([(4096,), (10,), (65, 64)], [(4161,)])
LARGE = (3, 16385)  # several chunks; an interpreter's are smaller
NARROW = [
    pytest.param(key, name, id=f"{key}-{name}")
    for key, named in FORMATS.items()
    for name in named
    if name != "float32"
]


def isas() -> Iterator[str]:
    if availability()["cpu"] is None:
        from ngn_kernels import _cpu

        yield from _cpu.isas()


def numbers(seed: int, size: int, decades: float, zeros: float = 0.05) -> Tensor:
    """Of many sizes, zeros among them; not negative."""
    generator = torch.Generator().manual_seed(seed)
    values = 10 ** (decades * torch.rand(size, generator=generator, dtype=torch.float64) - decades)
    values[torch.rand(size, generator=generator) < zeros] = 0.0
    return values.float()


SAMPLES = {
    "one size": numbers(0, 4096, 0.3),
    "two decades": numbers(1, 4095, 2),
    "twelve decades": numbers(2, 4033, 12),
    "tiny": 1e-40 * numbers(3, 1000, 3),
    "huge": 3.3e38 * numbers(4, 1000, 1),
    "one size, no zero": numbers(5, 4095, 0.3, 0),
    "two decades, no zero": numbers(6, 4096, 2, 0),
    "twelve decades, no zero": numbers(7, 1000, 12, 0),
    "tiny, no zero": 1e-40 * numbers(8, 1000, 3, 0),
    "huge, no zero": 3.3e38 * numbers(9, 1000, 1, 0),
    "zeros": torch.zeros(130),
    "one": torch.tensor([0.7]),
    "extremes": torch.tensor([1e-45, 1e-38, 1.0, 3.38e38, 0.0] * 30),
}


def sample(name: str, key: str) -> Tensor:
    values = SAMPLES[name].clone()
    if key == "momentum_buffer":
        values[1::2] *= -1
    return values


def through(form: Format, values: Tensor, number: int = 3, step: int = 5) -> Tensor:
    code, scale = form.encode(values, noise_of(values, number, step))
    return form.decode(code, scale)


def noise_of(values: Tensor, number: int, step: int, first: int = 0) -> Tensor:
    key, count = formats.noise_key(number), torch.tensor(float(step))
    return formats.noise(key, count, values.numel(), first)


# Codes


@pytest.mark.parametrize("isa", list(isas()))
@pytest.mark.parametrize(("key", "name"), NARROW)
@pytest.mark.parametrize("values", SAMPLES)
def test_the_engine_has_the_same_bits(isa: str, key: str, name: str, values: str) -> None:
    from ngn_kernels import _cpu

    form, given = FORMATS[key][name], sample(values, key)
    rounding = Rounding.STOCHASTIC if key == "exp_avg_sq" else Rounding.NEAREST
    before = _cpu.isa()
    _cpu.use_isa(isa)
    try:
        places = (0, 0, 0), (7, 62, 64), (7, 63, 2**32 - 77), (2**33 + 5, 100_000, 2**40 + 3)
        for number, step, first in places:
            code, scale = form.encode(given, noise_of(given, number, step, first))
            data = torch.zeros_like(code)
            scales = torch.zeros(0 if scale is None else len(scale), dtype=torch.int32)
            kind = DType[str(form.storage).removeprefix("torch.").upper()]
            as_bytes = data.view(torch.uint8 if data.itemsize == 1 else torch.int16).numpy()
            _cpu.encode(
                given.numpy(), as_bytes, scales.numpy(), kind, rounding,
                formats.noise_key(number), step + 1, first,
            )  # fmt: skip
            assert torch.equal(data, code)
            assert scale is None or torch.equal(scales, scale.view(torch.int32))
            back = torch.full_like(given, math.nan)
            _cpu.decode(back.numpy(), as_bytes, scales.numpy(), kind)
            assert torch.equal(back, form.decode(code, scale))
    finally:
        _cpu.use_isa(before)


@pytest.mark.parametrize(("key", "name"), NARROW)
@pytest.mark.parametrize("values", SAMPLES)
def test_storing_what_was_stored_changes_nothing(key: str, name: str, values: str) -> None:
    form = FORMATS[key][name]
    given = sample(values, key)
    stored = through(form, given.clamp(-form.limit, form.limit))
    assert stored.isfinite().all()
    assert not stored[given == 0].any(), "zero stays zero"
    for step in range(4):
        assert torch.equal(through(form, stored, step=step), stored)
    if key == "exp_avg_sq":
        assert (stored >= 0).all()
        if name == "8bit":
            assert (stored[given > 0] > 0).all(), "nothing positive becomes zero"


@pytest.mark.parametrize(("key", "name"), NARROW)
def test_the_mean_over_steps_is_the_number(key: str, name: str) -> None:
    """Noise is spread evenly over windows of 64 steps, so that few of them do for a mean."""
    if (key, name) == ("momentum_buffer", "bfloat16"):
        pytest.skip("to nearest")
    form, values = FORMATS[key][name], numbers(5, 4096, 1.5)
    mean = torch.stack([through(form, values, step=s) for s in range(63, 191)]).double().mean(0)
    step = (through(form, values) - values).abs().max() if name == "8bit" else 2.0**-7 * values
    off = ((mean - values) / step)[values > 0]
    assert off.abs().max() < 0.3 and off.mean().abs() < 0.02


def test_noise_differs_between_parameters_steps_and_elements() -> None:
    values = torch.zeros(4096)
    draws = [noise_of(values, n, s) for n in (0, 1, 2**32) for s in (0, 1, 64, 128)]
    for i, a in enumerate(draws):
        assert a.min() >= 0 and a.max() < 2**32
        assert len(a.unique()) > 4090
        assert abs(a.double().mean() / 2**32 - 0.5) < 0.02
        assert all((a == b).sum() < 5 for b in draws[i + 1 :])


def test_noise_is_spread_evenly_along_a_block_and_along_a_window() -> None:
    """Of 64 numbers none is further than 3/64 from the next, in either half of the word."""
    first_of_window = 63
    grid = torch.stack([noise_of(torch.zeros(640), 3, first_of_window + s) for s in range(64)])
    for half in (grid >> 16, grid & 0xFFFF):
        for along in (half.view(-1, 64), half.T):
            sorted_ = along.sort(1).values
            gap = (sorted_.roll(-1, 1) - sorted_) % 65536
            assert gap.max() < 3 / 64 * 65536
    starts = grid[0].view(-1, 64)[:, 0]
    assert (starts.diff() % 2**32).unique().numel() == 9, "a block follows from the one before"


def test_bytes_of_the_formats() -> None:
    assert [FORMATS[key]["8bit"].bytes for key in FORMATS] == [1 + 4 / 64, 1 + 4 / 64]
    assert [FORMATS[key]["bfloat16"].bytes for key in FORMATS] == [2, 2]


# Steps


def build(
    algorithm: Algorithm, backend: str, state: Any, dtype: torch.dtype, **options: Any
) -> Any:
    few, many = SHAPES
    columns = random_columns([few, many if backend in GPU_ENGINES else [*many, LARGE]], dtype)
    return algorithm.build(columns, backend=backend, state=state, **options)


@EVERY
@EVERY_STATE
@pytest.mark.essential
@pytest.mark.dtypes(torch.float32, torch.bfloat16, torch.float16)
def test_steps_from_identical_state(
    algorithm: Algorithm, backend: str, dtype: torch.dtype, state: Any, extent: Extent
) -> None:
    options: dict[str, Any] = {"max_grad_norm": 2.0, "loss_floor": -0.5}
    pair = Pair(algorithm, build(algorithm, backend, state, dtype, **options), **options)
    for k in range(extent.steps_from_sync):
        random_gradients(params_of(pair.optimizer), seed=k, norm=3.0 / (k + 1))
        pair.checked_step(0.7 + k)
    names = dict(zip(FORMATS, (state, state) if isinstance(state, str) else state, strict=True))
    for p in params_of(pair.optimizer):
        held = pair.optimizer.state[p]
        for key in set(FORMATS) & set(held):
            form = FORMATS[key][names[key] if p.numel() >= 4096 else "float32"]
            assert held[key].dtype == form.storage and held[key].shape == p.shape
            assert (f"{key}_scale" in held) == (form.scale is not None)
    assert int(pair.optimizer.skipped_steps) == 0


@EVERY_STATE
@pytest.mark.parametrize("algorithm", [NGNMDv1, NGNMDv2], ids=str)
def test_a_run_stays_near_float32(algorithm: Algorithm, backend: str, state: Any) -> None:
    """Gradients that fall tenfold, with sizes over two decades within a block."""
    generator = torch.Generator().manual_seed(0)
    size = 10 ** (-2 * torch.rand(64, 128, generator=generator))
    drift = torch.randn(64, 128, generator=generator).sign()
    params = [Parameter(torch.zeros(64, 128)) for _ in range(2)]
    optimizers = [
        algorithm.simple([p], backend=backend, state=s)
        for p, s in zip(params, ("float32", state), strict=True)
    ]
    for k in range(300):
        gradient = size * 10 ** (-k / 300) * (torch.randn(64, 128, generator=generator) + drift)
        for p, optimizer in zip(params, optimizers, strict=True):
            p.grad = gradient.clone()
            optimizer.step(loss=1e3)
    off = float((params[1] - params[0]).detach().norm() / params[0].detach().norm())
    eight_bit_v = "8bit" in (state, state[1])
    assert 0 < off < (0.05 if eight_bit_v else 0.015)


@EVERY_STATE
def test_threads_change_no_bit(backend: str, state: Any) -> None:
    runs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            optimizer = build(NGNMDv1, backend, state, torch.float32)
            train(optimizer, 0, 1)
            runs.append(snapshot(optimizer))
        finally:
            torch.set_num_threads(1)
    assert runs[0] == runs[1]


@EVERY_STATE
@pytest.mark.parametrize("algorithm", KEPT, ids=str)
@pytest.mark.essential
def test_a_skipped_step_leaves_every_code(algorithm: Algorithm, backend: str, state: Any) -> None:
    optimizer = build(algorithm, backend, state, torch.float32)
    train(optimizer, 0)
    before = snapshot(optimizer)
    for loss, found_inf in ((math.nan, 0.0), (1.0, 1.0)):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(found_inf)
        with pytest.warns(SkippedStepWarning):
            optimizer.step(loss=loss)
        assert snapshot(optimizer) == before


@EVERY_STATE
@pytest.mark.essential
def test_elements_that_would_not_be_finite_keep_their_numbers(backend: str, state: Any) -> None:
    """Their neighbours, which share a scale with them, go on."""
    optimizer = build(NGNMDv2, backend, state, torch.float32)
    train(optimizer, 0)
    p = params_of(optimizer)[2]
    x, held = p.detach().clone(), copy.deepcopy(numbers_in(optimizer, p))
    random_gradients(params_of(optimizer), seed=1)
    p.grad[5, 7] = math.nan
    p.grad[5, 8] = 1e30  # its square is not finite
    with pytest.warns(SkippedStepWarning, match="kept"):
        optimizer.step(loss=1.0)
    now = numbers_in(optimizer, p)
    assert torch.equal(p[5, 7:9], x[5, 7:9])
    for key in ("momentum_buffer", "exp_avg_sq"):
        assert now[key].isfinite().all()
        bound = 0.13 * held[key][5, 7:9].abs() + held[key][5].abs().max() / 60
        assert ((now[key][5, 7:9] - held[key][5, 7:9]).abs() <= bound).all()
    others = p != x
    others[5, 7:9] = True
    assert others.all()


@pytest.mark.essential
def test_what_a_narrow_type_cannot_hold_is_kept(backend: str) -> None:
    """Between the largest bfloat16 and the largest float32 there is room for a number."""
    p = with_grad(torch.zeros(4096), 1e-3)
    optimizer = ngn_kernels.NGNMDv2([p], betas=(0.9, 0.5), backend=backend, state="bfloat16")
    optimizer.step(loss=1.0)
    v = optimizer.state[p]["exp_avg_sq"]
    largest = torch.finfo(torch.bfloat16).max
    v[9] = largest  # 3.3895e38
    p.grad[9] = 1.8446e19  # (v + g^2) / 2 = 3.396e38; what float32 cannot hold begins at 3.4028e38
    with pytest.warns(SkippedStepWarning, match="kept"):
        optimizer.step(loss=1.0)
    v = optimizer.state[p]["exp_avg_sq"]
    assert v.isfinite().all() and v[9] == largest and (v[:9] > 0).all()


@pytest.mark.parametrize("start", [0.0, 3.4e38])
@pytest.mark.parametrize("state", ["bfloat16", "8bit"])
def test_momentum_that_a_narrow_type_cannot_hold_is_kept(
    backend: str, state: str, start: float
) -> None:
    """Nor does 3.4e38 fit a bfloat16, or a byte and its scale; also where it leads back to 0."""
    p = Parameter(torch.zeros(4096))
    p.data[9] = start
    optimizer = ngn_kernels.NGNM([p], lr=6.8e38, momentum=0.5, backend=backend, state=state)
    p.grad = torch.full_like(p, 1e-30)  # its neighbours' numbers are small
    p.grad[9] = 1.0
    with pytest.warns(SkippedStepWarning, match="kept"):
        optimizer.step(loss=1e90)
    m = numbers_in(optimizer, p)["momentum_buffer"]
    assert p[9] == torch.tensor(start) and m[9] == 0 and m.isfinite().all()
    assert (p[:9] < 0).all() and (m[:9] > 0).all()


@EVERY_STATE
def test_memory_orders(backend: str, state: Any) -> None:
    """Transposed, channels last, with gaps: blocks are counted in memory, whatever the shape."""

    def params() -> list[Parameter]:
        generator = torch.Generator().manual_seed(0)
        dense = torch.randn(80, 70, generator=generator)
        image = torch.randn(8, 16, 7, 7, generator=generator)
        wide = torch.randn(80, 140, generator=generator)
        return [
            Parameter(dense.t()),
            Parameter(image.to(memory_format=torch.channels_last)),
            Parameter(wide[:, ::2]),
        ]

    pair = Pair(NGNMDv1W, NGNMDv1W.simple(params(), backend=backend, state=state))
    checked_steps(pair, 0, 1, 2)


@EVERY_STATE
def test_a_new_memory_order_keeps_the_numbers_near(backend: str, state: Any) -> None:
    p = Parameter(torch.randn(8, 16, 7, 7, generator=torch.Generator().manual_seed(0)))
    optimizer = NGNMDv1.simple([p], backend=backend, state=state)
    random_gradients([p], seed=0)
    optimizer.step(loss=1.0)
    with torch.no_grad():
        p.data = p.data.to(memory_format=torch.channels_last)
    p.grad = None
    pair = Pair(NGNMDv1, optimizer)
    before = numbers_in(optimizer, p)
    optimizer.step(loss=1.0)  # without a gradient it makes a plan, and with it the state, alone
    now = numbers_in(optimizer, p)
    for key in ("momentum_buffer", "exp_avg_sq"):
        assert optimizer.state[p][key].is_contiguous(memory_format=torch.channels_last)
        bound = 0.13 * before[key].abs() + before[key].abs().max() / 60
        assert ((now[key] - before[key]).abs() <= bound).all()
    random_gradients([p], seed=1)
    pair.checked_step(1.0)


@OWN_GRADIENT_TYPES
@EVERY_STATE
def test_a_float64_gradient(backend: str, state: Any) -> None:
    if backend in GPU_ENGINES:
        pytest.skip("it has no float64")
    pair = Pair(NGNMDv1, build(NGNMDv1, backend, state, torch.float32))
    random_gradients(params_of(pair.optimizer), seed=0, dtype=torch.float64)
    for p in params_of(pair.optimizer):
        p.grad = p.grad.float().double()
    pair.step(1.0)
    pair.check_step()


# State of float64 beside a narrow column, or under parameters that are rounded

WIDE_WITH: dict[str, tuple[torch.dtype, dict[str, Any], tuple[str, ...]]] = {
    "8bit m": (torch.float32, {"state": ("8bit", "float32")}, ("exp_avg_sq",)),
    "bfloat16 m": (torch.float16, {"state": ("bfloat16", "float32")}, ("exp_avg_sq",)),
    "8bit v": (torch.bfloat16, {"state": ("float32", "8bit")}, ("momentum_buffer",)),
    "bfloat16 v": (torch.float32, {"state": ("float32", "bfloat16")}, ("momentum_buffer",)),
    **{
        f"{rounding} {dtype}, {'m and v' if len(keys) > 1 else keys[0]}": (
            dtype,
            {"rounding": rounding},
            keys,
        )
        for dtype, rounding in (
            (torch.bfloat16, "stochastic"),
            (torch.float16, "stochastic"),
            (torch.bfloat16, "exact"),
        )
        for keys in (("momentum_buffer",), ("exp_avg_sq",), tuple(FORMATS))
    },
    "stochastic beside 8bit": (
        torch.bfloat16,
        {"rounding": "stochastic", "state": ("float32", "8bit")},
        ("momentum_buffer",),
    ),
}


@pytest.mark.parametrize("algorithm", KEPT, ids=str)
@pytest.mark.parametrize(("stored", "options", "keys"), WIDE_WITH.values(), ids=WIDE_WITH)
def test_float64_state_beside_what_is_narrower(
    algorithm: Algorithm,
    backend: str,
    stored: torch.dtype,
    options: dict[str, Any],
    keys: tuple[str, ...],
) -> None:
    """It stays float64, with numbers computed in float32; whole blocks, a tail, and a small one."""
    if backend in GPU_ENGINES:
        pytest.skip("it has no float64")
    columns = random_columns([[(4096,), (10,)], [(65, 64), (4161,)]], stored)
    pair = Pair(algorithm, algorithm.build(columns, backend=backend, **options))
    random_gradients(params_of(pair.optimizer), seed=0, norm=3.0)
    pair.step(1.0)
    cast = [(s, key) for s in pair.optimizer.state.values() for key in keys if key in s]
    for state, key in cast:
        state[key] = state[key].double() * (1 + 2.0**-40)
    for k in range(1, 5):
        random_gradients(params_of(pair.optimizer), seed=k, norm=3.0)
        pair.checked_step(0.7 + k)
        assert {state[key].dtype for state, key in cast} <= {torch.float64}
    assert int(pair.optimizer.skipped_steps) == 0


def test_float64_state_that_is_kept_keeps_all_of_its_bits(backend: str) -> None:
    """It was rounded to be computed with, and may be more than float32 can hold."""
    if backend in GPU_ENGINES:
        pytest.skip("it has no float64")
    p = with_grad(torch.zeros(4100), 1e-3)
    optimizer = ngn_kernels.NGNMDv2([p], backend=backend, state=("8bit", "float32"))
    optimizer.step(loss=1.0)
    state = optimizer.state[p]
    state["exp_avg_sq"] = v = state["exp_avg_sq"].double() * (1 + 2.0**-40)
    places = [7, 8, 4098]  # in a whole block, and in the tail
    v[8] = 1e300
    v[4098] = 1e200
    p.grad[7] = math.nan
    before = v.clone()
    with pytest.warns(SkippedStepWarning, match="kept"):
        optimizer.step(loss=1.0)
    assert state["exp_avg_sq"] is v and torch.equal(v[places], before[places])
    assert (v != before).sum() == 4097 and v.isfinite().all()
    assert p.isfinite().all() and not (p == 0).all()


# Saving and loading


def trained(backend: str, state: Any, algorithm: Algorithm = NGNMDv1) -> Any:
    optimizer = build(algorithm, backend, state, torch.float32)
    train(optimizer, 0, 1, 2)
    return optimizer


def another(like: Any, backend: str, state: Any, algorithm: Algorithm = NGNMDv1) -> Any:
    return algorithm.build(copies_of(like), backend=backend, state=state)


def same_numbers(a: Any, b: Any) -> bool:
    return all(
        torch.equal(p, q)
        and all(
            torch.equal(u, v)
            for u, v in zip(numbers_in(a, p).values(), numbers_in(b, q).values(), strict=True)
        )
        for p, q in zip(params_of(a), params_of(b), strict=True)
    )


@EVERY_STATE
@pytest.mark.parametrize("algorithm", KEPT, ids=str)
def test_a_loaded_run_goes_on_with_the_same_bits(
    algorithm: Algorithm, backend: str, state: Any
) -> None:
    optimizer = trained(backend, state, algorithm)
    loaded = through_file(optimizer.state_dict())
    for values in loaded["state"].values():
        assert set(values) <= {"step", *FORMATS}
        assert {v.dtype for v in values.values()} <= {torch.float32, torch.bfloat16}
    other = another(optimizer, backend, state, algorithm)
    other.load_state_dict(loaded)
    copied = copy.deepcopy(optimizer)
    for k in range(3, 6):
        assert same_numbers(other, optimizer) and same_numbers(copied, optimizer)
        for each in (optimizer, other, copied):
            train(each, k)
    assert same_numbers(other, optimizer) and same_numbers(copied, optimizer)


@EVERY_STATE
@pytest.mark.parametrize("target", ["float32", *STATES], ids=str)
def test_every_state_loads_every_other(backend: str, state: Any, target: Any) -> None:
    optimizer = trained(backend, state)
    for name in runnable_backends():
        other = another(optimizer, name, target)
        other.load_state_dict(optimizer.state_dict())
        pair = Pair(NGNMDv1, other)
        for p, q in zip(params_of(optimizer), params_of(other), strict=True):
            was, now = numbers_in(optimizer, p), numbers_in(other, q)
            for key in ("momentum_buffer", "exp_avg_sq"):
                bound = 0.13 * was[key].abs() + was[key].abs().max() / 60
                assert ((now[key] - was[key]).abs() <= bound).all()
                assert target != "float32" or torch.equal(now[key], was[key].float())
        random_gradients(params_of(other), seed=7)
        pair.step(0.4)
        pair.check_step()


def test_small_parameters_keep_float32(backend: str) -> None:
    """From 4,096 elements on state is narrow, however they are laid out."""
    sizes = {(4095,): False, (4096,): True, (64, 64): True, (63, 65): False}
    params = [Parameter(torch.ones(shape)) for shape in sizes]
    optimizer = NGNMDv1.simple(params, backend=backend, state="8bit")
    random_gradients(params, seed=0)
    optimizer.step(loss=1.0)
    found = [optimizer.state[p]["exp_avg_sq"].dtype == torch.uint8 for p in params]
    assert found == list(sizes.values())


@pytest.mark.parametrize("state", ["8bit", "bfloat16"])
def test_a_negative_zero_is_loaded_as_zero(backend: str, state: str) -> None:
    """Its pattern is that of a huge number, for whoever counts in patterns."""
    optimizer = trained(backend, state)
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg_sq"] = torch.full_like(saved["state"][0]["exp_avg_sq"], -0.0)
    optimizer.load_state_dict(saved)
    assert not optimizer.state_dict()["state"][0]["exp_avg_sq"].any()
    check_next_step(NGNMDv1, optimizer, seed=9, loss=1.0)


def test_replaced_state_is_brought_into_its_format(backend: str) -> None:
    optimizer = trained(backend, "8bit")
    p = params_of(optimizer)[0]
    v = numbers_in(optimizer, p)["exp_avg_sq"]
    optimizer.state[p]["exp_avg_sq"] = v.clone()
    check_next_step(NGNMDv1, optimizer, seed=9, loss=1.0)
    assert optimizer.state[p]["exp_avg_sq"].dtype == torch.uint8


# Bad input


@pytest.mark.parametrize("state", ["int8", "8 bit", None, 8, ("8bit",), ("8bit", "fp8"), ()])
def test_an_unknown_state(state: Any) -> None:
    with pytest.raises(ValueError, match=r'"float32", "bfloat16", "8bit", or a pair'):
        ngn_kernels.NGNMDv1([Parameter(torch.zeros(3))], state=state)


def test_state_is_no_option_of_a_group() -> None:
    with pytest.raises(ValueError, match="of the whole optimizer"):
        ngn_kernels.NGNM([{"params": [Parameter(torch.zeros(3))], "state": "8bit"}])
    optimizer = ngn_kernels.NGNM([Parameter(torch.zeros(3))], state="8bit", rounding="stochastic")
    told = {"state": "8bit", "rounding": "stochastic"}  # as wrappers repeat them
    optimizer.add_param_group({"params": [Parameter(torch.zeros(3))], **told})
    for other in ({"state": "bfloat16"}, {"rounding": "nearest"}):
        with pytest.raises(ValueError, match="of the whole optimizer"):
            optimizer.add_param_group({"params": [Parameter(torch.zeros(3))], **other})


def test_float64_parameters_have_no_narrow_state(backend: str) -> None:
    p = with_grad(torch.zeros(3, dtype=torch.float64))
    if backend in GPU_ENGINES:
        pytest.skip("it has no float64")
    optimizer = ngn_kernels.NGNM([p], backend=backend, state="8bit")
    with pytest.raises(TypeError, match="leave state= out"):
        optimizer.step(loss=1.0)
    assert not optimizer.state and not p.any()
    ngn_kernels.NGN([p], backend=backend, state="8bit").step(loss=1.0)  # which has no state


@pytest.mark.parametrize(
    "scale",
    [None, torch.zeros(64), torch.zeros(63, dtype=torch.int32), torch.zeros(64, 1).int()],
    ids=["gone", "type", "blocks", "shape"],
)
def test_scales_that_do_not_fit(backend: str, scale: Tensor | None) -> None:
    optimizer = trained(backend, "8bit")
    p = params_of(optimizer)[0]
    held = optimizer.state[p]
    if scale is None:
        del held["exp_avg_sq_scale"]
    else:
        held["exp_avg_sq_scale"] = scale
    before = snapshot(optimizer)
    random_gradients(params_of(optimizer), seed=9)
    with pytest.raises(
        ValueError, match=f"needs a scale tensor.*each {QUANT_BLOCK}.*reset the state"
    ):
        optimizer.step(loss=1.0)
    assert snapshot(optimizer) == before


@pytest.mark.parametrize("bad", [3.39e38, 1e39])
def test_numbers_that_would_spoil_their_neighbours_are_not_loaded(backend: str, bad: float) -> None:
    optimizer = trained(backend, "8bit")
    saved = optimizer.state_dict()
    saved["state"][0]["momentum_buffer"] = saved["state"][0]["momentum_buffer"].double()
    saved["state"][0]["momentum_buffer"][17] = bad
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match='load it with state="float32"'):
        optimizer.load_state_dict(saved)
    assert snapshot(optimizer) == before


def test_codes_are_not_loaded_as_numbers(backend: str) -> None:
    optimizer = trained(backend, "8bit")
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg_sq"] = optimizer.state[params_of(optimizer)[0]]["exp_avg_sq"]
    with pytest.raises(ValueError, match="needs a scale tensor"):
        optimizer.load_state_dict(saved)
