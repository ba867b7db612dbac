"""docs/images/trainers.png from the Lightning script of docs/trainers.md, at two step sizes."""

from __future__ import annotations

import csv
import os
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RATES = {"1e-2": "tab:blue", "1.0": "tab:orange"}


def metrics(script: str, lr: str) -> list[dict[str, str]]:
    """What the script logs at this step size."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        try:
            exec(script.replace("trainer.fit(Digits(),", f"trainer.fit(Digits({lr}),"), {})
            (file,) = Path(work).rglob("metrics.csv")
            with file.open() as rows:
                return list(csv.DictReader(rows))
        finally:
            os.chdir(before)


def main() -> None:
    page = (HERE / "trainers.md").read_text(encoding="utf-8")
    script = page.split("## Lightning")[1].split("```python")[1].split("```")[0]
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
    for lr, colour in RATES.items():
        rows = metrics(script, lr)
        steps = [int(row["step"]) + 1 for row in rows]
        above.plot(steps, [float(row["loss"]) for row in rows], colour, label=f"lr={lr}")
        below.plot(steps, [float(row["ngn/shrink"]) for row in rows], colour)
    above.set(yscale="log", ylabel="loss")
    below.set(yscale="log", ylabel="ngn/shrink", xlabel="step")
    above.legend(frameon=False)
    for axis in (above, below):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "images" / "trainers.png", dpi=160, facecolor="white")


if __name__ == "__main__":
    main()
