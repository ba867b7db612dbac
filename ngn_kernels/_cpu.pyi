from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

_Ints: TypeAlias = npt.NDArray[np.int64]
_Floats: TypeAlias = npt.NDArray[np.float32]
_Doubles: TypeAlias = npt.NDArray[np.float64]

CHUNK: int
LAYOUT_CHECKSUM: int
SOURCES_CHECKSUM: int

# Rules are bits of layout.Flag; types and roundings are the numbers of layout.DType and layout.Rounding.
class Bucket:
    def __init__(
        self,
        *,
        table: _Ints,
        chunks: _Ints,
        groups: _Doubles,
        inputs: _Doubles,
        sums: _Doubles,
        totals: _Doubles,
        index: int,
        counts: _Ints,
        sizes: _Doubles,
        x_type: int,
        g_type: int,
        m_type: int,
        v_type: int,
        rounding: int,
    ) -> None: ...
    def reduce(self, rule: int, threads: int) -> None: ...
    def apply(self, rule: int, threads: int, last: bool) -> None: ...

class Signature:
    def __init__(
        self,
        *,
        groups: list[list[Tensor]],
        state: dict[Tensor, Any],
        rows: Sequence[tuple[Any, ...]],
        columns: list[_Ints],
        api: object,
    ) -> None: ...
    @staticmethod
    def understands(api: object) -> bool: ...
    def check(self, groups: list[dict[str, Any]], state: dict[Tensor, Any]) -> int: ...
    def extend(
        self,
        state: dict[Tensor, Any],
        rows: Sequence[tuple[Any, ...]],
        columns: list[_Ints],
        places: _Ints,
    ) -> None: ...
    def gradients(self) -> list[Tensor | None]: ...
    def release(self) -> None: ...

def encode(
    values: _Floats,
    data: npt.NDArray[Any],
    scales: npt.NDArray[Any],
    type: int,
    rounding: int,
    noise_key: int,
    step_count: int,
    offset: int = 0,
) -> None: ...
def decode(
    values: _Floats, data: npt.NDArray[Any], scales: npt.NDArray[Any], type: int
) -> None: ...
def isas() -> list[str]: ...
def isa() -> str: ...
def use_isa(name: str) -> None: ...
def use_team_launcher(address: int) -> None: ...
