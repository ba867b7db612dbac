"""The grid: every algorithm is one point of four independent choices. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cache


class StepSize(Enum):
    """One step size for all parameters, or one for each coordinate."""

    SCALAR = "scalar"
    COORDINATE = "coordinate"


class Preconditioner(Enum):
    """What D is: 1, or eps + the root of the bias-corrected second moment."""

    NONE = "none"
    RMS = "rms"


class Decay(Enum):
    """Where weight decay enters: beside the step, or inside the model that the step minimises."""

    DECOUPLED = "decoupled"
    REGULARISED = "regularised"


@dataclass(frozen=True, eq=False)
class Rule:
    """A point of the grid, compared by identity: each point that is used exists once."""

    momentum: bool
    step_size: StepSize
    preconditioner: Preconditioner
    decay: Decay = Decay.DECOUPLED

    @property
    def coordinate(self) -> bool:
        return self.step_size is StepSize.COORDINATE

    @property
    def rms(self) -> bool:
        return self.preconditioner is Preconditioner.RMS

    @property
    def regularised(self) -> bool:
        return self.decay is Decay.REGULARISED

    @property
    def reduce_reads(self) -> tuple[str, ...]:
        """The columns that its sum is taken over: g, v and x; none where it needs no sum."""
        if self.coordinate:
            return ()
        return _present(g=True, v=self.rms, x=self.regularised)

    @property
    def apply_reads(self) -> tuple[str, ...]:
        """The columns that the update reads: g gradient, v second moment, m momentum, x parameter."""
        return ("g", *self.apply_writes)

    @property
    def apply_writes(self) -> tuple[str, ...]:
        """The columns that the update writes."""
        return _present(v=self.rms, m=self.momentum, x=True)

    @cache  # noqa: B019 (rules are few and live for ever)
    def with_momentum(self, momentum: bool) -> Rule:
        return self if momentum == self.momentum else replace(self, momentum=momentum)

    @cache  # noqa: B019
    def reductions(self, clipping: bool) -> tuple[Rule, ...]:
        """The sums that must be known before the first write, as rules to reduce in this order.

        D depends on the clipped gradient, so RMS rules need the norm before their own sum; the
        norm is what NGN reduces. A scalar rule without RMS gets it from its own reduce. Momentum
        plays no part in a sum, so it is off here and a backend needs no variants for it.
        """
        own = () if self.coordinate else (self.with_momentum(False),)
        return (NORM, *own) if clipping and (self.coordinate or self.rms) else own


def _present(**columns: bool) -> tuple[str, ...]:
    return tuple(name for name, present in columns.items() if present)


NORM = Rule(momentum=False, step_size=StepSize.SCALAR, preconditioner=Preconditioner.NONE)

RULES: dict[str, Rule] = {
    "NGN": NORM,
    "NGNM": Rule(True, StepSize.SCALAR, Preconditioner.NONE),
    "NGND": Rule(False, StepSize.COORDINATE, Preconditioner.NONE),
    "NGND(rms)": Rule(False, StepSize.COORDINATE, Preconditioner.RMS),
    "NGNMDv1": Rule(True, StepSize.SCALAR, Preconditioner.RMS),
    "NGNMDv2": Rule(True, StepSize.COORDINATE, Preconditioner.RMS),
    "DecNGNMDv1": Rule(True, StepSize.SCALAR, Preconditioner.RMS),
    "NGNMDv1W": Rule(True, StepSize.SCALAR, Preconditioner.RMS, Decay.REGULARISED),
}
