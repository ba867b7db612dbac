"""Parameters of 16 bits: to nearest, at random, or with the bits they lack beside them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from algorithms import EVERY, Algorithm, NGNMDv1, NGNMDv1W, NGNMDv2
from extent import Shapes
from helpers import (
    GPU_ENGINES,
    copies_of,
    params_of,
    random_columns,
    random_gradients,
    unchanged,
    with_grad,
)
from pair import Pair
from steps import check_next_step, train
from torch import Tensor
from torch.nn import Parameter

import ngn_kernels
from ngn_kernels import SkippedStepWarning, formats

# Below, at and above a quantised block, a kernel's block and a chunk; an interpreter's chunks are smaller.
SHAPES = ([(1,), (63,), (65, 64)], [(513,), (3, 16385), ()])
INTERPRETED = ([(1,), (65, 64)], [(513,), ()])


def shapes(backend: str) -> Shapes:
    return INTERPRETED if backend in GPU_ENGINES else SHAPES


HALVES = (torch.bfloat16, torch.float16)


def at_random(value: Tensor, step: int) -> Tensor:
    random = formats.noise(formats.noise_key(2), torch.tensor(float(step)), value.numel())
    to_half = {
        torch.bfloat16: formats.stochastic_bfloat16,
        torch.float16: formats.stochastic_float16,
    }
    return torch.stack([to_half[dtype](value, random).float() for dtype in HALVES])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_stays_itself_and_others_go_to_a_neighbour(dtype: torch.dtype) -> None:
    i = HALVES.index(dtype)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    every = every[every.isfinite()]
    assert torch.equal(at_random(every, 3)[i], every)
    ordered = every.unique()
    share = torch.rand(len(ordered) - 1, generator=torch.Generator().manual_seed(0))
    between = ordered[:-1] + share * (ordered[1:] - ordered[:-1])
    ends = ordered[1:], ordered[:-1]
    draws = torch.stack([at_random(between, step)[i] for step in range(63, 191)])
    assert ((draws == ends[0]) | (draws == ends[1])).all()
    up = (draws == ends[0]).double().mean(0)
    wanted = (between.double() - ends[1]) / (ends[0].double() - ends[1])
    assert (up - wanted).abs().max() < 0.3 and (up - wanted).mean().abs() < 0.003


def test_split_numbers_are_joined_with_all_their_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator)
    edges = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x3F808000, 0x3F818000, 0x7F7F7FFF])
    values = torch.cat([bits, edges, edges - 2**31]).to(torch.int32).view(torch.float32)
    values = values[values.abs() <= float.fromhex("0x1.fefffep127")]
    near, remainder = formats.split_bfloat16(values)
    assert torch.equal(
        formats.join_bfloat16(near, remainder).view(torch.int32), values.view(torch.int32)
    )
    differs = near != values.bfloat16()
    assert 0 < differs.sum() < 50, "only ties are rounded otherwise"


def run(algorithm: Algorithm, backend: str, dtype: torch.dtype, **options: Any) -> Any:
    """Steps with gradients that float32 and bfloat16 parameters share."""
    columns = [[p.bfloat16().float() for p in column] for column in random_columns(shapes(backend))]
    params = [[Parameter(p.to(dtype)) for p in column] for column in columns]
    optimizer = algorithm.build(params, backend=backend, max_grad_norm=1.0, **options)
    for k in range(4):
        random_gradients(params_of(optimizer), seed=k, norm=3.0)
        for p in params_of(optimizer):
            gradient = p.grad.bfloat16()
            p.grad = gradient.to(dtype)
        optimizer.step(loss=1.0)
    return optimizer


@EVERY
@pytest.mark.parametrize("state", ["float32", "8bit"])
@pytest.mark.essential
def test_exact_has_the_bits_of_float32(algorithm: Algorithm, backend: str, state: str) -> None:
    narrow = run(algorithm, backend, torch.bfloat16, rounding="exact", state=state)
    wide = run(algorithm, backend, torch.float32, state=state)
    for p, q in zip(params_of(narrow), params_of(wide), strict=True):
        remainder = narrow.state[p]["remainder"]
        assert p.dtype == torch.bfloat16 and remainder.dtype == torch.int16
        joined = formats.join_bfloat16(p.detach(), remainder)
        assert torch.equal(joined.view(torch.int32), q.detach().view(torch.int32))
        for key in {"momentum_buffer", "exp_avg_sq"} & set(wide.state[q]):
            assert torch.equal(narrow.state[p][key], wide.state[q][key])


@EVERY
@pytest.mark.dtypes(torch.bfloat16, torch.float16)
@pytest.mark.essential
def test_stochastic_steps_end_at_a_neighbour(
    algorithm: Algorithm, backend: str, dtype: torch.dtype
) -> None:
    """The same step to nearest tells the unrounded number to half an ulp."""
    pairs = []
    for rounding in ("nearest", "stochastic"):
        columns = random_columns(shapes(backend), dtype)
        optimizer = algorithm.build(columns, backend=backend, rounding=rounding)
        pair = Pair(algorithm, optimizer)
        random_gradients(params_of(optimizer), seed=0)
        pair.step(1.0)
        pairs.append(pair)
    pairs[0].check_step()
    changed = 0
    roundoff = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    for p, q in zip(params_of(pairs[0].optimizer), params_of(pairs[1].optimizer), strict=True):
        apart = (p.float() - q.float()).abs()
        assert (apart <= 2 * roundoff * p.abs().float() + 2.0**-24).all()
        changed += int((p != q).sum())
    assert changed > 1000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_backends_round_to_the_same_bits(dtype: torch.dtype) -> None:
    """x - g is the same float32 everywhere; so is its noise, which is not that of v."""
    results = []
    for backend in ("reference", "cpu"):
        generator = torch.Generator().manual_seed(0)
        x, g = (torch.randn(4099, generator=generator).to(dtype) for _ in range(2))
        p = Parameter(x)
        optimizer = ngn_kernels.NGN([p], lr=1.0, backend=backend, rounding="stochastic")
        for _ in range(3):
            p.grad = g / 3
            optimizer.step(loss=1e30)
        results.append(p.detach())
    assert torch.equal(*results)


@pytest.mark.dtypes(torch.bfloat16, torch.float16)
def test_small_steps_are_not_lost(backend: str, dtype: torch.dtype) -> None:
    """A hundred steps of a hundredth of an ulp: to nearest nothing moves, at random all do."""
    moved = {}
    for rounding in ("nearest", "stochastic", *(["exact"] if dtype == torch.bfloat16 else [])):
        p = Parameter(torch.ones(4096, dtype=dtype))
        ulp = torch.finfo(dtype).eps
        optimizer = ngn_kernels.NGN([p], lr=1.0, backend=backend, rounding=rounding)
        for _ in range(100):
            p.grad = torch.full_like(p, -ulp / 100)
            optimizer.step(loss=1e6)
        moved[rounding] = float((p.detach().float() - 1).mean()) / ulp
    assert moved["nearest"] == 0
    assert abs(moved["stochastic"] - 1) < 0.1
    assert moved.get("exact", 1.0) == 1.0


@pytest.mark.essential
def test_both_rounded_and_quantised(backend: str) -> None:
    """Parameters and state at once, from identical state against the oracle."""
    options: dict[str, Any] = {"rounding": "exact", "state": ("8bit", "bfloat16")}
    optimizer = NGNMDv1W.build(
        random_columns(shapes(backend), torch.bfloat16), backend=backend, **options
    )
    check_next_step(NGNMDv1W, optimizer, seed=0, loss=1.0)


@pytest.mark.parametrize("rounding", ["stochastic", "exact"])
@pytest.mark.essential
def test_a_skipped_step_and_kept_elements(backend: str, rounding: str) -> None:
    params = random_columns([[(65, 64)]], torch.bfloat16)[0]
    optimizer = NGNMDv2.simple(params, backend=backend, rounding=rounding)
    random_gradients(params, seed=0)
    optimizer.step(loss=1.0)
    with unchanged(optimizer, new_state=False), pytest.warns(SkippedStepWarning):
        optimizer.step(loss=math.nan)
    x = params[0].detach().clone()
    rest = optimizer.state[params[0]].get("remainder", torch.zeros(0)).clone()
    random_gradients(params, seed=1, norm=1e3)
    assert params[0].grad is not None
    params[0].grad[3, 5] = math.inf
    with pytest.warns(SkippedStepWarning, match="kept"):
        optimizer.step(loss=1.0)
    assert params[0][3, 5] == x[3, 5] and params[0].isfinite().all()
    if rounding == "exact":
        assert optimizer.state[params[0]]["remainder"][3, 5] == rest[3, 5]


@pytest.mark.parametrize("rounding", ["stochastic", "exact"])
@pytest.mark.essential
def test_no_parameter_overflows_at_random(backend: str, rounding: str) -> None:
    largest = torch.finfo(torch.bfloat16).max
    p = with_grad(torch.full((4096,), largest, dtype=torch.bfloat16), 0.0)
    optimizer = ngn_kernels.NGNM([p], backend=backend, rounding=rounding)
    optimizer.step(loss=1.0)
    optimizer.state[p]["momentum_buffer"].fill_(-(2.0**118))  # a quarter of an ulp
    if rounding == "stochastic":
        with pytest.warns(SkippedStepWarning, match="kept"):
            optimizer.step(loss=1.0)
    else:
        optimizer.step(loss=1.0)
    assert (p == largest).all()


@pytest.mark.parametrize("rounding", ["stochastic", "exact"])
@pytest.mark.essential
def test_memory_orders(backend: str, rounding: str) -> None:
    """Transposed, and with gaps: each is the same numbers as its contiguous copy, or near them."""
    base = torch.randn(80, 140, generator=torch.Generator().manual_seed(0)).bfloat16()
    gradient = torch.randn(80, 70, generator=torch.Generator().manual_seed(1)).bfloat16()
    gaps, plain = Parameter(base.clone()[:, ::2]), Parameter(base[:, ::2].contiguous())
    for p in (gaps, plain):
        optimizer = NGNMDv1.simple([p], lr=0.1, backend=backend, rounding=rounding)
        for _ in range(3):
            p.grad = gradient.clone()
            optimizer.step(loss=100.0)
    assert torch.equal(gaps, plain)
    turned = Parameter(base[:, ::2].contiguous().t())
    optimizer = NGNMDv1.simple([turned], lr=0.1, backend=backend, rounding=rounding)
    for _ in range(3):
        turned.grad = gradient.t().clone()
        optimizer.step(loss=100.0)
    bound = 2.0**-6 * plain.abs().float() + 1e-3
    assert ((turned.t().float() - plain.float()).abs() <= bound).all()


@pytest.mark.parametrize("rounding", ["stochastic", "exact"])
def test_a_loaded_run_goes_on_with_the_same_bits(backend: str, rounding: str) -> None:
    optimizer = run(NGNMDv1, backend, torch.bfloat16, rounding=rounding, state="8bit")
    options = {"max_grad_norm": 1.0, "rounding": rounding, "state": "8bit"}
    other = NGNMDv1.build(copies_of(optimizer), backend=backend, **options)
    other.load_state_dict(optimizer.state_dict())
    for k in range(2):
        for each in (optimizer, other):
            train(each, k)
    for p, q in zip(params_of(optimizer), params_of(other), strict=True):
        assert torch.equal(p, q)
        if rounding == "exact":
            assert torch.equal(optimizer.state[p]["remainder"], other.state[q]["remainder"])


# Bad input


@pytest.mark.parametrize("rounding", ["even", None, 1, "Exact"])
def test_an_unknown_rounding(rounding: Any) -> None:
    with pytest.raises(ValueError, match='"nearest", "stochastic", "exact"'):
        ngn_kernels.NGN([Parameter(torch.zeros(3))], rounding=rounding)


@pytest.mark.parametrize(
    ("kind", "advice"),
    [(torch.float16, 'use bfloat16, or rounding="stochastic"'), (torch.float32, "leave it out")],
    ids=["float16", "float32"],
)
def test_exact_is_for_bfloat16(backend: str, kind: torch.dtype, advice: str) -> None:
    p = with_grad(torch.ones(9, dtype=kind))
    optimizer = ngn_kernels.NGNM([p], backend=backend, rounding="exact")
    with pytest.raises(TypeError, match=advice):
        optimizer.step(loss=1.0)
    assert (p == 1).all() and not optimizer.state


def test_exact_beside_float32_parameters(backend: str) -> None:
    params = [Parameter(torch.ones(9, dtype=d)) for d in (torch.bfloat16, torch.float32)]
    optimizer = ngn_kernels.NGNM(params, backend=backend, rounding="exact")
    random_gradients(params, seed=0)
    optimizer.step(loss=1.0)
    assert [("remainder" in optimizer.state[p]) for p in params] == [True, False]


def test_a_checkpoint_without_its_remainder(backend: str) -> None:
    p = with_grad(torch.ones(9, dtype=torch.bfloat16))
    plain = ngn_kernels.NGNM([p], backend=backend)
    plain.step(loss=1.0)
    saved = plain.state_dict()
    exact = ngn_kernels.NGNM([p], backend=backend, rounding="exact")
    with pytest.raises(ValueError, match=r"no remainder.*torch.zeros_like"):
        exact.load_state_dict(saved)
    assert not exact.state
    saved["state"][0] = {**saved["state"][0], "remainder": torch.zeros(9, dtype=torch.int16)}
    exact.load_state_dict(saved)
    exact.step(loss=1.0)
    plain.load_state_dict(exact.state_dict())  # to nearest, there is nothing to remember
    assert "remainder" not in plain.state[p]


@pytest.mark.parametrize(
    "bad", [torch.zeros(9), torch.zeros(8, dtype=torch.int16), 3], ids=["type", "shape", "number"]
)
def test_a_remainder_that_does_not_fit(backend: str, bad: Any) -> None:
    p = with_grad(torch.ones(9, dtype=torch.bfloat16))
    optimizer = ngn_kernels.NGNM([p], backend=backend, rounding="exact")
    optimizer.step(loss=1.0)
    optimizer.state[p]["remainder"] = bad
    before = p.detach().clone()
    with pytest.raises(ValueError, match="must be an int16 tensor of the parameter's shape"):
        optimizer.step(loss=1.0)
    assert torch.equal(p, before)
