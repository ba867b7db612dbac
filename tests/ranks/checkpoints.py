"""Training that is saved on some ranks and goes on on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from ranks.layouts import LAYOUTS, STEPS, algorithm_named, whole


def run_of(layout: str, algorithm: str) -> Any:
    if layout == "whole":
        return whole(algorithm_named(algorithm), reduce_group=None)
    return LAYOUTS[layout][0](algorithm_named(algorithm))


def options(flat: bool) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=flat)


def save(layout: str, algorithm: str, flat: bool, folder: str) -> None:
    run = run_of(layout, algorithm)
    for k in range(STEPS):
        run.step(k)
    model, optimizer = get_state_dict(run.model, run.optimizer, options=options(flat))
    state = {"model": model, "optimizer": optimizer}
    dcp.save(state, checkpoint_id=Path(folder), no_dist=layout == "whole")


def resume(layout: str, algorithm: str, flat: bool, folder: str) -> list[dict[str, Tensor]]:
    """The steps after those that were saved."""
    run = run_of(layout, algorithm)
    model, optimizer = get_state_dict(run.model, run.optimizer, options=options(flat))
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=Path(folder), no_dist=layout == "whole")
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options(flat),
    )
    seen = []
    for k in range(STEPS, 2 * STEPS):
        run.step(k)
        seen.append(run.whole())
    return seen


def uninterrupted(algorithm: str) -> list[dict[str, Tensor]]:
    run = run_of("whole", algorithm)
    seen = []
    for k in range(2 * STEPS):
        run.step(k)
        seen.append(run.whole())
    return seen[STEPS:]


def zero_consolidation(algorithm: str) -> list[dict[str, Tensor]]:
    """ZeroRedundancyOptimizer gathers its state on one rank; every rank loads it."""
    import torch.distributed as dist

    first = LAYOUTS["zero1"][0](algorithm_named(algorithm))
    for k in range(STEPS):
        first.step(k)
    first.optimizer.consolidate_state_dict(to=0)
    saved: list[Any] = [first.optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    second = LAYOUTS["zero1"][0](algorithm_named(algorithm))
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(saved[0])
    seen = []
    for k in range(STEPS, 2 * STEPS):
        second.step(k)
        seen.append(second.whole())
    return seen
