"""Reads the mutants of catalogue.txt, each with the tests that must notice it and the promise it breaks.

== rules.py                     a file name that only one source file has, wherever it lies
$ tests/test_x.py -k one        environment variables and arguments of pytest, for what follows;
                                the narrower they are, the sooner a mutant dies
a-name: the promise it breaks   docs/testing.md says which promises it belongs to
= why no test can notice it     only of an equivalent one, which is not run
- the text                      once in the file, in any indentation and with any line breaks
+ what it is replaced by        exactly; none if the text is left out
- the text => what replaces it  both in a line
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

SOURCES = ("ngn_kernels", "csrc")


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str
    breaks: str
    equivalent: str = ""

    @property
    def native(self) -> bool:
        """Whether the extension must be built for it."""
        return not self.file.endswith(".py")

    def path(self, root: Path) -> Path:
        found = [path for source in SOURCES for path in (root / source).rglob(self.file)]
        if len(found) != 1:
            raise LookupError(f"{len(found)} source files are named {self.file}")
        return found[0]

    def applied(self, text: str) -> str:
        """The mutated source."""
        pattern = r"\s+".join(re.escape(word) for word in self.old.split())
        mutated, count = re.subn(pattern, lambda match: self.new, text)
        if count != 1:
            raise LookupError(f"{self.file} has its text {count} times")
        return mutated


def read(text: str) -> tuple[Mutant, ...]:
    mutants, file, tests = [], "", ""
    lines: dict[str, list[str]] = {}
    for line in text.splitlines():
        mark, _, rest = line.partition(" ")
        if mark == "==":
            file = rest
        elif mark == "$":
            tests = rest
        elif mark in lines:
            old, arrow, new = rest.partition(" => ") if mark == "-" else (rest, "", "")
            lines[mark].append(old)
            lines["+"] += [new] * bool(arrow)
        elif line and mark != "#":
            name, breaks = line.split(": ", 1)
            lines = {"=": [], "-": [], "+": []}
            mutants.append((name, file, lines, tests, breaks))
    return tuple(
        Mutant(name, file, *("\n".join(lines[mark]) for mark in "-+"), tests, breaks, *lines["="])
        for name, file, lines, tests, breaks in mutants
    )


MUTANTS = read((Path(__file__).parent / "catalogue.txt").read_text())
