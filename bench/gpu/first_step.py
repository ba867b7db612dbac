"""`python -m ngn_bench.gpu.first_step`: the first step of a process, and the host's time of later ones.

Prints seconds as JSON: until the first step is done on the device, and the median of later calls of
`step()`, which do not wait for the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

import ngn_kernels

ROUNDS = 200


def measure(backend: str, device: str, tensors: int) -> dict[str, Any]:
    params = [torch.nn.Parameter(torch.zeros(64, 64, device=device)) for _ in range(tensors)]
    for p in params:
        p.grad = torch.full_like(p, 0.01)
    optimizer = ngn_kernels.NGNMDv1(params, backend=backend)
    loss = torch.ones((), device=device)

    def wait() -> None:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()

    wait()
    begin = time.perf_counter()
    optimizer.step(loss=loss)
    wait()
    first = time.perf_counter() - begin
    times = []
    for k in range(ROUNDS):
        begin = time.perf_counter()
        optimizer.step(loss=loss)
        times.append(time.perf_counter() - begin)
        if k % 20 == 19:  # a full queue would make the host wait
            wait()
    return {"tensors": tensors, "first": first, "later": statistics.median(times)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m ngn_bench.gpu.first_step", description=__doc__
    )
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tensors", type=int, default=100)
    args = parser.parse_args(arguments)
    print(json.dumps(measure(args.backend, args.device, args.tensors)))


if __name__ == "__main__":
    main()
