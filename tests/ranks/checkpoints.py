"""Training that is saved on some ranks and goes on on others."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from ranks.layouts import LAYOUTS, STEPS, Run, Trained, algorithm_named, contents, full, whole

Options = dict[str, Any]
WIDE: Options = {"dtype": torch.float64}


def run_of(layout: str, algorithm: str, options: Options) -> Run:
    if layout == "whole":
        return whole(algorithm_named(algorithm), reduce_group=None, **options)
    return LAYOUTS[layout][0](algorithm_named(algorithm), **options)


def numbers(run: Run) -> list[dict[str, Tensor]]:
    """The whole state of each parameter, as any layout would save it."""
    saved = run.optimizer.state_dict()["state"]
    return [{key: full(value) for key, value in saved[i].items()} for i in sorted(saved)]


def trained(run: Run, steps: range) -> Trained:
    seen = Trained([], [])
    for k in steps:
        run.step(k)
        seen.seen.append(run.whole())
        seen.contents.append(contents(run))
    return seen


def save(
    layout: str, algorithm: str, flat: bool, folder: str, options: Options = WIDE
) -> list[dict[str, Tensor]]:
    """What was saved, as numbers."""
    run = run_of(layout, algorithm, options)
    trained(run, range(STEPS))
    model, optimizer = get_state_dict(run.model, run.optimizer, options=flattened(flat))
    state = {"model": model, "optimizer": optimizer}
    dcp.save(state, checkpoint_id=Path(folder), no_dist=layout == "whole")
    return numbers(run)


def resume(
    layout: str, algorithm: str, flat: bool, folder: str, options: Options = WIDE
) -> tuple[list[dict[str, Tensor]], Trained]:
    """What was loaded, as numbers, and the steps after those that were saved."""
    run = run_of(layout, algorithm, options)
    model, optimizer = get_state_dict(run.model, run.optimizer, options=flattened(flat))
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=Path(folder), no_dist=layout == "whole")
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=flattened(flat),
    )
    return numbers(run), trained(run, range(STEPS, 2 * STEPS))


def flattened(flat: bool) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=flat)


def uninterrupted(layout: str, algorithm: str, options: Options = WIDE) -> Trained:
    seen = trained(run_of(layout, algorithm, options), range(2 * STEPS))
    return Trained(seen.seen[STEPS:], seen.contents[STEPS:])


def gathered(layout: str, algorithm: str, options: Options) -> tuple[Trained, Trained]:
    """A run that goes on, and one that goes on from all of its state on the first rank."""
    gather = StateDictOptions(full_state_dict=True)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    first, second = (run_of(layout, algorithm, options) for _ in range(2))
    trained(first, range(STEPS))
    model, optimizer = get_state_dict(first.model, first.optimizer, options=gather)
    if dist.get_rank() > 0:
        model, optimizer = {}, {}
    set_model_state_dict(second.model, model, options=spread)
    set_optimizer_state_dict(second.model, second.optimizer, optimizer, options=spread)
    later = range(STEPS, 2 * STEPS)
    return trained(first, later), trained(second, later)


def zero_consolidation(algorithm: str, options: Options = WIDE) -> tuple[Trained, Trained]:
    """ZeroRedundancyOptimizer gathers its state on one rank; every rank loads it."""
    first, second = (run_of("zero1", algorithm, options) for _ in range(2))
    trained(first, range(STEPS))
    first.optimizer.consolidate_state_dict(to=0)
    saved: list[Any] = [first.optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(deepcopy(saved[0]))  # it keeps tensors that are on the device
    later = range(STEPS, 2 * STEPS)
    return trained(first, later), trained(second, later)
