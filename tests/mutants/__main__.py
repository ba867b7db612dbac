"""`make mutants`: small mutations of the code, each of which some test must notice.

catalogue.txt lists them. Each is made in a copy under build/mutants, the extension is built anew where
it is C++, and the tests that it names are run. The tests that failed must pass without a mutant. One
that no test notices, and one whose text is no longer in the code exactly once, make the run fail;
`--check` looks for the latter alone, and for Python that is none.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from catalogue import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "mutants"
COPIED = ("ngn_kernels", "bench", "tests", "csrc", "CMakeLists.txt", "setup.py", "pyproject.toml")
TIMEOUT = 400  # seconds that the tests of one mutant may take; one that hangs them was noticed
KILLED, SURVIVED, EQUIVALENT, ERROR = "killed", "survived", "equivalent", "ERROR"


class WorkingCopy:
    """A copy of the project, with an extension of its own that is quick to build."""

    def __init__(self, number: int) -> None:
        self.folder = BUILD / f"copy{number}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        for name in COPIED:
            source, target = ROOT / name, self.folder / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=ignored)
            else:
                shutil.copy2(source, target)
        (self.folder / "ngn_bench").symlink_to("bench")
        self.cmake = BUILD / f"cmake{number}"
        self.built = self.folder / "built"
        self.clock = int(time.time())
        self.native = False  # whether the extension in the copy is that of a C++ mutant
        # Objects may be left of a mutant of another run.
        self.mutated = BUILD / f"mutated{number}"
        for name in self.mutated.read_text().split() if self.mutated.is_file() else ():
            (self.folder / name).touch()
        self.take_extension(ROOT / "ngn_kernels")
        self.server = subprocess.Popen(
            [sys.executable, Path(__file__).parent / "fork_server.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def try_out(self, mutant: Mutant) -> tuple[str, str]:
        """Killed, survived or an error, and a word on it."""
        try:
            path = mutant.path(self.folder)
            text = path.read_text()
            mutated = mutant.applied(text)
        except LookupError as problem:
            return ERROR, str(problem)
        if mutant.equivalent:
            return EQUIVALENT, mutant.equivalent
        self.write(path, mutated)
        try:
            if mutant.native:
                with self.mutated.open("a") as file:
                    print(path.relative_to(self.folder), file=file)
                problem = self.build()
                if problem:
                    return ERROR, problem
            elif self.native:
                self.take_extension(ROOT / "ngn_kernels")
            return self.run(mutant.tests)
        finally:
            self.write(path, text)

    def write(self, path: Path, text: str) -> None:
        """With a time that no other version of the file has had, so that no compiled one is taken."""
        path.write_text(text)
        self.clock = max(self.clock + 2, int(time.time()))
        os.utime(path, (self.clock, self.clock))

    def build(self) -> str:
        """The extension for one instruction set, not optimized: tests are small, compilers slow."""
        bin = Path(sys.executable).parent
        if not (self.cmake / "build.ninja").is_file():
            hints = subprocess.run(
                [sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True
            ).stdout.strip()
            configure = [
                *(bin / "cmake", "-S", self.folder, "-B", self.cmake, "-G", "Ninja"),
                *("-DNGN_X86=OFF", "-DCMAKE_CXX_FLAGS_RELEASE=-O0", f"-Dpybind11_DIR={hints}"),
                "-DNGN_CUDA_ARCHS=75",  # tests run its PTX
                *(f"-DCMAKE_MAKE_PROGRAM={bin / 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}"),
                f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={self.built}",
            ]
            problem = failure_of(configure)
            if problem:
                return problem
        problem = failure_of([bin / "cmake", "--build", self.cmake])
        if not problem:
            self.take_extension(self.built)
            self.native = True
        return problem

    def take_extension(self, folder: Path) -> None:
        for old in (self.folder / "ngn_kernels").glob("*.so"):
            old.unlink()
        for extension in folder.glob("*.so"):
            shutil.copy2(extension, self.folder / "ngn_kernels")
        self.native = False

    def check(self, tests: list[str], native: bool, names: list[str]) -> str:
        """Why tests do not pass where nothing was mutated; "" if they do."""
        if native:
            problem = self.build()
            if problem:
                return problem
        elif self.native:
            self.take_extension(ROOT / "ngn_kernels")
        outcome, detail = self.run(shlex.join(tests))
        return "" if outcome == SURVIVED else f"{detail} (of {len(names)} mutants)"

    def run(self, tests: str) -> tuple[str, str]:
        words = shlex.split(tests)
        variables = dict(word.split("=", 1) for word in words if is_assignment(word))
        arguments = [word for word in words if not is_assignment(word)]
        options = ["-q", "-x", "-p", "no:cacheprovider"]
        code, said = self.pytest({**variables, "PYTHONPATH": str(self.folder)}, options + arguments)
        if code is None:
            return KILLED, f"the tests hang for {TIMEOUT} s"
        lines = [line for line in said.splitlines() if line.strip()]
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        detail = (failed or lines or [""])[-1]
        if code < 0:
            return KILLED, f"the tests die of signal {-code}"
        return {0: SURVIVED, 1: KILLED}.get(code, ERROR), detail

    def pytest(self, variables: dict[str, str], arguments: list[str]) -> tuple[int | None, str]:
        """What it returned, None if it was too slow, and what it said."""
        task = {"folder": str(self.folder), "variables": variables, "arguments": arguments}
        assert self.server.stdin is not None and self.server.stdout is not None
        print(json.dumps({**task, "timeout": TIMEOUT}), file=self.server.stdin, flush=True)
        answer = json.loads(self.server.stdout.readline())
        return answer["code"], answer["said"]

    def close(self) -> None:
        self.server.communicate()


def is_assignment(word: str) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and name.isupper()


def failure_of(command: list[object]) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    said = done.stdout + done.stderr
    errors = [line for line in said.splitlines() if "error" in line] or said.splitlines()[-1:]
    return errors[0] if done.returncode else ""


def changed_files(base: str) -> set[str]:
    command = ["git", "-C", str(ROOT), "diff", "--name-only", base]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def chosen(options: argparse.Namespace) -> list[Mutant]:
    mutants = list(MUTANTS)
    unknown = set(options.names) - {mutant.name for mutant in mutants}
    if unknown:
        sys.exit(f"no such mutant: {', '.join(sorted(unknown))}; --list shows all")
    if options.names:
        mutants = [mutant for mutant in mutants if mutant.name in options.names]
    if options.changed is not None:
        files = {Path(file).name for file in changed_files(options.changed)}
        mutants = [mutant for mutant in mutants if mutant.file in files]
    if options.sample is not None:
        day = datetime.datetime.now(tz=datetime.timezone.utc).date().toordinal()
        count = min(options.sample, len(mutants))
        mutants = random.Random(day).sample(mutants, count)
    return mutants


class MutationRun:
    """All chosen mutants, some at a time: C++ ones from one end, the others from the other."""

    def __init__(self, mutants: list[Mutant], jobs: int) -> None:
        self.waiting = deque(sorted(mutants, key=lambda mutant: not mutant.native))
        self.jobs = jobs
        self.lock = threading.Lock()
        self.outcomes: dict[str, str] = {}
        self.noticed: dict[tuple[bool, tuple[str, ...]], dict[str, list[str]]] = {}
        self.total = len(mutants)

    def run(self) -> None:
        with ThreadPoolExecutor(self.jobs) as pool:
            list(pool.map(self._work, range(self.jobs)))

    def _work(self, number: int) -> None:
        copy = WorkingCopy(number)
        self._try_all(copy, from_the_front=number % 2 == 0)
        self._check_all(copy)
        copy.close()

    def _try_all(self, copy: WorkingCopy, from_the_front: bool) -> None:
        while True:
            with self.lock:
                if not self.waiting:
                    return
                mutant = self.waiting.popleft() if from_the_front else self.waiting.pop()
            started = time.monotonic()
            try:
                outcome, detail = copy.try_out(mutant)
            except Exception as error:
                outcome, detail = ERROR, repr(error)
            self._note(mutant, outcome, detail, time.monotonic() - started)

    def _check_all(self, copy: WorkingCopy) -> None:
        while True:
            with self.lock:
                if not self.noticed:
                    return
                (native, words), tests = self.noticed.popitem()
            names = [name for mutants in tests.values() for name in mutants]
            problem = copy.check([*words, *tests], native, names)
            if problem:
                with self.lock:
                    print(f"        {ERROR}    without any mutant: {problem}")
                    self.outcomes |= dict.fromkeys(names, ERROR)

    def _note(self, mutant: Mutant, outcome: str, detail: str, seconds: float) -> None:
        with self.lock:
            self.outcomes[mutant.name] = outcome
            done = f"{len(self.outcomes)}/{self.total}"
            print(f"{done:>7} {outcome:8} {mutant.name}  ({seconds:.0f} s) {detail}", flush=True)
            if outcome != KILLED:
                print(f"        {mutant.file}: {mutant.breaks}", flush=True)
                return
            # The test that has failed must pass without the mutant: all of a kind in one run.
            failed = re.match(r"FAILED (.*?\.py::.*?)( - |$)", detail)
            words = shlex.split(mutant.tests)
            given = words if failed is None else [w for w in words if is_given_to_all(w, words)]
            kept = self.noticed.setdefault((mutant.native, tuple(given)), {})
            kept.setdefault("-x" if failed is None else failed[1], []).append(mutant.name)


def is_given_to_all(word: str, words: list[str]) -> bool:
    """Whether it is a variable or an option, and neither a file nor what selects tests in it."""
    chosen = [later for w, later in pairwise(words) if w == "-k"]
    return not word.startswith("tests/") and word != "-k" and word not in chosen


def lost(mutants: list[Mutant]) -> list[str]:
    """Those whose text is no longer in the code, or that leave no Python."""
    found = []
    for mutant in mutants:
        try:
            mutated = mutant.applied(mutant.path(ROOT).read_text())
            if not mutant.native:
                compile(mutated, mutant.file, "exec")
        except (LookupError, SyntaxError) as problem:
            found.append(f"{mutant.name}: {problem}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="only these mutants")
    parser.add_argument("--changed", nargs="?", const="main", help="only of files that differ from")
    parser.add_argument("--sample", type=int, help="so many of them, others every day")
    parser.add_argument("--jobs", type=int, default=2, help="so many at a time")
    parser.add_argument("--list", action="store_true", help="name them and what they break")
    parser.add_argument("--check", action="store_true", help="only whether they still apply")
    options = parser.parse_args()
    mutants = chosen(options)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name:36} {mutant.file:40} {mutant.breaks}")
        return
    if options.check:
        sys.exit("\n".join(lost(mutants)) or None)
    BUILD.mkdir(parents=True, exist_ok=True)
    run = MutationRun(mutants, options.jobs)
    run.run()
    count = Counter(run.outcomes.values())
    for name, outcome in sorted(run.outcomes.items()):
        if outcome in (SURVIVED, ERROR):
            print(f"{outcome}: {name}")
    others = "".join(f", {count[kind]} {kind}" for kind in (EQUIVALENT, ERROR) if count[kind])
    print(f"{run.total} mutants: {count[KILLED]} killed, {count[SURVIVED]} survived{others}")
    sys.exit(count[KILLED] + count[EQUIVALENT] != run.total)


if __name__ == "__main__":
    main()
