"""What can go wrong on one rank only, each run on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from helpers import bits
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn import Parameter

from ngn_kernels import NGNM, NGNMDv1, NGNMDv2, SkippedStepWarning


def bad_rank() -> bool:
    return dist.get_rank() == 1


def one_parameter(value: float = 1.0, n: int = 5) -> Parameter:
    p = Parameter(torch.full((n,), value))
    p.grad = torch.full((n,), 0.5)
    return p


def bad_loss(p: Parameter, optimizer: Any) -> None:
    optimizer.step(loss="many" if bad_rank() else 1.0)


def bad_gradient(p: Parameter, optimizer: Any) -> None:
    if bad_rank():
        p.grad = p.grad.to_sparse()  # type: ignore[union-attr]
    optimizer.step(loss=1.0)


def bad_option(p: Parameter, optimizer: Any) -> None:
    if bad_rank():
        optimizer.param_groups[0]["weight_decay"] = -1.0
    optimizer.step(loss=1.0)


def bad_closure(p: Parameter, optimizer: Any) -> None:
    def closure() -> float:
        if bad_rank():
            raise MemoryError("out of memory in forward")
        return 1.0

    optimizer.step(closure)


def below_floor(p: Parameter, optimizer: Any) -> None:
    """The mean is below it on every rank."""
    optimizer.step(loss=-9.0 if bad_rank() else 1.0)


def no_loss(p: Parameter, optimizer: Any) -> None:
    optimizer.step()


def other_lr(p: Parameter, optimizer: Any) -> None:
    if bad_rank():
        optimizer.param_groups[0]["lr"] = 0.7
    optimizer.step(loss=1.0)


def other_groups(p: Parameter, optimizer: Any) -> None:
    if bad_rank():
        optimizer.add_param_group({"params": [one_parameter()]})
    optimizer.step(loss=1.0)


def other_size(p: Parameter, optimizer: Any) -> None:
    if bad_rank():
        optimizer.param_groups[0]["params"].append(one_parameter(n=3))
    optimizer.step(loss=1.0)


def other_algorithm(p: Parameter, optimizer: Any) -> None:
    other = NGNMDv2([p]) if bad_rank() else NGNMDv1([p])
    other.step(loss=1.0)


def uneven_replicas(p: Parameter, optimizer: Any) -> None:
    NGNM([p], replicas=dist.get_world_size() + 1).step(loss=1.0)


def lonely_group(p: Parameter, optimizer: Any) -> None:
    """A rank that is not in the group says so at once: nobody waits for it there."""
    group = dist.new_group([0])
    if bad_rank():
        NGNM([p], reduce_group=group).step(loss=1.0)
    else:
        raise ValueError("this rank is not in reduce_group")


def flattened(p: Parameter, optimizer: Any) -> None:
    if bad_rank():
        p._fsdp_flattened = True  # type: ignore[attr-defined]
    NGNMDv1([p], lr=0.1).step(loss=1.0)


def foreign_mesh(p: Parameter, optimizer: Any) -> None:
    """A DTensor on all ranks, and a group of the first two alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = Parameter(distribute_tensor(torch.ones(8), mesh, [Shard(0)]))
    sharded.grad = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        raise ValueError("lies on a mesh with ranks outside of reduce_group")
    NGNM([sharded], reduce_group=group).step(loss=1.0)


TROUBLES: dict[str, tuple[Callable[[Parameter, Any], None], str]] = {
    "a bad loss": (bad_loss, "rank 1 of .*TypeError: the loss is a str"),
    "a bad gradient": (bad_gradient, "rank 1 of .*TypeError: .*gradient of layout"),
    "a bad option": (bad_option, "rank 1 of .*ValueError: weight_decay=-1.0"),
    "an error in a closure": (bad_closure, "rank 1 of .*MemoryError: out of memory in forward"),
    "a loss below its floor": (below_floor, "the loss .* is below loss_floor=0.0"),
    "no loss": (no_loss, "needs the loss of this step from at least one rank"),
    "another lr": (other_lr, "disagree on the values of group 0: rank 0 has .*replicas=1"),
    "another number of groups": (other_groups, "disagree on the number of groups"),
    "another size": (other_size, "disagree on the number of elements: rank 0 has 5, rank 1 has 8"),
    "another algorithm": (other_algorithm, "disagree on the algorithm: .*NGNMDv1.*NGNMDv2"),
    "replicas that do not divide": (uneven_replicas, "replicas=.* does not divide the"),
    "a group without this rank": (lonely_group, "this rank is not in reduce_group"),
    "FSDP1": (flattened, "FSDP1 flattened and sharded .*fully_shard"),
    "a mesh outside of the group": (
        foreign_mesh,
        "lies on a mesh with ranks outside of reduce_group",
    ),
}


def trouble(kind: str) -> tuple[str, bool, bool]:
    """What was raised, whether everything stayed as it was, and whether the next step works."""
    p = one_parameter()
    optimizer = NGNMDv1([p], lr=0.1)
    optimizer.step(loss=1.0)
    before = bits(p), {key: bits(value) for key, value in optimizer.state[p].items()}
    said = ""
    try:
        TROUBLES[kind][0](p, optimizer)
    except Exception as error:
        said = str(error)
    after = bits(p), {key: bits(value) for key, value in optimizer.state[p].items()}
    dist.barrier()
    q = one_parameter()
    other = NGNMDv1([q], lr=0.1)
    other.step(loss=1.0)
    return said, before == after, bool((q < 1).all())


def skip(what: str) -> tuple[list[str], int, bool]:
    """A number that makes one rank skip makes all of them skip."""
    p = one_parameter()
    optimizer = NGNMDv1([p], lr=0.1)
    optimizer.step(loss=1.0)
    before, loss = bits(p), 1.0
    if bad_rank():
        if what == "gradient":
            p.grad[2] = float("nan")  # type: ignore[index]
        if what == "loss":
            loss = float("nan")
        if what == "overflow":
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    elif what == "overflow":
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", SkippedStepWarning)
        optimizer.step(loss=loss)
    return [str(w.message) for w in said], int(optimizer.skipped_steps), bits(p) == before


def nothing_to_do() -> tuple[bool, bool]:
    """No rank has a loss or a gradient, as where a Lightning training_step returns None."""
    p = Parameter(torch.ones(3))
    optimizer = NGNMDv1([p])
    nothing = optimizer.step() is None and bool((p == 1).all())
    p.grad = torch.ones(3)
    optimizer.step(loss=1.0)
    return nothing, bool((p < 1).all())


def one_has_nothing() -> tuple[bool, float | None]:
    """Each rank owns another parameter, and the last one's has no gradient."""
    p = Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = NGNM([p], lr=0.5, replicas=1)
    alone = NGNM([q := Parameter(torch.ones(3, dtype=torch.float64))], lr=0.5, reduce_group=None)
    p.grad = None if bad_rank() else torch.full_like(p, 2.0)
    q.grad = p.grad
    optimizer.step(loss=1.0)
    if q.grad is not None:
        alone.step(loss=1.0)
    shrink = optimizer.shrink
    return torch.equal(p, q), None if shrink is None else float(shrink)


def several_buckets() -> tuple[float, float]:
    """rho of two replicas with parameters of two types, and of one process."""
    found = []
    for group in ("auto", None):
        params = [Parameter(torch.ones(3, dtype=t)) for t in (torch.float32, torch.float64)]
        optimizer = NGNM(params, lr=0.5, reduce_group=group)
        for p in params:
            p.grad = torch.full_like(p, 2.0)
        optimizer.step(loss=1.0)
        assert optimizer.shrink is not None
        found.append(float(optimizer.shrink))
    return found[0], found[1]


def one_never_comes() -> str:
    group = dist.new_group()
    _set_pg_timeout(
        timedelta(seconds=2), group
    )  # not before ranks have met, which may take a while
    if bad_rank():
        dist.barrier()
        return ""
    try:
        NGNM([one_parameter()], reduce_group=group).step(loss=1.0)
    except RuntimeError as error:
        dist.barrier()
        return str(error)
    return "nothing was raised"


def collectives(algorithm: str, clipping: bool, sharded: bool) -> tuple[int, int]:
    """How many collectives a step takes, and how many bytes each rank sends in them."""
    from torch.distributed.tensor.debug import CommDebugMode

    from ranks.layouts import algorithm_named, ddp, fsdp2

    made = (fsdp2 if sharded else ddp)(
        algorithm_named(algorithm), torch.float64, max_grad_norm=0.1 if clipping else None
    )
    made.step(0)
    sent: list[int] = []
    gather = dist.all_gather

    def noted(received: Any, tensor: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return gather(received, tensor, **kwargs)

    dist.all_gather = noted
    try:
        with CommDebugMode() as counted:
            made.optimizer.step(loss=1.0)
    finally:
        dist.all_gather = gather
    return counted.get_total_counts(), max(sent)


def partial_gradients() -> bool:
    """A gradient that ranks have parts of is added up first."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.linspace(-1, 1, 10, dtype=torch.float64)
    sharded = Parameter(distribute_tensor(values.clone(), mesh, [Shard(0)]))
    plain = Parameter(values.clone())
    optimizers = NGNMDv1([sharded]), NGNMDv1([plain], reduce_group=None)
    for k in range(3):
        part = torch.arange(10, dtype=torch.float64) * (dist.get_rank() + 1 + k)
        sharded.grad = DTensor.from_local(part, mesh, [Partial()])
        plain.grad = sum(
            (torch.arange(10, dtype=torch.float64) * (r + 1 + k) for r in range(mesh.size())),
            torch.zeros(10, dtype=torch.float64),
        )
        for optimizer in optimizers:
            optimizer.step(loss=1.0)
    return torch.allclose(sharded.full_tensor(), plain, rtol=0, atol=1e-12)  # type: ignore[attr-defined]
