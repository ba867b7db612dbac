"""Runs pytest in forks of one process that has imported what every test needs: half of the time.

A line of JSON on stdin is a run: its folder, variables and arguments, and how long it may take. The
answer is a line, too: what pytest returned (None if it was too slow), and what it said last.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from typing import Any

import hypothesis
import numpy
import pytest
import torch
import torch.distributed.tensor

IMPORTED = (hypothesis, numpy, pytest, torch)


def child(task: dict[str, Any], output: int) -> None:
    os.setpgid(0, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(task["folder"])
    os.environ.update(task["variables"])
    sys.path.insert(0, task["folder"])
    code = 70
    try:
        code = int(pytest.main(task["arguments"]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(task: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            child(task, output.fileno())
        end = time.monotonic() + task["timeout"]
        code: int | None = None
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                break
            time.sleep(0.05)
        else:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        output.seek(0)
        return {"code": code, "said": output.read().decode(errors="replace")[-20000:]}


for line in sys.stdin:
    print(json.dumps(run(json.loads(line))), flush=True)
