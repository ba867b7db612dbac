"""Finds the C++ extension, and says why it cannot be used and what to do about it."""

from __future__ import annotations

import os
import shutil
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from . import layout

# pip keeps wheels: the cached one has no extension, either.
REBUILD = (
    "pip install --force-reinstall --no-deps --no-cache-dir ngn_kernels (in a clone: pip install "
    "--force-reinstall --no-deps .)"
)
COMPILERS = ("c++", "g++", "clang++", "cl", "clang-cl")


def why_missing() -> str | None:
    """None if the extension can be used, or else the reason and the fix."""
    try:
        from . import _cpu
    except ImportError as error:
        return _why_not_imported(error)
    if layout.checksum(vars(layout)) != _cpu.LAYOUT_CHECKSUM:
        return f"the C++ extension was built from other sources; build it anew: {REBUILD}"
    return None


def _why_not_imported(error: ImportError) -> str:
    folder = Path(__file__).parent
    if any((folder / f"_cpu{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        return f"the C++ extension does not load: {error}"
    others = sorted(p.name for p in folder.glob("_cpu.*") if p.suffix in (".so", ".pyd"))
    if others:
        return f"the C++ extension is of another Python ({', '.join(others)}); build it: {REBUILD}"
    if not compilers():
        return (
            f"the C++ extension is not built: install a C++ compiler, such as g++, then {REBUILD}"
        )
    return f"the C++ extension is not built, although a C++ compiler is here now: {REBUILD}"


def compilers() -> dict[str, str]:
    """The C++ compilers on this machine, $CXX first, with their paths."""
    chosen = os.environ.get("CXX")
    found = {name: shutil.which(name) for name in (*([chosen] if chosen else []), *COMPILERS)}
    return {name: path for name, path in found.items() if path}
