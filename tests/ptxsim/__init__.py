"""Run PTX that Triton or nvcc has compiled, on ordinary memory and without a GPU.

Every access is checked (bounds against registered allocations, alignment of its full width,
read-only memory, data races) and counted; registers and shared memory start as poison, never as
zeros; blocks run in any order, or interleaved at every access. What is not known raises before the
kernel starts.

Threads that part ways run one group after the other, the one that is furthest behind first, and go on
together where they meet. It says nothing about time. Memory is sequentially consistent: a missing
barrier, order or scope shows not in a result but as a race (races.py). `.approx` results are exact here,
up to the precision that the hardware delivers.
"""

from .instructions import DivergentBarrier
from .memory import Memory, MemoryFault, MisalignedAccess, Traffic
from .ptx import Kernel
from .races import DataRace
from .simulator import launch

__all__ = [
    "DataRace",
    "DivergentBarrier",
    "Kernel",
    "Memory",
    "MemoryFault",
    "MisalignedAccess",
    "Traffic",
    "launch",
]
