"""docs/images/reading-a-run.png: scikit-learn's digits with noisy labels, at three step sizes."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from ngn_kernels import NGNMDv1

STEPS = 400
RUNS = {
    "lr = 1e-4: lr is the limit": (1e-4, 0.8, "tab:blue"),
    "lr = 1: the loss decides": (1.0, 0.8, "tab:orange"),
    "lr = 1 without a loss_target: too large": (1.0, 0.0, "tab:red"),
}


def metrics(lr: float, target: float) -> tuple[list[float], list[float]]:
    """The loss and shrink of each step."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 8 - 1
    labels = torch.tensor(digits.target)
    noisy = torch.rand(len(labels)) < 0.3
    labels = torch.where(noisy, torch.randint(10, labels.shape), labels)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = NGNMDv1(model.parameters(), lr=lr, step_cap=lr, loss_target=target)
    losses, shrinks = [], []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = lr * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        rows = torch.randint(len(labels), (64,))
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss=loss)
        losses.append(loss.item())
        shrinks.append(optimizer.metrics(as_floats=True)["ngn/shrink"])
    return losses, shrinks


def smoothed(values: list[float], over: int = 10) -> list[float]:
    return [
        sum(values[max(0, i - over) : i + 1]) / len(values[max(0, i - over) : i + 1])
        for i in range(len(values))
    ]


def main() -> None:
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 5.4), sharex=True, layout="constrained")
    for label, (lr, target, colour) in RUNS.items():
        losses, shrinks = metrics(lr, target)
        above.plot(smoothed(losses), colour, label=label)
        below.plot(shrinks, colour)
    above.set(ylabel="loss")
    below.set(yscale="log", ylabel="ngn/shrink", xlabel="step")
    figure.legend(frameon=False, loc="outside upper left")
    for axis in (above, below):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(
        Path(__file__).parent / "images" / "reading-a-run.png", dpi=160, facecolor="white"
    )


if __name__ == "__main__":
    main()
