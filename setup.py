"""A thin caller of CMake. It never imports torch and never touches the network."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    """Build `ngn_kernels._cpu`; without a working compiler, install the package without it."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        build = Path(self.build_temp).resolve()
        try:
            import pybind11

            configure = [
                "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
                f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
                *shlex.split(os.environ.get("NGN_CMAKE_ARGS", "")),
            ]  # fmt: skip
            subprocess.run(configure, check=True)
            subprocess.run(["cmake", "--build", str(build)], check=True)
        except (ImportError, OSError, subprocess.CalledProcessError) as error:
            if os.environ.get("NGN_REQUIRE_EXTENSION") == "1":
                raise
            print(
                f"ngn_kernels: the C++ extension was not built ({error}). The package works "
                "without it, more slowly; `python -m ngn_kernels` says what is missing.",
                file=sys.stderr,
            )

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]


setup(
    ext_modules=[Extension("ngn_kernels._cpu", sources=[], optional=True)],
    cmdclass={"build_ext": CMakeBuild},
)
