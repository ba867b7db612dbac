"""Short randomised runs on several ranks; `make soak` makes many more of them."""

from __future__ import annotations

from collections import Counter

import pytest

from ranks.life import EVENTS
from ranks.pool import Pool


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_life_at_random(size: int) -> None:
    """Pools of its own: process groups are destroyed in it."""
    pool, happened = Pool(size), Counter[str]()
    try:
        for seed in range(14 if size < 4 else 8):
            answers = pool.run("ranks.life", "live", seed=seed, events=12, port=pool.store.port)
            assert len({held for *_, held in answers}) == 1, f"replicas differ after life {seed}"
            happened += answers[0][1]
    finally:
        pool.kill()
    missing = set(EVENTS) - set(happened)
    assert not missing or size == 4, missing
