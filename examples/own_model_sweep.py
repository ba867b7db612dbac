"""Choosing a setting for one's own model: python examples/own_model_sweep.py.

The same as: ngn-bench sweep --task examples/own_model_sweep.py:rings --optimizers …
"""

import sys

import torch
from torch import nn


def rings(setup):
    """Which of three noisy rings is a point on?"""
    from ngn_bench.lab import Classification

    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (3000,), generator=generator)
    angle = 2 * torch.pi * torch.rand(3000, generator=generator)
    radius = 1 + labels + 0.25 * torch.randn(3000, generator=generator)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    )
    return Classification(
        model,
        train=(points[600:], labels[600:]),
        test=(points[:600], labels[:600]),
        epochs=setup.epochs(10),
        batch_size=50,
    )


def main():
    from ngn_bench.cli import main as ngn_bench

    # Four step sizes each; a real search takes the default of eight, and several seeds.
    command = ["sweep", "--task", f"{__file__}:rings", "--optimizers", "ngn-mdv1,ngn-m,adam"]
    return ngn_bench([*command, "--lr", "1e-3:1", "--seeds", "1", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
