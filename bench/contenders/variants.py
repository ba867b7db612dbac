"""The algorithms of the library as the benchmarks name them: one for each row of its grid.

NGNMuon is no row: its matrix products count for more than its bytes. registry.py has it beside Muon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ngn_kernels.rules import RULES, Rule


@dataclass(frozen=True)
class NGNVariant:
    """An algorithm with the name that the paper gives it."""

    algorithm: str
    label: str

    @property
    def rule(self) -> Rule:
        return RULES[self.algorithm]

    @property
    def class_name(self) -> str:
        return self.algorithm.partition("(")[0]

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.algorithm == self.class_name else {"preconditioner": "rms"}


LABELS = {
    "NGN": "NGN",
    "NGNM": "NGN-M",
    "NGND": "NGN-D",
    "NGND(rms)": "NGN-D (RMS)",
    "NGNMDv1": "NGN-MDv1",
    "NGNMDv2": "NGN-MDv2",
    "DecNGNMDv1": "Dec-NGN-MDv1",
    "NGNMDv1W": "NGN-MDv1W",
}

# By the names of the command line.
NGN_VARIANTS = {
    algorithm.lower().replace("(rms)", "-rms"): NGNVariant(algorithm, LABELS[algorithm])
    for algorithm in LABELS
}
