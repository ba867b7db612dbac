"""Memory layouts, complex numbers and odd tensors: each in place, each as if contiguous."""

from __future__ import annotations

import pytest
import torch
from algorithms import EVERY, Algorithm, Hyper
from helpers import params_of, random_columns, random_gradients, real64
from layouts import LAYOUTS
from pair import Pair
from steps import checked_steps
from torch import Tensor
from torch.nn import Parameter

pytestmark = EVERY

ONE_GROUP = (Hyper(0.3, 0.9, 0.99, 1e-6, 0.05),)


def pair_with(algorithm: Algorithm, params: list[Tensor], backend: str) -> Pair:
    return Pair(algorithm, algorithm.build([params], ONE_GROUP, backend=backend))


@pytest.mark.essential
def test_parameter_and_gradient_layouts(
    algorithm: Algorithm, backend: str, dtype: torch.dtype
) -> None:
    """Every layout of a parameter with every layout of its gradient; parameters keep their own."""
    ((values,),) = random_columns([[(4, 3, 5, 2)]], dtype)
    params = [Parameter(LAYOUTS[here](values.detach())) for here in LAYOUTS for _ in LAYOUTS]
    places = [(p.stride(), p.data_ptr()) for p in params]
    pair = pair_with(algorithm, list(params), backend)
    for k in range(2):
        random_gradients(params, seed=k)
        for p, there in zip(params, list(LAYOUTS) * len(LAYOUTS), strict=True):
            assert p.grad is not None
            p.grad = LAYOUTS[there](p.grad)
        pair.checked_step(0.8)
    assert [(p.stride(), p.data_ptr()) for p in params] == places


def test_gaps_of_a_strided_parameter_are_not_touched(algorithm: Algorithm, backend: str) -> None:
    base = torch.full((6, 8), 7.0)
    p = Parameter(base[::2, 1::3])
    checked_steps(pair_with(algorithm, [p], backend), 0, 1, loss=0.8)
    base[::2, 1::3] = 7.0
    assert (base == 7.0).all()


@pytest.mark.essential
@pytest.mark.parametrize("layout", ["strided", "row_strided", "contiguous"])
def test_a_parameter_without_a_gradient_is_left_alone(
    algorithm: Algorithm, backend: str, layout: str
) -> None:
    """Autograd may still need it as it was: its version stays, and a later backward() works."""
    p, q = (Parameter(LAYOUTS[layout](torch.linspace(-1, 1, 12).view(3, 4))) for _ in range(2))
    pair = pair_with(algorithm, [p, q], backend)
    for k in range(4):
        kept = (q * q).sum()
        version, value = q._version, q.detach().clone()
        random_gradients([p], seed=k)
        q.grad = None
        pair.checked_step(0.8)
        assert q._version == version and torch.equal(q, value)
        assert p._version > 0
        kept.backward()
        pair.checked_step(0.8)


def test_interleaved_views_do_not_overlap(algorithm: Algorithm, backend: str) -> None:
    """Two parameters may share a storage as long as they share no element."""
    base = torch.linspace(-1, 1, 20)
    params = [Parameter(base[::2]), Parameter(base[1::2])]
    checked_steps(pair_with(algorithm, list(params), backend), 0, 1, loss=0.8)


def test_adjacent_views_do_not_overlap(algorithm: Algorithm, backend: str) -> None:
    base = torch.linspace(-1, 1, 33)
    params = [Parameter(base[:16]), Parameter(base[16:])]
    checked_steps(pair_with(algorithm, list(params), backend), 0, 1, loss=0.8)


@pytest.mark.essential
def test_expanded_gradient(algorithm: Algorithm, backend: str) -> None:
    """The gradient of a sum is an expanded scalar, with strides of zero."""
    p = Parameter(torch.linspace(-1, 1, 24).view(4, 6))
    pair = pair_with(algorithm, [p], backend)
    for _ in range(2):
        p.grad = torch.tensor(0.2).expand(4, 6)
        pair.checked_step(1.0)
        assert p.grad is not None and float(p.grad[3, 5]) == pytest.approx(0.2)


def test_row_expanded_gradient(algorithm: Algorithm, backend: str) -> None:
    p = Parameter(torch.linspace(-1, 1, 24).view(4, 6))
    pair = pair_with(algorithm, [p], backend)
    p.grad = torch.linspace(0.1, 0.6, 6).expand(4, 6)
    pair.step(1.0)
    pair.check_step()


def test_sum_gradient_from_autograd(algorithm: Algorithm, backend: str) -> None:
    p = Parameter(torch.linspace(0.1, 1, 12).view(3, 4))
    pair = pair_with(algorithm, [p], backend)
    loss = p.sum()
    loss.backward()
    pair.step(loss)
    pair.check_step()


@pytest.mark.essential
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
def test_complex_is_pairs_of_reals(algorithm: Algorithm, backend: str, layout: str) -> None:
    """Step for step what the same numbers do as a real tensor with a last dimension of two."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, 3, generator=generator, dtype=torch.complex64)
    p = Parameter(LAYOUTS[layout](values))
    q = Parameter(torch.view_as_real(values).clone())
    pair = pair_with(algorithm, [p], backend)
    real = algorithm.build([[q]], ONE_GROUP, backend=backend)
    for _ in range(3):
        p.grad = torch.randn(5, 3, generator=generator, dtype=torch.complex64)
        q.grad = torch.view_as_real(p.grad).clone()
        pair.checked_step(0.8)
        real.step(loss=0.8)
        if algorithm.spectral:  # the matrix of the pairs is another one
            continue
        torch.testing.assert_close(torch.view_as_real(p.detach()), q.detach(), rtol=1e-6, atol=1e-7)


def test_conjugate_gradient(algorithm: Algorithm, backend: str) -> None:
    """A gradient with the lazy conjugate bit set is read as what it means."""
    generator = torch.Generator().manual_seed(0)
    p = Parameter(torch.randn(6, generator=generator, dtype=torch.complex64))
    pair = pair_with(algorithm, [p], backend)
    p.grad = torch.randn(6, generator=generator, dtype=torch.complex64).conj()
    pair.step(0.8)
    pair.check_step()


def test_negated_gradient_view(algorithm: Algorithm, backend: str) -> None:
    """The imaginary part of a conjugate is a lazily negated view."""
    generator = torch.Generator().manual_seed(0)
    p = Parameter(torch.randn(6, generator=generator))
    pair = pair_with(algorithm, [p], backend)
    p.grad = torch.randn(6, generator=generator, dtype=torch.complex64).conj().imag
    assert p.grad is not None and p.grad.is_neg()
    pair.step(0.8)
    pair.check_step()


def test_only_empty_parameters(algorithm: Algorithm, backend: str) -> None:
    params = random_columns([[(0,), (3, 0)]])[0]
    optimizer = algorithm.simple(params, backend=backend)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step(loss=1.0)
    assert int(optimizer.skipped_steps) == 0


def test_no_gradients_at_all(algorithm: Algorithm, backend: str) -> None:
    params = random_columns([[(3,), (2, 2)]])[0]
    before = [real64(p) for p in params]
    optimizer = algorithm.simple(params, backend=backend)
    optimizer.step(loss=1.0)
    assert all((real64(p) == x).all() for p, x in zip(params, before, strict=True))
    assert int(optimizer.skipped_steps) == 0


@pytest.mark.essential
def test_many_small_tensors_in_many_groups(algorithm: Algorithm, backend: str) -> None:
    columns = random_columns([[(i % 7,), (3, i % 5), (i,)] * 5 for i in range(20)])
    hypers = [Hyper(0.3 / (i + 1), 0.9 - i / 40, 0.99, 1e-6, i / 100) for i in range(20)]
    pair = Pair(algorithm, algorithm.build(columns, hypers, backend=backend))
    checked_steps(pair, 0, 1)


def test_relaid_between_steps(algorithm: Algorithm, backend: str) -> None:
    """`model.to(memory_format=...)` between steps moves the parameter under its state."""
    ((values,),) = random_columns([[(4, 3, 5, 2)]])
    p = Parameter(values.detach())
    pair = pair_with(algorithm, [p], backend)
    for k, name in enumerate(("contiguous", "channels_last", "contiguous", "strided")):
        p.data = LAYOUTS[name](p.data)
        random_gradients([p], seed=k)
        pair.checked_step(0.8)


def test_gradients_move_between_steps(algorithm: Algorithm, backend: str) -> None:
    """Gradients freed by `zero_grad` come back elsewhere; kept ones are filled in place."""
    columns = random_columns([[(50,), (7, 3)]])
    pair = Pair(algorithm, algorithm.build(columns, ONE_GROUP, backend=backend))
    for k in range(4):
        set_to_none = k % 2 == 0
        pair.optimizer.zero_grad(set_to_none=set_to_none)
        loss = sum(((p - k) ** 2).mean() for p in params_of(pair.optimizer))
        assert isinstance(loss, Tensor)
        loss.backward()
        pair.checked_step(loss)
