"""Plans that grow: parameters whose first gradients come late, with the bits of plans built anew."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from algorithms import EVERY, NGNM, Algorithm, NGNMDv1, NGNMDv1W
from helpers import GPU_ENGINES, OWN_GRADIENT_TYPES, params_of, random_gradients, snapshot
from layouts import LAYOUTS
from pair import Pair
from steps import train
from torch import Tensor
from torch.nn import Parameter

from ngn_kernels import optimizer as module
from ngn_kernels.planning import signature
from ngn_kernels.planning.plan import Draft

GROWS = pytest.mark.skipif(
    signature.NativeSignature is None or not hasattr(Tensor, "__dlpack_c_exchange_api__"),
    reason="the signature in Python does not tell why a plan is stale",
)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each plan had that was built anew."""
    counts: list[int] = []
    make = module.make_plan

    def counting(draft: Draft, *args: Any) -> Any:
        plan = make(draft, *args)
        if draft.known is None:
            counts.append(sum(len(bucket.rows) for bucket in plan.buckets))
        return plan

    monkeypatch.setattr(module, "make_plan", counting)
    return counts


def many(algorithm: Algorithm, backend: str, float64: bool = True, **options: Any) -> Any:
    """Parameters of several types and layouts in two groups; every optimizer has the same."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3,), (2, 3), (70,), (), (0,), (4100,))

    def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    halves = [Parameter(values(shape, torch.bfloat16)) for shape in shapes]
    singles = [Parameter(values(shape, torch.float32)) for shape in shapes * 3]
    odd = [Parameter(torch.ones(3, dtype=torch.complex64))]
    odd += [Parameter(LAYOUTS["transposed"](values((4, 5), torch.float32)))]
    odd += [Parameter(LAYOUTS["strided"](values((7,), torch.float32)))]
    if float64 and backend not in GPU_ENGINES and "state" not in options:
        odd += [Parameter(values(shape, torch.float64)) for shape in shapes]
    columns = [[*halves[:3], *singles[::2], *odd], [*singles[1::2], *halves[3:]]]
    return algorithm.build(columns, backend=backend, **options)


@GROWS
@pytest.mark.essential
@pytest.mark.parametrize(
    "options",
    [{}, {"state": "8bit", "rounding": "stochastic", "max_grad_norm": 1.0}],
    ids=["wide", "narrow"],
)
@pytest.mark.parametrize("algorithm", [NGNM, NGNMDv1W], ids=str)
def test_parameters_that_join_have_the_bits_of_a_new_plan(
    algorithm: Algorithm, options: dict[str, Any], backend: str, built: list[int]
) -> None:
    """In any order, with others that lose their gradients, move, or get odd ones at the same time."""
    growing, anew = (many(algorithm, backend, **options) for _ in range(2))
    rng = random.Random(0)
    count = len(params_of(growing))
    order = rng.sample(range(count), count)
    moved = 0
    for k in range(count // 2):
        joining = order[2 * k : 2 * k + 2]
        kept = rng.sample(order[: 2 * k], rng.randint(0, 2 * k))
        replaced = rng.choice(kept) if kept and k % 5 == 4 else None
        moved += replaced is not None
        for each in (growing, anew):
            params = params_of(each)
            random_gradients(params, seed=k)
            for i, p in enumerate(params):
                if i not in (*joining, *kept):
                    p.grad = None
                elif k % 3 == 2 and p.dim() and not p.is_complex():
                    p.grad = LAYOUTS["strided"](p.grad)
            if replaced is not None:
                params[replaced].data = params[replaced].detach().clone()
        before = len(built)
        growing.step(loss=1.0)
        assert len(built) - before == (1 if k == 0 or replaced is not None else 0)
        anew._plan = None
        anew.step(loss=1.0)
        assert snapshot(growing) == snapshot(anew)
        assert growing.shrink is None or torch.equal(growing.shrink, anew.shrink)
    assert moved > 1


@GROWS
@EVERY
def test_parameters_that_join_beside_the_oracle(
    algorithm: Algorithm, backend: str, built: list[int]
) -> None:
    optimizer = many(algorithm, backend, float64=False)  # which would take float32 sums
    params = params_of(optimizer)
    for k in range(0, len(params), 5):
        random_gradients(params, seed=k)
        for p in params[k + 5 :]:
            p.grad = None
        Pair(algorithm, optimizer).checked_step(0.7)
    assert len(built) == 1


@pytest.mark.parametrize("what", ["parameter", "momentum_buffer", "exp_avg_sq"])
def test_a_parameter_that_joins_and_overlaps(what: str, backend: str) -> None:
    """Another one, or its state; nothing has changed then."""
    p, q = Parameter(torch.ones(10)), Parameter(torch.ones(4))
    optimizer = NGNMDv1.simple(
        [("p", p), ("q", q), ("r", Parameter(torch.ones(3)))], backend=backend
    )
    for k in range(2):
        random_gradients([p], seed=k)
        optimizer.step(loss=1.0)
    q.data = (p.detach() if what == "parameter" else optimizer.state[p][what])[6:]
    random_gradients([p, q], seed=5)
    before = snapshot(optimizer)[0]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"(?s)'p'.*'q'.*overlap|'q'.*'p'.*overlap"):
            optimizer.step(loss=1.0)
        assert snapshot(optimizer)[0] == before
    q.data = torch.ones(4)
    Pair(NGNMDv1, optimizer).checked_step(1.0)


def test_a_parameter_that_joins_between_the_elements_of_another(backend: str) -> None:
    memory = torch.linspace(-1, 1, 20)
    p, q = Parameter(memory[::2]), Parameter(memory[1::2])
    optimizer = NGNMDv1.simple([p, q], backend=backend)
    for k, with_gradients in enumerate(([p], [p], [p, q], [q], [p, q])):
        p.grad = q.grad = None
        random_gradients(with_gradients, seed=k)
        Pair(NGNMDv1, optimizer).checked_step(1.0)


def test_a_parameter_that_joins_and_is_refused(backend: str) -> None:
    p, q = Parameter(torch.ones(3)), torch.ones(4, dtype=torch.int64)
    optimizer = NGNMDv1.simple([p, q], backend=backend)
    random_gradients([p], seed=0)
    optimizer.step(loss=1.0)
    before = snapshot(optimizer)
    q.grad = torch.ones_like(q)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"parameter 1 of group 0 .* is torch\.int64"):
            optimizer.step(loss=1.0)
        assert snapshot(optimizer) == before
    q.grad = None
    optimizer.step(loss=1.0)
    assert snapshot(optimizer) != before


def test_a_plan_is_freed_at_once(backend: str) -> None:
    """Without a garbage collection: it has tensors, and the extension's tables."""
    optimizer = many(NGNMDv1, backend)
    gc.disable()
    try:
        train(optimizer, 0)
        plan = weakref.ref(optimizer._plan)
        optimizer.add_param_group({"params": [Parameter(torch.ones(3))]})
        assert plan() is None
    finally:
        gc.enable()


@OWN_GRADIENT_TYPES
def test_a_parameter_joins_where_another_gradient_changes_its_type(backend: str) -> None:
    p, q = Parameter(torch.ones(4)), Parameter(torch.ones(4))
    p.grad_dtype = None
    optimizer = NGNMDv1.simple([p, q], lr=0.1, backend=backend)
    random_gradients([p], seed=0)
    optimizer.step(loss=1.0)
    p.grad, q.grad = torch.ones(4, dtype=torch.bfloat16), torch.ones(4)
    Pair(NGNMDv1, optimizer).checked_step(1.0)


def test_a_parameter_joins_where_another_gradient_is_refused(backend: str) -> None:
    """Before any state is made."""
    p, q = Parameter(torch.ones(4)), Parameter(torch.ones(4))
    optimizer = NGNMDv1.simple([p, q], lr=0.1, backend=backend)
    random_gradients([p], seed=0)
    optimizer.step(loss=1.0)
    p.grad, q.grad = torch.ones(4).to_sparse(), torch.ones(4)
    with pytest.raises(TypeError, match="gradient of layout"):
        optimizer.step(loss=1.0)
    assert not optimizer.state.get(q)
