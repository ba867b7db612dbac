"""Stands in for CUDA's driver, to test the launcher and to time the host's part."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from ngn_kernels import _cuda
from ngn_kernels.backends.cuda import CudaBackend

SOURCE = Path(__file__).with_name("stub_driver.c")
LOAD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
LAUNCH = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_int, ctypes.c_char_p),
    *(ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p),
)


def compiler() -> str | None:
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


@cache
def library() -> Path:
    """The shared library; of this process, which keeps its folder."""
    found = compiler()
    if found is None:
        raise RuntimeError("no C compiler here: install one, such as gcc")
    target = Path(tempfile.mkdtemp(prefix="ngn_stub_driver")) / "libcuda.so"
    command = [found, "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, "-fvisibility=hidden", "-o", str(target), str(SOURCE)], check=True)
    return target


Launch = tuple[str, tuple[int, ...]]


def counting_backend(device_type: str) -> tuple[list[Launch], CudaBackend]:
    """A backend for tensors of a device type, and the list of its launches, which compute nothing."""
    launches: list[Launch] = []

    def note(device: int, name: bytes, blocks: int, threads: int, stream: int, at: int) -> int:
        launches.append((name.decode().split("_")[1], (blocks,)))
        return 0

    # The stub's streams of a device begin with its number.
    return launches, StubDriver(on_launch=note).backend(device_type, lambda device: device)


_current: StubDriver | None = None


class StubDriver:
    """The one driver of this process; making it anew forgets what it was told."""

    def __init__(
        self,
        on_load: Callable[[int, int], int] | None = None,
        on_launch: Callable[[int, bytes, int, int, int, int], int] | None = None,
    ) -> None:
        """`on_load` gets a device and an image's address; `on_launch` a device, the kernel's name,
        blocks, threads, stream, and the argument's address. Both return the driver's error or 0.
        """
        self._calls = ctypes.CDLL(str(library()))
        self._calls.stub_launches.restype = ctypes.c_int64
        # The library keeps the addresses of these.
        global _current
        _current = self
        self._load = LOAD(on_load) if on_load else LOAD()
        self._launch = LAUNCH(on_launch) if on_launch else LAUNCH()
        self._calls.stub_set(self._load, self._launch)
        self.engine = _cuda.Engine(str(library()))

    def backend(
        self, device_type: str, stream: Callable[[int], int] = lambda device: 0
    ) -> CudaBackend:
        return CudaBackend(self.engine, stream, device_type)

    def fail(self, call: str, code: int, after: int = 0) -> None:
        """Let a call fail with the driver's error `code`, after it has succeeded a few more times."""
        self._calls.stub_fail(call.encode(), code, after)

    @property
    def launches(self) -> int:
        return int(self._calls.stub_launches())

    @property
    def contexts(self) -> int:
        """How many contexts are on this thread's stack."""
        return int(self._calls.stub_depth())

    def push(self, device: int) -> None:
        """Make a device's context the current one, as torch does."""
        context = ctypes.c_void_p()
        assert self._calls.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert self._calls.cuCtxPushCurrent_v2(context) == 0

    @property
    def current(self) -> int:
        """The device of the current context; -1 without one."""
        return int(self._calls.stub_current())
