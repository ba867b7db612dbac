"""The scripts of docs/ranks.md, as they stand there, under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "ranks.md"
SCRIPT = re.compile(
    r"^<!-- torchrun --nproc-per-node (?P<ranks>\d+) -->\n```python\n(?P<code>.*?)^```$",
    re.M | re.S,
)
TIMEOUT = 300

# Torch's (pytorch/pytorch#190489): a thread of gloo that is the last to hold a tensor aborts if the
# interpreter ends meanwhile. DDP and ZeRO keep these threads beyond destroy_process_group().
ABORTED_AT_EXIT = "terminate called without an active exception"


def scripts() -> list[object]:
    """Each script with its number of ranks, under the heading that it stands below."""
    page = PAGE.read_text(encoding="utf-8")
    found = []
    for match in SCRIPT.finditer(page):
        heading = re.findall(r"^#+ (.*)$", page[: match.start()], re.M)[-1]
        ranks = int(match["ranks"])
        found.append(pytest.param(match["code"], ranks, id=f"{heading}-{ranks}".replace(" ", "-")))
    return found


def test_every_script_is_run() -> None:
    assert len(scripts()) == PAGE.read_text(encoding="utf-8").count("```python") == 7


@pytest.mark.parametrize(("code", "ranks"), scripts())
def test_script(code: str, ranks: int, tmp_path: Path) -> None:
    """It runs, and every rank ends with the same step size, a shrunken one."""
    for attempt in range(6):
        done, spoken = run(code, ranks, tmp_path / str(attempt))
        if done.returncode == 0 or ABORTED_AT_EXIT not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    assert "backward() calls" not in done.stderr, "a loss of one of several"
    said = dict(re.findall(r"rank (\d+): shrink (\S+)", spoken))
    assert set(said) == {str(rank) for rank in range(ranks)}
    (shrink,) = set(said.values())
    assert 0 < float(shrink) < 1


def run(code: str, ranks: int, folder: Path) -> tuple[subprocess.CompletedProcess[str], str]:
    """How it ended, and what the ranks said, each in a file: in one pipe their words would mix."""
    script, logs = folder / "script.py", folder / "logs"
    folder.mkdir()
    script.write_text(code)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            "--redirects",
            "1",
            "--log-dir",
            str(logs),
            str(script),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return done, "".join(log.read_text() for log in logs.rglob("stdout.log"))
