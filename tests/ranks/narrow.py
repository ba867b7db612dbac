"""Narrow numbers on ranks: the options that are tried, and how far they may lead from one process."""

from __future__ import annotations

from typing import Any

import torch

NARROW: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": torch.float32, "state": "bfloat16"},
    "8bit+bfloat16": {"dtype": torch.float32, "state": ("8bit", "bfloat16")},
    "8bit": {"dtype": torch.float32, "state": "8bit"},
    "exact": {"dtype": torch.bfloat16, "state": "8bit", "rounding": "exact"},
    "stochastic": {"dtype": torch.bfloat16, "state": "bfloat16", "rounding": "stochastic"},
}

# Of the run's displacement, in the 2-norm. With float32 parameters: a step of the coarsest code, of
# bfloat16 or of an int8 whose scale fits the largest of a block. With bfloat16 ones gradients are
# rounded before ranks add them up, and small sums of large parts lose more than the 2^-8 of each; at
# random, a parameter is a step of its own off, which is much beside a small displacement.
TOLERANCES = {
    "bfloat16": 2.0**-8,
    "8bit+bfloat16": 2.0**-6,
    "8bit": 2.0**-6,
    "exact": 2.0**-4,
    "stochastic": 2.0**-3,
}

# Where noise and blocks are one process', codes differ only where a sum in another order led past
# an edge. One int8 of 4,096 that does is 1.2e-4 of a displacement; all of them, 64 times as much.
SAME_CODES = 4e-4
