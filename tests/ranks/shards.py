"""One parameter in many ways over ranks, with gradients that are given: the bits of one process."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from helpers import bits
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import Parameter

from ngn_kernels import NGNMDv1, NGNMDv2, NGNMuon, SkippedStepWarning
from ngn_kernels.distributed.dtensors import first_element, is_split
from ngn_kernels.distributed.owners import Owners
from ngn_kernels.formats import decoded, narrow_format
from ranks.layouts import mesh_of, shard_of

PLACEMENTS = {
    "R": Replicate(),
    "S0": Shard(0),
    "S1": Shard(1),
    "SS0": _StridedShard(0, split_factor=2),
}


class Way(NamedTuple):
    """A parameter on a mesh of four ranks; whether noise, and then blocks, are one process'."""

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: str
    noise: bool = True
    blocks: bool = True


WAYS = {
    "rows": Way((130, 64), (4,), "S0"),  # 33, 33, 33 and 31
    "fewer rows than ranks": Way((3, 1408), (4,), "S0"),
    "a vector": Way((4230,), (4,), "S0", blocks=False),  # 1058, 1058, 1058 and 1056
    "short rows": Way((1408, 3), (4,), "S0", blocks=False),
    "replicas": Way((64, 64), (4,), "R"),
    "hybrid": Way((65, 64), (2, 2), "R S0"),
    "nested": Way((67, 64), (2, 2), "S0 S0"),
    "right to left": Way((68, 64), (2, 2), "SS0 S0"),
    "every other block": Way((68, 64), (2, 2), "S0 SS0", noise=False),
    "columns": Way((64, 66), (4,), "S1", noise=False),
    "rows and columns": Way((67, 64), (2, 2), "S0 S1", noise=False),
    "a row of columns": Way((1, 8192), (4,), "S1"),
    "three dimensions": Way((5, 8, 128), (4,), "S0"),
}


def spread(way: Way, tensor: Tensor) -> Any:
    mesh = mesh_of(way.mesh)
    # Every rank has the whole: nothing need be sent.
    placements = [PLACEMENTS[name] for name in way.placements.split()]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def places(way: str) -> tuple[int, list[int]]:
    """Where noise begins on this rank, and the places of its elements in the whole."""
    numel = torch.Size(WAYS[way].shape).numel()
    index = spread(WAYS[way], torch.arange(numel).view(WAYS[way].shape))
    return first_element(index), index._local_tensor.flatten().tolist()


def steps(way: str, dtype: torch.dtype, **options: Any) -> tuple[dict[str, bool], float]:
    """Whether this rank holds one process' bits, by what they are, and how far its part has strayed.

    A step size for each coordinate depends on no sum, which ranks add up in another order.
    """
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(WAYS[way].shape, generator=generator).to(dtype) for _ in range(5)]
    start, gradients = given[0], given[1:]
    whole = Parameter(start.clone())
    sharded = Parameter(spread(WAYS[way], start.clone()))
    one = NGNMDv2([whole], lr=0.3, reduce_group=None, **options)
    many = NGNMDv2([sharded], lr=0.3, **options)
    for k, gradient in enumerate(gradients):
        whole.grad, sharded.grad = gradient, spread(WAYS[way], gradient)
        for optimizer in (one, many):
            optimizer.step(loss=1.0 - 0.1 * k)
    same = {"parameter": bits(part(WAYS[way], whole)) == bits(sharded._local_tensor)}  # type: ignore[attr-defined]
    wanted, found = numbers(one.state[whole]), numbers(many.state[sharded])
    assert set(wanted) == set(found)
    for key, value in wanted.items():
        same[key] = bits(part(WAYS[way], value)) == bits(found[key])
    moved = part(WAYS[way], whole.detach() - start).float()
    error = part(WAYS[way], whole.detach()).float() - sharded.detach()._local_tensor.float()  # type: ignore[attr-defined]
    return same, float(error.norm() / moved.norm()) if moved.numel() else 0.0


def matrices(dtype: torch.dtype, **options: Any) -> tuple[float, list[bool], list[int]]:
    """All ways at once as matrices of ``NGNMuon``, beside one process.

    How far this rank's parts have strayed, whether ranks with the same elements have the same bits,
    and how many matrices each rank owns.
    """
    generator = torch.Generator().manual_seed(0)
    ways = [way for way in WAYS.values() if len(way.shape) > 1]
    start = [torch.randn(way.shape, generator=generator).to(dtype) for way in ways]
    whole = [Parameter(x.clone()) for x in start]
    sharded = [Parameter(spread(way, x.clone())) for way, x in zip(ways, start, strict=True)]
    made: dict[str, Any] = {"lr": 0.1, "spectral": "flat", "max_grad_norm": 1.0, **options}
    one, many = NGNMuon(whole, reduce_group=None, **made), NGNMuon(sharded, **made)
    for k in range(4):
        for i, (way, p, q) in enumerate(zip(ways, whole, sharded, strict=True)):
            gradient = torch.randn(way.shape, generator=generator).to(dtype)
            missing = i == 3 and k in (0, 2)  # one joins after the first step, and pauses
            p.grad = None if missing else gradient
            q.grad = None if missing else spread(way, gradient)
        for optimizer in (one, many):
            optimizer.step(loss=1.0 - 0.1 * k)
    errors = [0.0]
    for way, x, p, q in zip(ways, start, whole, sharded, strict=True):
        moved = (p.detach() - x).double()
        error = part(way, p.detach()).double() - q.detach()._local_tensor.double()  # type: ignore[attr-defined]
        errors.append(float(error.abs().max() / moved.abs().max()) if error.numel() else 0.0)
    same = [all_alike(q) for q in sharded]
    owners = Owners([q for q in sharded if is_split(q)], dist.group.WORLD)
    return max(errors), same, owners.owned


def stacks(placements: Sequence[str]) -> tuple[float, int]:
    """Stacks of matrices beside one process: how far this rank's parts have strayed, and how many messages
    with parts of matrices it has sent and received."""
    ways = [Way((7, 24, 16), (4,) if " " not in p else (2, 2), p) for p in placements]
    sent: list[Any] = []
    batch = dist.batch_isend_irecv

    def counted(operations: list[Any]) -> Any:
        sent.extend(operations)
        return batch(operations)

    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(way.shape, generator=generator).double() for way in ways]
    whole = [Parameter(x.clone()) for x in start]
    sharded = [Parameter(spread(way, x.clone())) for way, x in zip(ways, start, strict=True)]
    made: dict[str, Any] = {"lr": 0.1, "spectral": "stack"}
    one, many = NGNMuon(whole, reduce_group=None, **made), NGNMuon(sharded, **made)
    dist.batch_isend_irecv = counted
    try:
        for k in range(3):
            for way, p, q in zip(ways, whole, sharded, strict=True):
                p.grad = torch.randn(way.shape, generator=generator).double()
                q.grad = spread(way, p.grad)
            for optimizer in (one, many):
                optimizer.step(loss=1.0 - 0.1 * k)
    finally:
        dist.batch_isend_irecv = batch
    strayed = [
        float((part(way, p.detach()) - q.detach()._local_tensor).abs().sum())  # type: ignore[attr-defined]
        for way, p, q in zip(ways, whole, sharded, strict=True)
    ]
    return max(strayed), len(sent)


def all_alike(tensor: Any) -> bool:
    """Whether the ranks that hold the same elements hold the same bits."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, (shard_of(tensor), bits(tensor.detach()._local_tensor)))
    return all(mine == theirs for a, mine in held for b, theirs in held if a == b)


def alone() -> str:
    """What is said of a sharded matrix where ranks step by themselves."""
    p = Parameter(spread(WAYS["rows"], torch.ones(WAYS["rows"].shape)))
    p.grad = torch.ones_like(p)
    optimizer = NGNMuon([p], reduce_group=None)
    before = bits(p.detach()._local_tensor)  # type: ignore[attr-defined]
    try:
        optimizer.step(loss=1.0)
    except ValueError as error:
        assert before == bits(p.detach()._local_tensor)  # type: ignore[attr-defined]
        return str(error)
    return "nothing"


def part(way: Way, tensor: Tensor) -> Tensor:
    local: Tensor = spread(way, tensor.detach())._local_tensor
    return local


def numbers(state: dict[str, Any]) -> dict[str, Tensor]:
    """What lies here of each column, decoded; scales show in them."""
    found = {}
    for key, value in state.items():
        value = getattr(value, "_local_tensor", value)
        if key in ("momentum_buffer", "exp_avg_sq"):
            form = narrow_format(key, value.dtype)
            found[key] = value if form is None else decoded(value, state.get(f"{key}_scale"), form)
        if key == "remainder":
            found[key] = value
    return found


def another_mesh() -> list[str]:
    """What is said of state that lies on another mesh than its parameter."""
    ways = WAYS["rows"], WAYS["hybrid"]._replace(shape=WAYS["rows"].shape)
    p, q = (Parameter(spread(way, torch.ones(way.shape, dtype=torch.bfloat16))) for way in ways)
    said = []
    for key in ("momentum_buffer", "remainder"):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        ours = NGNMDv1([p], state="8bit", rounding="exact")
        theirs = NGNMDv1([q], state="8bit", rounding="exact")
        for optimizer in (ours, theirs):
            optimizer.step(loss=1.0)
        for name in (key, f"{key}_scale"):
            if name in theirs.state[q]:
                ours.state[p][name] = theirs.state[q][name]
        try:
            ours.step(loss=1.0)
        except Exception as error:
            said.append(str(error))
    return said


def another_placement() -> list[str]:
    """Which numbers have changed after state came with other placements on the same mesh."""
    way, generator = WAYS["rows"], torch.Generator().manual_seed(1)
    p = Parameter(spread(way, torch.ones(way.shape, dtype=torch.bfloat16)))
    p.grad = spread(way, torch.randn(way.shape, generator=generator).bfloat16())
    optimizer = NGNMDv1([p], state="8bit", rounding="exact")
    optimizer.step(loss=1.0)
    state, saved = optimizer.state[p], optimizer.state_dict()["state"][0]
    before = {key: bits(value) for key, value in numbers(state).items()}
    for key in ("momentum_buffer", "exp_avg_sq", "remainder"):
        state[key] = saved[key].redistribute(placements=[Replicate()])
        state.pop(f"{key}_scale", None)
    p.grad = torch.full_like(p, float("nan"))  # the step is skipped, after state was put in place
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedStepWarning)
        optimizer.step(loss=1.0)
    assert all(state[key].placements == p.placements for key in before)  # type: ignore[attr-defined]
    return [key for key, value in numbers(state).items() if bits(value) != before[key]]
