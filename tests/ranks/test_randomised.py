"""Short randomised runs on several ranks; `make soak` makes many more of them."""

from __future__ import annotations

from collections import Counter

import pytest

from ranks.pool import Pool
from ranks.randomised import event


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_randomised_run(size: int) -> None:
    """Pools of its own: process groups are destroyed in it."""
    pool, happened = Pool(size), Counter[str]()
    try:
        for seed in range(14 if size < 4 else 8):
            task = {"seed": seed, "events": 12, "port": pool.store.port}
            answers = pool.run("ranks.randomised", "randomised_run", **task)
            assert len({held for *_, held in answers}) == 1, f"replicas differ after run {seed}"
            happened += answers[0][1]
    finally:
        pool.kill()
    missing = set(event.functions) - set(+happened)
    assert not missing or size == 4, missing
