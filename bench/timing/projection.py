"""What the exchange of a step would cost on many GPUs: a projection, not a measurement.

The latencies are those by which NCCL chooses its own algorithms, and the iterations the paper's.
"""

from __future__ import annotations

import math
from typing import Any

from ..report import Table, columns, duration

GPUS = tuple(8 * 2**k for k in range(12))
PER_NODE = 8
# NCCL's src/graph/tuning.cc, its protocol for small messages (LL), in seconds.
BASE = {"ring": 6.6e-6, "tree": 6.8e-6}
NVLINK = {"ring": 0.6e-6, "tree": 0.6e-6}
NETWORK = {"ring": 2.7e-6, "tree": 5.0e-6}
NETWORK_OVERHEAD = 1.0e-6  # the least that a hop of a ring takes where nodes are involved
BYTES_PER_SECOND = {False: 87.7e9, True: 19.0e9}  # one node, several
MESSAGE = 64
NORM = 4
# The paper's Table "Train time": AdamW's seconds per iteration on 8 H100.
ITERATIONS = {"70M": 1.63, "160M": 3.33, "410M": 8.41}
SHORT = 0.1
CAPTION = (
    "A PROJECTION from latencies, nothing of it was measured. Times of one exchange between GPUs, 8 "
    "in a node with NVLink, nodes on InfiniBand, with the latencies that NCCL uses to choose its "
    "algorithms (src/graph/tuning.cc). gather: the 64 bytes of each rank by NCCL's ring. clip: the "
    "norm's all-reduce that AdamW with clipping needs for sharded parameters, by ring or tree, the "
    "shorter. Shares are of the paper's iterations on 8 GPUs (70M 1.63 s, 160M 3.33 s, 410M 8.41 s), "
    "with the same work for each GPU on more of them, and of an iteration of 0.1 s."
)


def hops(algorithm: str, gpus: int) -> float:
    """Seconds that a message needs to pass all ranks once around a ring, or up a tree."""
    nodes = math.ceil(gpus / PER_NODE)
    if algorithm == "ring":
        inside = max(NVLINK["ring"], NETWORK_OVERHEAD if nodes > 1 else 0.0)
        return (gpus - nodes) * inside + (nodes - 1) * NETWORK["ring"]
    return (gpus // nodes - 1) * NVLINK["tree"] + math.floor(math.log2(nodes)) * NETWORK["tree"]


def all_gather(gpus: int, sent: int = MESSAGE) -> float:
    """Seconds; by a ring, NCCL's only algorithm for it with several GPUs in a node."""
    return BASE["ring"] + hops("ring", gpus) + sent * gpus / BYTES_PER_SECOND[gpus > PER_NODE]


def all_reduce(gpus: int, sent: int = NORM) -> float:
    """Seconds of a reduction and a broadcast, by the faster of NCCL's algorithms."""
    times = [BASE[algorithm] + 2 * hops(algorithm, gpus) for algorithm in ("ring", "tree")]
    return min(times) + 2 * sent / BYTES_PER_SECOND[gpus > PER_NODE]


def project() -> list[dict[str, Any]]:
    """A row for each number of GPUs: seconds of each exchange, and shares of an iteration."""
    rows = []
    for gpus in GPUS:
        times = {"gather": all_gather(gpus), "clip": all_reduce(gpus)}
        iterations = {**ITERATIONS, "0.1 s": SHORT}
        shares = {
            what: {name: seconds / (iteration + seconds) for name, iteration in iterations.items()}
            for what, seconds in times.items()
        }
        rows.append({"gpus": gpus, **times, "shares": shares})
    return rows


def projection_table(record: dict[str, Any]) -> Table:
    names = list(record["projection"][0]["shares"]["gather"])
    shares = [f"{what} in {name}" for what in ("gather", "clip") for name in names]
    rows = [
        [f"{row['gpus']:,}", duration(row["gather"]), duration(row["clip"])]
        + [percent(row["shares"][what][name]) for what in ("gather", "clip") for name in names]
        for row in record["projection"]
    ]
    headings = columns("GPUs", "gather", "clip", *shares, text=())
    return Table("PROJECTION: the exchange of a step on many GPUs", headings, rows, CAPTION)


def percent(share: float) -> str:
    return f"{share:.2%}" if share >= 1e-3 else f"{share:.4%}"
