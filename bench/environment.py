"""What this machine is: recorded in every result file and printed by `ngn-bench info`."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import ngn_kernels
from ngn_kernels.backends import select_backend
from ngn_kernels.planning.rows import BucketKey

from .errors import BenchError

PACKAGES = (
    "ngn-kernels",
    "torch",
    "triton",
    "numpy",
    "momo-opt",
    "pytorch_optimizer",
    "MomSPS",
    "prodigyopt",
    "dadaptation",
    "schedulefree",
    "scikit-learn",
    "torchao",
    "bitsandbytes",
    "deepspeed",
    "matplotlib",
    "rich",
)
BACKENDS = ("cpu", "cuda", "triton", "reference")
CGROUP = Path("/sys/fs/cgroup")
RESULTS = "results"  # stored records, in the folder of this file


def package_versions() -> dict[str, str | None]:
    """Installed versions; None for a package that is not there."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    versions["torch"] = torch.__version__
    versions["ngn-kernels"] = ngn_kernels.__version__
    return versions


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cache_bytes() -> dict[str, int]:
    """Data cache sizes by level, as Linux reports them for the first core."""
    caches: dict[str, int] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            if (index / "type").read_text().strip() == "Instruction":
                continue
            level = (index / "level").read_text().strip()
            caches[f"L{level}"] = _parse_size((index / "size").read_text().strip())
        except (OSError, ValueError):
            continue
    return caches


def _parse_size(text: str) -> int:
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def available_cores() -> int:
    """How many cores this process may use: its affinity, and a container's share of time."""
    # os.process_cpu_count() says it from Python 3.13 on.
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    cores = len(allowed) or os.cpu_count() or 1
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        share = math.ceil(int(quota) / int(period)) if quota != "max" else cores
    except (OSError, ValueError):
        return cores
    return max(1, min(cores, share))


def memory_free(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`, container limits included; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            used = int((CGROUP / "memory.current").read_text())
            lines = (CGROUP / "memory.stat").read_text().splitlines()
            sizes = {name: int(number) for name, number in map(str.split, lines)}
            # The page cache counts as used, but is freed when memory is needed.
            cached = sizes.get("active_file", 0) + sizes.get("inactive_file", 0)
            limits.append(max(0, int(limit) - used + cached))
    except (OSError, ValueError):
        pass
    return min(limits, default=None)


def memory_total() -> int | None:
    """Bytes of main memory; None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def select_device(name: str) -> torch.device:
    """The device called `name`; "auto" is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BenchError(f"{name!r} is not a device; write cpu, cuda or cuda:1") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise BenchError(f"only cpu and cuda devices are measured, not {name!r}")
    if not torch.cuda.is_available():
        raise BenchError(
            f"device {name!r} is not there: this torch ({torch.__version__}) sees no CUDA or ROCm "
            "GPU. Use --device cpu."
        )
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise BenchError(
            f"device {name!r} is not there: this machine has {torch.cuda.device_count()} GPU(s), "
            "counted from cuda:0"
        )
    return device


def backend_status(device: torch.device) -> dict[str, str]:
    """For each NGN backend "ok", or why it cannot run on `device`: found by running one step."""
    status: dict[str, str] = {}
    for backend in BACKENDS:
        param = torch.ones(8, device=device, requires_grad=True)
        param.grad = torch.ones_like(param)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ngn_kernels.NGN([param], backend=backend).step(loss=torch.ones((), device=device))
        except Exception as error:  # any failure is the answer here
            status[backend] = first_line(error)
        else:
            status[backend] = "ok"
    return status


def fastest_backend(device: torch.device, dtype: torch.dtype) -> str:
    """The backend that `backend="auto"` takes for parameters of this kind."""
    state = torch.promote_types(dtype, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return select_backend("auto", BucketKey(device, dtype, dtype, state, state)).name


def git_revision() -> str | None:
    """The commit of this code, with "-dirty" if it was changed; None outside a clone.

    Result files do not count: those of one command must not make the next one's revision dirty.
    """
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # An installed copy may lie inside some other repository.
        git("ls-files", "--error-unmatch", here.name)
        revision = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "-uno", "--", ":/", f":(exclude){RESULTS}")
        return f"{revision}-dirty" if changed else revision
    except (OSError, subprocess.CalledProcessError):
        return None


def first_line(error: BaseException) -> str:
    """An exception as one line."""
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def describe(device: torch.device) -> dict[str, Any]:
    """The machine and the versions of a measurement, for its result file."""
    return {
        "packages": package_versions(),
        "revision": git_revision(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": available_cores(),
        "caches": cache_bytes(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "memory": memory_total(),
        "device": str(device),
        "gpus": [
            torch.cuda.get_device_name(index)
            for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        ],
        "backends": backend_status(device),
    }


def machine_line(environment: dict[str, Any]) -> str:
    """One line for headings: processor, threads, torch."""
    device = environment["device"]
    if device.startswith("cuda") and environment["gpus"]:
        hardware = environment["gpus"][torch.device(device).index or 0]
    else:
        hardware = f"{environment['cpu']}, {environment['threads']} thread(s)"
    return f"{hardware}, torch {environment['packages']['torch']}"
