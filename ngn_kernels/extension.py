"""Finds the compiled modules, and says why one cannot be used and what to do about it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from . import layout

# pip keeps wheels: the cached one has no extension, either.
REINSTALL = "pip install --force-reinstall --no-deps"
IN_A_CLONE = f"(in a clone: {REINSTALL} .)"
REBUILD = f"{REINSTALL} --no-cache-dir ngn_kernels {IN_A_CLONE}"
# From source: wheels of some systems have no CUDA kernels.
REBUILD_CUDA = (
    f"NGN_CUDA=on {REINSTALL} --no-cache-dir --no-binary ngn_kernels ngn_kernels {IN_A_CLONE}"
)
NAMES = {"_cpu": "the C++ extension", "_cuda": "the module of CUDA kernels"}
COMPILERS = ("c++", "g++", "clang++", "cl", "clang-cl")


def why_missing(module: str = "_cpu") -> str | None:
    """None if the module can be used, or else the reason and the fix."""
    try:
        built = importlib.import_module(f".{module}", __package__)
    except ImportError as error:
        return _why_not_imported(error, module)
    wanted = {"LAYOUT_CHECKSUM": layout.checksum(vars(layout)), **_sources()}
    if any(getattr(built, name, None) != number for name, number in wanted.items()):
        return f"{NAMES[module]} was built from other sources; build it anew: {REBUILD}"
    return None


@cache
def _sources() -> dict[str, int]:
    """What compiled modules say of their sources, where these lie beside the package, as in a clone."""
    folder = Path(__file__).resolve().parents[1] / "csrc"
    is_ours = (folder / "generate_layout.py").is_file()
    return {"SOURCES_CHECKSUM": layout.sources_checksum(folder)} if is_ours else {}


def is_built(module: str) -> bool:
    """Whether the module is there, for this Python; it may still not load."""
    return importlib.util.find_spec(f".{module}", __package__) is not None


def _why_not_imported(error: ImportError, module: str = "_cpu") -> str:
    name = NAMES[module]
    folder = Path(__file__).parent
    if any((folder / f"{module}{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        return f"{name} does not load: {error}"
    others = sorted(p.name for p in folder.glob(f"{module}.*") if p.suffix in (".so", ".pyd"))
    if others:
        return f"{name} is of another Python ({', '.join(others)}); build it: {REBUILD}"
    if module == "_cuda":
        return (
            f"{name} is not built: install CUDA's compiler (nvcc 12 or newer), then {REBUILD_CUDA}"
        )
    if not compilers():
        return f"{name} is not built: install a C++ compiler, such as g++, then {REBUILD}"
    return f"{name} is not built, although a C++ compiler is here now: {REBUILD}"


def compilers() -> dict[str, str]:
    """The C++ compilers on this machine, $CXX first, with their paths."""
    chosen = os.environ.get("CXX")
    found = {name: shutil.which(name) for name in (*([chosen] if chosen else []), *COMPILERS)}
    return {name: path for name, path in found.items() if path}
