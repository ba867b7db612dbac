"""The shape of the code: which module may import which, and what the doctor says."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from algorithms import ALGORITHMS

import ngn_kernels
from ngn_kernels.backends import availability
from ngn_kernels.extension import NAMES, why_missing
from ngn_kernels.layout import Column, Flag, GroupColumn
from ngn_kernels.planning import tables
from ngn_kernels.rules import RULES, Rule

PACKAGE = Path(ngn_kernels.__file__).parent
# A module may import from earlier layers, and from its own. A package stands for its modules, unless
# one of them has a layer of its own.
LAYERS = (
    *("version", "layout", "extension", "messages", "rules", "options", "formats"),
    *(
        "distributed.dtensors",
        "spectral",
        "distributed.owners",
        "backwards",
        "loss",
        "planning.checks",
        "planning.state",
        "adamw",
    ),
    *("checkpoint", "parameter_groups", "planning.signature", "planning.transfer"),
    *("planning.tables", "step_size", "planning", "distributed", "backends"),
    *("skips", "hooks", "optimizer", "optimizers", "trainers", "__init__", "doctor", "__main__"),
)


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(name: str) -> str:
    """Of the dotted name of a module in the package, or of something in it."""
    parts = name.split(".")
    return next((n for n in (".".join(parts[:2]), parts[0]) if n in LAYERS), "__init__")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports(path: Path) -> set[str]:
    """Absolute names of everything a file imports, inside functions too."""
    package = ["ngn_kernels", *path.relative_to(PACKAGE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{stem}.{alias.name}" for alias in node.names}
    return found


def imported_layers(path: Path) -> set[str]:
    inside = {n.partition(".")[2] for n in imports(path) if n.split(".")[0] == "ngn_kernels"}
    return {layer_of(name) for name in inside if not name.startswith(("_cpu", "_cuda"))}


def test_every_module_has_a_layer() -> None:
    first = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in modules()}
    assert first <= {layer.split(".")[0] for layer in LAYERS}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_dependencies_point_one_way(path: Path) -> None:
    layer = layer_of(name_of(path))
    wrong = imported_layers(path) - set(LAYERS[: LAYERS.index(layer) + 1])
    assert not wrong, f"{layer} imports {sorted(wrong)}, which come after it"


def test_the_map_of_modules_is_true() -> None:
    """CONTRIBUTING.md names every module, and nothing that is not there."""
    root = PACKAGE.parent
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    listed = {name for cell in first_cells for name in re.findall("`([^`]+)`", cell)}
    assert [name for name in listed if not (root / name).exists()] == []
    files = [*PACKAGE.glob("[a-z]*"), *(root / "csrc").rglob("*")]
    there = {
        str(path.relative_to(root)) + "/" * path.is_dir()
        for path in files
        if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh") or (path / "__init__.py").exists()
    }
    assert there - {"ngn_kernels/version.py"} <= listed


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_benchmarks_are_never_imported(path: Path) -> None:
    assert not {name for name in imports(path) if name.split(".")[0] in ("ngn_bench", "bench")}


@pytest.mark.parametrize("name", NAMES)
def test_the_modules_were_built_from_this_layout(name: str) -> None:
    missing = why_missing(name)
    if missing is not None:
        pytest.skip(missing)
    module = importlib.import_module(f"ngn_kernels.{name}")
    header = runpy.run_path(str(PACKAGE.parent / "csrc" / "generate_layout.py"))["header"]()
    assert f"LAYOUT_CHECKSUM = {module.LAYOUT_CHECKSUM}u;" in header


def test_values_of_a_group_are_in_the_order_of_their_table() -> None:
    assert list(tables.GroupValues._fields) == [column.name.lower() for column in GroupColumn]


def test_tables_are_read_by_name() -> None:
    """No kernel finds a column by a number."""
    source = (PACKAGE / "backends" / "triton" / "kernels.py").read_text(encoding="utf-8")
    loads = re.findall(r"tl\.(?:load|store|atomic_\w+)\(([^,()]*)", source)
    assert len(loads) > 20
    tables_read = re.compile(r"\b(groups|group|inputs|sums|total|counts|sizes)\b")
    bare = [text for text in loads if tables_read.search(text) and re.search(r"\+\s*\d", text)]
    assert not bare, bare


def test_every_choice_of_a_rule_reaches_the_engines() -> None:
    names = [field.name for field in fields(Rule)]
    assert names == [flag.name.lower() for flag in Flag]
    found = [Rule(**{name: True}).flags for name in names]
    assert found == [1 << flag for flag in Flag]


@pytest.mark.parametrize(("name", "found"), [("rules", "RULES"), ("layout", "Column")])
def test_plain_modules_need_no_torch(name: str, found: str) -> None:
    """They load, without the package, in an interpreter where torch cannot be imported."""
    assert not {module for module in imports(PACKAGE / f"{name}.py") if module.startswith("torch")}
    code = (
        "import sys, types\n"
        "sys.modules['torch'] = None\n"
        "package = sys.modules['ngn_kernels'] = types.ModuleType('ngn_kernels')\n"
        f"package.__path__ = [{str(PACKAGE)!r}]\n"
        f"from ngn_kernels.{name} import {found}\n"
        f"print(*map(str, {found}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        str(member) for member in {"rules": RULES, "layout": Column}[name]
    ]


def test_import_is_light() -> None:
    """Importing the package compiles nothing and pulls in neither Triton nor the benchmarks."""
    code = (
        "import sys, ngn_kernels; print({'triton', 'ngn_bench', 'numpy.f2py'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "set()"


def test_public_names() -> None:
    names = {algorithm.name for algorithm in ALGORITHMS}
    assert names | {"SkippedStepWarning"} <= set(ngn_kernels.__all__)
    assert issubclass(ngn_kernels.SkippedStepWarning, RuntimeWarning)
    assert all(getattr(ngn_kernels, name).__doc__ for name in names)


def test_the_doctor_lists_every_backend() -> None:
    """`python -m ngn_kernels`: each backend is available, or the reason stands beside it."""
    done = subprocess.run([sys.executable, "-m", "ngn_kernels"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"reference", "cpu", "triton", "cuda"} <= set(availability())
    lines = done.stdout.splitlines()
    for name, reason in availability().items():
        (i,) = [i for i, line in enumerate(lines) if line.split()[:1] == [name]]
        text = " ".join(" ".join(lines[i:]).split())
        assert " ".join((reason or "available").split()) in text
    assert availability()["reference"] is None


def test_the_oracle_shares_nothing_with_the_package() -> None:
    spec = importlib.util.find_spec("oracle")
    assert spec is not None and spec.origin is not None
    names = imports_of_oracle(Path(spec.origin))
    assert not {name for name in names if name.startswith(("ngn_kernels", "torch"))}


def imports_of_oracle(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    plain = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    return plain | {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
