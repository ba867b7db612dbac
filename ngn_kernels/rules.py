"""The grid: each algorithm is a choice of momentum, step size, preconditioner and decay.

The module imports no torch. Regularised decay is implemented for scalar step sizes with RMS only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .layout import Flag


@dataclass(frozen=True)
class Rule:
    """A point of the grid.

    Attributes:
        momentum: whether the displacement has momentum.
        coordinate: a step size for each coordinate; otherwise one for all parameters together.
        rms: D is eps + the root of the bias-corrected second moment; otherwise 1.
        regularised: weight decay is part of the model that the step minimises; otherwise it is added
            to the displacement.
        adamw_decay: weight decay is taken off the parameter beside the displacement, so that
            momentum does not keep it, and follows gamma, the step size that is taken, not c.
        directed: the direction d that takes the place of g / D is given, in a column of its own.
        nesterov: the parameter moves ahead of the displacement, by beta1 times what this has changed.
    """

    momentum: bool = False
    coordinate: bool = False
    rms: bool = False
    regularised: bool = False
    adamw_decay: bool = False
    directed: bool = False
    nesterov: bool = False

    def has(self, flag: Flag) -> bool:
        chosen: bool = getattr(self, flag.name.lower())
        return chosen

    @property
    def flags(self) -> int:
        """The choices as one number, for C++ and CUDA."""
        return sum(1 << flag for flag in Flag if self.has(flag))

    @property
    def reduce_reads(self) -> tuple[str, ...]:
        """The columns that its sum is taken over: g, d, v and x; none where it needs no sum."""
        if self.coordinate:
            return ()
        return _present(g=True, d=self.directed, v=self.rms, x=self.regularised)

    @property
    def apply_reads(self) -> tuple[str, ...]:
        """The columns that the update reads: g gradient, or d direction, v second moment, m momentum,
        x parameter."""
        return ("d" if self.directed else "g", *self.apply_writes)

    @property
    def apply_writes(self) -> tuple[str, ...]:
        """The columns that the update writes."""
        return _present(v=self.rms, m=self.momentum, x=True)

    @property
    def sums_clipped(self) -> bool:
        """Whether its sum is over clipped gradients, so that their norm is a sum of its own.

        D depends on the clipped gradient, and a rule with given directions shares its sum with one
        that has a D.
        """
        return self.rms or self.directed

    def reductions(self, clipping: bool) -> tuple[Rule, ...]:
        """The sums that must be known before the first write, as rules to reduce in this order.

        The norm is what NGN reduces. A scalar rule whose sum is over unclipped gradients gets it from
        its own reduce. Momentum plays no part in a sum, so it is off here and a backend needs no
        variants for it.
        """
        plain = replace(self, momentum=False, adamw_decay=False, nesterov=False)
        own = () if self.coordinate else (plain,)
        return (NORM, *own) if clipping and (self.coordinate or self.sums_clipped) else own

    def with_directions(self) -> Rule:
        """That of parameters whose directions are given, beside others of the same optimizer."""
        return replace(self, rms=False, directed=True)


def _present(**columns: bool) -> tuple[str, ...]:
    return tuple(name for name, present in columns.items() if present)


NORM = Rule()

RULES: dict[str, Rule] = {
    "NGN": NORM,
    "NGNM": Rule(momentum=True),
    "NGND": Rule(coordinate=True),
    "NGND(rms)": Rule(coordinate=True, rms=True),
    "NGNMDv1": Rule(momentum=True, rms=True),
    "NGNMDv2": Rule(momentum=True, coordinate=True, rms=True),
    "DecNGNMDv1": Rule(momentum=True, rms=True),
    "NGNMDv1W": Rule(momentum=True, rms=True, regularised=True),
    "NGNMuon": Rule(momentum=True, rms=True),
}
DECAY_FORMS = ("paper", "adamw")


def rule_of(algorithm: str, decay_form: str, nesterov: bool = False) -> Rule:
    """The rule of an algorithm, with one of the two forms of weight decay, and of momentum."""
    if decay_form not in DECAY_FORMS:
        raise ValueError(f'decay_form={decay_form!r}: must be "paper" or "adamw"')
    rule = RULES[algorithm]
    if decay_form == "adamw" and rule.regularised:
        raise ValueError(
            f'{algorithm} is a form of weight decay of its own: use NGNMDv1(..., decay_form="adamw")'
        )
    if not isinstance(nesterov, bool):
        raise TypeError(f"nesterov={nesterov!r}: must be True or False")
    if nesterov and decay_form != "adamw":
        raise ValueError(
            'nesterov=True is for decay_form="adamw": the paper\'s weight decay is part of the momentum, and '
            "its momentum is not Nesterov's"
        )
    return replace(rule, adamw_decay=decay_form == "adamw", nesterov=nesterov)
