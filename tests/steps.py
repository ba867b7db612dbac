"""Steps with random gradients, plain and beside the oracle."""

from __future__ import annotations

from typing import Any

from algorithms import Algorithm
from helpers import params_of, random_gradients
from pair import Pair


def train(optimizer: Any, *seeds: int, loss: float = 1.0, **gradients: Any) -> None:
    """A step for each seed, with random gradients."""
    assert seeds, "no step"
    for seed in seeds:
        random_gradients(params_of(optimizer), seed=seed, **gradients)
        optimizer.step(loss=loss)


def check_next_step(algorithm: Algorithm, optimizer: Any, seed: int = 7, loss: float = 0.8) -> None:
    """One step beside the oracle, from wherever the optimizer is now."""
    random_gradients(params_of(optimizer), seed=seed)
    Pair(algorithm, optimizer).checked_step(loss)


def checked_steps(pair: Pair, *seeds: int, loss: float = 1.0, **gradients: Any) -> None:
    """A step for each seed, with random gradients, each compared element by element."""
    assert seeds, "no step"
    for seed in seeds:
        random_gradients(params_of(pair.optimizer), seed=seed, **gradients)
        pair.checked_step(loss)
