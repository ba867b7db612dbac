from typing import Any

import numpy as np
from torch import Tensor

CHUNK: int

class DType:
    float64: DType
    float32: DType
    bfloat16: DType
    float16: DType

class Rule:
    def __init__(
        self, *, momentum: bool, coordinate: bool, rms: bool, regularised: bool
    ) -> None: ...

class Bucket:
    def __init__(
        self,
        *,
        table: np.ndarray,
        chunks: np.ndarray,
        groups: np.ndarray,
        scalars: np.ndarray,
        sums: np.ndarray,
        index: int,
        report: np.ndarray,
        x_type: DType,
        g_type: DType,
        state_type: DType,
    ) -> None: ...
    def reduce(self, rule: Rule, threads: int) -> None: ...
    def apply(self, rule: Rule, threads: int, last: bool) -> None: ...

class Scan:
    def __init__(
        self,
        *,
        params: list[Tensor],
        dense: list[Tensor],
        states: list[dict[str, Any]],
        keys: tuple[str, ...],
        api: object,
        sample: Tensor,
    ) -> None: ...
    def refresh(self, pointers: np.ndarray) -> int: ...

def same_items(items: list[Any], others: list[Any], /) -> bool: ...
def same_values(mapping: dict[Any, Any], others: list[Any], /) -> bool: ...
def isas() -> list[str]: ...
def isa() -> str: ...
def use_isa(name: str) -> None: ...
def use_team_launcher(address: int) -> None: ...
