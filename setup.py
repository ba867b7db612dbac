"""A thin caller of CMake. It never imports torch and never touches the network."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
PACKAGES = ("ngn_kernels", "ngn_bench")
MODULES = ("ngn_kernels._cpu", "ngn_kernels._cuda")
WITHOUT = os.environ.get("NGN_EXTENSION") == "0"
"""Build a wheel for every platform, without the C++ extension."""
FIX = (
    "install a C++17 compiler (Debian: apt install g++; macOS: xcode-select --install; Windows: "
    "LLVM's clang++, with CXX=clang++) and repeat the command, or set NGN_EXTENSION=0 to install "
    "without the extension: every optimizer works then, on CPUs with plain torch operations that "
    "are 15 to 55 times slower"
)
TOOLS = (
    "leave out --no-build-isolation, or install cmake, ninja and pybind11 beside setuptools and repeat "
    "the command"
)
# Without build isolation, CMake may be in an environment that is not activated.
SEARCHED = [os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")]
ENVIRONMENT = {**os.environ, "PATH": os.pathsep.join(SEARCHED)}
CUDA = os.environ.get("NGN_CUDA", "auto")
CUDA_FIX = (
    " With NGN_CUDA=on it also needs nvcc; CMake's message above says what is missing, and "
    "NGN_CUDA=off leaves the CUDA kernels out."
    if CUDA == "on"
    else ""
)


class Build(build):
    """Pack what this build made, and nothing that an earlier one left in the build folder."""

    def run(self) -> None:
        for package in PACKAGES:
            shutil.rmtree(Path(self.build_lib) / package, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Build `ngn_kernels._cpu`, or fail: pip would keep a wheel without it and install it again.

    `ngn_kernels._cuda` is built with it if NGN_CUDA says so: `auto` (where an nvcc works), `on` or `off`.
    """

    def build_extensions(self) -> None:
        targets = {
            ext.name: Path(self.get_ext_fullpath(ext.name)).resolve() for ext in self.extensions
        }
        target = targets["ngn_kernels._cpu"]
        build = Path(self.build_temp).resolve()
        compile_all = ["cmake", "--build", str(build)]
        for stale in targets.values():
            stale.unlink(missing_ok=True)
        # It has the paths of the isolated environment of an earlier build, which is gone.
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        try:
            import pybind11

            configure = [
                "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
                f"-DPython_EXECUTABLE={Path(sys.executable).as_posix()}",
                f"-Dpybind11_DIR={Path(pybind11.get_cmake_dir()).as_posix()}",
                f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target.parent.as_posix()}",
                f"-DNGN_CUDA={CUDA}",
                *shlex.split(os.environ.get("NGN_CMAKE_ARGS", "")),
            ]  # fmt: skip
            subprocess.run(configure, check=True, env=ENVIRONMENT)
            subprocess.run([*compile_all, "--target", "_cpu"], check=True, env=ENVIRONMENT)
        except (ImportError, FileNotFoundError) as error:
            raise SystemExit(
                f"ngn_kernels: the C++ extension was not built ({error}): {TOOLS}"
            ) from error
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(
                f"ngn_kernels: the C++ extension was not built ({error}): {FIX}.{CUDA_FIX}"
            ) from error
        if not target.exists():
            raise SystemExit(f"ngn_kernels: CMake made no {target.name}")
        # Afterwards, so that nvcc has the memory to itself, and what fails is known to be its part.
        try:
            subprocess.run(compile_all, check=True, env=ENVIRONMENT)
        except subprocess.CalledProcessError as error:
            targets["ngn_kernels._cuda"].unlink(missing_ok=True)
            if CUDA == "on":
                raise SystemExit(
                    f"ngn_kernels: the CUDA kernels were not built ({error}): nvcc's messages are "
                    "above; set NGN_CUDA=off to install without them"
                ) from error
            print(f"ngn_kernels: without the CUDA kernels, which nvcc did not compile ({error})")
        # What setuptools packs, and links to in an editable installation.
        self.extensions = [ext for ext in self.extensions if targets[ext.name].exists()]

    def copy_extensions_to_source(self) -> None:
        """For an editable installation, in the place of what an earlier one left there."""
        for name in MODULES:
            (ROOT / self.get_ext_filename(name)).unlink(missing_ok=True)
        super().copy_extensions_to_source()


setup(
    ext_modules=[] if WITHOUT else [Extension(name, sources=[]) for name in MODULES],
    cmdclass={"build": Build, "build_ext": CMakeBuild},
)
