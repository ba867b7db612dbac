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
    for module in ("_cpu", "_cuda"):
        path = pathlib.Path(folder) / (module + sysconfig.get_config_var("EXT_SUFFIX"))
        assert not path.exists(), "an earlier extension is in the way"
        if module == "_cpu" or "-DNGN_CUDA=on" in sys.argv:
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
    for name in (extension.name, extension.name.replace("_cpu", "_cuda")):
        (library / "ngn_kernels" / name).write_bytes(STALE)
        (plain / name).write_bytes(STALE)
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
    assert not [file for file in files if "/_cuda." in file and "pyi" not in file]


def test_a_build_packs_the_cuda_kernels_if_it_made_them(source: Path, tmp_path: Path) -> None:
    _, files = wheel_of(source, tmp_path, NGN_CUDA="on")
    for module in ("_cpu", "_cuda"):
        (data,) = (files[f] for f in files if f"/{module}." in f and "pyi" not in f)
        assert data == b"new"


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


# The search for nvcc, and what CMake makes of it

NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release {version}, V{version}.1" ;;
  --list-gpu-code) echo "sm_75 sm_80" ;;
  *) {compiles} ;;
esac
"""


def fake_nvcc(folder: Path, version: str = "12.4", compiles: str = "exit 0") -> Path:
    path = folder / "bin" / "nvcc"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(NVCC.format(version=version, compiles=compiles))
    path.chmod(0o755)
    return path


def search(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """By a Python that has no NVIDIA wheels, on a PATH without nvcc."""
    variables = {"PATH": "/usr/bin:/bin", **environment}
    command = [sys.executable, str(ROOT / "csrc" / "find_nvcc.py"), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True)


def test_an_nvcc_of_the_environment_comes_first(tmp_path: Path) -> None:
    home, other = (fake_nvcc(tmp_path / name) for name in ("home", "other"))
    found = search(
        "75", "90", "80", CUDA_HOME=str(tmp_path / "home"), PATH=f"{other.parent}:/usr/bin:/bin"
    )
    assert found.stdout.strip() == f"{home};12.4;75;80"
    found = search("75", CUDA_HOME=str(tmp_path / "nowhere"), PATH=f"{other.parent}:/usr/bin:/bin")
    assert found.stdout.strip() == f"{other};12.4;75"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"version": "11.8"}, "it is version 11.8, and 12.0 is needed"),
        ({"version": "nonsense"}, "it names no version"),
        ({"compiles": "echo unsupported GNU version >&2; exit 1"}, "unsupported GNU version"),
    ],
)
def test_an_nvcc_that_does_not_work_is_passed_over(
    options: dict[str, str], said: str, tmp_path: Path
) -> None:
    """For the next one; without another, it is the reason."""
    broken = fake_nvcc(tmp_path / "broken", **options)
    working = fake_nvcc(tmp_path / "working")
    environment = {"CUDACXX": str(broken), "CUDA_HOME": str(tmp_path / "working")}
    assert search("75", **environment).stdout.startswith(str(working))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import find_nvcc; from pathlib import Path\n"
        "find_nvcc.candidates = lambda: [Path(sys.argv[2])]; sys.exit(find_nvcc.main(['75']))"
    )
    command = [sys.executable, "-c", code, str(ROOT / "csrc"), str(broken)]
    alone = subprocess.run(command, capture_output=True, text=True)
    assert alone.returncode == 1 and f"{broken} does not work: {said}" in alone.stderr


def test_architectures_that_nvcc_does_not_know_are_left_out(tmp_path: Path) -> None:
    fake_nvcc(tmp_path)
    assert search("120", "80", CUDA_HOME=str(tmp_path)).stdout.strip().endswith(";12.4;80")


@pytest.mark.parametrize(
    ("choice", "nvcc", "status", "said"),
    [
        ("auto", {}, 0, "with the CUDA kernels for 75 80, by nvcc 12.4"),
        ("auto", {"version": "11.0"}, 0, "without the CUDA kernels: "),
        ("on", {"version": "11.0"}, 1, "NGN_CUDA=on, but "),
        ("off", {}, 0, "without the CUDA kernels (NGN_CUDA=off)"),
        ("yes", {}, 1, "it must be auto, on or off"),
    ],
)
def test_cmake_says_in_a_line_what_it_does(
    choice: str, nvcc: dict[str, str], status: int, said: str, tmp_path: Path
) -> None:
    """A project of the CUDA part alone, in which every nvcc but the given one is out of sight."""
    pybind11 = pytest.importorskip("pybind11")
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if cmake is None or shutil.which("c++") is None:
        pytest.skip("needs CMake and a C++ compiler")
    source = tmp_path / "source"
    shutil.copytree(ROOT / "csrc", source / "csrc")
    shutil.copy(ROOT / "CMakeLists.txt", source)
    finder = source / "csrc" / "find_nvcc.py"
    path = fake_nvcc(tmp_path, **nvcc)
    text = finder.read_text()
    begin, end = text.index("    name = "), text.index("def tried")
    finder.write_text(f'{text[:begin]}    yield Path("{path}")\n\n\n{text[end:]}')
    command = [
        *(cmake, "-S", str(source), "-B", str(tmp_path / "build"), f"-DNGN_CUDA={choice}"),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "CUDA" in line]
    words = " ".join((done.stdout + done.stderr).split())
    assert (done.returncode != 0) == bool(status), done.stderr
    assert said in words
    if status == 0:
        assert len(lines) == 1, lines
