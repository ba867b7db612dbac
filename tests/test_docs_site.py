"""What the site shows is complete: public names, pages, and a notebook without stale outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import ngn_kernels
from ngn_kernels import trainers

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "examples" / "tour.ipynb"


def cells() -> list[dict[str, Any]]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize(
    ("page", "module", "skipped"),
    [
        ("optimizers", ngn_kernels, {"trainers", "__version__"}),
        ("trainers", trainers, set()),
    ],
)
def test_the_reference_has_every_public_name(page: str, module: Any, skipped: set[str]) -> None:
    text = (ROOT / "docs" / "api" / f"{page}.md").read_text(encoding="utf-8")
    shown = re.findall(rf"^::: {re.escape(module.__name__)}\.(\w+)$", text, re.M)
    assert sorted(shown) == sorted(set(module.__all__) - skipped)
    assert all(getattr(module, name).__doc__ for name in shown)


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"\b[\w/.-]+\.md\b", (ROOT / "mkdocs.yml").read_text("utf-8")))
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= listed


def test_the_notebook_is_stored_without_outputs() -> None:
    """So that none can be stale: `make notebook` runs it and makes its page."""
    for cell in cells():
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


def test_pictures_of_the_notebook_are_checked() -> None:
    """Each code cell that draws ends with what the text says of its picture."""
    drawing = ["".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code"]
    drawing = [source for source in drawing if "plt.subplots" in source]
    assert len(drawing) == 4
    assert all("\nassert " in source for source in drawing)
