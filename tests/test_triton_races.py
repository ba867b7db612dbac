"""The compiled GPU kernels have no data race, and would not get one unseen.

The simulator checks every launch of every test for races. Here are the kernels in all variants and
in several orders of blocks, and kernels that someone has broken, which must be found out.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from algorithms import (
    ALGORITHMS,
    DIRECTED,
    EVERY,
    NGNM,
    TWO_GROUPS,
    Algorithm,
    DecNGNMDv1,
    NGNMDv1,
    NGNMDv1W,
    NGNMDv2,
    NGNMuon,
)
from helpers import params_of, random_columns, random_gradients, replace_triton
from steps import train
from torch import Tensor

from ngn_kernels import SkippedStepWarning
from ngn_kernels.rules import RULES

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("these tests compile, the interpreter does not", allow_module_level=True)
pytest.importorskip("triton")

import triton
import triton.language as tl
from ngn_bench.gpu.triton_report import STORAGE, narrow_variants, variants
from ptxsim import DataRace, Kernel, SimulatedGPU, launch
from ptxsim.backend import SimulatedBackend

from ngn_kernels.backends.triton import constants
from ngn_kernels.backends.triton import kernels as triton_kernels

# Two chunks each; the second one ends in the middle of a vector.
SHAPES = ([(2100,)], [(2051,)])
SOURCE = Path(triton_kernels.__file__).read_text()


class WatchedBackend(SimulatedBackend):
    """Notes which variants of the kernels were launched."""

    def __init__(self, gpu: SimulatedGPU, kernels: Any) -> None:
        super().__init__(gpu, kernels)
        self.launched: set[tuple[str, ...]] = set()

    def launch(self, prepared: Any, name: str, rule: Any, *rest: Any) -> None:
        self.launched.add((name, *map(str, constants(name, rule, prepared.key).values())))
        super().launch(prepared, name, rule, *rest)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WatchedBackend]]:
    """Makes the simulated GPU that stands in for a real one, with the kernels of a module."""
    gpu = SimulatedGPU()

    def make(kernels: Any = triton_kernels) -> WatchedBackend:
        backend = WatchedBackend(gpu, kernels)
        replace_triton(monkeypatch, backend)
        return backend

    with gpu.active():
        yield make


def build(algorithm: Algorithm, **options: Any) -> Any:
    return algorithm.build(random_columns(SHAPES), backend="triton", **options)


# The kernels as they are


@EVERY
@pytest.mark.parametrize(("order", "seed"), [("reversed", 0), ("interleaved", 1), ("random", 2)])
def test_no_race_in_any_order(algorithm: Algorithm, order: str, seed: int, start: Any) -> None:
    """Two buckets, clipping, and a step that is skipped or leaves an element as it was."""
    gpu = start().gpu
    gpu.order, gpu.seed = order, seed
    columns = [random_columns([s], d)[0] for s, d in zip(SHAPES, STORAGE, strict=False)]
    optimizer = algorithm.build(columns, backend="triton", max_grad_norm=1.0)
    train(optimizer, 0)
    random_gradients(params_of(optimizer), seed=1)
    columns[1][0].grad[2050] = float("inf")  # type: ignore[index]
    with pytest.warns(SkippedStepWarning):
        optimizer.step(loss=1.0)
    assert int(optimizer.skipped_steps) == 1
    assert {launched.blocks for launched in gpu.launches} == {2}


def test_no_race_in_elements_that_are_kept(start: Any) -> None:
    """All blocks report at once, and the last one takes the report back."""
    gpu = start().gpu
    gpu.order = "interleaved"
    optimizer = build(NGNMDv2)
    random_gradients(params_of(optimizer), seed=0)
    for p in params_of(optimizer):
        p.grad[::1000] = float("nan")
    with pytest.warns(SkippedStepWarning):
        optimizer.step(loss=1.0)
    assert int(optimizer.skipped_steps) == 1


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch ties the two dtypes")
def test_no_race_in_any_variant(start: Any) -> None:
    backend = start()
    each = [a for a in ALGORITHMS if a not in (DecNGNMDv1, NGNMuon)] + [DIRECTED]
    for algorithm, beta1, param, grad in product(each, (0.9, 0.0), STORAGE, STORAGE):
        # A rule without momentum is one variant; DecNGNMDv1 compiles to what NGNMDv1 does.
        if algorithm.momentum or beta1:
            hypers = [hyper._replace(beta1=beta1) for hyper in TWO_GROUPS]
            columns = random_columns(SHAPES, param)
            train(algorithm.build(columns, hypers, backend="triton"), 0, dtype=grad)
    for algorithm in (NGNM, NGNMDv1, NGNMDv2, DIRECTED):
        columns = random_columns(SHAPES)
        train(algorithm.build(columns, backend="triton", decay_form="adamw"), 0)
    wanted = {(v.kernel, *map(str, v.constants.values())) for v in variants()}
    assert backend.launched == wanted


def test_no_race_in_narrow_numbers(start: Any) -> None:
    """Threads of a warp share a scale: one reads it from memory, and the same one writes it."""
    backend = start()
    backend.gpu.order = "interleaved"
    wanted = set()
    for variant in narrow_variants():
        wanted.add((variant.kernel, *map(str, variant.constants.values())))
        names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
        state = tuple(names.get(dtype, "8bit") for dtype in (variant.m, variant.v))
        rule = replace(variant.rule, adamw_decay=False)
        alike = [a for a in ALGORITHMS if RULES[a.rule_name] == rule]
        algorithm = DIRECTED if rule.directed else alike[0]
        columns = random_columns(([(4100,)], [(4161,)]), variant.param)
        form = "adamw" if variant.rule.adamw_decay else "paper"
        options = {"state": state, "rounding": variant.rounding, "decay_form": form}
        train(algorithm.build(columns, backend="triton", **options), 0)
    assert wanted <= backend.launched


# Broken kernels: a source that was changed is compiled like any other


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., ModuleType]:
    """The module of kernels with a part of one of them replaced."""

    def make(kernel: str, old: str, new: str) -> ModuleType:
        begin = SOURCE.index(f"\ndef {kernel}(")
        end = SOURCE.find("\n@", begin)
        body = SOURCE[begin : end if end > 0 else None]
        assert body.count(old) == 1, f"{old!r} is not in {kernel}"
        file = tmp_path / "triton_kernels.py"
        file.write_text(SOURCE[:begin] + body.replace(old, new) + SOURCE[begin + len(body) :])
        spec = importlib.util.spec_from_file_location("ngn_kernels.backends.triton.changed", file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return make


TICKET = 'tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu")'


@pytest.mark.parametrize(
    ("kernel", "algorithm", "place"),
    [
        ("reduce", NGNM, "partials"),
        ("reduce", NGNMDv1W, "partials"),
        # The last block advances step counts, which rules with RMS read.
        ("apply", NGNMDv1, "step"),
        ("apply", NGNMDv2, "step"),
        ("apply", NGNM, "ticket"),
    ],
    ids=str,
)
def test_a_relaxed_ticket_is_a_race(
    kernel: str, algorithm: Algorithm, place: str, start: Any, changed: Any
) -> None:
    start(changed(kernel, TICKET, TICKET.replace("acq_rel", "relaxed")))
    with pytest.raises(DataRace, match=rf"^{kernel}: (?s:.*)from the start of {place}") as race:
        train(build(algorithm), 0)
    assert "acq_rel" not in str(race.value)


@pytest.mark.parametrize(("kernel", "algorithm"), [("reduce", NGNM), ("apply", NGNMDv2)], ids=str)
def test_a_missing_barrier_is_a_race(
    kernel: str, algorithm: Algorithm, start: Any, changed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the source compiles to the very same instructions.

    To these Triton 3.7.1 does: it puts a barrier there by itself, because the ticket goes through
    shared memory. That barrier is taken out by test_every_barrier_is_needed.
    """
    ran: dict[str, list[str]] = {}

    def note(compiled: Kernel, *args: Any, **options: Any) -> Any:
        ran[compiled.name] = [instruction.text for instruction in compiled.instructions]
        return launch(compiled, *args, **options)

    monkeypatch.setattr("ptxsim.driver.launch", note)
    start()
    train(build(algorithm), 0)
    as_they_are = ran.copy()
    start(changed(kernel, "    tl.debug_barrier()\n", ""))
    try:
        train(build(algorithm), 0)
    except DataRace as race:
        assert str(race).startswith(f"{kernel}: ")
    else:
        assert ran[kernel] == as_they_are[kernel]


# Broken kernels: PTX that was changed


@pytest.mark.parametrize("how", ["gpu.relaxed", "gpu.acquire", "gpu.release", "cta.acq_rel"])
@pytest.mark.parametrize("algorithm", [NGNM, NGNMDv1, NGNMDv2], ids=str)
def test_any_weaker_ticket_is_a_race(
    algorithm: Algorithm, how: str, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    weakened = []

    def weaken(compiled: Kernel, *args: Any, **options: Any) -> Any:
        assert compiled.ptx.count("atom.global.gpu.acq_rel") == 1
        weak = Kernel(compiled.ptx.replace("atom.global.gpu.acq_rel", f"atom.global.{how}"))
        with pytest.raises(DataRace):
            launch(weak, *args, **options)
        weakened.append(compiled.name)
        return launch(compiled, *args, **options)

    monkeypatch.setattr("ptxsim.driver.launch", weaken)
    train(build(algorithm), 0)
    assert set(weakened) == ({"apply"} if algorithm.coordinate else {"reduce", "apply"})


@pytest.mark.parametrize("algorithm", [NGNM, NGNMDv1W, NGNMDv2], ids=str)
def test_every_barrier_is_needed(
    algorithm: Algorithm, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever one is taken out, that is a race; nothing that a launch leaves behind hides it."""
    start()
    removed = []

    def with_one_less(compiled: Kernel, *args: Any, **options: Any) -> Any:
        for barrier in re.finditer(r"bar\.sync\s+0;", compiled.ptx):
            less = compiled.ptx[: barrier.start()] + compiled.ptx[barrier.end() :]
            with pytest.raises(DataRace):
                launch(Kernel(less), *args, **options)
            removed.append(compiled.name)
        return launch(compiled, *args, **options)

    monkeypatch.setattr("ptxsim.driver.launch", with_one_less)
    train(build(algorithm), 0)
    assert removed.count("apply") >= 7
    assert algorithm.coordinate or removed.count("reduce") >= 7


# What Triton makes of a barrier where it has no use for one of its own


@triton.jit
def publish(data, ticket, total, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    """Every thread stores a number of its own; the last block adds them all."""
    o = tl.arange(0, BLOCK)
    tl.store(data + tl.program_id(0) * BLOCK + o, o.to(tl.float32))
    if BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == 1:
        tl.store(total, tl.sum(tl.load(data + o)) + tl.sum(tl.load(data + BLOCK + o)))


@pytest.mark.parametrize("barrier", [True, False])
def test_one_thread_takes_the_ticket_for_all(barrier: bool) -> None:
    data, total, ticket = torch.zeros(512), torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    with SimulatedGPU().active() as gpu:
        for name, tensor in {"data": data, "ticket": ticket, "total": total}.items():
            gpu.memory.register(tensor, name)
        arguments: dict[str, Any] = {"BLOCK": 256, "BARRIER": barrier, "num_warps": 8}
        if not barrier:
            with pytest.raises(DataRace, match="from the start of data"):
                publish[(2,)](data, ticket, total, **arguments)
            return
        publish[(2,)](data, ticket, total, **arguments)
    assert float(total) == 255 * 256
