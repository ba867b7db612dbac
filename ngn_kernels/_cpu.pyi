from collections.abc import Sequence
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
        inputs: np.ndarray,
        sums: np.ndarray,
        totals: np.ndarray,
        index: int,
        counts: np.ndarray,
        sizes: np.ndarray,
        x_type: DType,
        g_type: DType,
        m_type: DType,
        v_type: DType,
    ) -> None: ...
    def reduce(self, rule: Rule, threads: int) -> None: ...
    def apply(self, rule: Rule, threads: int, last: bool) -> None: ...

class Signature:
    def __init__(
        self,
        *,
        groups: list[list[Tensor]],
        state: dict[Tensor, Any],
        rows: Sequence[tuple[Any, ...]],
        columns: list[np.ndarray],
        api: object,
    ) -> None: ...
    @staticmethod
    def understands(api: object) -> bool: ...
    def look(self, groups: list[dict[str, Any]], state: dict[Tensor, Any]) -> int: ...
    def extend(
        self,
        state: dict[Tensor, Any],
        rows: Sequence[tuple[Any, ...]],
        columns: list[np.ndarray],
        places: np.ndarray,
    ) -> None: ...
    def release(self) -> None: ...

def layout() -> dict[str, dict[str, int]]: ...
def isas() -> list[str]: ...
def isa() -> str: ...
def use_isa(name: str) -> None: ...
def use_team_launcher(address: int) -> None: ...
