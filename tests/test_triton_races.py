"""Triton's kernels have no data race in any variant, and would not get one unseen.

Here is what only Triton has: variants that are compiled at the first step, and a source that can be changed.
"""

from __future__ import annotations

import importlib.util
import os
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
    NGNM,
    TWO_GROUPS,
    Algorithm,
    DecNGNMDv1,
    NGNMDv1,
    NGNMDv1W,
    NGNMDv2,
    NGNMuon,
)
from helpers import random_columns, replace_backend
from steps import train
from torch import Tensor

from ngn_kernels.rules import RULES

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("these tests compile, the interpreter does not", allow_module_level=True)
pytest.importorskip("triton")

import triton
import triton.language as tl
from ngn_bench.gpu.triton_report import STORAGE, narrow_variants, variants
from ptxsim import DataRace, Kernel, launch
from ptxsim.backend import SimulatedBackend
from ptxsim.driver import SimulatedGPU

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
        replace_backend(monkeypatch, backend, "triton")
        return backend

    with gpu.active():
        yield make


def build(algorithm: Algorithm, **options: Any) -> Any:
    return algorithm.build(random_columns(SHAPES), backend="triton", **options)


# The kernels as they are


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
    for algorithm in (NGNMuon, DIRECTED):
        ahead = {"decay_form": "adamw", "nesterov": True}
        train(algorithm.build(random_columns(SHAPES), backend="triton", **ahead), 0)
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
        rule = replace(variant.rule, adamw_decay=False, nesterov=False)
        alike = [a for a in ALGORITHMS if RULES[a.rule_name] == rule]
        algorithm = DIRECTED if rule.directed else alike[-1 if variant.rule.nesterov else 0]
        columns = random_columns(([(4100,)], [(4161,)]), variant.param)
        form = "adamw" if variant.rule.adamw_decay else "paper"
        options = {"state": state, "rounding": variant.rounding, "decay_form": form}
        if variant.rule.nesterov:
            options["nesterov"] = True
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

    monkeypatch.setattr("ptxsim.traffic.launch", note)
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
