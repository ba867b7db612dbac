"""What can go wrong on one rank only, each run on every rank."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from helpers import bits, warnings_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import Parameter

from ngn_kernels import NGNM, NGNMDv1, NGNMDv2, NGNMuon, SkippedStepError, SkippedStepWarning
from ngn_kernels.planning import tables
from ngn_kernels.planning.transfer import Copied
from ranks.layouts import algorithm_named, ddp, fsdp2


def bad_rank() -> bool:
    return dist.get_rank() == 1


def one_parameter(value: float = 1.0, n: int = 5, dtype: Any = None) -> Parameter:
    p = Parameter(torch.full((n,), value, dtype=dtype))
    p.grad = torch.full((n,), 0.5, dtype=dtype)
    return p


def one_matrix() -> Parameter:
    p = Parameter(torch.ones(2, 2))
    p.grad = torch.ones(2, 2)
    return p


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def rho_after_step(optimizer: Any, *args: Any, **kwargs: Any) -> float:
    optimizer.step(*args, **kwargs)
    assert optimizer.shrink is not None
    return float(optimizer.shrink)


@contextmanager
def numbers_are_sent() -> Iterator[None]:
    """As on devices that the host shares no memory with: it sends what has changed."""
    kept = tables.numbers_of
    tables.numbers_of = lambda target, values=None: Copied(target, target.numpy().copy())
    try:
        yield
    finally:
        tables.numbers_of = kept


Trouble = Callable[[Parameter, Any], None]


def spoiled(spoil: Callable[[Parameter, Any], Any]) -> Trouble:
    """One rank does this before a step of all."""

    def trouble(p: Parameter, optimizer: Any) -> None:
        if bad_rank():
            spoil(p, optimizer)
        optimizer.step(loss=1.0)

    return trouble


def made(make: Callable[[Parameter, bool], Any]) -> Trouble:
    """Ranks step with another optimizer each; `make` is told whether it is the bad rank's."""
    return lambda p, optimizer: make(p, bad_rank()).step(loss=1.0)


def stepped(step: Callable[[Any], Any]) -> Trouble:
    return lambda p, optimizer: step(optimizer)


def bad_closure(p: Parameter, optimizer: Any) -> None:
    def closure() -> float:
        if bad_rank():
            raise MemoryError("out of memory in forward")
        return 1.0

    optimizer.step(closure)


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


def whole_number_lr(p: Parameter, optimizer: Any) -> None:
    """The same number, of another type."""
    q = one_parameter()
    optimizer = NGNM([q], lr=1 if bad_rank() else 1.0, max_grad_norm=2 if bad_rank() else 2.0)
    optimizer.step(loss=1.0)
    raise ValueError("this works")


def with_partial_gradient(step: Callable[[Any], Any], before: int = 2) -> Trouble:
    """The other ranks have a gradient to add up before they can send their numbers."""

    def trouble(p: Parameter, optimizer: Any) -> None:
        mesh = mesh_of_all()
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
    mesh = mesh_of_all()
    a = Parameter(distribute_tensor(torch.ones(8), mesh, [Replicate()]))
    joins = Parameter(torch.ones(3))
    other = NGNMDv1([a, joins], lr=0.1)
    for k in range(2):
        a.grad = DTensor.from_local(torch.ones(8), mesh, [Partial()])
        joins.grad = torch.ones(3) if k else None
        other.step(loss="many" if bad_rank() and k else 1.0)


def with_a_loss_in_parts(step: Callable[[Any, Any], Any]) -> Trouble:
    def trouble(p: Parameter, optimizer: Any) -> None:
        mesh = mesh_of_all()
        step(optimizer, DTensor.from_local(torch.tensor(0.5), mesh, [Partial()]))

    return trouble


def with_sharded_matrices(before: int, missing: int) -> Trouble:
    """After some steps the last rank has no gradient for some of its parts."""

    def trouble(p: Parameter, optimizer: Any) -> None:
        mesh = mesh_of_all()
        params = [Parameter(distribute_tensor(torch.eye(n), mesh, [Shard(0)])) for n in (4, 8, 6)]
        other = NGNMuon([{"params": params[:2]}, {"params": params[2:], "spectral": False}])
        for k in range(before + 1):
            lacks = bad_rank() and k == before
            for i, q in enumerate(params):
                gradient = distribute_tensor(torch.ones(q.shape), mesh, [Shard(0)])
                q.grad = None if lacks and i < missing else gradient
            other.step(loss=1.0)

    return trouble


def lonely_group(p: Parameter, optimizer: Any) -> None:
    """A rank that is not in the group says so at once: nobody waits for it there."""
    group = dist.new_group([0])
    if bad_rank():
        NGNM([p], reduce_group=group).step(loss=1.0)
    else:
        raise ValueError("this rank is not in reduce_group")


def flattened(p: Parameter, bad: bool) -> Any:
    if bad:
        p._fsdp_flattened = True  # type: ignore[attr-defined]
    return NGNMDv1([p], lr=0.1)


def foreign_mesh(p: Parameter, optimizer: Any) -> None:
    """A DTensor on all ranks, and a group of the first two alone."""
    mesh = mesh_of_all()
    sharded = Parameter(distribute_tensor(torch.ones(8), mesh, [Shard(0)]))
    sharded.grad = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        raise ValueError("lies on a mesh with ranks outside of reduce_group")
    NGNM([sharded], reduce_group=group).step(loss=1.0)


def word_or(loss: Any) -> Any:
    """A loss that is none on the bad rank."""
    return "many" if bad_rank() else loss


BAD_LOSS = "rank 1 of .*TypeError: the loss is a str"
TROUBLES: dict[str, tuple[Trouble, str]] = {
    "a bad loss": (stepped(lambda o: o.step(loss=word_or(1.0))), BAD_LOSS),
    "a bad gradient": (
        spoiled(lambda p, o: setattr(p, "grad", p.grad.to_sparse())),  # type: ignore[union-attr]
        "rank 1 of .*TypeError: .*gradient of layout",
    ),
    "a bad option": (
        spoiled(lambda p, o: o.param_groups[0].update(weight_decay=-1.0)),
        "rank 1 of .*ValueError: weight_decay=-1.0",
    ),
    "an error in a closure": (bad_closure, "rank 1 of .*MemoryError: out of memory in forward"),
    "a loss below its floor": (  # the mean is below it on every rank
        stepped(lambda o: o.step(loss=-9.0 if bad_rank() else 1.0)),
        "the loss .* is below loss_floor=0.0",
    ),
    "no loss": (stepped(lambda o: o.step()), "needs the loss of this step from at least one rank"),
    "a bad loss beside partial gradients": (
        with_partial_gradient(lambda o: o.step(loss=word_or(1.0))),
        BAD_LOSS,
    ),
    "a bad loss beside partial gradients of a new plan": (
        with_partial_gradient(lambda o: o.step(loss=word_or(1.0)), before=0),
        BAD_LOSS,
    ),
    "a bad loss where a parameter joins partial gradients": (
        with_partial_gradient_that_stays,
        BAD_LOSS,
    ),
    "an error in a closure beside partial gradients": (
        with_partial_gradient(lambda o: o.step(lambda: 1 / 0 if bad_rank() else 1.0)),
        "rank 1 of .*ZeroDivisionError|division by zero",
    ),
    "a bad loss beside a loss in parts": (
        with_a_loss_in_parts(lambda o, loss: o.step(loss=word_or(loss))),
        BAD_LOSS,
    ),
    "a bad option beside a loss in parts": (
        with_a_loss_in_parts(
            lambda o, loss: (
                o.param_groups[0].update(eps=-1.0 if bad_rank() else 1e-8),
                o.step(loss=loss),
            )
        ),
        "rank 1 of .*ValueError: eps=-1.0",
    ),
    "an lr of another type": (whole_number_lr, "this works"),
    "another order of parameters": (  # as many elements, but their noise would be another one
        made(lambda p, bad: NGNMDv1([one_parameter(n=n) for n in ((5, 3) if bad else (3, 5))])),
        r"order of the parameters from parameter 0 on: rank 0 has float32\(3,\), rank 1 has float32\(5,\)",
    ),
    "another element type": (
        made(lambda p, bad: NGNMDv1([one_parameter(dtype=torch.bfloat16 if bad else None)])),
        r"rank 0 has float32\(5,\), rank 1 has bfloat16\(5,\)",
    ),
    "another backend": (
        made(lambda p, bad: NGNMDv1([p], backend="reference" if bad else "auto")),
        "disagree on the backend: rank 0 has cpu, rank 1 has reference; .*pass backend= one",
    ),
    "clipping on one rank": (
        spoiled(lambda p, o: setattr(o, "max_grad_norm", 1.0)),
        "disagree on max_grad_norm: rank 0 has None, rank 1 has",
    ),
    "another loss_target": (
        spoiled(lambda p, o: setattr(o, "loss_target", 0.5)),
        "disagree on loss_target: rank 0 has 0.0, rank 1 has 0.5",
    ),
    "another decay_form": (
        spoiled(lambda p, o: setattr(o, "decay_form", "adamw")),
        "disagree on decay_form: rank 0 has paper, rank 1 has adamw",
    ),
    "another momentum": (
        made(lambda p, bad: NGNMuon([one_matrix()], decay_form="adamw", nesterov=bad)),
        "disagree on nesterov: rank 0 has False, rank 1 has True",
    ),
    "another step_cap": (
        spoiled(lambda p, o: o.param_groups[0].update(step_cap=3.0)),
        "disagree on step_cap of group 0: rank 0 has None, rank 1 has 3.0; ",
    ),
    "other spectral groups": (
        made(lambda p, bad: NGNMuon([one_matrix()], spectral=not bad)),
        r"disagree on the directions of group 0: rank 0 has Spectral\(form=True, .* rank 1 has None",
    ),
    "other coefficients": (
        made(lambda p, bad: NGNMuon([one_matrix()], ns_steps=5 + bad)),
        r"disagree on the directions of group 0: rank 0 has Spectral",
    ),
    "a matrix without a gradient": (
        with_sharded_matrices(before=0, missing=1),
        r"the sharded matrices that have gradients .*rank 0 has .*\(4, 4\).*rank 1 has .*\(8, 8\).*zeros",
    ),
    "a matrix without a gradient later": (
        with_sharded_matrices(before=2, missing=1),
        r"the sharded matrices that have gradients .*rank 0 has .*\(4, 4\).*rank 1 has .*\(8, 8\).*zeros",
    ),
    "no matrix with a gradient": (
        with_sharded_matrices(before=0, missing=2),
        r"the sharded matrices that have gradients .*rank 0 has .*\(4, 4\).*rank 1 has none",
    ),
    "another lr": (
        spoiled(lambda p, o: o.param_groups[0].update(lr=0.7)),
        "disagree on lr of group 0: rank 0 has .*, rank 1 has 0.7; .*replicas=1",
    ),
    "another number of groups": (
        spoiled(lambda p, o: o.add_param_group({"params": [one_parameter()]})),
        "disagree on the number of groups",
    ),
    "another size": (
        spoiled(lambda p, o: o.param_groups[0]["params"].append(one_parameter(n=3))),
        "disagree on the number of elements: rank 0 has 5, rank 1 has 8",
    ),
    "another size later": (other_size_later, "disagree on the number of elements"),
    "another algorithm": (
        made(lambda p, bad: (NGNMDv2 if bad else NGNMDv1)([p])),
        "disagree on the algorithm: .*NGNMDv1.*NGNMDv2",
    ),
    "replicas that do not divide": (
        made(lambda p, bad: NGNM([p], replicas=dist.get_world_size() + 1)),
        "replicas=.* does not divide the",
    ),
    "a group without this rank": (lonely_group, "this rank is not in reduce_group"),
    "FSDP1": (made(flattened), "FSDP1 flattened and sharded .*fully_shard"),
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
    if bad_rank() and what == "gradient":
        p.grad[2] = float("nan")  # type: ignore[index]
    if bad_rank() and what == "loss":
        loss = float("nan")
    if what == "overflow":
        optimizer.grad_scale = torch.tensor(2.0)
        optimizer.found_inf = torch.tensor(float(bad_rank()))
    said = warnings_of(lambda: optimizer.step(loss=loss))
    return said, int(optimizer.skipped_steps), bits(p) == before


def skip_that_raises(limit: int | None) -> tuple[list[str], bool]:
    """What is raised at each of four steps, where one rank has a bad gradient in the first two."""
    p = one_parameter()
    on_skip = "raise" if limit is None else "ignore"
    optimizer = NGNMDv1([p], lr=0.1, on_skip=on_skip, max_skipped_steps=limit)
    raised = []
    for k in range(4):
        p.grad = torch.full((5,), float("nan") if bad_rank() and k < 2 else 0.5)
        try:
            optimizer.step(loss=1.0)
            raised.append("")
        except SkippedStepError as error:
            raised.append(str(error))
        except RuntimeError as error:
            raised.append(f"from another rank: {error}")
    return raised, bool((p < 1).all())


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
        found.append(rho_after_step(optimizer, loss=1.0))
    return found[0], found[1]


def one_never_comes() -> str:
    group = dist.new_group()
    # Not before ranks have met, which may take a while.
    _set_pg_timeout(timedelta(seconds=2), group)
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
    mesh = mesh_of_all()
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
    told, first = [], dist.get_rank() == 0
    with numbers_are_sent() if copied else nullcontext():
        p = Parameter(torch.ones(4, dtype=torch.float64))
        optimizer = algorithm_named(algorithm).simple(
            [p], lr=1.0, weight_decay=0.0, replicas=1, max_grad_norm=clipping
        )
        for _ in range(steps):
            p.data.fill_(1.0)
            if optimizer.state.get(p):
                optimizer.state[p].get("exp_avg_sq", torch.zeros(1)).zero_()
                optimizer.state[p]["step"].zero_()
            p.grad = torch.ones_like(p) if first else None
            given = {"loss": 1.0} if first or not copied else {}
            told.append(rho_after_step(optimizer, **given))
    return told


def overflow_once() -> list[int]:
    """Steps skipped so far, after each of three; the other rank's scaler overflowed in the first."""
    counts = []
    with numbers_are_sent():
        p = one_parameter()
        optimizer = NGNMDv1([p], lr=0.1)
        for k in range(3):
            optimizer.grad_scale = torch.tensor(1.0)
            optimizer.found_inf = torch.tensor(float(k == 0 and bad_rank()))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SkippedStepWarning)
                optimizer.step(loss=1.0)
            counts.append(int(optimizer.skipped_steps))
    return counts


def by_hand_around_tensor_parallel(
    steps: int, shape: tuple[int, ...], replicas: int | None, placement: str = "shard"
) -> list[float]:
    """rho where each mesh["tp"] holds the whole parameter, and dp ranks average gradients by hand."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))["tp"]
    spread = [Shard(0) if placement == "shard" else Replicate()]
    p = Parameter(distribute_tensor(torch.ones(4, dtype=torch.float64), mesh, spread))
    optimizer = NGNM([p], lr=1.0, replicas=replicas)
    told = []
    for _ in range(steps):
        p.grad = distribute_tensor(torch.ones(4, dtype=torch.float64), mesh, spread)
        told.append(rho_after_step(optimizer, loss=1.0))
    return told


def groups_come_and_go(port: int) -> list[float]:
    """rho alone, on three ranks, on two of them, on three of another group, and alone again."""
    p = Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = NGNM([p], lr=1.0)
    told = []

    def step() -> None:
        p.grad = torch.full_like(p, 0.5)
        told.append(rho_after_step(optimizer, loss=1.0))

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
    mesh, told = mesh_of_all(), []
    size = dist.get_world_size()
    for part, placement in ((2.0 / size, Partial()), (2.0, Replicate())):
        p = one_parameter()
        optimizer = NGNM([p], lr=1.0)
        for _ in range(2):
            loss = DTensor.from_local(torch.tensor(part), mesh, [placement])
            rho = rho_after_step(optimizer, loss=loss)
        told.append(rho)
    return told[0], told[1]


def partial_on_some_ranks() -> list[float]:
    """rho where the first two ranks share a parameter in parts, and the last one has its own."""
    mesh, told = DeviceMesh("cpu", [0, 1]), []
    shared = dist.get_rank() < 2
    ones = torch.ones(4, dtype=torch.float64)
    p = Parameter(distribute_tensor(ones, mesh, [Shard(0)]) if shared else ones.clone())
    optimizer = NGNM([p], lr=1.0, replicas=1)
    for _ in range(3):
        p.grad = DTensor.from_local(ones / 2, mesh, [Partial()]) if shared else ones
        told.append(rho_after_step(optimizer, loss=1.0))
    return told


def warm_up_from_zero(frozen: bool) -> list[float]:
    """rho of each step at a rank without a loss: all gradients 0 at first, or nothing to train."""
    p = Parameter(torch.ones(4, dtype=torch.float64), requires_grad=not (frozen and bad_rank()))
    optimizer, told = NGNM([p], lr=0.0, replicas=1), []
    for k in range(4):
        optimizer.param_groups[0]["lr"] = k / 4
        if not frozen or not bad_rank():
            p.grad = torch.full_like(p, 0.0 if bad_rank() and k == 0 else 1.0)
        told.append(rho_after_step(optimizer, **({} if bad_rank() else {"loss": 1.0 + k})))
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
