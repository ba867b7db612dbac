"""How much of the long tests a backend runs: one that is interpreted takes some 15 ms per block."""

from __future__ import annotations

from typing import NamedTuple

from helpers import GPU_ENGINES

Shapes = tuple[list[tuple[int, ...]], ...]


class Extent(NamedTuple):
    """What a test with many cases goes through."""

    steps: int  # of a trajectory; the loss is at its floor in steps 10 and 20
    steps_from_sync: int  # each from the state of the one before, so that t = 2 is among them
    shapes: Shapes  # of the parameters, one list per group
    sizes: tuple[int, ...]  # below, at and above what a kernel takes at once
    places: int  # of a bad number among the parameters, one after the other
    tensors: int  # of one element each


FULL = Extent(
    steps=50,
    steps_from_sync=3,
    shapes=(
        [(), (1,), (7,), (3, 5), (16,), (0,), (1025,), (2, 3, 4)],
        [(8,), (9, 1), (0, 3), (17,), (33, 5), (1,)],
    ),
    # SIMD widths, blocks and chunks.
    sizes=(
        *(0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129),
        *(1023, 1024, 1025, 4095, 4096, 4097, 16383, 16384, 16385),
    ),
    places=4,
    tensors=1000,
)

INTERPRETED = Extent(
    steps=21,
    steps_from_sync=2,
    shapes=([(), (3, 5), (0,), (1025,)], [(8,), (0, 3), (33, 5)]),
    # Vectors of 4 and 8 elements, blocks of 1,024 and 2,048, chunks of 2,048.
    sizes=(0, 1, 3, 4, 5, 7, 8, 9, 1023, 1024, 1025, 2047, 2048, 2049, 4097),
    places=2,
    tensors=40,
)


def extent_of(backend: str) -> Extent:
    return INTERPRETED if backend in GPU_ENGINES else FULL
