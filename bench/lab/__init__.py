"""The stability lab: the paper's experiments, on any machine, with pictures.

For a task of one's own, return one of these problems from a function that takes a `Setup`.
"""

from __future__ import annotations

from .problems import (
    Classification,
    Evaluation,
    LanguageModel,
    Problem,
    RecurrentLanguageModel,
    warmup_cosine,
)
from .tasks import Scale, Setup, task

__all__ = [
    "Classification",
    "Evaluation",
    "LanguageModel",
    "Problem",
    "RecurrentLanguageModel",
    "Scale",
    "Setup",
    "task",
    "warmup_cosine",
]
