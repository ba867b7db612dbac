"""The list of mutants follows the code, and the page about it follows the list."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from mutants.catalogue import MUTANTS, Mutant

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "testing.md").read_text()


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_its_tests_are_there(mutant: Mutant) -> None:
    assert mutant.old.split() != mutant.new.split() and mutant.breaks
    files = [word for word in shlex.split(mutant.tests) if word.startswith("tests/")]
    assert files and all((ROOT / file).is_file() for file in files)


def test_a_mutant_is_found_in_any_layout_and_only_once() -> None:
    mutant = Mutant("name", "file.py", "  if a:\n    b()\n", "if not a:\n    b()\n", "", "")
    assert mutant.applied("x\n        if a:\n            b()\ny\n").startswith(
        "x\n        if not a:"
    )
    for text in ("if a: c()", "if a: b()\nif a: b()"):
        with pytest.raises(LookupError, match=r"has its text [02] times"):
            mutant.applied(text)


def test_names_are_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    assert sum(bool(mutant.equivalent) for mutant in MUTANTS) <= 2, (
        "an equivalent one shows nothing"
    )


def test_the_page_names_what_there_is() -> None:
    rows = [
        line.split("|") for line in PAGE.splitlines() if line.startswith("| ") and "test_" in line
    ]
    promises = [row for row in rows if "`make" not in row[1]]
    assert len(promises) >= 20
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for _, promise, tests, mutants, _ in promises:
        for test in re.findall(r"`(\w+)`", tests):
            assert f"def {test}(" in sources, f"{promise}: no test {test}"
        named = re.findall(r"`([a-z0-9-]+)`", mutants)
        assert named and set(named) <= {mutant.name for mutant in MUTANTS}, promise
