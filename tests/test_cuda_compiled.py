"""What nvcc has made of the CUDA kernels, on every architecture: registers, spills, widths of access."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from compiled import check_ptx
from ngn_bench.gpu.triton_report import spills_in_loops
from ptxsim.image import ptx_of, tool
from ptxsim.ptx import modules

from ngn_kernels.extension import why_missing

if why_missing("_cuda") is not None:
    pytest.skip(str(why_missing("_cuda")), allow_module_level=True)
if tool("cuobjdump") is None:
    pytest.skip("there is no cuobjdump on PATH or in Triton", allow_module_level=True)

from ngn_kernels import _cuda

ARCHITECTURES = _cuda.TARGETS.split()
PTX = modules(ptx_of(_cuda.image()))
KERNELS = list(PTX)
# Registers of a thread with which half of 2,048 threads are resident, or three eighths.
HALF, THREE_EIGHTHS = 64, 80


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "kernels.fatbin"
    path.write_bytes(_cuda.image())
    return path


def dumped(image: Path, what: str, arch: str) -> dict[str, str]:
    """What cuobjdump says of each kernel."""
    program = tool("cuobjdump")
    assert program
    command = [program, what, "-arch", f"sm_{arch}", str(image)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    parts = re.split(r"Function\s*:?\s+(ngn_\w+):?", text)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def columns(kernel: str) -> tuple[int, int, int]:
    """How many columns a kernel reads, writes, and how many of those read are float32 unless narrow."""
    momentum, rms = "momentum" in kernel, "rms" in kernel or "aligned" in kernel
    if "reduce" in kernel:
        directed = "directed" in kernel
        return 1 + rms + ("aligned" in kernel) + directed, 0, rms + directed
    return 2 + momentum + rms, 1 + momentum + rms, momentum + rms


def test_the_kernels_are_all_there() -> None:
    """Few enough to compile in a minute, and no larger than a page of a model."""
    assert len(KERNELS) == len(set(KERNELS)) == 23
    assert len(_cuda.image()) < 10_000_000


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_resources(arch: str, image: Path) -> None:
    used = dumped(image, "--dump-resource-usage", arch)
    assert set(used) == set(KERNELS)
    for kernel, text in used.items():
        registers = int(re.search(r"REG:(\d+)", text)[1])  # type: ignore[index]
        formats_of_v = "narrow" in kernel and ("rms" in kernel or "aligned" in kernel)
        assert registers <= (THREE_EIGHTHS if formats_of_v else HALF), f"{kernel}: {registers}"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_loops_neither_spill_nor_split_their_vectors(arch: str, image: Path) -> None:
    code = dumped(image, "--dump-sass", arch)
    assert set(code) == set(KERNELS)
    for kernel, text in code.items():
        assert spills_in_loops(text) == 0, kernel
        read, written, _ = columns(kernel)
        assert len(re.findall(r"\bLDG\.E\.128\b", text)) >= read, kernel
        assert len(re.findall(r"\bSTG\.E\.128\b", text)) >= written, kernel


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_column_has_one_access_of_each_width(kernel: str) -> None:
    """128 bits of four float32 or eight halves; 64 bits of four halves."""
    read, written, fixed = columns(kernel)
    found = Counter(re.findall(r"(ld|st)\.global\.(v\d)\.u32", PTX[kernel]))
    assert (found["ld", "v4"], found["st", "v4"]) == (read, written)
    if "half" in kernel:
        assert (found["ld", "v2"], found["st", "v2"]) == (0, 0)
    elif "narrow" not in kernel:
        assert (found["ld", "v2"], found["st", "v2"]) == (
            read - fixed,
            written - fixed * (written > 0),
        )


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_fused_approximated_or_flushed(kernel: str) -> None:
    check_ptx(PTX[kernel])
    assert ".local" not in PTX[kernel] and "call" not in PTX[kernel]
