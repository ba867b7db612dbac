"""`ngn-bench ranks`: a step on several local processes, NGN-MDv1 and torch's fused AdamW."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import BenchError
from ..report import Progress, Table, columns, duration, size, spread_text

SIDE = 32  # every rank has matrices of 32 × 32, whatever the layout
WARM_UP = 3
MIN_ROUNDS = 5
LEARNING_RATE = 1e-3
TIMEOUT = timedelta(seconds=120)
# What a step may call, with the position of what this rank sends.
COLLECTIVES = {"all_gather": 1, "all_gather_into_tensor": 1, "all_reduce": 0}
LAYOUTS = {"alone": "alone", "ddp": "DDP", "fsdp2": "FSDP2"}
OPTIMIZERS = ("NGN-MDv1", "AdamW · fused")
CAPTION = (
    "Each process has {tensors} matrices of {side} × {side}: whole ones alone and under DDP, its "
    "shard of larger ones under FSDP2. All rows of a number of processes take turns in the same "
    "processes, {threads} thread(s) each. step(): median on rank 0, after a barrier; outside: the "
    "part of it that is not in a collective. sent: by a rank in a step, and in how many collectives. "
    "vs AdamW: step() over that of AdamW in the same layout. vs alone: the part outside, over that "
    "of each process alone. same bits: parameters on all ranks under DDP, the step size under FSDP2."
)


@dataclass(frozen=True)
class RanksSettings:
    ranks: tuple[int, ...]
    tensors: int
    seconds: float
    threads: int = 1


@dataclass
class Traffic:
    """What a rank sent in the collectives of a step, and how long these took."""

    seconds: float = 0.0
    count: int = 0
    bytes: int = 0


class Matrices(nn.Module):
    """Many small matrices; its loss touches each of them once."""

    def __init__(self, tensors: int, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(rows, SIDE) for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        losses = [(weight @ x - 1).square().mean() for weight in self.weights]
        return torch.stack(losses).mean()


@dataclass
class Trained:
    """A model in one layout, its optimizer, and what their steps took."""

    layout: str
    optimizer_name: str
    model: nn.Module
    optimizer: Optimizer
    step: Callable[[Tensor], object]
    seconds: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)

    def iterate(self, x: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.model(x)
        loss.backward()
        if dist.is_initialized():
            dist.barrier()
        with timed_collectives() as self.traffic:
            start = time.perf_counter()
            self.step(loss)
            seconds = time.perf_counter() - start
        self.seconds.append(seconds)
        self.outside.append(seconds - self.traffic.seconds)


@contextlib.contextmanager
def timed_collectives() -> Iterator[Traffic]:
    """Time the collectives that are called inside, and count them and their bytes."""
    traffic = Traffic()
    original = {name: getattr(dist, name) for name in COLLECTIVES}

    def timed(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original[name](*args, **kwargs)
            finally:
                traffic.seconds += time.perf_counter() - start
                sent = args[COLLECTIVES[name]]
                traffic.count += 1
                traffic.bytes += sent.numel() * sent.element_size()

        return call

    for name in COLLECTIVES:
        setattr(dist, name, timed(name))
    try:
        yield traffic
    finally:
        for name, function in original.items():
            setattr(dist, name, function)


def make_model(layout: str, tensors: int) -> nn.Module:
    if layout == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        model = Matrices(tensors, SIDE * dist.get_world_size())
        fully_shard(model)
        return model
    model = Matrices(tensors, SIDE)
    return nn.parallel.DistributedDataParallel(model) if layout == "ddp" else model


def make_trained(layout: str, name: str, tensors: int) -> Trained:
    from ngn_kernels import NGNMDv1

    model = make_model(layout, tensors)
    optimizer: Any
    if name == "NGN-MDv1":
        group = None if layout == "alone" else "auto"
        optimizer = NGNMDv1(model.parameters(), lr=LEARNING_RATE, reduce_group=group)
        return Trained(layout, name, model, optimizer, lambda loss: optimizer.step(loss=loss))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    return Trained(layout, name, model, optimizer, lambda loss: optimizer.step())


def count_collectives(trained: Trained, x: Tensor) -> int:
    """The collectives of a step as torch counts them, which are more than those of `COLLECTIVES`."""
    from torch.distributed.tensor.debug import CommDebugMode

    trained.optimizer.zero_grad()
    loss = trained.model(x)
    loss.backward()
    with CommDebugMode() as counted:
        trained.step(loss)
    return int(counted.get_total_counts())


def same_bits(trained: Trained) -> bool | None:
    """Whether all ranks have the same numbers; None where none of them should."""
    if trained.layout == "alone":
        return None
    optimizer: Any = trained.optimizer
    if trained.layout == "ddp":
        tensors = [p.detach() for p in trained.model.parameters()]
    elif trained.optimizer_name == "NGN-MDv1":
        tensors = [optimizer.shrink]
    else:
        return None
    digest = hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).digest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    return len(set(digests)) == 1


def _continues(rounds: int, deadline: float) -> bool:
    """Rank 0's decision, so that all ranks stop after the same round."""
    more = torch.tensor([rounds < MIN_ROUNDS or time.perf_counter() < deadline])
    if dist.is_initialized():
        dist.broadcast(more, 0)
    return bool(more)


def measure_here(tensors: int, seconds: float) -> list[dict[str, Any]]:
    """The rows of this number of processes; every one of them calls this."""
    group = dist.is_initialized()
    ranks = dist.get_world_size() if group else 1
    layouts = list(LAYOUTS) if group else ["alone"]
    all_trained = [make_trained(lay, name, tensors) for lay in layouts for name in OPTIMIZERS]
    generator = torch.Generator().manual_seed(1 + (dist.get_rank() if group else 0))
    for _ in range(WARM_UP):
        for trained in all_trained:
            trained.iterate(torch.randn(SIDE, generator=generator))
    for trained in all_trained:
        trained.seconds.clear()
        trained.outside.clear()
    gc.disable()
    rounds, deadline = 0, time.perf_counter() + seconds
    while _continues(rounds, deadline):
        for trained in all_trained if rounds % 2 == 0 else reversed(all_trained):
            trained.iterate(torch.randn(SIDE, generator=generator))
        rounds += 1
    gc.enable()
    return [_row(ranks, trained, torch.randn(SIDE)) for trained in all_trained]


def _row(ranks: int, trained: Trained, x: Tensor) -> dict[str, Any]:
    name = f"{trained.optimizer_name} ({LAYOUTS[trained.layout]}, {processes_text(ranks)})"
    if ranks > 1:
        seen = count_collectives(trained, x)
        if seen != trained.traffic.count:
            raise BenchError(f"{name}: {seen} collectives in a step, timed {trained.traffic.count}")
    if getattr(trained.optimizer, "skipped_steps", 0):
        raise BenchError(f"{name} skipped steps, so its times mean nothing")
    return {
        "ranks": ranks,
        "layout": trained.layout,
        "optimizer": trained.optimizer_name,
        "time": _summary(trained.seconds),
        "outside": _summary(trained.outside),
        "collectives": trained.traffic.count,
        "bytes": trained.traffic.bytes,
        "same_bits": same_bits(trained),
    }


def _summary(seconds: Sequence[float]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    numbers = {"median": median, "low": low, "high": high, "fastest": min(seconds)}
    return {**numbers, "samples": len(seconds)}


def _run_rank(rank: int, ranks: int, settings: RanksSettings, seconds: float, folder: str) -> None:
    torch.set_num_threads(settings.threads)
    if ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=ranks,
            timeout=TIMEOUT,
        )
    rows = measure_here(settings.tensors, seconds)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    if ranks > 1:
        dist.barrier()
        os._exit(0)  # gloo's threads may abort an interpreter that ends while they drop tensors


def processes_text(ranks: int) -> str:
    return f"{ranks} process{'es' * (ranks > 1)}"


def run_ranks(settings: RanksSettings, progress: Progress) -> list[dict[str, Any]]:
    """Rows for each number of processes, with their ratios."""
    import torch.multiprocessing as mp

    if not dist.is_available() or not dist.is_gloo_available():
        raise BenchError("ngn-bench ranks needs a torch with torch.distributed and gloo")
    os.environ.setdefault("GLOO_LOG_LEVEL", "ERROR")
    rows: list[dict[str, Any]] = []
    seconds = settings.seconds / len(settings.ranks)
    for index, ranks in enumerate(settings.ranks):
        progress(index / len(settings.ranks), processes_text(ranks))
        with tempfile.TemporaryDirectory() as folder:
            arguments = (ranks, settings, seconds, folder)
            processes = mp.start_processes(_run_rank, arguments, ranks, join=False)
            try:
                while not processes.join(1.0):
                    pass
            except mp.ProcessRaisedException as error:
                raise BenchError(f"with {processes_text(ranks)}: {str(error).strip()}") from None
            finally:
                for process in processes.processes:
                    process.kill()
            rows += json.loads(Path(folder, "rows.json").read_text())
    progress(1.0, "")
    return with_ratios(rows)


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row's time over AdamW's, and its time outside of collectives over that alone."""

    def median(which: str, row: dict[str, Any], **other: str) -> float:
        wanted = {**{key: row[key] for key in ("ranks", "layout", "optimizer")}, **other}
        (found,) = [r for r in rows if all(r[key] == value for key, value in wanted.items())]
        return float(found[which]["median"])

    return [
        {
            **row,
            "ratio": median("time", row) / median("time", row, optimizer=OPTIMIZERS[1]),
            "outside_ratio": median("outside", row) / median("outside", row, layout="alone"),
        }
        for row in rows
    ]


def ranks_table(record: dict[str, Any]) -> Table:
    headings = columns(
        *("ranks", "layout", "optimizer", "step()", "±", "fastest", "outside", "sent"),
        *("vs AdamW", "vs alone", "same bits"),
        text=(1, 2),
    )
    words = {True: "yes", False: "NO", None: "–"}
    rows = [
        [
            str(row["ranks"]),
            LAYOUTS[row["layout"]],
            row["optimizer"],
            duration(row["time"]["median"]),
            spread_text(row["time"]),
            duration(row["time"]["fastest"]),
            duration(row["outside"]["median"]),
            f"{size(row['bytes'])} in {row['collectives']}" if row["collectives"] else "–",
            f"{row['ratio']:.2f}×",
            f"{row['outside_ratio']:.2f}×",
            words[row["same_bits"]],
        ]
        for row in record["rows"]
    ]
    caption = CAPTION.format(
        tensors=record["tensors"], side=record["side"], threads=record["threads"]
    )
    return Table("A step on many ranks (gloo, on this machine)", headings, rows, caption)
