"""Short randomised runs of optimizers, drawn by hypothesis; `make soak` makes many more of them."""

from __future__ import annotations

import warnings
from typing import Any

from conftest import runnable_backends
from helpers import TIES_GRADIENTS
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from randomised import Run, event

from ngn_kernels import SkippedStepWarning

SEEDS = st.integers(0, 2**32 - 1)


class Machine(RuleBasedStateMachine):
    """A rule for each event."""

    @initialize(seed=SEEDS)
    def begin(self, seed: int) -> None:
        self.run = Run(seed, tuple(runnable_backends()))


def rule_of(name: str) -> Any:
    @rule(seed=SEEDS)
    def happens(self: Machine, seed: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", SkippedStepWarning)
            self.run.happen(name, seed)

    return happens


for name in event.functions:
    setattr(Machine, name.replace(" ", "_"), rule_of(name))


def test_a_randomised_run() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=60, stateful_step_count=25, deadline=None)
    )


def test_every_event_happens() -> None:
    """To some optimizer at least, so that no event is there for show."""
    missing = set(event.functions)
    if TIES_GRADIENTS:
        missing.remove("a gradient of another kind is refused")
    for seed in range(40):
        run = Run(seed, tuple(name for name in runnable_backends() if name != "triton"))
        run.happen("steps", seed)
        with warnings.catch_warnings():
            warnings.simplefilter("error", SkippedStepWarning)
            missing = {name for name in missing if not run.happen(name, seed)}
        if not missing:
            break
    assert not missing
