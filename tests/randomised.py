"""Randomised stateful tests: events that training code applies to an optimizer, beside the oracle.

An event draws all that it needs from a seed of its own, so that a run is a list of (name, seed) and can
be repeated. test_randomised.py lets hypothesis write that list, soak.py a plain loop.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from algorithms import ALGORITHMS, Algorithm, Hyper
from helpers import (
    DTYPES,
    GPU_ENGINES,
    copies_of,
    params_of,
    real64,
    through_file,
    unchanged,
    warnings_of,
)
from layouts import LAYOUTS
from pair import Pair, close, largest, numbers_in
from torch import Tensor
from torch.nn import Parameter

from ngn_kernels import SkippedStepWarning
from ngn_kernels.planning.checks import is_dense

NAN, INF = float("nan"), float("inf")
STATE = ("momentum_buffer", "exp_avg_sq")
OWN = "the user's own"
SHAPES = ((), (1,), (3,), (2, 3), (7,), (2, 2, 2), (0,), (17,))
COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
WIDE = (torch.float32, torch.float64)
MOST_PARAMS, MOST_GROUPS = 5, 3
# What narrow runs are built with, and the types of their parameters.
NARROW: tuple[tuple[dict[str, Any], tuple[torch.dtype, ...]], ...] = (
    *(({"state": state}, (torch.float32,)) for state in ("8bit", "bfloat16")),
    *(({"state": ("8bit", other)}, (torch.float32,)) for other in ("bfloat16", "float32")),
    *(({"state": ("float32", other)}, (torch.float32,)) for other in ("8bit", "bfloat16")),
    ({"rounding": "stochastic"}, (torch.bfloat16, torch.float16, torch.float32)),
    ({"rounding": "stochastic", "state": ("float32", "8bit")}, (torch.bfloat16, torch.float16)),
    ({"rounding": "exact"}, (torch.bfloat16,)),
    ({"rounding": "exact", "state": ("bfloat16", "float32")}, (torch.bfloat16,)),
)
# The relative error of a few steps from identical state, where every number is a wide one.
TRAJECTORY = {torch.float64: 1e-10, torch.float32: 1e-4}


class Events:
    """What may happen to a run, by name; an event returns False where there is nothing to happen to.

    Steps follow each event, which show whether it was taken for what it was.
    """

    def __init__(self) -> None:
        self.functions: dict[str, Callable[[Any, random.Random], bool | None]] = {}
        self.weights: list[int] = []

    def __call__(self, weight: int = 1) -> Callable[[Any], Any]:
        def register(function: Any) -> Any:
            self.functions[function.__name__.replace("_", " ")] = function
            self.weights.append(weight)
            return function

        return register

    def draw(self, rng: random.Random) -> tuple[str, int]:
        """The name and the seed of the next one."""
        return rng.choices(list(self.functions), self.weights)[0], rng.getrandbits(32)


class RandomisedRun:
    """What is the same in one process and on several ranks."""

    event: Events
    optimizer: Any

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.steps = self.skipped = 0
        self.generator = torch.Generator().manual_seed(seed)

    def take(self, rng: random.Random) -> None:
        raise NotImplementedError

    def happen(self, name: str, seed: int) -> bool:
        """One event; False where there is nothing that it could happen to."""
        rng = random.Random(seed)
        if self.event.functions[name](self, rng) is False:
            return False
        self.take(rng)
        return True

    def skip(self, step: Callable[[], Any]) -> None:
        """A step that is counted and warned of once."""
        assert len(warnings_of(step, SkippedStepWarning)) == 1
        self.skipped += 1
        self.steps += 1
        assert int(self.optimizer.skipped_steps) == self.skipped

    @contextmanager
    def scaler(self, scale: float, overflow: bool = False) -> Iterator[None]:
        """What a GradScaler hands over, and takes away if the step has not done so itself."""
        self.optimizer.grad_scale = torch.tensor(scale)
        self.optimizer.found_inf = torch.tensor(float(overflow))
        try:
            yield
        finally:
            for name in ("grad_scale", "found_inf"):
                self.optimizer.__dict__.pop(name, None)


event = Events()


class Run(RandomisedRun):
    event = event

    def __init__(self, seed: int, backends: tuple[str, ...]) -> None:
        super().__init__(seed)
        rng = random.Random(seed)
        self.backends = backends
        self.frozen: set[int] = set()
        self.algorithm: Algorithm = rng.choice(ALGORITHMS)
        backend = rng.choice(backends)
        self.kind = rng.choices(("wide", "half", "narrow"), (30, 4, 2))[0]
        if backend in GPU_ENGINES and self.kind == "narrow":
            self.kind = "wide"
        self.options = {"max_grad_norm": rng.choice((None, None, 0.5))}
        self.options["loss_floor"] = rng.choice((0.0, -1.0, 0.3))
        self.options |= self.new_forms(rng)
        self.options["loss_target"] = rng.choice((0.0, 0.0, 0.8))
        built, self.narrow_types = rng.choice(NARROW) if self.kind == "narrow" else ({}, ())
        columns = [
            [self.new_param(rng, backend) for _ in range(rng.randint(1, 2))]
            for _ in range(rng.randint(1, 2))
        ]
        if self.kind == "narrow":
            columns[0].append(self.tensor(rng, (65, 64), self.narrow_types[0]))
        self.optimizer: Any = self.algorithm.build(
            columns,
            [self.new_hyper(rng) for _ in columns],
            backend=backend,
            **self.options,
            **built,
        )

    # What there is

    @property
    def backend(self) -> str:
        return str(self.optimizer.backend)

    @property
    def slack(self) -> float:
        """At a loss of 0, rho of regularised decay is a sum of numbers of both signs, and nothing else."""
        return 16.0 if self.algorithm.name == "NGNMDv1W" else 1.0

    @property
    def params(self) -> list[Any]:
        return params_of(self.optimizer)

    def new_hyper(self, rng: random.Random) -> Hyper:
        return Hyper(
            lr=rng.choice((0.0, 1e-3, 0.05, 0.3, 1.0)),
            beta1=rng.choice((0.0, 0.5, 0.9)),
            beta2=rng.choice((0.9, 0.99, 0.999)),
            eps=rng.choice((1e-8, 1e-4, 1e-2)),
            weight_decay=rng.choice((0.0, 0.0, 1e-3, 0.1)),
            step_cap=rng.choice((None, None, 0.05, 3.0)),
            spectral=rng.choice(("flat", False)),
        )

    def new_forms(self, rng: random.Random) -> dict[str, Any]:
        """Of weight decay and, where it is an option, of momentum."""
        form = "paper" if self.algorithm.name == "NGNMDv1W" else rng.choice(("paper", "adamw"))
        ahead = form == "adamw" and rng.random() < 0.5
        return {"decay_form": form} | ({"nesterov": ahead} if self.algorithm.spectral else {})

    def tensor(self, rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        values = 0.5 * torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return Parameter(LAYOUTS[rng.choice(tuple(LAYOUTS))](values.to(dtype)))

    def new_param(self, rng: random.Random, backend: str) -> Tensor:
        allowed = [d for d in DTYPES[backend] if self.kind != "wide" or d in WIDE]
        if self.kind == "half":  # whose sums are those of float32
            allowed.remove(torch.float64) if torch.float64 in allowed else None
        elif self.kind == "narrow":
            allowed = list(self.narrow_types)
        dtype = rng.choice(allowed)
        if self.kind == "wide" and rng.random() < 0.1:
            dtype = COMPLEX[dtype]
        return self.tensor(rng, rng.choice(SHAPES), dtype)

    def one(self, rng: random.Random) -> tuple[Tensor, dict[str, Any]]:
        """A parameter, and its state if it has any yet."""
        p = rng.choice(self.params)
        return p, self.optimizer.state.get(p, {})

    # Steps

    def give_gradients(self, rng: random.Random, scale: float = 1.0) -> bool:
        """False if every parameter is frozen: then there is none."""
        size = rng.choice((1e-3, 0.1, 1.0))
        for p in self.params:
            p.grad = None
            if id(p) in self.frozen:
                continue
            grad = torch.randn(p.shape, generator=self.generator, dtype=p.dtype).mul_(size * scale)
            roll = rng.random()
            if roll < 0.05 and p.dim() > 1:
                grad = LAYOUTS["transposed"](grad)
            elif roll < 0.1 and p.dim() > 0:
                grad = LAYOUTS["strided"](grad)
            elif roll < 0.13:
                grad = grad.new_full((), size * scale).expand(p.shape)
            p.grad = grad
        return any(p.grad is not None for p in self.params)

    def new_loss(self, rng: random.Random) -> float:
        above_floor = rng.choice((0.0, 1e-3, 0.5, 2.0, 30.0))
        return float(self.optimizer.loss_floor) + above_floor

    def start(self) -> Pair:
        """The oracle, where the optimizer is."""
        self.sizes = [largest(real64(p)) for p in self.params]
        return Pair(self.algorithm, self.optimizer, **self.options)

    def take(self, rng: random.Random, step: Callable[[float], None] | None = None) -> None:
        """A few steps from where the optimizer is, and a comparison with the oracle's."""
        pair, several = self.start(), self.kind == "wide" and step is None
        still = [(p, p._version) for p in self.params if id(p) in self.frozen]
        for _ in range(rng.randint(1, 12) if several else 1):
            self.give_gradients(rng)
            loss = self.new_loss(rng)
            pair.expect(loss)
            if step is None:
                self.optimizer.step(loss=loss)
            else:
                step(loss)
            self.steps += 1
        self.compare(pair)
        assert int(self.optimizer.skipped_steps) == self.skipped
        assert all(p._version == version for p, version in still)

    def compare(self, pair: Pair) -> None:
        if self.kind != "wide":
            return pair.check_step(self.slack)
        variables = [v for group in pair.oracle.groups for v in group.variables]
        # One narrower tensor brings its error to the step size of all.
        states = self.optimizer.state.values()
        held = [state[key] for state in states for key in STATE if key in state]
        relative = max(TRAJECTORY[t.abs().dtype] for t in (*self.params, *held))
        for p, variable, start in zip(self.params, variables, self.sizes, strict=True):
            state = numbers_in(self.optimizer, p)
            columns = {"x": (p, variable.x), "exp_avg_sq": (state.get("exp_avg_sq"), variable.v)}
            columns["momentum_buffer"] = (state.get("momentum_buffer"), variable.momentum_buffer)
            size = max(start, largest(variable.x), largest(variable.previous))
            for name, (actual, expected) in columns.items():
                if actual is not None:
                    reach = 4 * largest(expected) if name == "exp_avg_sq" else size
                    bound = relative * reach + 1e-36
                    close(real64(actual), expected, bound, name)
            if "step" in state and p.numel():
                assert int(state["step"]) == variable.t, "the step count"


@event(30)
def steps(run: Run, rng: random.Random) -> None:
    """Nothing else."""


# Groups and parameters


@event()
def a_group_is_added(run: Run, rng: random.Random) -> Any:
    if len(run.params) >= MOST_PARAMS or len(run.optimizer.param_groups) >= MOST_GROUPS:
        return False
    values = run.algorithm.values(run.new_hyper(rng))
    params = [run.new_param(rng, run.backend)]
    run.optimizer.add_param_group({"params": params, **values})


def alike(group: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether their parameters keep the same state."""
    return group.get("spectral") == other.get("spectral")


@event()
def groups_are_merged(run: Run, rng: random.Random) -> Any:
    groups = run.optimizer.param_groups
    if len(groups) < 2 or not alike(groups[0], groups[-1]):
        return False
    groups[0]["params"] += groups.pop()["params"]


@event()
def a_parameter_is_moved(run: Run, rng: random.Random) -> Any:
    groups = run.optimizer.param_groups
    if len(groups) < 2 or not groups[-1]["params"] or not alike(groups[0], groups[-1]):
        return False
    groups[0]["params"].append(groups[-1]["params"].pop(0))


@event()
def a_parameter_is_taken_out(run: Run, rng: random.Random) -> Any:
    if len(run.params) < 3:
        return False
    group = rng.choice([g for g in run.optimizer.param_groups if g["params"]])
    gone = group["params"].pop(rng.randrange(len(group["params"])))
    if rng.random() < 0.5:
        run.optimizer.state.pop(gone, None)
    kept = gone.detach().clone()
    run.take(rng)
    assert torch.equal(gone, kept)


@event()
def a_parameter_is_replaced(run: Run, rng: random.Random) -> None:
    group = rng.choice([g for g in run.optimizer.param_groups if g["params"]])
    index = rng.randrange(len(group["params"]))
    old = group["params"][index]
    group["params"][index] = run.new_param(rng, run.backend)
    if rng.random() < 0.5:
        run.optimizer.state.pop(old, None)


@event()
def parameters_are_frozen(run: Run, rng: random.Random) -> None:
    run.frozen = {id(p) for p in run.params if rng.random() < 0.5}
    still = [(p, p.detach().clone()) for p in run.params if id(p) in run.frozen]
    run.take(rng)
    assert all(torch.equal(p, x) for p, x in still)
    if rng.random() < 0.7:
        run.frozen = set()


@event()
def a_parameter_is_cast(run: Run, rng: random.Random) -> Any:
    p, _ = run.one(rng)
    if run.kind != "wide" or run.backend in GPU_ENGINES:
        return False
    to = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    to |= {wide: narrow for narrow, wide in to.items()}
    p.grad = None
    p.data = p.data.to(to[p.dtype])


@event()
def a_parameter_is_laid_out_anew(run: Run, rng: random.Random) -> None:
    p, _ = run.one(rng)
    p.grad = None
    p.data = LAYOUTS[rng.choice(tuple(LAYOUTS))](p.detach())
    if run.kind == "narrow":  # codes are rounded once more in their new order
        run.give_gradients(rng)
        run.optimizer.step(loss=run.new_loss(rng))
        run.steps += 1


@event()
def values_change(run: Run, rng: random.Random) -> None:
    """As a scheduler does it; an lr may become a tensor."""
    group = rng.choice(run.optimizer.param_groups)
    hyper = run.new_hyper(rng)._replace(spectral=group.get("spectral", False))
    group.update(run.algorithm.values(hyper))
    if rng.random() < 0.3:
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)


@event()
def options_change(run: Run, rng: random.Random) -> None:
    run.options = {
        "max_grad_norm": rng.choice((None, 0.1, 2.0)),
        "loss_floor": rng.choice((0.0, -2.0, 0.25)),
        "loss_target": rng.choice((0.0, 0.5, 0.99)),
        **run.new_forms(rng),
    }
    run.optimizer.nesterov = False  # with which any form of decay goes
    for name, value in run.options.items():
        setattr(run.optimizer, name, value)


# State


@event()
def state_is_cast(run: Run, rng: random.Random) -> Any:
    p, state = run.one(rng)
    keys = [key for key in STATE if key in state and state[key].abs().dtype in WIDE]
    if not keys or run.backend in GPU_ENGINES:
        return False
    key = rng.choice(keys)
    wide = torch.complex128 if p.is_complex() else torch.float64
    state[key] = state[key].to(wide)


@event()
def state_is_replaced(run: Run, rng: random.Random) -> Any:
    """The tensors, their memory, or the whole dict, with other numbers."""
    p, state = run.one(rng)
    keys = [key for key in STATE if key in state]
    if not keys or run.kind == "narrow":
        return False
    way = rng.choice(("tensor", "memory", "dict", "order"))
    for key in keys:
        if way == "memory":  # as offloading helpers do it
            state[key].data = state[key].detach().clone() * 0.5
        elif way == "order":
            state[key] = LAYOUTS["transposed"](state[key].detach().clone())
        elif way == "tensor":
            state[key] = state[key] * 0.5
    if way == "dict":
        run.optimizer.state[p] = {k: v.clone() for k, v in state.items()}


@event()
def state_is_offloaded_and_back(run: Run, rng: random.Random) -> Any:
    """The memory is given away between two steps, and comes back elsewhere."""
    _, state = run.one(rng)
    keys = [key for key in STATE if key in state]
    if not keys:
        return False
    parked = {key: state[key].detach().clone() for key in keys}
    for key in keys:
        state[key].data = torch.empty(0, dtype=state[key].dtype)
    for key, values in parked.items():
        state[key].data = values


@event()
def state_is_reset(run: Run, rng: random.Random) -> None:
    if rng.random() < 0.3:
        run.optimizer.state.clear()
    else:
        run.optimizer.state.pop(rng.choice(run.params), None)


@event()
def the_user_keeps_something_in_the_state(run: Run, rng: random.Random) -> None:
    p, _ = run.one(rng)
    kept = torch.full((rng.randint(0, 3),), float(rng.randint(0, 9)), dtype=torch.float16)
    run.optimizer.state[p][OWN] = kept
    run.take(rng)
    assert run.optimizer.state[p][OWN] is kept


@event()
def a_step_count_is_another_kind_of_number(run: Run, rng: random.Random) -> Any:
    _, state = run.one(rng)
    if "step" not in state:
        return False
    count = float(state["step"])
    kinds = (int(count), count, torch.tensor([count]), torch.tensor(count, dtype=torch.float64))
    state["step"] = rng.choice(kinds)


# Copies and checkpoints


@event()
def a_checkpoint_goes_to_another_backend(run: Run, rng: random.Random) -> Any:
    """Into a fresh optimizer over copies of the parameters."""
    old = run.optimizer
    here = {id(p) for p in run.params}
    for gone in [p for p in old.state if id(p) not in here]:  # torch cannot save these
        del old.state[gone]
    saved = old.state_dict()
    if rng.random() < 0.3:
        saved = through_file(saved)
    target = rng.choice(run.backends)
    if target in GPU_ENGINES and not fits_triton(run):
        return False
    groups = [{"params": column} for column in copies_of(old)]
    options = {"state": old._storage.given, "rounding": old._storage.rounding}
    new = run.algorithm.simple(groups, backend=target, **run.options, **options)
    new.load_state_dict(saved)
    for p, q in zip(params_of(old), params_of(new), strict=True):
        kept, loaded = (o.state.get(x, {}).get(OWN) for o, x in ((old, p), (new, q)))
        assert (kept is None) == (loaded is None)
        assert kept is None or (torch.equal(loaded, kept) and loaded is not kept)
    run.optimizer, run.frozen = new, set()


def fits_triton(run: Run) -> bool:
    """It takes float32 and halves, with float32 state."""
    tensors = [*run.params, *(s[k] for s in run.optimizer.state.values() for k in STATE if k in s)]
    double = {torch.float64, torch.complex128, torch.int8, torch.uint8}
    return run.kind != "narrow" and not any(t.dtype in double for t in tensors)


@event()
def the_backend_changes(run: Run, rng: random.Random) -> Any:
    target = rng.choice(run.backends)
    if target in GPU_ENGINES and not fits_triton(run):
        return False
    run.optimizer.backend = target


@event()
def a_copy_takes_over(run: Run, rng: random.Random) -> None:
    """With a loss that is pending, too."""
    run.optimizer.zero_grad()
    pending = rng.random() < 0.5
    if pending:
        run.optimizer.add_loss(0.25)
    copied = rng.choice((copy.deepcopy, lambda old: pickle.loads(pickle.dumps(old))))
    other = copied(run.optimizer)
    run.optimizer._pending.clear()
    run.optimizer, run.frozen = other, set()

    def step(loss: float) -> None:
        run.optimizer.add_loss(loss - 0.25)
        run.optimizer.step()

    if pending:
        run.take(rng, step)


# Real backward passes


@event(4)
def batches_are_discarded(run: Run, rng: random.Random) -> Any:
    """Cleared by a module, which the optimizer does not see, with a loss given for them."""
    if run.frozen:
        return False
    for p in run.params:
        if p.grad is not None and not is_dense(p.grad):
            p.grad = None  # autograd cannot add to an expanded one
    module = torch.nn.ParameterList(run.params)
    set_to_none, first, by_mean = (rng.random() < 0.5 for _ in range(3))
    give = run.optimizer.set_loss if by_mean else run.optimizer.add_loss
    module.zero_grad(set_to_none=set_to_none)
    for _ in range(rng.randint(1, 3)):
        backward(run, rng, give, [1000.0], first)
    module.zero_grad(set_to_none=set_to_none)

    pair = run.start()
    loss, parts = run.new_loss(rng), rng.randint(1, 3)
    shares = [loss] * parts if by_mean else [loss / parts] * parts
    backward(run, rng, give, shares, first)
    pair.expect(loss)
    run.optimizer.step(*rng.choice(((), (lambda: None,))))
    run.steps += 1
    run.compare(pair)
    module.zero_grad()


def backward(
    run: Run, rng: random.Random, give: Callable[[float], None], shares: list[float], first: bool
) -> None:
    """Of one micro-batch for each share, which reaches every parameter."""
    for share in shares:
        if first:
            give(share)
        grads = [torch.randn(p.shape, generator=run.generator, dtype=p.dtype) for p in run.params]
        torch.autograd.backward(run.params, [g / len(shares) for g in grads])
        if not first:
            give(share)


# Ways to step


@event(2)
def the_loss_comes_another_way(run: Run, rng: random.Random) -> None:
    way = rng.choice(("closure", "set", "add", "tensor", "closure and add"))

    def step(loss: float) -> None:
        optimizer = run.optimizer
        if way == "closure":
            optimizer.step(lambda: torch.tensor(loss, dtype=torch.float64))
        elif way == "set":
            optimizer.set_loss(loss - 3.0, weight=1.0)
            optimizer.set_loss(loss + 1.0, weight=3.0)
            optimizer.step()
        elif way == "add":
            optimizer.add_loss(loss - 0.5)
            optimizer.add_loss(0.5)
            optimizer.step()
        elif way == "tensor":
            optimizer.step(loss=torch.tensor([loss], dtype=torch.float64))
        else:
            optimizer.add_loss(loss)
            optimizer.step(lambda: None)

    run.take(rng, step)


@event()
def the_loss_is_scaled(run: Run, rng: random.Random) -> None:
    """As a GradScaler hands it over."""
    scale, pair = float(2 ** rng.randint(0, 6)), run.start()
    run.give_gradients(rng, scale)
    loss = run.new_loss(rng)
    pair.expect(loss, grad_scale=scale)
    with run.scaler(scale):
        run.optimizer.step(loss=loss)
    run.steps += 1
    run.compare(pair)


@event()
def a_thread_steps(run: Run, rng: random.Random) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run.take, rng).result()


@event()
def the_default_device_is_another_one(run: Run, rng: random.Random) -> None:
    def step(loss: float) -> None:
        torch.set_default_device("meta")
        try:
            run.optimizer.step(loss=loss)
        finally:
            torch.set_default_device(None)

    run.take(rng, step)


@event()
def a_step_in_inference_mode(run: Run, rng: random.Random) -> None:
    def step(loss: float) -> None:
        with torch.inference_mode():
            run.optimizer.step(loss=loss)

    run.take(rng, step)


# Bad numbers and refused steps


@event()
def a_bad_loss(run: Run, rng: random.Random) -> Any:
    if not run.give_gradients(rng):
        return False
    with unchanged(run.optimizer):
        run.skip(lambda: run.optimizer.step(loss=rng.choice((NAN, INF, -INF))))


@event()
def an_overflow_of_the_scaler(run: Run, rng: random.Random) -> Any:
    if not run.give_gradients(rng):
        return False
    with run.scaler(4.0, overflow=True), unchanged(run.optimizer):
        run.skip(lambda: run.optimizer.step(loss=run.new_loss(rng)))


@event()
def a_bad_gradient(run: Run, rng: random.Random) -> Any:
    run.give_gradients(rng)
    there = [p for p in run.params if p.grad is not None and p.numel()]
    if not there:
        return False
    p = rng.choice(there)
    p.grad = p.grad.clone(memory_format=torch.contiguous_format)
    place = rng.randrange(p.numel())
    p.grad.view(-1)[place] = rng.choice((NAN, INF, -INF))
    loss = run.new_loss(rng)
    if run.algorithm.coordinate and run.optimizer.max_grad_norm is None:
        old = p.detach().clone().reshape(-1)
        run.skip(lambda: run.optimizer.step(loss=loss))
        kept = p.detach().reshape(-1)[place]
        assert torch.equal(kept.real, old[place].real)  # a complex number is two coordinates
    else:
        with unchanged(run.optimizer):
            run.skip(lambda: run.optimizer.step(loss=loss))
    for q in run.params:
        numbers = numbers_in(run.optimizer, q)
        assert all(torch.as_tensor(t).isfinite().all() for t in (q, *numbers.values()))


@event()
def a_step_is_refused(run: Run, rng: random.Random) -> Any:
    if not run.give_gradients(rng):
        return False
    optimizer = run.optimizer
    below = optimizer.loss_floor - 1.0
    with unchanged(run.optimizer):
        kind, wrong = rng.choice(
            (
                (ValueError, lambda: optimizer.step(loss=below)),
                (TypeError, lambda: optimizer.step(loss="much")),
                (ValueError, lambda: optimizer.step(loss=torch.ones(2))),
                (RuntimeError, lambda: optimizer.step(lambda: 1.0, loss=1.0)),
                (TypeError, lambda: optimizer.step(3.0)),
            )
        )
        with pytest.raises(kind):
            wrong()
    assert int(optimizer.skipped_steps) == run.skipped


@event()
def a_gradient_of_another_kind_is_refused(run: Run, rng: random.Random) -> Any:
    """Complex where the parameter is real, or the other way round."""
    if not hasattr(torch.Tensor, "grad_dtype"):
        return False
    run.give_gradients(rng)
    p, _ = run.one(rng)
    kept, p.grad_dtype = p.grad, None
    dtype = p.dtype.to_real() if p.is_complex() else COMPLEX.get(p.dtype, torch.complex64)
    p.grad = torch.zeros(p.shape, dtype=dtype)
    with unchanged(run.optimizer), pytest.raises(TypeError, match="both must be real or both"):
        run.optimizer.step(loss=run.new_loss(rng))
    p.grad = kept


@event()
def state_that_does_not_fit_is_refused(run: Run, rng: random.Random) -> Any:
    p, state = run.one(rng)
    keys = [key for key in STATE if key in state]
    run.give_gradients(rng)
    if not keys or not p.numel():
        return False
    key = rng.choice(keys)
    kept = state[key]
    state[key] = kept.new_zeros(p.numel() + 1)
    with pytest.raises(ValueError, match="has shape"):
        run.optimizer.step(loss=run.new_loss(rng))
    state[key] = kept
