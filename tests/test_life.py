"""Short lives of optimizers, written by hypothesis; `make soak` lives many more of them."""

from __future__ import annotations

import warnings
from typing import Any

from conftest import runnable_backends
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from life import EVENTS, Life

from ngn_kernels import SkippedStepWarning

SEEDS = st.integers(0, 2**32 - 1)


class Machine(RuleBasedStateMachine):
    """A rule for each event."""

    @initialize(seed=SEEDS)
    def begin(self, seed: int) -> None:
        self.life = Life(seed, tuple(runnable_backends()))


def rule_of(name: str) -> Any:
    @rule(seed=SEEDS)
    def happens(self: Machine, seed: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", SkippedStepWarning)
            self.life.live(name, seed)

    return happens


for name in EVENTS:
    setattr(Machine, name.replace(" ", "_"), rule_of(name))


def test_a_life_at_random() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=60, stateful_step_count=25, deadline=None)
    )


def test_every_event_happens() -> None:
    """To some optimizer at least, so that no event is there for show."""
    missing = set(EVENTS)
    for seed in range(40):
        life = Life(seed, tuple(name for name in runnable_backends() if name != "triton"))
        life.live("steps", seed)
        with warnings.catch_warnings():
            warnings.simplefilter("error", SkippedStepWarning)
            missing = {name for name in missing if not life.live(name, seed)}
        if not missing:
            break
    assert not missing
