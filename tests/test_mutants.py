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
def test_it_still_applies(mutant: Mutant) -> None:
    """`make mutants` would say so, too, but nobody runs all of it every day."""
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, "mend it in the catalogue"
    assert mutant.old != mutant.new and mutant.breaks
    files = [word for word in shlex.split(mutant.tests) if word.startswith("tests/")]
    assert files and all((ROOT / file).is_file() for file in files)


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
