"""Random problems, and optimizers as bits."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from algorithms import Algorithm
from oracle import Array
from torch import Tensor
from torch.nn import Parameter

from ngn_kernels import backends

DTYPES = {
    "reference": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "cpu": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "triton": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
# Interpreted or simulated where tensors are on the CPU: slow, and without float64.
GPU_ENGINES = ("cuda", "triton")
Snapshot = list[tuple[bytes, dict[str, bytes]]]
SHAPES = ([(3,), (5, 7)], [(40,), ()])


def real64(tensor: Tensor) -> Array:
    """Any tensor as float64 numpy, exactly; complex numbers as pairs in a last dimension."""
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return np.array(tensor.double().numpy())


def params_of(optimizer: Any) -> list[Any]:
    """All parameters; as Any, since the tests know which of them have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def random_columns(
    shapes: Sequence[Sequence[tuple[int, ...]]],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    scale: float = 0.1,
) -> list[list[Tensor]]:
    """Parameters of the given shapes, one list per group."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            Parameter(
                (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
            )
            for shape in column
        ]
        for column in shapes
    ]


TIES_GRADIENTS = not hasattr(Tensor, "grad_dtype")
OWN_GRADIENT_TYPES = pytest.mark.skipif(TIES_GRADIENTS, reason="this torch ties the two dtypes")
# Beside a Triton that is new enough for the kernels, older torch imports no compiler and no test helpers.
IMPORTS_COMPILER = torch.__version__ >= (2, 8)
FSDP2_ON_ONE_CPU = pytest.mark.skipif(
    torch.__version__ < (2, 7), reason="this torch's FSDP2 wants streams of a GPU"
)
TORCHS_MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
COMPILES = pytest.mark.skipif(not IMPORTS_COMPILER, reason="this torch needs an older Triton")


def random_gradients(
    params: Iterable[Tensor], seed: int, norm: float = 1.0, dtype: torch.dtype | None = None
) -> None:
    """Give every parameter a random gradient; together they have about the given norm."""
    params = list(params)
    generator = torch.Generator().manual_seed(seed)
    size = max(1, sum(p.numel() for p in params))
    for p in params:
        values = torch.randn(p.shape, generator=generator, dtype=torch.float64) * norm / size**0.5
        if p.is_complex():
            values = torch.complex(values, values.flip(0) / 2) if values.dim() else values + 0j
        p.grad = None
        if dtype is not None:
            p.grad_dtype = dtype
        p.grad = values.to(dtype or p.dtype)


def replace_backend(monkeypatch: pytest.MonkeyPatch, backend: Any, name: str) -> None:
    """Another backend in its place, or the reason why there is none."""
    load = backends._load
    monkeypatch.setattr(backends, "_load", lambda n: backend if n == name else load(n))


def with_grad(values: Tensor, grad: float = 1.0) -> Any:
    """A parameter whose gradient is the same number everywhere."""
    p = Parameter(values)
    p.grad = torch.full_like(p, grad)
    return p


def copies_of(optimizer: Any) -> list[list[Parameter]]:
    """Its parameters once more, one list per group."""
    return [
        [Parameter(p.detach().clone()) for p in group["params"]] for group in optimizer.param_groups
    ]


def through_file(saved: Any) -> Any:
    """Written and read again, as weights only."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def fresh(algorithm: Algorithm, backend: str, **options: Any) -> Any:
    """An optimizer of two groups whose parameters have gradients."""
    optimizer = algorithm.build(random_columns(SHAPES), backend=backend, **options)
    random_gradients(params_of(optimizer), seed=1)
    return optimizer


def after_step(algorithm: Algorithm, backend: str, loss: float) -> Snapshot:
    """What a `fresh` optimizer is after a plain step."""
    optimizer = fresh(algorithm, backend)
    optimizer.step(loss=loss)
    return snapshot(optimizer)


def bits(tensor: Tensor) -> bytes:
    """The stored bits, so that NaN equals NaN and 0.0 differs from -0.0."""
    whole = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return bytes(whole.view(-1).view(torch.uint8).numpy().tobytes())


def snapshot(optimizer: Any) -> Snapshot:
    """Parameters and state of an optimizer, as bits, in the order of its parameters."""
    return [
        (bits(p), {k: bits(torch.as_tensor(v)) for k, v in optimizer.state.get(p, {}).items()})
        for p in params_of(optimizer)
    ]


def warnings_of(step: Callable[[], Any], kind: type[Warning] = Warning) -> list[str]:
    """What is said in warnings of a kind, each of them every time."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step()
    return [str(w.message) for w in said if issubclass(w.category, kind)]


@contextmanager
def unchanged(optimizer: Any, new_state: bool = True) -> Iterator[None]:
    """Nothing of it changes, except that there may be new state of zeros."""
    before = snapshot(optimizer)
    yield
    assert_unchanged(optimizer, before)
    assert new_state or snapshot(optimizer) == before


def assert_unchanged(optimizer: Any, before: Snapshot) -> None:
    """Bit-identical, except that state which did not exist may now be there as zeros."""
    for i, ((x0, state0), (x1, state1)) in enumerate(zip(before, snapshot(optimizer), strict=True)):
        assert x0 == x1, f"parameter {i} changed"
        for key, value in state1.items():
            assert value == state0.get(key, bytes(len(value))), f"{key} of parameter {i} changed"
        assert set(state0) <= set(state1), f"state of parameter {i} was lost"
