"""Train a few steps on every backend named, and fail unless each lowers the loss as `reference` does.

Needs torch and an installed ngn_kernels, no test runner: wheels are tried with it where they are built.
"""

from __future__ import annotations

import os
import sys

BACKENDS = sys.argv[1:]
if "triton" in BACKENDS:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch

import ngn_kernels


def trained(backend: str, **options: object) -> tuple[list[float], torch.Tensor]:
    """The loss of each step, and the parameters after the last."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
    optimizer = ngn_kernels.NGNMDv1(
        model.parameters(), lr=0.1, weight_decay=0.01, backend=backend, **options
    )
    x = torch.randn(64, 10)
    y = x.sum(1, keepdim=True)
    losses = []
    for step in range(8):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step(loss=loss)
        losses.append(loss.item())
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()])


def main() -> None:
    reference = trained("reference")
    for backend in BACKENDS:
        losses, parameters = trained(backend)
        assert losses[-1] < 0.5 * losses[0], (backend, losses)
        torch.testing.assert_close(parameters, reference[1], rtol=1e-4, atol=1e-5)
        narrow, _ = trained(backend, state=("8bit", "bfloat16"))
        assert narrow[-1] < 0.5 * narrow[0], (backend, narrow)
        print(f"{backend}: loss {losses[0]:.3f} to {losses[-1]:.3f}, as reference")
    print(f"works: {ngn_kernels.__file__}")


assert BACKENDS, "name the backends to try"
main()
