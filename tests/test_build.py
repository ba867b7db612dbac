"""What `pip install` packs: what this build made, or nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STALE = b"an earlier build's"
CMAKE = f"""#!{sys.executable}
import pathlib, sys, sysconfig
folders = [word.split("=", 1)[1] for word in sys.argv if "LIBRARY_OUTPUT_DIRECTORY" in word]
for folder in folders:
    name = "_cpu" + sysconfig.get_config_var("EXT_SUFFIX")
    path = pathlib.Path(folder) / name
    assert not path.exists(), "an earlier extension is in the way"
    path.write_bytes(b"new")
"""

pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").exists() or sys.platform == "win32", reason="needs the sources"
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The sources, after an earlier build whose products are still there."""
    pytest.importorskip("pybind11")
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    for name in ("ngn_kernels", "bench"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "results")
        )
    assert not list(folder.rglob("*.so"))
    cmake = tmp_path / "bin" / "cmake"
    cmake.parent.mkdir()
    cmake.write_text(CMAKE)
    cmake.chmod(0o755)
    wheel_of(folder, tmp_path)
    (library,) = (folder / "build").glob("lib*")
    (extension,) = library.glob("ngn_kernels/_cpu.*[!i]")
    extension.write_bytes(STALE)
    (library / "ngn_kernels" / "removed.py").write_text("")
    plain = folder / "build" / "lib" / "ngn_kernels"
    plain.mkdir(parents=True, exist_ok=True)
    (plain / extension.name).write_bytes(STALE)
    return folder


def run_build(source: Path, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    shutil.rmtree(source / "dist", ignore_errors=True)
    variables = {k: v for k, v in os.environ.items() if not k.startswith("NGN_")}
    variables |= {"PATH": f"{path}:{variables['PATH']}", "PYTHONPATH": "", **environment}
    code = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=source, env=variables, capture_output=True, text=True
    )


def wheel_of(source: Path, path: Path, **environment: str) -> tuple[str, dict[str, bytes]]:
    """The name of the wheel, and its files."""
    done = run_build(source, path / "bin", **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return wheel.name, {name: archive.read(name) for name in archive.namelist()}


def test_a_build_packs_the_extension_that_it_made(source: Path, tmp_path: Path) -> None:
    name, files = wheel_of(source, tmp_path)
    assert "none-any" not in name
    assert [data for file, data in files.items() if "/_cpu." in file and "pyi" not in file] == [
        b"new"
    ]
    assert "ngn_kernels/removed.py" not in files
    assert "ngn_kernels/optimizer.py" in files


def test_without_a_compiler_there_is_no_wheel(source: Path, tmp_path: Path) -> None:
    failing = tmp_path / "failing"
    failing.mkdir()
    (failing / "cmake").write_text("#!/bin/sh\nexit 1\n")
    (failing / "cmake").chmod(0o755)
    done = run_build(source, failing)
    assert done.returncode != 0
    assert not list((source / "dist").glob("*.whl"))
    last = done.stderr.strip().splitlines()[-1]
    assert "apt install g++" in last and "NGN_EXTENSION=0" in last


def test_a_wheel_without_the_extension_is_of_every_platform(source: Path, tmp_path: Path) -> None:
    name, files = wheel_of(source, tmp_path, NGN_EXTENSION="0")
    assert name.endswith("-py3-none-any.whl")
    assert not [file for file in files if file.endswith((".so", ".pyd")) or "removed" in file]
    assert "ngn_kernels/optimizer.py" in files
