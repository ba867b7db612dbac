"""Pools of ranks, started once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ranks.pool import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    pools: dict[int, Pool] = {}

    def of(size: int) -> Pool:
        if size not in pools or pools[size].broken:
            pools[size] = Pool(size)
        return pools[size]

    yield of
    for pool in pools.values():
        if not pool.broken:
            pool.close()
