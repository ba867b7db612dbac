"""Run the PTX that Triton compiles, on ordinary memory and without a GPU.

Every access is checked (bounds against registered allocations, alignment of its full width,
read-only memory) and counted; registers and shared memory start as poison, never as zeros; blocks
run in any order, or interleaved at every access. What is not known raises before the kernel starts.

It is a functional model of kernels whose branches are the same for all threads of a block, which
Triton's are. It says nothing about time, and memory is sequentially consistent: a missing fence
is not found. `.approx` results are exact here, up to the precision that the hardware delivers.
"""

from .driver import SimulatedGPU
from .memory import Memory, MemoryFault, MisalignedAccess, Traffic
from .ptx import Kernel
from .simulator import launch

__all__ = [
    "Kernel",
    "Memory",
    "MemoryFault",
    "MisalignedAccess",
    "SimulatedGPU",
    "Traffic",
    "launch",
]
