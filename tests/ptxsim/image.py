"""PTX out of an image that carries the code of several architectures."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path


def tool(name: str) -> str | None:
    """One of CUDA's programs, on PATH or as Triton brings it."""
    if found := shutil.which(name):
        return found
    try:
        import triton
    except ImportError:
        return None
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return str(path) if path.exists() else None


def ptx_of(image: bytes) -> str:
    cuobjdump = tool("cuobjdump")
    assert cuobjdump, "cuobjdump is neither on PATH nor in Triton"
    with tempfile.NamedTemporaryFile(suffix=".fatbin") as file:
        file.write(image)
        file.flush()
        command = [cuobjdump, "--dump-ptx", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return text[text.index(".version") :]
