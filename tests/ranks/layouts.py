"""Ways to spread one small model over ranks, each with the same training steps.

Every layout trains the model that `whole` trains in one process with the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from algorithms import ALGORITHMS, TWO_GROUPS, Algorithm
from helpers import bits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS = 3
BATCH = 8
HIDDEN = 1408


def make_model(dtype: torch.dtype) -> nn.Sequential:
    """Matrices with enough elements for narrow state, one of them with fewer rows than ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 3)).to(dtype)


def make_batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(BATCH, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(BATCH, 3, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def groups_of(model: nn.Module, algorithm: Algorithm) -> list[dict[str, Any]]:
    """Matrices and vectors, each with values of their own."""
    params = list(model.parameters())
    split = [[p for p in params if p.dim() > 1], [p for p in params if p.dim() == 1]]
    return [
        {"params": group, **algorithm.values(hyper)}
        for group, hyper in zip(split, algorithm.mixed(TWO_GROUPS), strict=True)
    ]


def algorithm_named(name: str) -> Algorithm:
    (found,) = [algorithm for algorithm in ALGORITHMS if str(algorithm) == name]
    return found


@dataclass
class Run:
    """A model on its ranks, and how one step of it goes."""

    model: nn.Module
    optimizer: Any
    step: Callable[[int], None]
    # What this rank knows of the whole model, by name.
    whole: Callable[[], dict[str, Tensor]]
    keep: list[Any] = field(default_factory=list)


def full(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]
    return whole.detach().clone()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): full(p) for name, p in model.named_parameters()}


def my_share(tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = tensors
    return x[rank::size], y[rank::size]


@cache  # each mesh has threads of its own
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def everything(tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return tensors


def optimizer_of(model: nn.Module, algorithm: Algorithm, **options: Any) -> Any:
    return algorithm.cls(groups_of(model, algorithm), **algorithm.options, **options)


def run_of(
    model: nn.Module,
    optimizer: Any,
    share: Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]] = my_share,
) -> Run:
    """Each rank trains on its share of a batch."""
    dtype = next(model.parameters()).dtype

    def step(k: int) -> None:
        x, y = share(make_batch(k, dtype))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step(loss=loss)

    return Run(model, optimizer, step, lambda: weights_of(model))


def whole(algorithm: Algorithm, dtype: torch.dtype, **options: Any) -> Run:
    model = make_model(dtype)
    return run_of(model, optimizer_of(model, algorithm, **options), everything)


def ddp(algorithm: Algorithm, dtype: torch.dtype, **options: Any) -> Run:
    model = nn.parallel.DistributedDataParallel(make_model(dtype))
    return run_of(model, optimizer_of(model, algorithm, **options))


def fsdp2(algorithm: Algorithm, dtype: torch.dtype, mesh: Any = None, **options: Any) -> Run:
    model = make_model(dtype)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return run_of(model, optimizer_of(model, algorithm, **options))


def hsdp(algorithm: Algorithm, dtype: torch.dtype, **options: Any) -> Run:
    mesh = mesh_of((2, dist.get_world_size() // 2), ("r", "s"))
    return fsdp2(algorithm, dtype, mesh=mesh, **options)


def tensor_parallel(model: nn.Sequential, mesh: Any) -> nn.Module:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def tp(algorithm: Algorithm, dtype: torch.dtype, **options: Any) -> Run:
    """Every rank has the whole batch, and a part of each matrix."""
    model = tensor_parallel(make_model(dtype), mesh_of((dist.get_world_size(),)))
    return run_of(model, optimizer_of(model, algorithm, **options), everything)


def two_d(algorithm: Algorithm, dtype: torch.dtype, **options: Any) -> Run:
    """Tensor parallel within pairs, sharded data parallel across them."""
    mesh = mesh_of((dist.get_world_size() // 2, 2), ("dp", "tp"))
    model = tensor_parallel(make_model(dtype), mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    part, parts = mesh.get_local_rank("dp"), mesh["dp"].size()

    def share(tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = tensors
        return x[part::parts], y[part::parts]

    return run_of(model, optimizer_of(model, algorithm, **options), share)


def zero1(algorithm: Algorithm, dtype: torch.dtype, **options: Any) -> Run:
    model = nn.parallel.DistributedDataParallel(make_model(dtype))
    groups = groups_of(model, algorithm)
    optimizer = ZeroRedundancyOptimizer(
        groups, optimizer_class=algorithm.cls, replicas=1, **algorithm.options, **options
    )
    return run_of(model, optimizer)


def pipeline(algorithm: Algorithm, dtype: torch.dtype, **options: Any) -> Run:
    """The first rank has the first layer, the last one the rest, and alone knows the loss."""
    layers, rank = make_model(dtype), dist.get_rank()
    model = layers[:2] if rank == 0 else nn.Sequential(layers[2])
    optimizer = optimizer_of(model, algorithm, replicas=1, **options)

    def step(k: int) -> None:
        x, y = make_batch(k, dtype)
        optimizer.zero_grad()
        if rank == 0:
            out = model(x)
            dist.send(out.detach(), 1)
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
            optimizer.step()
        else:
            received = torch.empty(BATCH, HIDDEN, dtype=dtype)
            dist.recv(received, 0)
            received.requires_grad_(True)
            loss = nn.functional.mse_loss(model(received), y)
            loss.backward()
            assert received.grad is not None
            dist.send(received.grad, 0)
            optimizer.step(loss=loss)

    def gathered() -> dict[str, Tensor]:
        names = {0: {"0.weight": 0, "0.bias": 1}, 1: {"2.weight": 0, "2.bias": 1}}
        ours = [p.detach() for p in model.parameters()]
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, ours)
        return {name: parts[r][i] for r, part in names.items() for name, i in part.items()}

    return Run(model, optimizer, step, gathered)


def mixed(algorithm: Algorithm, dtype: torch.dtype, **options: Any) -> Run:
    """A sharded layer beside one that every rank holds, as an ignored or frozen-in-place part is."""
    model = make_model(dtype)
    fully_shard(model[2])
    optimizer = optimizer_of(model, algorithm, **options)

    def step(k: int) -> None:
        x, y = my_share(make_batch(k, dtype))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        for p in model[0].parameters():
            dist.all_reduce(p.grad)
            assert p.grad is not None
            p.grad /= dist.get_world_size()
        optimizer.step(loss=loss)

    return Run(model, optimizer, step, lambda: weights_of(model))


# Each layout with the numbers of ranks that it is tried on.
LAYOUTS: dict[str, tuple[Callable[..., Run], tuple[int, ...]]] = {
    "ddp": (ddp, (2, 4)),
    "fsdp2": (fsdp2, (2, 4)),
    "hsdp": (hsdp, (4,)),
    "tp": (tp, (2, 4)),
    "two_d": (two_d, (4,)),
    "zero1": (zero1, (2, 4)),
    "pipeline": (pipeline, (2,)),
    "mixed": (mixed, (2,)),
}


def shard_of(tensor: Any) -> tuple[int, ...]:
    """The same number on all ranks that hold the same elements."""
    if not hasattr(tensor, "placements"):
        return ()
    coordinate, placements = tensor.device_mesh.get_coordinate(), tensor.placements
    return tuple(c for c, p in zip(coordinate, placements, strict=True) if not p.is_replicate())


def contents(run: Run) -> dict[str, bytes]:
    """The bits of all parameters and state on this rank, under the name of what they are parts of."""
    inner = getattr(run.optimizer, "optim", run.optimizer)
    found = {}
    for name, p in run.model.named_parameters():
        part = f"{name} {tuple(p.shape)} {shard_of(p)}"
        found[part] = bits(getattr(p, "_local_tensor", p))
        for key, value in inner.state.get(p, {}).items():
            found[f"{key} of {part}"] = bits(getattr(value, "_local_tensor", value))
    return found


class Trained(NamedTuple):
    """What a rank knows after each step: the whole model and the telemetry, and what it holds."""

    seen: list[dict[str, Tensor]]
    contents: list[dict[str, bytes]]


def train(
    layout: str, algorithm: str, dtype: torch.dtype = torch.float64, **options: Any
) -> Trained:
    run = LAYOUTS[layout][0](algorithm_named(algorithm), dtype, **options)
    trained = Trained([], [])
    for k in range(STEPS):
        run.step(k)
        inner = getattr(run.optimizer, "optim", run.optimizer)
        shrink = inner.shrink
        told = (
            {} if shrink is None else {"shrink": shrink, "sizes": torch.stack(inner.step_sizes())}
        )
        trained.seen.append({**run.whole(), **told})
        trained.contents.append(contents(run))
    return trained


def train_whole(
    algorithm: str, dtype: torch.dtype = torch.float64, **options: Any
) -> list[dict[str, Tensor]]:
    """The same in this process alone, and what it began with."""
    run = whole(algorithm_named(algorithm), dtype, reduce_group=None, **options)
    seen = [run.whole()]
    for k in range(STEPS):
        run.step(k)
        seen.append(run.whole())
    return seen
