"""What `pip install` packs: what this build made, or nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STALE = b"an earlier build's"
CMAKE = f"""#!{sys.executable}
import pathlib, sys, sysconfig
folders = [word.split("=", 1)[1] for word in sys.argv if "LIBRARY_OUTPUT_DIRECTORY" in word]
for folder in folders:
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    for module in ("_cpu", "_cuda"):
        path = pathlib.Path(folder) / (module + sysconfig.get_config_var("EXT_SUFFIX"))
        assert not path.exists(), "an earlier extension is in the way"
        if module == "_cpu" or "-DNGN_CUDA=on" in sys.argv:
            path.write_bytes(b"new")
"""
# Its nvcc passed the trial, and then fails.
NVCC_FAILS = (
    CMAKE.replace("-DNGN_CUDA=on", "-S")
    + """
if "--build" in sys.argv and "--target" not in sys.argv:
    sys.exit("ninja: build stopped: nvcc ran out of memory")
"""
)

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


def run_build(
    source: Path, path: Path, product: str = "wheel", **environment: str
) -> subprocess.CompletedProcess[str]:
    shutil.rmtree(source / "dist", ignore_errors=True)
    variables = {k: v for k, v in os.environ.items() if not k.startswith("NGN_")}
    variables |= {"PATH": f"{path}:{variables['PATH']}", "PYTHONPATH": "", **environment}
    code = f"from setuptools import build_meta; build_meta.build_{product}('dist')"
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


@pytest.mark.parametrize("choice", ["auto", "on"])
def test_an_nvcc_that_fails_after_its_trial(choice: str, source: Path, tmp_path: Path) -> None:
    """`auto` goes on without the CUDA kernels and says so; `on` blames nvcc, not the C++ compiler."""
    (tmp_path / "bin" / "cmake").write_text(NVCC_FAILS)
    if choice == "auto":
        _, files = wheel_of(source, tmp_path)
        assert [file for file in files if "/_cpu." in file and "pyi" not in file]
        assert not [file for file in files if "/_cuda." in file and "pyi" not in file]
    done = run_build(source, tmp_path / "bin", NGN_CUDA=choice)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "CUDA kernels" in line]
    assert (done.returncode == 0) == (choice == "auto")
    assert len(said) == 1 and "nvcc" in said[0] and "g++" not in done.stdout + done.stderr
    assert ("NGN_CUDA=off" in said[0]) == (choice == "on")


def test_an_editable_installation_keeps_no_earlier_cuda_kernels(
    source: Path, tmp_path: Path
) -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    cpu, cuda = (source / "ngn_kernels" / f"{module}{suffix}" for module in ("_cpu", "_cuda"))
    for choice in ("on", "off"):
        done = run_build(source, tmp_path / "bin", "editable", NGN_CUDA=choice)
        assert done.returncode == 0, done.stderr[-2000:]
        assert cpu.read_bytes() == b"new" and cuda.exists() == (choice == "on")


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


ALONE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import find_nvcc
find_nvcc.candidates = lambda: [Path(sys.argv[2])]
find_nvcc.TIMEOUT = float(sys.argv[3])
sys.exit(find_nvcc.main(["75"]))
"""


def alone(nvcc: Path, timeout: float = 100.0) -> str:
    """What is said where there is no other, and this one does not work."""
    command = [sys.executable, "-c", ALONE, str(ROOT / "csrc"), str(nvcc), str(timeout)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    return done.stderr


def test_an_nvcc_of_the_environment_comes_first(tmp_path: Path) -> None:
    home, other = (fake_nvcc(tmp_path / name) for name in ("home", "other"))
    found = search(
        "75", "90", "80", CUDA_HOME=str(tmp_path / "home"), PATH=f"{other.parent}:/usr/bin:/bin"
    )
    assert found.stdout.strip() == f"{home};12.4;75;80"


def test_an_nvcc_of_the_environment_that_is_not_there_is_named(tmp_path: Path) -> None:
    """CUDACXX may be a command; what it names nothing by is said, whichever nvcc is taken."""
    other = fake_nvcc(tmp_path)
    path = f"{other.parent}:/usr/bin:/bin"
    command = other.rename(other.with_name("nvcc-12"))
    assert search("75", CUDACXX="nvcc-12", PATH=path).stdout.strip() == f"{command};12.4;75"
    other = fake_nvcc(tmp_path)
    for variable, value, named in (
        ("CUDACXX", "nvcc-13", "nvcc-13"),
        ("CUDA_HOME", str(tmp_path / "nowhere"), str(tmp_path / "nowhere" / "bin" / "nvcc")),
    ):
        found = search("75", PATH=path, **{variable: value})
        assert found.stdout.strip() == f"{other};12.4;75"
        assert found.stderr.strip() == f"{named} does not work: there is no such file"
        assert alone(Path(named)) == found.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"version": "11.8"}, "it is version 11.8, and 12.0 is needed"),
        ({"version": "nonsense"}, "it names no version"),
        ({"compiles": "echo unsupported GNU version >&2; exit 1"}, "unsupported GNU version"),
        ({"compiles": r"printf 'no \377 locale' >&2; exit 1"}, "no "),
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
    assert f"{broken} does not work: {said}" in alone(broken)


def test_an_nvcc_that_hangs_is_passed_over(tmp_path: Path) -> None:
    hanging = fake_nvcc(tmp_path, compiles="exec sleep 9")
    assert f"{hanging} does not work: no answer in 0.5 seconds" in alone(hanging, timeout=0.5)


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
    body = f'    yield Path("{tmp_path}/nowhere")\n    yield Path("{path}")\n\n\n'
    finder.write_text(text[:begin] + body + text[end:])
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
        assert ("nowhere does not work: there is no such file" in words) == (choice == "auto")
