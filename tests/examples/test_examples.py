"""Every script of examples/ runs in a short setting, and its loss falls: `make examples`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PLAIN = [sys.executable]
ON_TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# How each is started, for how many steps, and below which share of the first loss it ends.
TRAINING = {
    "gpt.py": (PLAIN, 60, 0.85),
    "resnet.py": (PLAIN, 40, 0.7),
    "hf_trainer.py": (PLAIN, 60, 0.85),
    "lightning_gpt.py": (PLAIN, 60, 0.85),
    "trl_sft.py": (PLAIN, 40, 0.7),
    "accelerate_fsdp2.py": (ON_TWO_RANKS, 40, 0.9),
}
SWEEP = "own_model_sweep.py"
ABORTED = "terminate called without an active exception"
"""What gloo's threads may do to an interpreter that ends on a busy machine, after the work is done."""
SCRIPTS = [*TRAINING, SWEEP]


def run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for _ in range(3):
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
        )
        if done.returncode == 0 or ABORTED not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", TRAINING)
def test_the_loss_falls(name: str, tmp_path: Path) -> None:
    start, steps, share = TRAINING[name]
    printed = run([*start, str(EXAMPLES / name), "--steps", str(steps)], tmp_path)
    (found,) = re.findall(r"^loss at start (\S+), at end (\S+)$", printed, re.MULTILINE)
    first, last = map(float, found)
    assert 0 < last < share * first
    assert not list(tmp_path.iterdir())


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("xyz" * 500, encoding="utf-8")
    words = ["--text", "own.txt", "--steps", "3"]
    error = subprocess.run(
        [sys.executable, str(EXAMPLES / "gpt.py"), *words],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert error.returncode == 0, error.stderr
    assert set(error.stdout.splitlines()[-1]) <= set("xyz")


def test_the_sweep_of_an_own_model(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / SWEEP), "--processes", "1", "--out", "out"]
    printed = run([*command, "--scale", "steps=0.3"], tmp_path)
    best = dict(re.findall(r"^(NGN-MDv1|NGN-M|Adam) +\S+ +([\d.]+)", printed, re.MULTILINE))
    assert set(best) == {"NGN-MDv1", "NGN-M", "Adam"}
    assert float(best["NGN-MDv1"]) > 60
    assert (tmp_path / "out" / "resilience.png").exists()


def test_every_script_is_here_and_short() -> None:
    there = {path.name for path in EXAMPLES.glob("*.py")} - {"common.py"}
    assert there == set(SCRIPTS)
    for name in SCRIPTS:
        assert 30 <= len((EXAMPLES / name).read_text("utf-8").splitlines()) <= 80, name
        assert f"`{name}`" in (EXAMPLES / "README.md").read_text("utf-8")
