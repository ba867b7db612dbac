"""One training run: from a `RunSpec` to the record that a sweep keeps."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import environment
from ..errors import BenchError
from . import optimizers
from .problems import SCHEDULES, WARMUP, Batch, Problem
from .tasks import Scale, Setup, find_task

Run = dict[str, Any]
"""The record of a run, as it stands in `runs.jsonl`."""

SAMPLES = 100
"""About how many samples of step sizes and updates a run records."""
EARLY = 50
"""All of the first steps are sampled: step sizes change most there."""


PARAMETERS = {"mixed": torch.float32, "bfloat16": torch.bfloat16}
"""As `--dtype`: the type of the parameters where a model computes in bfloat16."""
KNOWN_FLOOR = "known"
"""As `--loss-floor`: the lower bound of the loss that the task itself gives."""
SWEPT_CAP = "lr"
"""As `--step-cap`: the run's own step size, without its schedule."""


@dataclass(frozen=True)
class RunSpec:
    """Everything that decides a run's result. Two runs with equal specs are the same run."""

    task: str
    optimizer: str
    lr: float
    seed: int
    scale: str = str(Scale())
    betas: tuple[float, float] | None = None
    weight_decay: float = 0.0
    options: tuple[tuple[str, str], ...] = field(default=())
    files: str = ""
    """Fingerprint of the user's own files that the run depends on."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"options": dict(self.options)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> RunSpec:
        betas = content["betas"]
        return cls(
            **content
            | {
                "options": tuple(sorted(content["options"].items())),
                "betas": None if betas is None else (betas[0], betas[1]),
            }
        )


@dataclass(frozen=True)
class Machine:
    """Where and how runs are executed; no part of their identity."""

    data_dir: Path = Path("data")
    device: str = "cpu"
    threads: int = 1
    micro_batch: int | None = None
    loader_workers: int = 0
    command: tuple[str, ...] = ()


@functools.cache
def _environment(device: str, threads: int) -> dict[str, Any]:
    return environment.describe(torch.device(device))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(spec: RunSpec, machine: Machine) -> Run:
    """Train once. A run that diverges ends early and is a result like any other."""
    start = time.perf_counter()
    with threads(machine.threads):
        problem = build(spec, machine)
        optimizer = make_optimizer(spec, problem)
        training = Training(problem, optimizer, spec, machine.micro_batch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            training.run()
        described = _environment(machine.device, machine.threads)
    skipped = getattr(optimizer, "skipped_steps", None)
    return {
        "spec": spec.as_json(),
        "status": "finished" if training.diverged_at is None else "diverged",
        "diverged_at": training.diverged_at,
        "curve": training.curve,
        "telemetry": training.telemetry,
        "skipped_steps": None if skipped is None else int(skipped),
        **identity(problem),
        "seconds": round(time.perf_counter() - start, 3),
        "command": list(machine.command),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "environment": described,
    }


IDENTITY = ("metric", "steps", "parameters", "version", "data")


def identity(problem: Problem) -> dict[str, Any]:
    """The facts on which runs of one task, scale and seed must agree."""
    values = (
        problem.metric,
        problem.steps,
        sum(p.numel() for p in problem.model.parameters()),
        problem.version,
        problem.checksum(),
    )
    return dict(zip(IDENTITY, values, strict=True))


def make_optimizer(spec: RunSpec, problem: Problem) -> Optimizer:
    """The spec's optimizer of the problem's model."""
    options = dict(spec.options)
    given = options.get("loss_floor", "0")
    if given == KNOWN_FLOOR and not problem.loss_floor:
        raise BenchError(f"{spec.task} knows no loss floor but 0: give --loss-floor a number")
    cap = options.get("step_cap")
    aim = {
        "loss_target": float(options.get("loss_target", "0")),
        "step_cap": spec.lr if cap == SWEPT_CAP else float(cap or "0"),
    }
    optimizer = optimizers.make(
        spec.optimizer,
        problem.model,
        spec.lr,
        spec.betas or problem.betas,
        spec.weight_decay,
        problem.loss_floor if given == KNOWN_FLOOR else float(given),
        optimizers.storage(options.get("state"), options.get("rounding")),
        {key: value for key, value in aim.items() if value},
    )
    if optimizers.find(spec.optimizer).own_schedule:
        for group in optimizer.param_groups:
            group["warmup_steps"] = round(WARMUP * problem.steps)
    return optimizer


def build(spec: RunSpec, machine: Machine) -> Problem:
    """The task's problem, seeded, on its device."""
    torch.manual_seed(spec.seed)
    setup = Setup(
        machine.data_dir,
        spec.seed,
        Scale.parse(spec.scale),
        dict(spec.options),
        machine.loader_workers,
    )
    problem = find_task(spec.task)(setup)
    if not isinstance(problem, Problem):
        raise BenchError(
            f"the task {spec.task} returned {type(problem).__name__}; it should return a problem, "
            "such as ngn_bench.lab.Classification"
        )
    problem.model.to(machine.device)
    if problem.channels_last and problem.device.type == "cpu":
        problem.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if (dtype := setup.options.get("dtype")) is not None:
        problem.autocast = torch.bfloat16
        problem.model.to(PARAMETERS[dtype])
    if "steps" in setup.options:
        problem.steps = int(setup.options["steps"])
    if "schedule" in setup.options:
        problem.schedule = SCHEDULES[setup.options["schedule"]]
    return problem


def _spread(count: int, steps: int) -> set[int]:
    """About `count` steps, evenly spread, the last one included."""
    count = min(count, steps)
    return {round(steps * (k + 1) / count) for k in range(count)}


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: a number that overflowed is recorded as missing."""
    return value if value is not None and math.isfinite(value) else None


class Training:
    """The training loop and what it records.

    `curve` holds, per evaluation, the mean training loss since the last one and the held-out loss
    and score. `telemetry` holds, per sample, the batch's loss, the step size γ, and for each
    watched parameter the median and the mean of γ/D and the norm of the update. (The paper plots
    the mean, which in a network with ReLUs is decided by the few coordinates that hardly ever see a
    gradient.)
    """

    def __init__(
        self, problem: Problem, optimizer: Optimizer, spec: RunSpec, micro_batch: int | None
    ) -> None:
        self.problem = problem
        self.optimizer = optimizer
        self.spec = spec
        self.micro_batch = micro_batch
        self.step = 0
        self.diverged_at: int | None = None
        self.curve: list[dict[str, float | int]] = []
        named = dict(problem.model.named_parameters())
        missing = [name for name in problem.watch if name not in named]
        if missing:
            raise ValueError(f"the task watches {missing}, which the model does not have")
        self.watched = {name: named[name] for name in problem.watch}
        self.telemetry: dict[str, Any] = {
            "step": [],
            "loss": [],
            "step_size": [],
            "layers": {
                name: {"step_size": [], "step_size_mean": [], "update": []} for name in self.watched
            },
        }

    def run(self) -> None:
        """Train to the end, or until a number overflows."""
        problem = self.problem
        samples = _spread(SAMPLES, problem.steps) | set(range(1, EARLY + 1))
        evaluations = _spread(problem.evaluations, problem.steps)
        batches = problem.batches(torch.Generator().manual_seed(self.spec.seed))
        losses: list[float] = []
        scheduled = not optimizers.find(self.spec.optimizer).own_schedule
        problem.model.train()
        for self.step in range(1, problem.steps + 1):
            for group in self.optimizer.param_groups if scheduled else ():
                lr = problem.schedule(self.spec.lr, self.step, problem.steps)
                group["lr"] = lr * group.get("lr_factor", 1.0)
            loss = self.backward(next(batches))
            losses.append(float(loss))
            healthy = math.isfinite(losses[-1]) and self.update(loss, self.step in samples)
            if healthy and self.step in evaluations:
                healthy = self.evaluate(losses)
            if not healthy:
                self.diverged_at = self.step
                return

    def backward(self, batch: Batch) -> Tensor:
        """Gradients and loss of a batch, in micro-batches if `--micro-batch` is given, then clipped."""
        problem = self.problem
        batch = tuple(part.to(problem.device) for part in batch)
        size = self.micro_batch or len(batch[0])
        pieces = list(zip(*(part.split(size) for part in batch), strict=True))
        self.optimizer.zero_grad()
        total = torch.zeros((), device=problem.device)
        for piece in pieces:
            share = len(piece[0]) / len(batch[0])
            with self.autocast():
                loss = problem.loss(piece) * share if len(pieces) > 1 else problem.loss(piece)
            loss.backward()
            total += loss.detach()
        if problem.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(problem.model.parameters(), problem.max_grad_norm)
        return total

    def autocast(self) -> torch.autocast:
        dtype = self.problem.autocast
        return torch.autocast(self.problem.device.type, dtype=dtype, enabled=dtype is not None)

    def update(self, loss: Tensor, sample: bool) -> bool:
        """The optimizer's step; on a sample, also what it did. False if the step overflowed."""
        before = {name: p.detach().clone() for name, p in self.watched.items()} if sample else {}
        optimizers.observe(self.optimizer, sample)
        try:
            optimizers.step(self.spec.optimizer, self.optimizer, loss)
        except ArithmeticError:
            return False
        if sample:
            self.sample(float(loss), before)
        return True

    def sample(self, loss: float, before: dict[str, Tensor]) -> None:
        """Add the last step's loss and sizes to the telemetry."""
        self.telemetry["step"].append(self.step)
        self.telemetry["loss"].append(loss)
        self.telemetry["step_size"].append(_finite(optimizers.step_size(self.optimizer)))
        for name, p in self.watched.items():
            sizes = optimizers.coordinate_step_sizes(self.spec.optimizer, self.optimizer, p)
            layer = self.telemetry["layers"][name]
            for key, pick in (("step_size", torch.median), ("step_size_mean", torch.mean)):
                layer[key].append(None if sizes is None else _finite(float(pick(sizes))))
            layer["update"].append(_finite(float((p.detach() - before[name]).norm())))

    def evaluate(self, losses: list[float]) -> bool:
        """Note a point of the curve; False if the model has become useless."""
        self.problem.model.eval()
        optimizers.set_training(self.optimizer, False)
        with torch.no_grad(), self.autocast():
            held_out = self.problem.evaluate()
        optimizers.set_training(self.optimizer, True)
        self.problem.model.train()
        if not all(map(math.isfinite, held_out)):
            return False
        point = {"step": self.step, "train_loss": sum(losses) / len(losses)}
        self.curve.append(point | {"loss": held_out.loss, "score": held_out.score})
        losses.clear()
        return True
