"""The randomised stateful test on several ranks: every rank draws the same events from one seed.

Each rank keeps the oracle of the whole model beside its own part of it. Gradients and losses come and
go, ranks own different parameters or hold replicas, gradients are sums of the ranks' parts, one rank
alone makes a mistake, and process groups are destroyed and made anew.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from algorithms import ALGORITHMS, SCALAR, Algorithm, Hyper
from helpers import bits, real64
from oracle import Array, Group, Oracle, Variable
from pair import close, largest, spectral_of
from randomised import Events, RandomisedRun
from torch import Tensor
from torch.nn import Parameter

from ngn_kernels import SkippedStepWarning

event = Events()
NAN = float("nan")
SHAPES = ((3,), (4, 2), (7,), (), (0,), (5, 3))
# The relative error of a whole run.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-3}


@cache  # each mesh has threads of its own
def mesh_of(shape: tuple[int, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[: len(shape)])


@dataclass
class Part:
    """A parameter of the whole model, and what of it lies on this rank."""

    variable: Variable
    group: int
    kind: str  # "ordinary", "sharded", "replicated" or "inner": a mesh within the group
    owner: int | None  # the only rank that has it
    param: Tensor | None

    @property
    def mesh(self) -> Any:
        size = dist.get_world_size()
        return mesh_of((size // 2, 2))["inner"] if self.kind == "inner" else mesh_of((size,))


class Run(RandomisedRun):
    """The same on every rank but for what lies there."""

    event = event

    def __init__(self, seed: int, port: int) -> None:
        super().__init__(seed)
        rng = random.Random(seed)
        self.port = port
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.groups_made = 0
        self.algorithm: Algorithm = rng.choice(ALGORITHMS)
        self.dtype = rng.choice((torch.float64, torch.float64, torch.float32))
        self.owned = rng.random() < 0.5
        self.meshes = rng.random() < 0.6
        self.hypers = self.algorithm.mixed([self.new_hyper(rng) for _ in range(2)])
        self.options = {
            "max_grad_norm": rng.choice((None, 0.5)),
            "loss_floor": 0.0,
            "loss_target": 0.0,
            "decay_form": "paper",
        }
        self.backend = rng.choice(("cpu", "reference"))
        kinds = ["ordinary"] * 2
        if self.meshes:
            kinds += ["sharded", "replicated"]
            kinds += ["inner"] if self.size % 2 == 0 and self.size > 2 and not self.owned else []
        self.parts = [self.new_part(rng, rng.choice(kinds)) for _ in range(rng.randint(2, 5))]
        self.optimizer = self.build()
        self.oracle = Oracle(
            self.algorithm.name, [Group([], lr=0.0) for _ in self.hypers], rms=self.algorithm.rms
        )
        for part in self.parts:
            self.oracle.groups[part.group].variables.append(part.variable)

    # What there is

    def new_hyper(self, rng: random.Random) -> Hyper:
        return Hyper(
            lr=rng.choice((1e-3, 0.05, 0.3)),
            beta1=rng.choice((0.1, 0.5, 0.9)),  # at 0 everywhere there would be no buffer
            beta2=rng.choice((0.9, 0.99)),
            eps=rng.choice((1e-6, 1e-2)),
            weight_decay=rng.choice((0.0, 0.0, 0.1)),
            step_cap=rng.choice((None, None, 3.0)),
        )

    def numbers(self, shape: tuple[int, ...]) -> Tensor:
        values = 0.5 * torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return values.to(self.dtype)

    def new_part(self, rng: random.Random, kind: str) -> Part:
        values = self.numbers(rng.choice(SHAPES if kind == "ordinary" else ((5,), (4, 2), (1, 3))))
        owner = rng.randrange(self.size) if self.owned and kind == "ordinary" else None
        part = Part(Variable.at(real64(values)), rng.randrange(2), kind, owner, None)
        if owner in (None, self.rank):
            part.param = Parameter(self.spread(part, values))
        return part

    def spread(self, part: Part, values: Tensor) -> Tensor:
        """Values of the whole parameter, placed as it is."""
        if part.kind == "ordinary":
            return values.clone()
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        placement = Replicate() if part.kind == "replicated" else Shard(0)
        return distribute_tensor(values, part.mesh, [placement])

    def build(self) -> Any:
        columns = [
            [p.param for p in self.parts if p.group == group and p.param is not None]
            for group in range(2)
        ]
        if not any(columns):  # torch takes no optimizer without any parameter
            columns[0].append(Parameter(torch.zeros(1, dtype=self.dtype)))
        options = {**self.options, "backend": self.backend, "replicas": 1 if self.owned else None}
        return self.algorithm.build(columns, self.hypers, **options)

    def local(self, part: Part) -> tuple[Tensor, Callable[[Array], Array]]:
        """What of a parameter lies here, and the same part of its oracle."""
        assert part.param is not None
        here = getattr(part.param, "_local_tensor", part.param)
        if part.kind not in ("sharded", "inner"):
            return here, lambda whole: whole
        ranks, index = part.mesh.size(), part.mesh.get_local_rank()
        rows = -(-part.param.shape[0] // ranks)
        return here, lambda whole: whole[index * rows : (index + 1) * rows]

    # Steps

    def give_gradients(self, rng: random.Random, spoil: bool = False) -> bool:
        """Draw a gradient for most parameters; whether there is any on any rank."""
        size, given = rng.choice((1e-2, 1.0)), False
        self.gradients: list[Array | None] = []
        for part in self.parts:
            roll, way = rng.random(), rng.random()
            values = self.numbers(tuple(part.variable.x.shape)) * size
            pieces = [self.numbers(tuple(values.shape)) for _ in range(self.size)]
            if part.param is not None:
                part.param.grad = None
            if roll < 0.25:
                self.gradients.append(None)
                continue
            given = True
            if spoil and values.numel():
                values.view(-1)[-1] = NAN
            if part.kind in ("sharded", "replicated") and way < 0.5:
                from torch.distributed.tensor import DTensor, Partial

                pieces[0] = values - sum(pieces[1:], torch.zeros_like(values))
                mine = pieces[self.rank]
                part.param.grad = DTensor.from_local(mine, part.mesh, [Partial()])  # type: ignore[union-attr]
                values = sum(pieces[1:], pieces[0])
            elif part.param is not None:
                part.param.grad = self.spread(part, values)
            self.gradients.append(real64(values))
        return given

    def losses(self, rng: random.Random) -> list[float | None]:
        """Of each rank; at least one has one."""
        found = [
            rng.choice((0.1, 2.0, 30.0)) if rng.random() < 0.7 else None for _ in range(self.size)
        ]
        found[rng.randrange(self.size)] = rng.choice((0.0, 0.5))
        return found

    def step(self, loss: float | None, way: str = "keyword") -> None:
        if loss is None:
            self.optimizer.step()
        elif way == "keyword":
            self.optimizer.step(loss=loss)
        elif way == "closure":
            self.optimizer.step(lambda: torch.tensor(loss, dtype=torch.float64))
        else:
            self.optimizer.set_loss(loss)
            self.optimizer.step()

    def expect(self, loss: float) -> None:
        for group, hyper in zip(self.oracle.groups, self.hypers, strict=True):
            group.lr, group.weight_decay = hyper.lr, hyper.weight_decay
            group.step_cap = hyper.step_cap
            group.beta1 = hyper.beta1 if self.algorithm.momentum else 0.0
            group.beta2, group.eps = hyper.beta2, hyper.eps
        for group, values in zip(self.oracle.groups, self.optimizer.param_groups, strict=False):
            group.spectral = spectral_of(values)
        self.oracle.loss_floor = float(self.options["loss_floor"] or 0.0)
        self.oracle.loss_target = self.options["loss_target"]
        self.oracle.adamw_decay = self.options["decay_form"] == "adamw"
        self.oracle.nesterov = self.options.get("nesterov", False)
        self.oracle.max_grad_norm = self.options["max_grad_norm"]
        columns: list[list[Array | None]] = [[], []]
        for part, gradient in zip(self.parts, self.gradients, strict=True):
            columns[part.group].append(gradient)
        self.oracle.step(loss, columns)

    def take(self, rng: random.Random, same_loss: bool = False) -> None:
        for _ in range(rng.randint(1, 5)):
            self.give_gradients(rng)
            losses = self.losses(rng)
            if same_loss:
                losses = [losses[0] or 1.0] * self.size
            given = [loss for loss in losses if loss is not None]
            self.step(losses[self.rank], rng.choice(("keyword", "closure", "set")))
            self.steps += 1
            self.expect(sum(given) / len(given))
            self.compare()
        assert int(self.optimizer.skipped_steps) == self.skipped

    def compare(self) -> None:
        relative = TOLERANCES[self.dtype]
        for number, part in enumerate(self.parts):
            if part.param is None:
                continue
            here, of = self.local(part)
            state, variable = self.optimizer.state.get(part.param, {}), part.variable
            size = max(largest(variable.x), largest(variable.previous), 1.0)
            columns = {"x": (here, variable.x, size)}
            if "momentum_buffer" in state:
                m = variable.momentum_buffer
                columns["momentum_buffer"] = (state["momentum_buffer"], m, size)
            if "exp_avg_sq" in state:
                columns["exp_avg_sq"] = (state["exp_avg_sq"], variable.v, largest(variable.v))
            for name, (actual, expected, reach) in columns.items():
                actual = getattr(actual, "_local_tensor", actual)
                what = f"{name} of {number} ({part.kind}) on rank {self.rank}"
                close(real64(actual), of(expected), relative * reach + 1e-30, what)

    def held(self) -> list[bytes]:
        found = []
        for part in self.parts:
            if part.param is not None:
                found.append(bits(self.local(part)[0]))
                state = self.optimizer.state.get(part.param, {})
                found += [bits(getattr(t, "_local_tensor", t)) for t in state.values()]
        return found

    def refused(self, step: Callable[[], Any], kinds: tuple[type[Exception], ...]) -> None:
        """Every rank raises, and nothing changes."""
        before = self.held()
        try:
            step()
        except kinds:
            pass
        else:
            raise AssertionError(f"nothing was raised on rank {self.rank}")
        # A refused step may have made state, of zeros; the numbers that there were stay.
        assert [b for b in self.held() if any(b)] == [b for b in before if any(b)]

    def skip(self, step: Callable[[], Any]) -> None:
        """A step that changes no numbers, too."""
        before = self.held()
        super().skip(step)
        assert [b for b in self.held() if any(b)] == [b for b in before if any(b)]


@event(10)
def steps(run: Run, rng: random.Random) -> None:
    """Nothing else."""


@event()
def values_change(run: Run, rng: random.Random) -> None:
    """A whole number on one rank is the same lr as the float on the others."""
    number = rng.randrange(2)
    kept = {"lr": rng.choice((0.0, 1.0, 0.3)), "spectral": run.hypers[number].spectral}
    run.hypers[number] = run.new_hyper(rng)._replace(**kept)
    values = run.algorithm.values(run.hypers[number])
    if values["lr"] in (0.0, 1.0) and run.rank == 0:
        values["lr"] = int(values["lr"])
    run.optimizer.param_groups[number].update(values)


@event()
def options_change(run: Run, rng: random.Random) -> None:
    run.options = {
        "max_grad_norm": rng.choice((None, 0.1, 2.0)),
        "loss_floor": rng.choice((0.0, -1.0)),
        "loss_target": rng.choice((0.0, 0.8)),
        "decay_form": "paper"
        if run.algorithm.name == "NGNMDv1W"
        else rng.choice(("paper", "adamw")),
    }
    if run.algorithm.spectral:
        run.options["nesterov"] = run.options["decay_form"] == "adamw" and rng.random() < 0.5
        run.optimizer.nesterov = False  # with which any form of decay goes
    for name, value in run.options.items():
        setattr(run.optimizer, name, value)


@event()
def one_rank_has_a_bad_loss(run: Run, rng: random.Random) -> None:
    bad, loss = rng.randrange(run.size), run.losses(rng)[run.rank]
    run.give_gradients(rng)
    run.refused(lambda: run.step("many" if run.rank == bad else loss), (TypeError,))  # type: ignore[arg-type]


@event()
def one_rank_fails_in_its_closure(run: Run, rng: random.Random) -> None:
    bad, loss = rng.randrange(run.size), run.losses(rng)[run.rank]
    run.give_gradients(rng)

    def closure() -> float | None:
        if run.rank == bad:
            raise MemoryError
        return loss

    run.refused(lambda: run.optimizer.step(closure), (MemoryError, RuntimeError))


@event()
def one_rank_has_another_option(run: Run, rng: random.Random) -> None:
    bad, loss = rng.randrange(run.size), run.losses(rng)[run.rank]
    kept = run.optimizer.max_grad_norm
    run.give_gradients(rng)
    if run.rank == bad:
        run.optimizer.max_grad_norm = 7.0 if kept is None else None
    run.refused(lambda: run.step(loss), (ValueError,))
    run.optimizer.max_grad_norm = kept


@event()
def no_rank_has_a_loss(run: Run, rng: random.Random) -> None:
    if run.give_gradients(rng):
        run.refused(run.optimizer.step, (RuntimeError,))
    else:
        run.optimizer.step()


@event()
def one_rank_has_an_overflow(run: Run, rng: random.Random) -> None:
    bad, losses = rng.randrange(run.size), run.losses(rng)
    run.give_gradients(rng)
    with run.scaler(1.0, overflow=run.rank == bad):
        run.skip(lambda: run.step(losses[run.rank]))


@event()
def one_rank_has_a_loss_that_is_not_finite(run: Run, rng: random.Random) -> None:
    losses = run.losses(rng)
    losses[rng.randrange(run.size)] = NAN
    run.give_gradients(rng)
    run.skip(lambda: run.step(losses[run.rank]))


@event()
def bad_gradients(run: Run, rng: random.Random) -> Any:
    losses = run.losses(rng)
    if run.algorithm not in SCALAR and run.optimizer.max_grad_norm is None:
        return False
    run.give_gradients(rng, spoil=True)
    if not any(g is not None and g.size for g in run.gradients):
        return False
    run.skip(lambda: run.step(losses[run.rank]))


@event()
def a_checkpoint_is_loaded(run: Run, rng: random.Random) -> None:
    saved, skipped = run.optimizer.state_dict(), int(run.optimizer.skipped_steps)
    run.backend = rng.choice(("cpu", "reference"))
    run.optimizer = run.build()
    run.optimizer.load_state_dict(saved)
    assert int(run.optimizer.skipped_steps) == skipped


@event()
def the_process_group_is_made_anew(run: Run, rng: random.Random) -> Any:
    """With steps of each process alone in between, where they have the same loss."""
    if run.meshes or run.owned:
        return False
    run.take(rng)
    dist.barrier()
    dist.destroy_process_group()
    if rng.random() < 0.7:
        run.take(rng, same_loss=True)
    run.groups_made += 1
    store = dist.TCPStore("127.0.0.1", run.port, is_master=False)
    store = dist.PrefixStore(f"run {run.seed} {run.groups_made}", store)
    dist.init_process_group("gloo", store=store, rank=run.rank, world_size=run.size)


def randomised_run(seed: int, events: int, port: int) -> tuple[int, Counter[str], bytes]:
    """Its steps, its events, and what all ranks must hold alike."""
    torch.set_num_threads(1)
    mesh_of.cache_clear()
    run, rng, happened = Run(seed, port), random.Random(seed + 1), Counter[str]()
    drawn = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", SkippedStepWarning)
            run.take(rng)
            for _ in range(events):
                drawn.append(event.draw(rng))
                happened[drawn[-1][0]] += run.happen(*drawn[-1])
    except BaseException as problem:
        told = f"run {seed} of {run.algorithm}, {run.dtype}, owned {run.owned}: {drawn}"
        raise AssertionError(told) from problem
    shared = [
        bits(p.param)
        for p in run.parts
        if p.kind == "ordinary" and p.owner is None and p.param is not None
    ]
    return run.steps, happened, b"".join(shared)
