"""The workflows of .github run make targets and nothing else, with no more rights than they need."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RUN = re.compile(r"^ *(?:- )?run: *(.*)$", re.M)
COMMAND = re.compile(r"make((?: [a-z][a-z0-9-]*)+)")
MATRIX = re.compile(r"^ *target: \[(.*)\]$", re.M)

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="needs a clone")


def targets_of_makefile() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z0-9-]*):(?!=)", text, re.M))


def targets_of_workflow(text: str) -> set[str]:
    """The make targets that a workflow runs; an error if it runs anything else."""
    matrix = [word.strip() for line in MATRIX.findall(text) for word in line.split(",")]
    found: set[str] = set()
    for line in RUN.findall(text):
        if not line:
            continue  # `defaults: run:`
        if line == "make ${{ matrix.target }}":
            assert matrix, "the workflow has no matrix of targets"
            found.update(matrix)
            continue
        command = COMMAND.fullmatch(line)
        assert command, f"not a call of make targets: run: {line}"
        found.update(command[1].split())
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_step_is_a_make_target(path: Path) -> None:
    targets = targets_of_workflow(path.read_text(encoding="utf-8"))
    assert targets, "the workflow runs nothing"
    assert targets - targets_of_makefile() == set()


@pytest.mark.parametrize("line", ["run: pip install .", "run: |", "run: make test && echo yes"])
def test_a_step_that_is_no_make_target_is_found(line: str) -> None:
    with pytest.raises(AssertionError, match="not a call of make targets"):
        targets_of_workflow(f"      - {line}\n")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_reads_the_sources_and_no_more(path: Path) -> None:
    """More is granted to single jobs: to publish on PyPI, and on the project's pages."""
    text = path.read_text(encoding="utf-8")
    assert "\npermissions:\n  contents: read\n\n" in text
    granted = set(re.findall(r"^ +([a-z-]+): write$", text, re.M))
    assert granted <= (
        {"wheels": {"id-token"}, "docs": {"id-token", "pages"}}.get(path.stem, set())
    )


def test_the_corners_name_versions_that_the_package_accepts() -> None:
    """The oldest Python and torch of pyproject.toml, and the newest Python of its classifiers."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    ci = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    oldest = (ROOT / "tests" / "versions" / "oldest.txt").read_text(encoding="utf-8")
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', project)
    versions = re.findall(r"Python :: (3\.\d+)", project)
    corners = dict(re.findall(r'python: "([\d.]+)", constraints: ([\w./]+)', ci))
    assert versions[0] == python
    assert corners[python].endswith("oldest.txt")
    assert corners[versions[-1]].endswith("newest.txt")
    for package in ("torch", "numpy"):
        (floor,) = re.findall(rf'"{package}>=([\d.]+)"', project)
        assert re.search(rf"^{package}=={floor}(\.0)*$", oldest, re.M)
    wheels = re.findall(r"cp3(\d+)-\*", project)
    assert [f"3.{minor}" for minor in wheels] == versions
