"""Find an nvcc that works: `python find_nvcc.py ARCH…` prints its path, version, and known ARCHs.

The errors say why it passed others over; without one that works the exit status is 1.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

OLDEST = (12, 0)
TIMEOUT = 120.0  # seconds; a trial takes about one
TRIAL = "#include <cmath>\n__global__ void trial(double* x) { *x = std::sqrt(*x); }\n"


def candidates() -> Iterator[Path]:
    """As a user would expect: what the environment names, PATH, NVIDIA's wheels, the usual folder.

    Only what the environment names may not be there.
    """
    name = "nvcc.exe" if os.name == "nt" else "nvcc"
    if named := os.environ.get("CUDACXX"):
        yield Path(shutil.which(named) or named)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin" / name
    if found := shutil.which("nvcc"):
        yield Path(found)
    folder = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    yield from sorted(folder.glob(f"*/bin/{name}"), reverse=True)
    usual = Path("/usr/local/cuda/bin") / name
    if usual.exists():
        yield usual


def tried(nvcc: Path, wanted: list[str]) -> tuple[str, list[str]]:
    """Its version, and those of the architectures that it knows; raises if it does not work."""

    def run(*arguments: str) -> str:
        try:
            done = subprocess.run(
                [str(nvcc), *arguments],
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=TIMEOUT,
            )
        except FileNotFoundError as error:
            raise RuntimeError("there is no such file") from error
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"no answer in {TIMEOUT:g} seconds") from error
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            raise RuntimeError(lines[0])
        return done.stdout

    match = re.search(r"release (\d+)\.(\d+)", run("--version"))
    if not match:
        raise RuntimeError("it names no version")
    version = int(match[1]), int(match[2])
    if version < OLDEST:
        raise RuntimeError(f"it is version {match[1]}.{match[2]}, and 12.0 is needed")
    known = [arch for arch in wanted if f"sm_{arch}" in run("--list-gpu-code").split()]
    if not known:
        raise RuntimeError(f"it knows none of the architectures {', '.join(wanted)}")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "trial.cu"
        source.write_text(TRIAL)
        run(
            "-std=c++17",
            f"-arch=sm_{known[0]}",
            "-cubin",
            "-o",
            str(source.with_suffix("")),
            str(source),
        )
    return f"{match[1]}.{match[2]}", known


def main(wanted: list[str]) -> int:
    reasons: list[str] = []
    status = 1
    for nvcc in dict.fromkeys(candidates()):
        try:
            version, known = tried(nvcc, wanted)
        except (OSError, RuntimeError) as error:
            reasons.append(f"{nvcc} does not work: {error}")
            continue
        print(";".join([nvcc.as_posix(), version, *known]))
        status = 0
        break
    if status and not reasons:
        reasons = ["there is no nvcc on PATH, in CUDA_HOME or in site-packages"]
    if reasons:
        print("; ".join(reasons), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
