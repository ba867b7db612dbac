"""The compiled kernels of the GPU engines have no data race, and would not get one unseen.

The simulator checks every launch of every test for races. Here are the kernels in several orders of
blocks, and kernels that someone has broken, which must be found out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from algorithms import EVERY, NGNM, Algorithm, NGNMDv1, NGNMDv1W, NGNMDv2
from gpu_engines import EACH_ENGINE, simulated
from helpers import params_of, random_columns, random_gradients
from ptxsim import DataRace, Kernel, launch
from steps import train

from ngn_kernels import SkippedStepWarning

# Two chunks each; the second one ends in the middle of a vector.
SHAPES = ([(2100,)], [(2051,)])
TICKET = re.compile(r"\batom\.[\w.]*acq_rel[\w.]*")


@pytest.fixture(params=EACH_ENGINE)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with simulated(request.param, monkeypatch) as stand_in:
        yield stand_in


def build(gpu: Any, algorithm: Algorithm, **options: Any) -> Any:
    return algorithm.build(random_columns(SHAPES), backend=gpu.name, **options)


def kind_of(kernel: Kernel) -> str:
    return "apply" if "apply" in kernel.name else "reduce"


# The kernels as they are


@EVERY
@pytest.mark.parametrize(("order", "seed"), [("reversed", 0), ("interleaved", 1), ("random", 2)])
def test_no_race_in_any_order(algorithm: Algorithm, order: str, seed: int, gpu: Any) -> None:
    """Two buckets, clipping, and a step that is skipped or leaves an element as it was."""
    gpu.order, gpu.seed = order, seed
    columns = [
        random_columns([s], d)[0]
        for s, d in zip(SHAPES, (torch.float32, torch.bfloat16), strict=True)
    ]
    optimizer = algorithm.build(columns, backend=gpu.name, max_grad_norm=1.0)
    train(optimizer, 0)
    random_gradients(params_of(optimizer), seed=1)
    columns[1][0].grad[2050] = float("inf")  # type: ignore[index]
    with pytest.warns(SkippedStepWarning):
        optimizer.step(loss=1.0)
    assert int(optimizer.skipped_steps) == 1
    assert {launched.blocks for launched in gpu.launches} == {2}


def test_no_race_in_elements_that_are_kept(gpu: Any) -> None:
    """All blocks report at once, and the last one takes the report back."""
    gpu.order = "interleaved"
    optimizer = build(gpu, NGNMDv2)
    random_gradients(params_of(optimizer), seed=0)
    for p in params_of(optimizer):
        p.grad[::1000] = float("nan")
    with pytest.warns(SkippedStepWarning):
        optimizer.step(loss=1.0)
    assert int(optimizer.skipped_steps) == 1


# Broken kernels: PTX that was changed


@pytest.mark.parametrize("how", ["gpu.relaxed", "gpu.acquire", "gpu.release", "cta.acq_rel"])
@pytest.mark.parametrize("algorithm", [NGNM, NGNMDv1, NGNMDv2], ids=str)
def test_any_weaker_ticket_is_a_race(
    algorithm: Algorithm, how: str, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weakened = []

    def weaken(compiled: Kernel, *args: Any, **options: Any) -> Any:
        (ticket,) = TICKET.findall(compiled.ptx)
        scope, order = how.split(".")
        weak = ticket.replace("acq_rel", order).replace("gpu", scope)
        weak = Kernel(compiled.ptx.replace(ticket, weak))
        with pytest.raises(DataRace):
            launch(weak, *args, **options)
        weakened.append(kind_of(compiled))
        return launch(compiled, *args, **options)

    monkeypatch.setattr("ptxsim.traffic.launch", weaken)
    train(build(gpu, algorithm), 0)
    assert set(weakened) == ({"apply"} if algorithm.coordinate else {"reduce", "apply"})


@pytest.mark.parametrize("algorithm", [NGNM, NGNMDv1W, NGNMDv2], ids=str)
def test_every_barrier_is_needed(
    algorithm: Algorithm, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever one is taken out, that is a race; nothing that a launch leaves behind hides it."""
    removed = []

    def with_one_less(compiled: Kernel, *args: Any, **options: Any) -> Any:
        for barrier in re.finditer(r"bar\.sync\s+0;", compiled.ptx):
            less = compiled.ptx[: barrier.start()] + compiled.ptx[barrier.end() :]
            with pytest.raises(DataRace):
                launch(Kernel(less), *args, **options)
            removed.append(kind_of(compiled))
        return launch(compiled, *args, **options)

    monkeypatch.setattr("ptxsim.traffic.launch", with_one_less)
    train(build(gpu, algorithm), 0)
    # Triton's reductions within a block take some more, and its ticket goes through shared memory.
    least = {"cuda": (2, 5), "triton": (7, 7)}[gpu.name]
    assert removed.count("apply") >= least[0]
    assert algorithm.coordinate or removed.count("reduce") >= least[1]
