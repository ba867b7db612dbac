"""What can go wrong on one rank only, each run on every rank."""

from __future__ import annotations

import copy
import pickle
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


def other_target(p: Parameter, optimizer: Any) -> None:
    if bad_rank():
        optimizer.loss_target = 0.5
    optimizer.step(loss=1.0)


def other_decay_form(p: Parameter, optimizer: Any) -> None:
    if bad_rank():
        optimizer.decay_form = "adamw"
    optimizer.step(loss=1.0)


def other_cap(p: Parameter, optimizer: Any) -> None:
    if bad_rank():
        optimizer.param_groups[0]["step_cap"] = 3.0
    optimizer.step(loss=1.0)


def other_cap_of_a_device_lr(p: Parameter, optimizer: Any) -> None:
    """The lr itself is not compared there: the cap is."""
    lr = torch.tensor(1.0, device="meta")
    optimizer.param_groups[0].update(lr=lr, step_cap=3.0 if bad_rank() else 2.0)
    optimizer.step(loss=1.0)


def other_groups(p: Parameter, optimizer: Any) -> None:
    if bad_rank():
        optimizer.add_param_group({"params": [one_parameter()]})
    optimizer.step(loss=1.0)


def other_size(p: Parameter, optimizer: Any) -> None:
    if bad_rank():
        optimizer.param_groups[0]["params"].append(one_parameter(n=3))
    optimizer.step(loss=1.0)


def other_size_later(p: Parameter, optimizer: Any) -> None:
    """After a step in which they agreed."""
    q = Parameter(torch.ones(5))
    later = NGNMDv1([q], lr=0.1)
    for _ in range(2):
        q.grad = torch.ones(5)
        later.step(loss=1.0)
    if bad_rank():
        later.param_groups[0]["params"].append(one_parameter(n=3))
    q.grad = torch.ones(5)
    later.step(loss=1.0)


def other_algorithm(p: Parameter, optimizer: Any) -> None:
    other = NGNMDv2([p]) if bad_rank() else NGNMDv1([p])
    other.step(loss=1.0)


def whole_number_lr(p: Parameter, optimizer: Any) -> None:
    """The same number, of another type."""
    q = one_parameter()
    optimizer = NGNM([q], lr=1 if bad_rank() else 1.0, max_grad_norm=2 if bad_rank() else 2.0)
    optimizer.step(loss=1.0)
    raise ValueError("this works")


def other_order(p: Parameter, optimizer: Any) -> None:
    """As many elements, with other places: their noise would be another one."""
    params = [one_parameter(n=3), one_parameter(n=5)]
    NGNMDv1(params[::-1] if bad_rank() else params).step(loss=1.0)


def other_type(p: Parameter, optimizer: Any) -> None:
    q = Parameter(torch.ones(5, dtype=torch.bfloat16 if bad_rank() else torch.float32))
    q.grad = torch.ones_like(q)
    NGNMDv1([q]).step(loss=1.0)


def other_backend(p: Parameter, optimizer: Any) -> None:
    NGNMDv1([p], backend="reference" if bad_rank() else "auto").step(loss=1.0)


def other_clipping(p: Parameter, optimizer: Any) -> None:
    optimizer.max_grad_norm = 1.0 if bad_rank() else None
    optimizer.step(loss=1.0)


def with_partial_gradient(
    step: Callable[[Any], None], before: int = 2
) -> Callable[[Parameter, Any], None]:
    """The other ranks have a gradient to add up before they can send their numbers."""

    def trouble(p: Parameter, optimizer: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        sharded = Parameter(distribute_tensor(torch.ones(8), mesh, [Shard(0)]))
        other = NGNMDv1([sharded], lr=0.1)
        for _ in range(before):
            sharded.grad = DTensor.from_local(torch.ones(8), mesh, [Partial()])
            other.step(loss=1.0)
        sharded.grad = DTensor.from_local(torch.ones(8), mesh, [Partial()])
        step(other)

    return trouble


def with_partial_gradient_that_stays(p: Parameter, optimizer: Any) -> None:
    """A parameter joins, while another one's gradient must be added up."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    a = Parameter(distribute_tensor(torch.ones(8), mesh, [Replicate()]))
    joins = Parameter(torch.ones(3))
    other = NGNMDv1([a, joins], lr=0.1)
    for k in range(2):
        a.grad = DTensor.from_local(torch.ones(8), mesh, [Partial()])
        joins.grad = torch.ones(3) if k else None
        other.step(loss="many" if bad_rank() and k else 1.0)


def with_a_loss_in_parts(step: Callable[[Any, Any], None]) -> Callable[[Parameter, Any], None]:
    def trouble(p: Parameter, optimizer: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        step(optimizer, DTensor.from_local(torch.tensor(0.5), mesh, [Partial()]))

    return trouble


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
    "a bad loss beside partial gradients": (
        with_partial_gradient(lambda o: o.step(loss="many" if bad_rank() else 1.0)),
        "rank 1 of .*TypeError: the loss is a str",
    ),
    "a bad loss beside partial gradients of a new plan": (
        with_partial_gradient(lambda o: o.step(loss="many" if bad_rank() else 1.0), before=0),
        "rank 1 of .*TypeError: the loss is a str",
    ),
    "a bad loss where a parameter joins partial gradients": (
        with_partial_gradient_that_stays,
        "rank 1 of .*TypeError: the loss is a str",
    ),
    "an error in a closure beside partial gradients": (
        with_partial_gradient(lambda o: o.step(lambda: 1 / 0 if bad_rank() else 1.0)),
        "rank 1 of .*ZeroDivisionError|division by zero",
    ),
    "a bad loss beside a loss in parts": (
        with_a_loss_in_parts(lambda o, loss: o.step(loss="many" if bad_rank() else loss)),
        "rank 1 of .*TypeError: the loss is a str",
    ),
    "a bad option beside a loss in parts": (
        with_a_loss_in_parts(
            lambda o, loss: (
                o.step(loss=loss)
                if not bad_rank()
                else (o.param_groups[0].update(eps=-1.0), o.step(loss=loss))
            )
        ),
        "rank 1 of .*ValueError: eps=-1.0",
    ),
    "an lr of another type": (whole_number_lr, "this works"),
    "another loss_target": (
        other_target,
        "disagree on loss_target: rank 0 has 0.0, rank 1 has 0.5",
    ),
    "another decay_form": (other_decay_form, "disagree on decay_form: rank 0 has paper, rank 1"),
    "another step_cap": (other_cap, "disagree on .*rank 1 has .*3.0"),
    "another order of parameters": (
        other_order,
        r"order of the parameters from parameter 0 on: rank 0 has float32\(3,\), rank 1 has float32\(5,\)",
    ),
    "another element type": (other_type, r"rank 0 has float32\(5,\), rank 1 has bfloat16\(5,\)"),
    "another backend": (
        other_backend,
        "disagree on the backend: rank 0 has cpu, rank 1 has reference",
    ),
    "clipping on one rank": (
        other_clipping,
        "disagree on max_grad_norm: rank 0 has None, rank 1 has",
    ),
    "another lr": (other_lr, "disagree on the values of group 0: rank 0 has .*replicas=1"),
    "another number of groups": (other_groups, "disagree on the number of groups"),
    "another size": (other_size, "disagree on the number of elements: rank 0 has 5, rank 1 has 8"),
    "another size later": (other_size_later, "disagree on the number of elements"),
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


def constant_steps(
    algorithm: str, steps: int, clipping: float | None = None, copied: bool = False
) -> list[float]:
    """rho of each step in which only the first rank has gradients, and a loss that never changes."""
    from ngn_kernels.planning import tables
    from ngn_kernels.planning.transfer import Copied
    from ranks.layouts import algorithm_named

    kept, told = tables.numbers_of, []
    if copied:  # as on devices that the host shares no memory with: it sends what has changed
        tables.numbers_of = lambda target, values=None: Copied(target, target.numpy().copy())
    try:
        p = Parameter(torch.ones(4, dtype=torch.float64))
        optimizer = algorithm_named(algorithm).simple(
            [p], lr=1.0, weight_decay=0.0, replicas=1, max_grad_norm=clipping
        )
        for _ in range(steps):
            p.data.fill_(1.0)
            if optimizer.state.get(p):
                optimizer.state[p].get("exp_avg_sq", torch.zeros(1)).zero_()
                optimizer.state[p]["step"].zero_()
            first = dist.get_rank() == 0
            p.grad = torch.ones_like(p) if first else None
            if first or not copied:
                optimizer.step(loss=1.0)
            else:
                optimizer.step()
            told.append(float(optimizer.shrink))
    finally:
        tables.numbers_of = kept
    return told


def overflow_once() -> list[int]:
    """Steps skipped so far, after each of three; the other rank's scaler overflowed in the first."""
    from ngn_kernels.planning import tables
    from ngn_kernels.planning.transfer import Copied

    kept, counts = tables.numbers_of, []
    tables.numbers_of = lambda target, values=None: Copied(target, target.numpy().copy())
    try:
        p = one_parameter()
        optimizer = NGNMDv1([p], lr=0.1)
        for k in range(3):
            optimizer.grad_scale = torch.tensor(1.0)
            optimizer.found_inf = torch.tensor(float(k == 0 and bad_rank()))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SkippedStepWarning)
                optimizer.step(loss=1.0)
            counts.append(int(optimizer.skipped_steps))
    finally:
        tables.numbers_of = kept
    return counts


def by_hand_around_tensor_parallel(
    steps: int, shape: tuple[int, ...], replicas: int | None, placement: str = "shard"
) -> list[float]:
    """rho where each mesh["tp"] holds the whole parameter, and dp ranks average gradients by hand."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))["tp"]
    spread = [Shard(0) if placement == "shard" else Replicate()]
    p = Parameter(distribute_tensor(torch.ones(4, dtype=torch.float64), mesh, spread))
    optimizer = NGNM([p], lr=1.0, replicas=replicas)
    told = []
    for _ in range(steps):
        p.grad = distribute_tensor(torch.ones(4, dtype=torch.float64), mesh, spread)
        optimizer.step(loss=1.0)
        assert optimizer.shrink is not None
        told.append(float(optimizer.shrink))
    return told


def groups_come_and_go(port: int) -> list[float]:
    """rho alone, on three ranks, on two of them, on three of another group, and alone again."""
    p = Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = NGNM([p], lr=1.0)
    told = []

    def step() -> None:
        p.grad = torch.full_like(p, 0.5)
        optimizer.step(loss=1.0)
        assert optimizer.shrink is not None
        told.append(float(optimizer.shrink))

    rank = dist.get_rank()
    dist.destroy_process_group()
    step()
    for k, size in enumerate((3, 2, 3)):  # the last rank is alone meanwhile
        if rank < size:
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group(
                "gloo", store=dist.PrefixStore(f"again{k}", store), rank=rank, world_size=size
            )
        step()
        step()
        if rank < size:
            dist.destroy_process_group()
    step()
    return told


def dtensor_loss() -> tuple[float, float]:
    """rho with a loss of which each rank has a part, and with the number that it is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, told = init_device_mesh("cpu", (dist.get_world_size(),)), []
    size = dist.get_world_size()
    for part, placement in ((2.0 / size, Partial()), (2.0, Replicate())):
        p = one_parameter()
        optimizer = NGNM([p], lr=1.0)
        for _ in range(2):
            optimizer.step(loss=DTensor.from_local(torch.tensor(part), mesh, [placement]))
        assert optimizer.shrink is not None
        told.append(float(optimizer.shrink))
    return told[0], told[1]


def partial_on_some_ranks() -> list[float]:
    """rho where the first two ranks share a parameter in parts, and the last one has its own."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    mesh, told = DeviceMesh("cpu", [0, 1]), []
    shared = dist.get_rank() < 2
    ones = torch.ones(4, dtype=torch.float64)
    p = Parameter(distribute_tensor(ones, mesh, [Shard(0)]) if shared else ones.clone())
    optimizer = NGNM([p], lr=1.0, replicas=1)
    for _ in range(3):
        p.grad = DTensor.from_local(ones / 2, mesh, [Partial()]) if shared else ones
        optimizer.step(loss=1.0)
        assert optimizer.shrink is not None
        told.append(float(optimizer.shrink))
    return told


def warm_up_from_zero(frozen: bool) -> list[float]:
    """rho of each step at a rank without a loss: all gradients 0 at first, or nothing to train."""
    p = Parameter(torch.ones(4, dtype=torch.float64), requires_grad=not (frozen and bad_rank()))
    optimizer, told = NGNM([p], lr=0.0, replicas=1), []
    for k in range(4):
        optimizer.param_groups[0]["lr"] = k / 4
        if not frozen or not bad_rank():
            p.grad = torch.full_like(p, 0.0 if bad_rank() and k == 0 else 1.0)
        if bad_rank():
            optimizer.step()
        else:
            optimizer.step(loss=1.0 + k)
        assert optimizer.shrink is not None
        told.append(float(optimizer.shrink))
    return told


def copies_with_a_group() -> tuple[bool, str]:
    """A copy shares the process group; a pickle cannot."""
    p = one_parameter()
    optimizer = NGNM([p], lr=1.0, reduce_group=dist.group.WORLD)
    optimizer.step(loss=1.0)
    other = copy.deepcopy(optimizer)
    other.param_groups[0]["params"][0].grad = torch.full((5,), 0.5)
    other.step(loss=1.0)
    try:
        pickle.dumps(optimizer)
    except TypeError as error:
        return other.reduce_group is optimizer.reduce_group, str(error)
    return False, "nothing was raised"
